"""Only unattended jobs are ended, and only leftovers removed: with a real API server and controllers."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.cluster import failing as make
from tests.cluster.backends import opened
from tests.cluster.waits import until, until_phase
from tests.testcluster import kueue
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._backends.kubernetes.leases import JOBS, LARGEST
from trainjob._jobs.launching import launch
from trainjob._jobs.reaper import Reaped, reap
from trainjob._jobs.waiting import wait
from trainjob._manifest.unattended import AFTER
from trainjob.status import CANCELLED

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

LEASES = "coordination.k8s.io/v1"
AFTER_SECONDS = 4
OURS = {"app.kubernetes.io/managed-by": "trainjob"}


@pytest.fixture
async def backend(cluster: Access) -> AsyncIterator[KubernetesBackend]:
    """A backend with a Lease that no other test uses, as another process has it."""
    async with opened(cluster.kubeconfig, timings=Timings(renew=0.3)) as found:
        yield found


def spec(unattended: str = "suspend", **fields: Any) -> TrainJobSpec:
    asked = {"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never"), "unattended": unattended}
    return TrainJobSpec.parse(asked | fields)


async def launched(backend: KubernetesBackend, namespace: str, key: str, asked: TrainJobSpec | None = None) -> JobRef:
    """A job that counts as unattended after `AFTER_SECONDS`, which no author may ask for."""
    ref = await launch(backend, asked or spec(), key, namespace=namespace)
    await backend.patch(ref, {"metadata": {"annotations": {AFTER: str(AFTER_SECONDS)}}})
    return ref


@asynccontextmanager
async def waited_for(backend: KubernetesBackend, ref: JobRef) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, backend, ref)
        yield
        tasks.cancel_scope.cancel()


async def reaped(backend: KubernetesBackend, namespace: str) -> list[Reaped]:
    return await reap(backend, namespace, grace=1.0, interval=0.3)


async def until_unattended() -> None:
    await anyio.sleep(AFTER_SECONDS + 1.5)  # the API server's times are whole seconds


def job(access: Access, ref: JobRef) -> dict[str, Any]:
    found = access.api.get(TRAINER, "TrainJob", ref.namespace, ref.name)
    assert found is not None
    return found


# ---------------------------------------------------------------- Leases


def leases(access: Access, namespace: str) -> list[dict[str, str | None]]:
    """For each Lease, the UIDs of the jobs that it names, with the time until which an earlier one was waited for."""
    found = [each["metadata"]["annotations"] for each in access.api.find(LEASES, "Lease", namespace)]
    return [json.loads(annotations[JOBS]) for annotations in found if JOBS in annotations]


async def test_the_api_server_accepts_the_largest_lease(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    """An annotation with the names of any number of jobs would exceed its limit; these jobs do not exist."""
    refs = [JobRef(namespace, f"job-{number}", str(uuid.uuid4())) for number in range(LARGEST + 2)]
    for ref in refs:
        backend.attend(ref)
    await until(lambda: sorted(map(len, leases(cluster, namespace))) == [2, LARGEST])
    for ref in refs:
        backend.leave(ref, ended=True)
    await until(lambda: leases(cluster, namespace) == [])


async def test_a_renewal_in_the_future_counts_from_its_arrival(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    jobs = {JOBS: '{"a": null, "b": "2998-01-01T00:00:00.000000Z"}'}
    metadata = {"name": "ahead", "namespace": namespace, "labels": OURS, "annotations": jobs}
    times = dict.fromkeys(("acquireTime", "renewTime"), "2999-01-01T00:00:00.000000Z")
    cluster.api.create({"apiVersion": LEASES, "kind": "Lease", "metadata": metadata, "spec": times})
    (first,) = await backend.waiters(namespace)
    assert abs(backend.now() - first.renewed) < timedelta(seconds=10)
    assert first.jobs == {"a": first.renewed, "b": first.renewed}
    await anyio.sleep(2.5)
    assert await backend.waiters(namespace) == [first], "not the time of the reading"


# ---------------------------------------------------------------- jobs that nothing waits for


async def test_an_unattended_job_is_suspended_and_the_next_waiter_resumes_it(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    attended, left = [await launched(backend, namespace, key) for key in ("attended", "left")]
    async with waited_for(backend, attended):
        async with waited_for(backend, left):
            await until_unattended()
            assert await reaped(backend, namespace) == []
        await until_unattended()
        (done,) = await reaped(backend, namespace)
    assert (done.job, done.done) == (str(left), "suspended")
    assert done.unattended is not None
    assert timedelta(seconds=AFTER_SECONDS) < done.unattended < timedelta(seconds=60)
    assert job(cluster, left)["metadata"]["annotations"][CANCELLED] == "unattended"
    assert await reaped(backend, namespace) == [], "a suspended job is not reaped again"
    async with waited_for(backend, left):
        await until_phase(backend, left, Phase.RUNNING)
    assert CANCELLED not in job(cluster, left)["metadata"]["annotations"]
    assert not job(cluster, attended)["spec"].get("suspend")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (spec(labels={kueue.QUEUE_LABEL: "gpus"}), "Kueue would resume it"),
        (spec(**make.OWN), "could not be suspended"),
    ],
    ids=["Kueue", "its runtime is gone"],
)
async def test_a_job_that_cannot_be_suspended_is_deleted(
    cluster: Access, backend: KubernetesBackend, namespace: str, asked: TrainJobSpec, reason: str
) -> None:
    with make.own(make.NODE)(cluster, namespace):
        ref = await launched(backend, namespace, "a", asked)
    await until_phase(backend, ref, Phase.RUNNING)
    cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
    await until_unattended()
    (done,) = await reaped(backend, namespace)
    assert done.done == "deleted"
    assert reason in done.reason
    assert await backend.get(namespace, ref.name) is None


# ---------------------------------------------------------------- jobs left suspended
