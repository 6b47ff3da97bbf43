"""Objects that explain why a job waits: which are read, and what a missing permission costs, over the fake server."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.objects import Object, condition

from trainjob import JobRef, TrainJobSpec
from trainjob._diagnosis import diagnosis_of
from trainjob._manifest.render import render
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.status import QUEUE_LABEL

pytestmark = pytest.mark.anyio

QUEUED: dict[str, Any] = {"runtime": "r", "command": ["train"], "labels": {QUEUE_LABEL: "gpus"}}
EXPLAINED = ("clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses", "nodes")
INACTIVE = condition("QuotaReserved", "Inadmissible", value="False", message="ClusterQueue gpus is inactive")
LOCAL: Object = {"metadata": {"name": "gpus"}, "spec": {"clusterQueue": "gpus"}}
LACKS = condition("Active", "FlavorNotFound", value="False", message="references missing ResourceFlavor(s): h100.")
MISSING: Object = {"metadata": {"name": "gpus"}, "status": {"conditions": [LACKS]}}


class Cluster(DirectBackend):
    """A cluster with one job in the queue ``gpus``."""

    async def launch(self, *conditions: Object, **more: Any) -> JobRef:
        ref = JobRef.of(await self.create(render(TrainJobSpec.parse(QUEUED | more), "key", 1, "default")))
        await self.patch(ref, {"spec": {"suspend": True}})
        if conditions:
            status = {"conditions": list(conditions)}
            labels = {"kueue.x-k8s.io/job-uid": ref.uid}
            self.put(
                "workloads",
                {"metadata": {"name": "w", "labels": labels}, "spec": {"queueName": "gpus"}, "status": status},
            )
        return ref

    def put(self, plural: str, item: Object, namespace: str = "default") -> None:
        self.store.put(plural, item | {"metadata": {"namespace": namespace, **item["metadata"]}})

    async def diagnose(self, ref: JobRef) -> Diagnosis:
        return diagnosis_of(await self.evidence(ref))


@pytest.fixture
def cluster() -> Cluster:
    backend = Cluster()
    backend.store.put("clustertrainingruntimes", {"metadata": {"name": "r"}})
    return backend


async def test_a_queue_that_admits_nothing_is_explained_by_its_cluster_queue(cluster: Cluster) -> None:
    ref = await cluster.launch(INACTIVE)
    cluster.put("localqueues", LOCAL)
    cluster.put("clusterqueues", MISSING, namespace="")
    found = await cluster.diagnose(ref)
    assert (found.category, found.retry) == (Category.CONFIGURATION, RetryVerdict.CONFIGURATION)
    assert found.summary == "ClusterQueue gpus is FlavorNotFound: references missing ResourceFlavor(s): h100."


async def test_without_the_permission_nothing_is_permanent_and_the_kind_is_unseen(cluster: Cluster) -> None:
    ref = await cluster.launch(INACTIVE)
    cluster.put("localqueues", LOCAL)
    cluster.put("clusterqueues", MISSING, namespace="")
    cluster.store.forbidden = (frozenset(EXPLAINED), frozenset())
    found = await cluster.diagnose(ref)
    assert (found.category, found.retry) == (Category.QUOTA, RetryVerdict.QUOTA)
    assert [each.partition(":")[0] for each in found.unseen] == ["localqueues"]


async def test_a_missing_priority_class_is_named(cluster: Cluster) -> None:
    ref = await cluster.launch(labels=QUEUED["labels"] | {"kueue.x-k8s.io/priority-class": "urgent"})
    found = await cluster.diagnose(ref)
    assert found.summary == "the job is not queued: its WorkloadPriorityClass urgent does not exist"
    assert found.retry is RetryVerdict.CONFIGURATION
    cluster.put("workloadpriorityclasses", {"metadata": {"name": "urgent"}}, namespace="")
    assert (await cluster.diagnose(ref)).category is Category.NONE


async def test_a_job_that_does_not_wait_costs_no_further_request(cluster: Cluster) -> None:
    ref = await cluster.launch(condition("QuotaReserved"), condition("Admitted"))
    await cluster.evidence(ref)
    assert not {f"GET {each}" for each in EXPLAINED} & set(cluster.requests)
