"""Fixtures of unit tests."""

from __future__ import annotations

import pytest
from tests.fakes.kube.direct import DirectBackend


@pytest.fixture
def backend() -> DirectBackend:
    """The real backend of a cluster over a fake API server, without sockets."""
    return DirectBackend()
