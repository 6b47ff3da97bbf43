"""Each mechanism of the launch protocol is needed: without it, a script violates a property that holds with it."""

from __future__ import annotations

import pytest
from tests.simulation.mechanisms import MECHANISMS, Mechanism
from tests.simulation.properties import KINDS


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
def test_a_property_fails_without(mechanism: Mechanism) -> None:
    assert mechanism.violates in KINDS
    assert mechanism.violates in mechanism.by_script().found
