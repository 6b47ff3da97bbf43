"""What `on_retry` changes, on real controllers: memory of the pods, nodes that are excluded, queues of Kueue."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from tests.cluster.waits import until
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import (
    Category,
    Diagnosis,
    JobRef,
    RankCrashed,
    RetryVerdict,
    TrainJobSpec,
    WaitOptions,
)
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.job import FAILURE_OF

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]


def spec(**fields: Any) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, **fields})


async def pod_of(backend: KubernetesBackend, ref: JobRef) -> dict[str, Any]:
    """The pod of a job, once it has a node."""
    with anyio.fail_after(60):
        while True:
            pods = (await backend.state(ref)).pods
            if pods and pods[0]["spec"].get("nodeName"):
                return dict(pods[0])
            await anyio.sleep(0.2)


async def test_a_pod_does_not_return_to_a_lost_node(backend: KubernetesBackend, namespace: str) -> None:
    elsewhere = spec(env=simulate(run="never"), on_retry={"node_lost": {"max_excluded_nodes": 2}})
    seen: list[str] = []
    for _ in range(3):
        ref = await launch(backend, elsewhere, "a", namespace=namespace)
        seen.append((await pod_of(backend, ref))["spec"]["nodeName"])
        lost = Diagnosis(Category.NODE_LOST, RetryVerdict.INFRASTRUCTURE, "lost", rank="node-0", node=seen[-1])
        await give_up(backend, ref, lost)
    assert seen[1] != seen[0]
    assert seen[2] not in seen[:2]


async def test_a_pod_that_was_killed_for_lack_of_memory_gets_more_although_kueue_manages_its_job(
    backend: KubernetesBackend, cluster: Access, namespace: str
) -> None:
    """The job is deleted, and a record that nothing starts keeps the reason."""
    asked = spec(
        env=simulate(run="2s", exit_code=137, reason="OOMKilled"),
        resources_per_node={"memory": "1Gi"},
        on_retry={"out_of_memory": {"max_memory": "8Gi"}},
        labels={kueue.QUEUE_LABEL: kueue.QUEUE},
    )

    def jobs() -> list[dict[str, Any]]:
        return cluster.api.find(TRAINER, "TrainJob", namespace)

    first = await launch(backend, asked, "a", namespace=namespace)
    with anyio.fail_after(90), pytest.raises(RankCrashed) as caught:
        await wait(backend, first, WaitOptions(fail_on_first_crash=True))
    why = caught.value.diagnosis
    assert (why.category, why.change) == (Category.OUT_OF_MEMORY, "memory 1Gi -> 1536Mi")
    assert why.retry is RetryVerdict.INFRASTRUCTURE
    assert why.node.startswith("simulated-")
    assert "was deleted: Kueue would start it again" in await give_up(backend, first, why)
    await until(lambda: len(jobs()) == 1 and jobs()[0]["metadata"]["name"] != first.name)
    (record,) = jobs()
    assert record["spec"]["suspend"] is True
    assert FAILURE_OF in record["metadata"]["labels"]
    await anyio.sleep(2)
    assert cluster.api.find("v1", "Pod", namespace) == [], "nothing starts the record"
    second = await launch(backend, asked, "a", namespace=namespace)
    assert second.attempt == 2
    (container,) = (await pod_of(backend, second))["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == "1536Mi"
    await until(lambda: [each["metadata"]["name"] for each in jobs()] == [second.name])
    await cancel(backend, second)
