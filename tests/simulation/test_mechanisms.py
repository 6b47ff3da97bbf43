"""Each mechanism of the launch protocol is needed: without it, a schedule violates a property."""

from __future__ import annotations

import pytest
from tests.simulation.mechanisms import MECHANISMS, Mechanism
from tests.simulation.properties import KINDS
from tests.simulation.schedules import replay


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
def test_a_property_fails_without(mechanism: Mechanism) -> None:
    assert mechanism.violates in KINDS
    assert mechanism.violates in mechanism.by_script().found


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda each: each.name)
def test_every_property_holds_with(mechanism: Mechanism) -> None:
    assert replay(mechanism.script).found == {}
