"""The cluster for tests: started once per session, or whichever one ``TRAINJOB_TEST_KUBECONFIG`` names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster import build
from tests.cluster.access import Access
from tests.cluster.control_plane import Cluster
from tests.cluster.real_node import unfit

KUBECONFIG = "TRAINJOB_TEST_KUBECONFIG"


@pytest.fixture(scope="session")
def access(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Access]:
    """Any cluster that has Trainer. A test that needs more asks `needs`, or for `cluster`."""
    if given := os.environ.get(KUBECONFIG):
        foreign = Access(Path(given), tmp_path_factory.mktemp("cluster"))
        if why := foreign.lacks("trainer"):
            pytest.skip(why)
        yield foreign
        foreign.close()
        return
    with Cluster() as own:
        yield own


@pytest.fixture(scope="session")
def cluster(access: Access) -> Cluster:
    """The cluster that was started here: its components can be killed and started again."""
    if not isinstance(access, Cluster):
        pytest.skip(access.lacks("processes"))
    return access


@pytest.fixture(scope="session")
def real_node(access: Access) -> Access:
    """The cluster, with a node that runs real pods."""
    if isinstance(access, Cluster) and access.real_node is None:
        if why := unfit():
            pytest.skip(f"no real node: {why}")
        build.ensure("node")
        access.start_real_node()
    elif why := access.lacks("real-node"):
        pytest.skip(why)
    return access


@pytest.fixture
def needs(access: Access) -> Callable[[str], None]:
    """``needs("kueue")`` skips the test, with the reason, where the cluster has no Kueue."""

    def check(feature: str) -> None:
        if why := access.lacks(feature):
            pytest.skip(why)

    return check


@pytest.fixture
def namespace(access: Access) -> Iterator[str]:
    """A namespace of the test's own, for pods on simulated nodes; with the LocalQueue ``gpus``."""
    with access.namespace() as name:
        yield name
