"""The goodput of a job that Kueue preempted and nothing waited for: its conditions keep the latest admission only."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from tests.cluster import lost_time
from tests.cluster.failing import queue
from tests.cluster.pods import pods_of
from tests.cluster.waits import until, until_phase
from tests.testcluster import kueue
from tests.testcluster.access import Access
from tests.testcluster.nodes import run_until_finished

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob.goodput import Activity

pytestmark = pytest.mark.anyio

TRAINED = 4.0  # seconds


async def test_training_before_a_preemption_is_no_queue(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    """Kueue counts the time of the admission that is over; tests/unit/test_goodput.py divides it."""
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

    def counted() -> list[float]:
        """Seconds of each Workload that lost an admission."""
        statuses = [each.get("status", {}) for each in cluster.api.find(kueue.API, "Workload", namespace)]
        return list(filter(None, (each.get("accumulatedPastExecutionTimeSeconds") for each in statuses)))

    with queue(cluster, namespace, "own", gpu=1):
        job = await begin("preempted")
        await until_phase(backend, job, Phase.RUNNING)
        await anyio.sleep(TRAINED)
        await begin("urgent", **{kueue.PRIORITY_LABEL: namespace})
        await until_phase(backend, job, Phase.QUEUED)
        await until(lambda: not pods_of(cluster, job))  # they would show when they have trained
        await until(counted)
        found = await lost_time.measured(backend, namespace, "preempted")
        assert min(counted()) >= TRAINED - 1
    assert found.seconds[Activity.TRAINING] >= TRAINED - lost_time.SECONDS
    assert found.segments[-1].activity is Activity.QUEUED, "the training was before its preemption"
    cluster.api.delete(kueue.API, "WorkloadPriorityClass", "", namespace)
