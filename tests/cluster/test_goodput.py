"""The goodput of a job that Kueue preempted and nothing waited for: its conditions keep the latest admission only."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
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
from trainjob.backends.kubernetes.backend import KubernetesBackend
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.cancellation import cancel
from trainjob.goodput import Activity, Goodput
from trainjob.kube_objects import mapping
from trainjob.lifecycle import launch
from trainjob.manifest import labels_of

pytestmark = pytest.mark.anyio

SECONDS = 4.0  # of each part
SLACK = 4.0  # three changes of conditions in whole seconds, and what pods need to end


def check(goodput: Goodput, *, queued: float, admitted: float) -> None:
    """Compare with the test's times. Kueue counts how long a job was admitted, which includes the start of its pods."""
    spent = goodput.seconds
    assert spent[Activity.QUEUED] == pytest.approx(queued, abs=SLACK)
    assert spent[Activity.TRAINING] + spent.get(Activity.STARTING, 0) == pytest.approx(admitted, abs=SLACK)
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

    async def reached(ref: JobRef, *phases: Phase) -> float:
        await until_phase(backend, ref, *phases)
        return time.time()

    async def measured() -> Goodput:
        return await lost_time.measured(backend, namespace, "preempted")

    not_queued = set(Phase) - {Phase.QUEUED}
    first = await begin("first")
    await reached(first, Phase.RUNNING)
    job = await begin("preempted")
    times = [time.time()]
    await anyio.sleep(SECONDS)
    await cancel(backend, first, timeout_seconds=0)  # Kueue admits the next job before the pods have ended
    times.append(await reached(job, *not_queued))
    await reached(job, Phase.RUNNING)
    await anyio.sleep(2 * SECONDS)
    urgent = await begin("urgent", **{kueue.PRIORITY_LABEL: namespace})
    times.append(await reached(job, Phase.QUEUED))
    await anyio.sleep(SECONDS)
    waits, now = await measured(), time.time()
    check(waits, queued=times[1] - times[0] + now - times[2], admitted=times[2] - times[1])
    assert waits.segments[0].activity is Activity.QUEUED  # the training was before its preemption

    await cancel(backend, urgent, timeout_seconds=0)
    times.append(await reached(job, *not_queued))
    await reached(job, Phase.RUNNING)
    await anyio.sleep(SECONDS)
    await anyio.to_thread.run_sync(cluster.finish, namespace)
    times.append(await reached(job, Phase.COMPLETE))
    complete = await measured()
    queued, admitted = times[1] - times[0] + times[3] - times[2], times[2] - times[1] + times[4] - times[3]
    check(complete, queued=queued, admitted=admitted)
    (workload,) = await backend.states(namespace, labels_of("preempted"))
    assert mapping(workload.workload, "status")["accumulatedPastExecutionTimeSeconds"] > 0
    cluster.api.delete(kueue.API, "ClusterQueue", "", namespace)
    cluster.api.delete(kueue.API, "WorkloadPriorityClass", "", namespace)
