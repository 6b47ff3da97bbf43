"""Failures that affect the other pods of the real node: its kubelet is restarted with other settings."""

from __future__ import annotations

import pytest
from tests.cluster import corpus
from tests.cluster.failures import FAILURES, Failure
from tests.testcluster.control_plane import Cluster

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("failure", [each for each in FAILURES if each.alone], ids=lambda failure: failure.name)
def test_an_eviction_is_diagnosed(failure: Failure, own_cluster: Cluster, step_image: str) -> None:
    found = corpus.make_all([failure], own_cluster)[failure.name]
    if isinstance(found, Exception):
        raise found
    assert corpus.differences(failure, found.diagnosis, found.evidence) == [], found.diagnosis.text()
