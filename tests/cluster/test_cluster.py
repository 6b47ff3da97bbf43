"""The test cluster itself: that it is what other tests take it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.cluster import kueue
from tests.cluster.access import TRAINER, Access, condition, trainjob
from tests.cluster.api import Api, ApiError
from tests.cluster.control_plane import Cluster
from tests.cluster.nodes import GPU, fate
from tests.cluster.processes import wait_until

pytestmark = pytest.mark.timeout(900)  # the first one may build the cluster's programs


def _job(access: Access, namespace: str, name: str = "job") -> dict[str, Any]:
    return access.api.get(TRAINER, "TrainJob", namespace, name) or {}


def _ends(access: Access, namespace: str, kind: str, timeout: float = 60) -> dict[str, Any]:
    return wait_until(f"the job is {kind}", lambda: condition(_job(access, namespace), kind) or {}, timeout)


def _pods(access: Access, namespace: str) -> list[dict[str, Any]]:
    return access.api.find("v1", "Pod", namespace)


def _never_restarting(access: Access, name: str) -> str:
    """A runtime whose pods are not restarted in place and whose Job fails with the first of them."""
    container = {"name": "node", "image": "none"}
    job = {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    node = {"name": "node", "template": {"metadata": {"labels": labels}, "spec": job}}
    access.api.apply(
        {
            "apiVersion": TRAINER,
            "kind": "ClusterTrainingRuntime",
            "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {"mlPolicy": {"numNodes": 1, "torch": {}}, "template": {"spec": {"replicatedJobs": [node]}}},
        }
    )
    return name


def test_reports_its_versions(cluster: Cluster) -> None:
    versions = cluster.versions()
    assert versions["kubernetes"] == "v1.36.2"
    assert versions["trainer"] == "v2.3.0"
    assert versions["kueue"] == "v0.18.4"


def test_a_job_on_simulated_nodes_completes(access: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    access.api.create(trainjob("job", namespace, trainer={"numNodes": 2, "env": fate(message="all done")}))
    assert _ends(access, namespace, "Complete")["reason"] == "AllJobsCompleted"
    pods = _pods(access, namespace)
    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded", "Succeeded"]
    ended = pods[0]["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (ended["exitCode"], ended["message"]) == (0, "all done")
    assert "log of a simulated pod" in access.pod_log(namespace, pods[0]["metadata"]["name"])


def test_a_rank_fails_and_the_evidence_stays(access: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    told = fate(exit_code=137, reason="OOMKilled", message="too much", ranks="1")
    runtime = _never_restarting(access, "never-restarting")
    access.api.create(trainjob("job", namespace, runtime=runtime, trainer={"numNodes": 2, "env": told}))
    assert _ends(access, namespace, "Failed")["reason"] == "FailedJobs"
    ended = [pod["status"]["containerStatuses"][0]["state"].get("terminated", {}) for pod in _pods(access, namespace)]
    assert {"exitCode": 137, "reason": "OOMKilled", "message": "too much"}.items() <= max(
        ended, key=lambda each: each.get("exitCode", -1) == 137
    ).items()


def test_pods_of_a_shipped_runtime_restart_in_place(
    access: Access, namespace: str, needs: Callable[[str], None]
) -> None:
    needs("simulated-nodes")
    told = fate(exit_code=1, run="200ms", failures=2)
    access.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": told}))
    _ends(access, namespace, "Complete")
    status = _pods(access, namespace)[0]["status"]["containerStatuses"][0]
    assert status["restartCount"] == 2
    assert status["lastState"]["terminated"]["exitCode"] == 1


def test_an_image_that_cannot_be_pulled(access: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("simulated-nodes")
    told = fate(waiting="ImagePullBackOff", message="no such image")
    access.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": told}))

    def waiting() -> dict[str, Any]:
        statuses = [each for pod in _pods(access, namespace) for each in pod["status"].get("containerStatuses", [])]
        return dict(statuses[0]["state"]["waiting"]) if statuses else {}

    assert wait_until("the pod waits", waiting, 20) == {"reason": "ImagePullBackOff", "message": "no such image"}


def test_kueue_holds_a_job_until_there_is_quota(access: Access, namespace: str, needs: Callable[[str], None]) -> None:
    needs("kueue")
    needs("simulated-nodes")
    access.api.apply(kueue.cluster_queue(namespace, gpu=8))
    access.api.create(kueue.local_queue(namespace, "small", namespace))

    def submit(name: str, run: str) -> None:
        resources = {"requests": {GPU: "8"}, "limits": {GPU: "8"}}
        each = trainjob(name, namespace, trainer={"numNodes": 1, "resourcesPerNode": resources, "env": fate(run=run)})
        each["metadata"]["labels"] = {kueue.QUEUE_LABEL: "small"}
        access.api.create(each)

    try:
        submit("first", "never")
        wait_until("the first is admitted", lambda: _job(access, namespace, "first")["spec"]["suspend"] is False, 20)
        wait_until(
            "the first runs", lambda: [pod for pod in _pods(access, namespace) if pod["spec"].get("nodeName")], 20
        )
        submit("second", "100ms")

        def told() -> str:
            found = access.api.find(kueue.API, "Workload", namespace)
            second = [each for each in found if "second" in each["metadata"]["name"]]
            conditions = second[0].get("status", {}).get("conditions", []) if second else []
            return next((each["message"] for each in conditions if each["type"] == "QuotaReserved"), "")

        assert "insufficient unused quota" in wait_until("the second is told why it waits", told, 20)
        assert condition(_job(access, namespace, "second"), "Suspended")
        access.api.delete(TRAINER, "TrainJob", namespace, "first")
        finished = lambda: condition(_job(access, namespace, "second"), "Complete")  # noqa: E731
        wait_until("the second completes", finished, 60)
    finally:
        access.api.delete(kueue.API, "ClusterQueue", "", namespace)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ({"runtime": "no-such-runtime"}, "not found"),
        ({"trainer": {"env": [{"name": "PET_NNODES", "value": "1"}]}}, "PET_NNODES"),
        ({"trainer": {"numNodes": "two"}}, "numNodes"),
    ],
)
def test_bad_jobs_are_refused(access: Access, namespace: str, spec: dict[str, Any], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        access.api.create(trainjob("job", namespace, **spec))


def test_a_user_may_do_what_the_role_says_and_no_more(access: Access, namespace: str) -> None:
    user = Api(access.kubeconfig_for(namespace=namespace))
    try:
        user.create(trainjob("job", namespace, trainer={"numNodes": 1}))
        assert user.get(TRAINER, "TrainJob", namespace, "job")
        with pytest.raises(ApiError) as refused:
            user.find("jobset.x-k8s.io/v1alpha2", "JobSet", namespace)
        assert refused.value.status == 403
    finally:
        user.close()


def test_the_api_server_restarts_and_forgets_the_past(cluster: Cluster, namespace: str) -> None:
    cluster.api.create(trainjob("job", namespace, trainer={"numNodes": 1, "env": fate(run="1s")}))
    job = _job(cluster, namespace)
    accounts = cluster.api.path("v1", "ServiceAccount")
    list_token = cluster.api.request("GET", accounts, params={"limit": "1"})["metadata"]["continue"]
    _ends(cluster, namespace, "Complete")
    cluster.kill("kube-apiserver")
    with pytest.raises(httpx.TransportError):
        _job(cluster, namespace)
    cluster.compact()
    cluster.start_component("kube-apiserver")
    assert _job(cluster, namespace)["metadata"]["uid"] == job["metadata"]["uid"]
    with pytest.raises(ApiError) as gone:
        cluster.api.request("GET", accounts, params={"limit": "1", "continue": list_token})
    assert gone.value.status == 410
    watch = {"watch": "true", "resourceVersion": job["metadata"]["resourceVersion"], "timeoutSeconds": "5"}
    events = cluster.api.request("GET", cluster.api.path(TRAINER, "TrainJob", namespace), params=watch)
    assert events["object"]["code"] == 410  # the one event there is
    cluster.api.create(trainjob("next", namespace, trainer={"numNodes": 1}))
    finished = lambda: condition(_job(cluster, namespace, "next"), "Complete")  # noqa: E731
    wait_until("the controllers have found the API server again", finished, 60)
