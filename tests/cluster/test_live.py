"""Jobs in queues of Kueue: their position in documents, also without optional APIs, and their goodput."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import pytest
from tests.cluster import lost_time
from tests.cluster.backends import opened
from tests.cluster.failing import queue
from tests.cluster.pods import pods_of
from tests.cluster.waits import document_when, until, until_phase
from tests.testcluster import kueue
from tests.testcluster.access import RULES, Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import run_until_finished, simulate

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.kubernetes import client
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._install import objects
from trainjob._jobs.launching import launch
from trainjob._pages.live import LiveReader
from trainjob.goodput import Activity

(ROLE,) = [each for each in objects("rbac") if each["kind"] == "Role"]
# A waiter that may not list them logs this once it has waited for some seconds.
WORKLOADS = {"apiGroups": ["kueue.x-k8s.io"], "resources": ["workloads"], "verbs": ["get", "list", "watch"]}

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


def spec(queue: str) -> TrainJobSpec:
    """A job of two pods with four GPUs each."""
    never = {"num_nodes": 2, "resources_per_node": {"gpu": 4}, "env": simulate(run="never")}
    return TrainJobSpec.parse({"runtime": "torch-distributed", "labels": {kueue.QUEUE_LABEL: queue}, **never})


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests for optional APIs, each with the status of its reply."""
    sent: list[str] = []
    send = ApiClient._open

    async def recorded(self: ApiClient, request: Request, refused: Any = None) -> Any:
        response, access = await send(self, request, refused)
        if "metrics.k8s.io" in request.path or "visibility" in request.path:
            sent.append(f"{response.status_code} {request.path}")
        return response, access

    monkeypatch.setattr(ApiClient, "_open", recorded)
    return sent


def position(document: dict[str, Any]) -> Any:
    return document["blocker"] and document["blocker"]["position"]


def _is_at(expected: int, document: dict[str, Any]) -> bool:
    return bool(position(document) == expected)


@pytest.fixture
async def backend(cluster: Access, namespace: str) -> AsyncIterator[KubernetesBackend]:
    """A backend with the permissions of `trainjob install`."""
    async with opened(cluster.kubeconfig_for(ROLE["rules"], namespace)) as found:
        yield found


async def test_queued_jobs_show_their_positions(
    own_cluster: Cluster, backend: KubernetesBackend, namespace: str, small_queue: str
) -> None:
    jobs = []
    for name in ("runs", "first", "second", "third"):
        jobs.append(await launch(backend, spec(small_queue), name, namespace=namespace))
        if name == "runs":
            await until_phase(backend, jobs[0], Phase.RUNNING)
        await anyio.sleep(1.1)  # Kueue orders jobs of one second by their names
    running, *queued = jobs
    reader = LiveReader(backend, seconds=0.5)
    with own_cluster.visibility_api():
        for expected, ref in enumerate(queued):
            document = await document_when(reader, ref, partial(_is_at, expected))
            blocker = document["blocker"]
            assert document["phase"] == "Queued"
            assert blocker["queue"] == small_queue
            assert f"waiting for admission in queue {small_queue}" in blocker["message"]
            assert not blocker["permanent"]
        # Kueue 0.18 records no reason for a job that asks for the same as one that it could not admit.
        document = await document_when(reader, queued[0], lambda seen: seen["blocker"]["reason"] == "Pending")
        assert "insufficient unused quota" in document["blocker"]["message"]
        assert position(document) == 0
        assert (await reader.document(namespace, running.name, tail=0))["blocker"] is None
        await backend.delete(running)
        await document_when(reader, queued[0], lambda seen: seen["phase"] == "Running")
        await document_when(reader, queued[2], lambda seen: position(seen) == 1)


@pytest.mark.parametrize("allowed", [True, False], ids=["absent", "forbidden"])
async def test_without_the_apis_a_job_is_read_as_before(
    cluster: Access,
    namespace: str,
    small_queue: str,
    requests: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    *,
    allowed: bool,
) -> None:
    """Each path is requested once per minute; what may not be read is not logged."""
    caplog.set_level(logging.INFO, logger="trainjob")
    kubeconfig = cluster.kubeconfig if allowed else cluster.kubeconfig_for([*RULES, WORKLOADS], namespace)
    async with opened(kubeconfig) as backend:
        running = await launch(backend, spec(small_queue), "runs", namespace=namespace)
        await until_phase(backend, running, Phase.RUNNING)
        queued = await launch(backend, spec(small_queue), "queued", namespace=namespace)
        reader = LiveReader(backend, seconds=0)
        await document_when(reader, queued, lambda seen: seen["blocker"] and seen["phase"] == "Queued")
        for _ in range(5):
            document = await reader.document(namespace, running.name, tail=0)
            assert document["resources"]["used"] is None
            assert position(await reader.document(namespace, queued.name, tail=0)) is None
        status = "404" if allowed else "403"
        queues = f"namespaces/{namespace}/localqueues/{small_queue}/pendingworkloads"
        expected = {
            f"{status} /apis/metrics.k8s.io/v1beta1/namespaces/{namespace}/pods",
            f"{status} /apis/visibility.kueue.x-k8s.io/v1beta2/{queues}",
            f"{status} /apis/visibility.kueue.x-k8s.io/v1beta1/{queues}",
        }
        assert sorted(requests) == sorted(expected)
        monkeypatch.setattr(client, "_ABSENT_SECONDS", 0.0)
        assert await backend.usage(running) is None
        assert len(requests) == 4, "the pause is over"
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---------------------------------------------------------------- goodput of a job that nothing waited for


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
