"""What `on_retry` changes, on real controllers: memory of the pods, nodes that are excluded, queues of Kueue."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.cluster.waits import until, until_phase
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import (
    Category,
    Diagnosis,
    JobRef,
    Phase,
    QueueTimeout,
    RankCrashed,
    RetryVerdict,
    TrainJobFailed,
    TrainJobSpec,
    WaitOptions,
)
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._diagnosis.serialization import unpack_diagnosis
from trainjob._jobs.cancellation import cancel, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.job import FAILURE, FAILURE_OF

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


def growing(**fields: Any) -> TrainJobSpec:
    """A job whose pod is killed again and again because memory ran out, and whose next attempt may get more."""
    killed = simulate(run="2s", exit_code=137, reason="OOMKilled")
    more = {"resources_per_node": {"memory": "1Gi"}, "on_retry": {"out_of_memory": {"max_memory": "8Gi"}}}
    return spec(env=killed, **more, **fields)


async def killed(backend: KubernetesBackend, asked: TrainJobSpec, namespace: str) -> tuple[JobRef, Diagnosis]:
    ref = await launch(backend, asked, "a", namespace=namespace)
    with anyio.fail_after(90), pytest.raises(RankCrashed) as caught:
        await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    return ref, caught.value.diagnosis


async def memory_of(backend: KubernetesBackend, ref: JobRef) -> str:
    (container,) = (await pod_of(backend, ref))["spec"]["containers"]
    return str(container["resources"]["limits"]["memory"])


async def test_a_pod_that_was_killed_for_lack_of_memory_gets_more(backend: KubernetesBackend, namespace: str) -> None:
    first, why = await killed(backend, growing(), namespace)
    assert (why.category, why.change) == (Category.OUT_OF_MEMORY, "memory 1Gi -> 1536Mi")
    assert why.retry is RetryVerdict.INFRASTRUCTURE
    assert why.node.startswith("simulated-")
    await give_up(backend, first, why)
    second = await launch(backend, growing(), "a", namespace=namespace, after_failure="infrastructure")
    assert await memory_of(backend, second) == "1536Mi"
    assert await launch(backend, growing(), "a", namespace=namespace) == second
    await cancel(backend, second)


async def test_the_diagnosis_of_a_failed_job_outlives_its_pods(backend: KubernetesBackend, namespace: str) -> None:
    asked = spec(
        runtime="torch-resilient",  # fails at the first exit code of a program
        env=simulate(run="200ms", exit_code=3, reason="OOMKilled"),
        resources_per_node={"memory": "1Gi"},
        on_retry={"out_of_memory": {"max_memory": "1200Mi"}},
    )
    first = await launch(backend, asked, "a", namespace=namespace)
    with anyio.fail_after(90), pytest.raises(TrainJobFailed, match="the next attempt changes memory 1Gi -> 1200Mi"):
        await wait(backend, first)
    present = await backend.get(namespace, first.name)
    assert present is not None
    assert unpack_diagnosis(json.loads(present["metadata"]["annotations"][FAILURE])).node_memory
    second = await launch(backend, asked, "a", namespace=namespace)
    assert await memory_of(backend, second) == "1200Mi"


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


async def test_a_job_without_capacity_runs_in_another_queue(
    backend: KubernetesBackend, cluster: Access, namespace: str, small_queue: str
) -> None:
    def queued(**fields: Any) -> TrainJobSpec:
        return spec(labels={kueue.QUEUE_LABEL: small_queue}, resources_per_node={"gpu": 8}, **fields)

    blocking = await launch(backend, queued(env=simulate(run="never")), "blocking", namespace=namespace)
    await until_phase(backend, blocking, Phase.RUNNING)
    moving = queued(env=simulate(run="200ms"), on_retry={"quota": {"queue": kueue.QUEUE}})
    first = await launch(backend, moving, "moving", namespace=namespace)
    with anyio.fail_after(90), pytest.raises(QueueTimeout, match=f"waiting for admission in queue {small_queue}"):
        await wait(backend, first, WaitOptions(queue_timeout=timedelta(seconds=1)))
    second = await launch(backend, moving, "moving", namespace=namespace)
    assert second.attempt == 2
    await until(lambda: cluster.api.get(TRAINER, "TrainJob", namespace, first.name) is None)
    notices: list[str] = []
    with anyio.fail_after(120):
        await wait(backend, second, on_change=lambda _, notice: notices.append(notice))
    assert f"queue {small_queue} -> {kueue.QUEUE}; because of quota" in notices[0]
    await cancel(backend, blocking)


async def test_the_reason_outlives_a_job_that_kueue_manages(
    backend: KubernetesBackend, cluster: Access, namespace: str
) -> None:
    def jobs() -> list[dict[str, Any]]:
        return cluster.api.find(TRAINER, "TrainJob", namespace)

    asked = growing(labels={kueue.QUEUE_LABEL: kueue.QUEUE})
    first, why = await killed(backend, asked, namespace)
    assert "was deleted: Kueue would start it again" in await give_up(backend, first, why)
    await until(lambda: len(jobs()) == 1 and jobs()[0]["metadata"]["name"] != first.name)
    (record,) = jobs()
    assert record["spec"]["suspend"] is True
    assert FAILURE_OF in record["metadata"]["labels"]
    await anyio.sleep(2)
    assert cluster.api.find("v1", "Pod", namespace) == [], "nothing starts the record"
    second = await launch(backend, asked, "a", namespace=namespace)
    assert second.attempt == 2
    assert await memory_of(backend, second) == "1536Mi"
    await until(lambda: [each["metadata"]["name"] for each in jobs()] == [second.name])
    await cancel(backend, second)
