"""The goodput of a job that Kueue preempted and nothing waited for: its conditions keep the latest admission only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
import pytest
from tests.cluster import lost_time
from tests.cluster.waits import until_phase
from tests.testcluster import kueue
from tests.testcluster.access import Access
from tests.testcluster.nodes import run_until_finished

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._support.kube_objects import mapping
from trainjob.goodput import Activity, Goodput
from trainjob.job import labels_of

pytestmark = pytest.mark.anyio

SECONDS = 4.0  # of each part
SLACK = 3.0  # three changes of conditions in whole seconds


@dataclass
class Change:
    """When something changed: the test knows when it caused that, and when it has seen it, in Unix time."""

    earliest: float
    latest: float


def check(goodput: Goodput, *changes: Change) -> None:
    """Compare with the test's times, at which the job was queued, admitted, queued, and so on.

    Kueue counts how long a job was admitted, which includes the start of its pods.
    """
    spent = goodput.seconds
    queued = spent[Activity.QUEUED]
    admitted = spent[Activity.TRAINING] + spent.get(Activity.STARTING, 0)
    for first, measured in enumerate((queued, admitted)):
        parts = list(zip(changes[first::2], changes[first + 1 :: 2], strict=False))
        shortest = sum(end.earliest - begin.latest for begin, end in parts)
        longest = sum(end.latest - begin.earliest for begin, end in parts)
        assert shortest - SLACK <= measured <= longest + SLACK, (shortest, longest, goodput)
    assert spent[Activity.TRAINING] > 2 * SECONDS - 2  # what the test trains at least, in whole seconds


@pytest.fixture
async def backend(cluster: Access) -> AsyncIterator[KubernetesBackend]:
    opened = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    yield opened
    await opened.aclose()


async def test_training_before_a_preemption_is_no_queue(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    cluster.api.apply(kueue.cluster_queue(namespace, gpu=1))
    cluster.api.create(kueue.local_queue(namespace, "own", namespace))
    cluster.api.create(kueue.priority_class(namespace, 1000))

    async def begin(key: str, **labels: str) -> JobRef:
        fields: dict[str, Any] = {
            "runtime": "torch-distributed",
            "num_nodes": 1,
            "resources_per_node": {"gpu": 1},
            "runtime_patches": [run_until_finished()],
            "labels": {kueue.QUEUE_LABEL: "own", **labels},
        }
        return await launch(backend, TrainJobSpec.parse(fields), key, namespace=namespace)

    async def reached(since: float, ref: JobRef, *phases: Phase) -> Change:
        await until_phase(backend, ref, *phases)
        return Change(since, time.time())

    async def measured() -> Goodput:
        return await lost_time.measured(backend, namespace, "preempted")

    not_queued = set(Phase) - {Phase.QUEUED}
    first = await begin("first")
    await until_phase(backend, first, Phase.RUNNING)
    since = time.time()
    job = await begin("preempted")
    created = Change(since, time.time())
    await anyio.sleep(SECONDS)
    since = time.time()
    await cancel(backend, first, timeout_seconds=0)  # Kueue admits the next job before the pods have ended
    admitted = await reached(since, job, *not_queued)
    await until_phase(backend, job, Phase.RUNNING)
    await anyio.sleep(2 * SECONDS)
    since = time.time()
    urgent = await begin("urgent", **{kueue.PRIORITY_LABEL: namespace})
    preempted = await reached(since, job, Phase.QUEUED)
    await anyio.sleep(SECONDS)
    since = time.time()
    waits = await measured()
    check(waits, created, admitted, preempted, Change(since, time.time()))
    assert waits.segments[0].activity is Activity.QUEUED  # the training was before its preemption

    since = time.time()
    await cancel(backend, urgent, timeout_seconds=0)
    again = await reached(since, job, *not_queued)
    await until_phase(backend, job, Phase.RUNNING)
    await anyio.sleep(SECONDS)
    since = time.time()
    await anyio.to_thread.run_sync(cluster.finish, namespace)
    ended = await reached(since, job, Phase.COMPLETE)
    check(await measured(), created, admitted, preempted, again, ended)
    (workload,) = await backend.states(namespace, labels_of("preempted"))
    assert mapping(workload.workload, "status")["accumulatedPastExecutionTimeSeconds"] > 0
    cluster.api.delete(kueue.API, "ClusterQueue", "", namespace)
    cluster.api.delete(kueue.API, "WorkloadPriorityClass", "", namespace)
