"""Only unattended jobs are ended, and only leftovers removed: with a real API server and controllers."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.leftovers import remove_leftovers
from trainjob._jobs.reaper import Reaped, reap
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import failure_record
from trainjob._manifest.unattended import AFTER, unattended_for
from trainjob.status import CANCELLED, GIVEN_UP

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


async def test_a_process_has_one_lease_for_several_jobs(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    refs = [await launched(backend, namespace, key) for key in ("a", "b", "c")]
    kept = await launch(backend, spec("keep"), "kept", namespace=namespace)
    async with waited_for(backend, refs[0]), waited_for(backend, refs[1]), waited_for(backend, kept):
        async with waited_for(backend, refs[2]):
            await until(lambda: leases(cluster, namespace) == [{ref.uid: None for ref in refs}])
        (lease,) = cluster.api.find(LEASES, "Lease", namespace)
        assert lease["metadata"]["labels"] == OURS
        renewed = lease["spec"]["renewTime"]
        await until(lambda: cluster.api.find(LEASES, "Lease", namespace)[0]["spec"]["renewTime"] > renewed)
        # The waiter stopped while the job runs; the Lease has the time.
        await until(lambda: leases(cluster, namespace)[0][refs[2].uid] is not None)
    assert len(leases(cluster, namespace)) == 1, "its jobs still run, and it has the time until which they had a waiter"


async def test_a_lease_is_deleted_when_its_jobs_end(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    ref = await launched(backend, namespace, "a", spec(env=simulate(run="2s")))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, backend, ref)
        await until(lambda: leases(cluster, namespace) == [{ref.uid: None}])
        (lease,) = cluster.api.find(LEASES, "Lease", namespace)
        owners = [each["uid"] for each in lease["metadata"]["ownerReferences"]]
        assert owners == [ref.uid], "the job's deletion deletes the Lease of a process that died"
    await until(lambda: leases(cluster, namespace) == [])


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


@contextmanager
def counted_from_now(access: Access, backend: KubernetesBackend, ref: JobRef) -> Iterator[None]:
    """Resume the job inside the block: earlier unattended time does not count."""
    began = time.monotonic()
    yield
    seconds = unattended_for(job(access, ref), None, backend.now()).total_seconds()
    assert seconds < time.monotonic() - began + 1.5, "the API server's times are whole seconds"


async def test_launching_the_key_again_resumes_the_job(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    ref = await launched(backend, namespace, "a")
    await until_unattended()
    assert len(await reaped(backend, namespace)) == 1
    with counted_from_now(cluster, backend, ref):
        assert await launch(backend, spec(), "a", namespace=namespace) == ref
        await until_phase(backend, ref, Phase.RUNNING)


async def test_jobs_suspended_by_a_person_are_kept(cluster: Access, backend: KubernetesBackend, namespace: str) -> None:
    paused, deleting = [await launched(backend, namespace, action, spec(action)) for action in ("suspend", "cancel")]
    for ref in (paused, deleting):
        await backend.patch(ref, {"spec": {"suspend": True}})
    await until_unattended()
    assert await reaped(backend, namespace) == []
    with counted_from_now(cluster, backend, paused):
        await backend.patch(paused, {"spec": {"suspend": False}})
        await until_phase(backend, paused, Phase.RUNNING)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (spec("cancel"), ""),
        (spec(labels={kueue.QUEUE_LABEL: "gpus"}), "Kueue would resume it"),
        (spec(**make.OWN), "could not be suspended"),
    ],
    ids=["its policy", "Kueue", "its runtime is gone"],
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


async def test_leftovers_are_removed(cluster: Access, backend: KubernetesBackend, namespace: str) -> None:
    suspended = {"suspend": True}
    old = {
        why: await launched(backend, namespace, why) for why in ("cancelled", "given-up", "reaped", "again", "waits")
    }
    running, person = [await launched(backend, namespace, why) for why in ("running", "person")]
    for why in ("cancelled", "waits"):
        await cancel(backend, old[why], "suspend")
    await backend.patch(old["given-up"], {"metadata": {"annotations": {GIVEN_UP: "{}"}}, "spec": suspended})
    for why in ("reaped", "again"):
        await backend.patch(old[why], {"metadata": {"annotations": {CANCELLED: "unattended"}}, "spec": suspended})
    for suspend in (False, True):  # by a person: the mark stays
        cluster.api.patch(TRAINER, "TrainJob", namespace, old["again"].name, {"spec": {"suspend": suspend}})
    record = JobRef.of(await backend.create(failure_record(job(cluster, running), "{}")))
    cluster.api.patch(TRAINER, "TrainJob", namespace, person.name, {"spec": suspended})
    async with waited_for(backend, old["waits"]):
        await until(lambda: {old["waits"].uid: None} in leases(cluster, namespace))
        for ref in old.values():
            await until_phase(backend, ref, Phase.SUSPENDED)
        await until_unattended()
        keep_for = timedelta(seconds=AFTER_SECONDS)
        assert await remove_leftovers(backend, namespace, timedelta(hours=1)) == []
        would = {each.ref for each in await remove_leftovers(backend, namespace, keep_for, dry_run=True)}
        assert would == {old["cancelled"], old["given-up"], old["reaped"], record}
        assert {each.ref for each in await remove_leftovers(backend, namespace, keep_for)} == would
    left = {each["metadata"]["name"] for each in cluster.api.find(TRAINER, "TrainJob", namespace)}
    assert left == {ref.name for ref in (old["again"], old["waits"], running, person)}
