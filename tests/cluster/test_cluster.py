"""The test cluster itself: checks of what the other tests assume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.processes import wait_until
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access, condition, trainjob
from tests.testcluster.api import Api, ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import GPU, simulate


def _job(cluster: Access, namespace: str, name: str = "job") -> dict[str, Any]:
    return cluster.api.get(TRAINER, "TrainJob", namespace, name) or {}


def _ends(cluster: Access, namespace: str, kind: str, timeout: float = 60, name: str = "job") -> dict[str, Any]:
    return wait_until(f"{name} is {kind}", lambda: condition(_job(cluster, namespace, name), kind) or {}, timeout)


def _pods(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    return cluster.api.find("v1", "Pod", namespace)


def _never_restarting(cluster: Access, name: str) -> str:
    """A runtime whose pods are not restarted in place and whose Job fails with the first of them."""
    container = {"name": "node", "image": "none"}
    job = {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": job}}
    cluster.api.apply(
        {
            "apiVersion": TRAINER,
            "kind": "ClusterTrainingRuntime",
            "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}},
        }
    )
    return name


def test_the_cluster_reports_its_versions(own_cluster: Cluster) -> None:
    versions = own_cluster.versions()
    assert versions["kubernetes"] == "v1.37.2"
    assert versions["trainer"] == "v2.3.0"
    assert versions["kueue"] == "v0.19.2"


def test_a_job_on_simulated_nodes_completes(cluster: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 2, "env": simulate(message="all done")}))
    assert _ends(cluster, namespace, "Complete")["reason"] == "AllJobsCompleted"
    pods = _pods(cluster, namespace)
    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded", "Succeeded"]
    ended = pods[0]["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (0, "all done")
    assert "log of a simulated pod" in cluster.pod_log(namespace, pods[0]["metadata"]["name"])


def test_a_rank_fails_and_the_evidence_stays(cluster: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    settings = simulate(exit_code=137, reason="OOMKilled", message="too much", ranks="1")
    runtime = _never_restarting(cluster, "never-restarting")
    cluster.api.create(trainjob("job", namespace, runtime=runtime, trainer={"numNodes": 2, "env": settings}))
    assert _ends(cluster, namespace, "Failed")["reason"] == "FailedJobs"
    ended = [pod["status"]["containerStatuses"][0]["state"].get("terminated", {}) for pod in _pods(cluster, namespace)]
    assert {"exitCode": 137, "reason": "OOMKilled", "message": "too much"}.items() <= max(
        ended, key=lambda each: each.get("exitCode", -1) == 137
    ).items()


def test_pods_of_a_shipped_runtime_restart_in_place(
    cluster: Access, namespace: str, needs: Callable[[str], None]
) -> None:
    needs("simulated-nodes")
    settings = simulate(exit_code=1, run="200ms", failures=2)
    cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": settings}))
    _ends(cluster, namespace, "Complete")
    status = _pods(cluster, namespace)[0]["status"]["containerStatuses"][0]
    assert status["restartCount"] == 2
    assert status["lastState"]["terminated"]["exitCode"] == 1


def test_an_image_that_cannot_be_pulled(cluster: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    settings = simulate(waiting="ImagePullBackOff", message="no such image")
    cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": settings}))

    def waiting() -> dict[str, Any]:
        statuses = [each for pod in _pods(cluster, namespace) for each in pod["status"].get("containerStatuses", [])]
        return dict(statuses[0]["state"]["waiting"]) if statuses else {}

    assert wait_until("the pod waits", waiting, 20) == {"reason": "ImagePullBackOff", "message": "no such image"}


def _queued(name: str, namespace: str, queue: str, run: str, priority: str = "") -> dict[str, Any]:
    resources = {"requests": {GPU: "8"}, "limits": {GPU: "8"}}
    each = trainjob(name, namespace, trainer={"numNodes": 1, "resourcesPerNode": resources, "env": simulate(run=run)})
    each["metadata"]["labels"] = {kueue.QUEUE_LABEL: queue, **({kueue.PRIORITY_LABEL: priority} if priority else {})}
    return each


def _runs(cluster: Access, namespace: str, name: str) -> bool:
    pods = cluster.api.find("v1", "Pod", namespace, labels=f"jobset.sigs.k8s.io/jobset-name={name}")
    return any(pod["status"]["phase"] == "Running" for pod in pods)


def test_kueue_holds_a_job_until_there_is_quota(cluster: Access, namespace: str, small_queue: str) -> None:
    cluster.api.create(_queued("first", namespace, small_queue, "never"))
    wait_until("the first runs", lambda: _runs(cluster, namespace, "first"), 20)
    cluster.api.create(_queued("second", namespace, small_queue, "100ms"))

    def message() -> str:
        found = cluster.api.find(kueue.API, "Workload", namespace)
        second = [each for each in found if "second" in each["metadata"]["name"]]
        conditions = second[0].get("status", {}).get("conditions", []) if second else []
        return next((each["message"] for each in conditions if each["type"] == "QuotaReserved"), "")

    assert "insufficient unused quota" in wait_until("Kueue reports why the second job waits", message, 20)
    wait_until("it is suspended", lambda: condition(_job(cluster, namespace, "second"), "Suspended"), 20)
    cluster.api.delete(TRAINER, "TrainJob", namespace, "first")
    finished = lambda: condition(_job(cluster, namespace, "second"), "Complete")  # noqa: E731
    wait_until("the second completes", finished, 60)


def test_a_job_of_higher_priority_preempts(cluster: Access, namespace: str, small_queue: str) -> None:
    cluster.api.apply(kueue.priority_class("test-high", 1000))
    cluster.api.create(_queued("low", namespace, small_queue, "never"))
    wait_until("the low one runs", lambda: _runs(cluster, namespace, "low"), 20)
    cluster.api.create(_queued("high", namespace, small_queue, "6s", "test-high"))
    wait_until("the low one is suspended", lambda: condition(_job(cluster, namespace, "low"), "Suspended"), 20)
    finished = lambda: condition(_job(cluster, namespace, "high"), "Complete")  # noqa: E731
    wait_until("the high one completes", finished, 60)
    wait_until("the low one runs again", lambda: _runs(cluster, namespace, "low"), 30)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"runtime": "no-such-runtime"}, "not found"),
        ({"trainer": {"env": [{"name": "PET_NNODES", "value": "1"}]}}, "PET_NNODES"),
        ({"trainer": {"numNodes": "two"}}, "numNodes"),
    ],
)
def test_bad_jobs_are_refused(cluster: Access, namespace: str, spec: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        cluster.api.create(trainjob("job", namespace, **spec))


def test_a_user_has_only_the_permissions_of_the_role(cluster: Access, namespace: str) -> None:
    user = Api(cluster.kubeconfig_for(namespace=namespace))
    try:
        user.create(trainjob("job", namespace, trainer={"numNodes": 1}))
        assert user.get(TRAINER, "TrainJob", namespace, "job")
        with pytest.raises(ApiError) as refused:
            user.find("jobset.x-k8s.io/v1alpha2", "JobSet", namespace)
        assert refused.value.status == 403
    finally:
        user.close()
