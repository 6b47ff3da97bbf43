"""The contract of all backends, with each of them (`conftest`); tests/cluster runs it on a real API server."""

from __future__ import annotations

import pytest
from tests.contract.contract import contract

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

globals().update(contract())
