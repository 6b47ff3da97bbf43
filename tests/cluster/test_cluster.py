"""The test cluster itself: the versions that its documentation names, and an image that cannot be pulled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.processes import wait_until
from tests.testcluster.access import Access, trainjob
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate


def test_the_cluster_reports_its_versions(own_cluster: Cluster) -> None:
    versions = own_cluster.versions()
    assert versions["kubernetes"] == "v1.37.2"
    assert versions["trainer"] == "v2.3.0"
    assert versions["kueue"] == "v0.19.2"


def test_an_image_that_cannot_be_pulled(cluster: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    settings = simulate(waiting="ImagePullBackOff", message="no such image")
    cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": settings}))

    def waiting() -> dict[str, Any]:
        pods = cluster.api.find("v1", "Pod", namespace)
        statuses = [each for pod in pods for each in pod["status"].get("containerStatuses", [])]
        return dict(statuses[0]["state"]["waiting"]) if statuses else {}

    assert wait_until("the pod waits", waiting, 20) == {"reason": "ImagePullBackOff", "message": "no such image"}
