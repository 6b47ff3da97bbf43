"""Only unattended jobs are ended, and only leftovers removed: with a real API server and controllers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any

import anyio
import anyio.abc
import pytest
from tests.cluster.waits import until, until_phase
from tests.testcluster import kueue
from tests.testcluster.access import RULES, TRAINER, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._backends.kubernetes.leases import JOBS, LARGEST
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.leftovers import remove_leftovers
from trainjob._jobs.reaper import Reaped, reap
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import failure_record
from trainjob._manifest.unattended import AFTER, LABEL, unattended_for
from trainjob.status import CANCELLED, GIVEN_UP

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

LEASES = "coordination.k8s.io/v1"
AFTER_SECONDS = 2
GRACE, LOOK = 1.0, 0.3


def spec(unattended: str = "suspend", **fields: Any) -> TrainJobSpec:
    asked = {"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never"), "unattended": unattended}
    return TrainJobSpec.parse(asked | fields)


@asynccontextmanager
async def opened(access: Access, kubeconfig: str = "") -> AsyncIterator[KubernetesBackend]:
    """A backend with a Lease that no other test uses, as another process has it."""
    backend = KubernetesBackend(
        Credentials(kubeconfig=kubeconfig or str(access.kubeconfig)), timings=Timings(renew=0.3)
    )
    yield backend
    await backend.aclose()


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
    return await reap(backend, namespace, grace=GRACE, interval=LOOK)


async def until_unattended() -> None:
    await anyio.sleep(AFTER_SECONDS + 1.5)  # the API server's times are whole seconds


@contextmanager
def counted_from_now(access: Access, backend: KubernetesBackend, ref: JobRef) -> Iterator[None]:
    """Resume the job inside the block: earlier unattended time does not count."""
    began = time.monotonic()
    yield
    seconds = unattended_for(job(access, ref), None, backend.now()).total_seconds()
    assert seconds < time.monotonic() - began + 1.5, "the API server's times are whole seconds"


def leases(access: Access, namespace: str) -> dict[str, set[str]]:
    """Lease -> UIDs of the jobs that it names."""
    found = [each["metadata"] for each in access.api.find(LEASES, "Lease", namespace)]
    return {each["name"]: set(json.loads(each["annotations"][JOBS])) for each in found if JOBS in each["annotations"]}


def job(access: Access, ref: JobRef) -> dict[str, Any]:
    found = access.api.get(TRAINER, "TrainJob", ref.namespace, ref.name)
    assert found is not None
    return found


async def test_a_process_has_one_lease_for_several_jobs(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
        refs = [await launched(backend, namespace, key) for key in ("a", "b", "c")]
        kept = await launch(backend, spec("keep"), "kept", namespace=namespace)
        async with waited_for(backend, refs[0]), waited_for(backend, refs[1]), waited_for(backend, kept):
            async with waited_for(backend, refs[2]):
                await until(lambda: list(leases(cluster, namespace).values()) == [{ref.uid for ref in refs}])
            (lease,) = cluster.api.find(LEASES, "Lease", namespace)
            assert lease["metadata"]["labels"] == {"app.kubernetes.io/managed-by": "trainjob"}
            renewed = lease["spec"]["renewTime"]
            await until(lambda: cluster.api.find(LEASES, "Lease", namespace)[0]["spec"]["renewTime"] > renewed)
            # The waiter stopped while the job runs; the Lease has the time.
            await until(
                lambda: (
                    json.loads(cluster.api.find(LEASES, "Lease", namespace)[0]["metadata"]["annotations"][JOBS])[
                        refs[2].uid
                    ]
                    is not None
                )
            )
    assert len(leases(cluster, namespace)) == 1, (
        "its jobs still run, and it has the time until which they were waited for"
    )


async def test_leases_have_room_for_any_number_of_jobs(cluster: Access, namespace: str) -> None:
    """An annotation with all names would exceed the limit of the API server.

    A Lease with a single job would have it as its owner; these jobs do not exist.
    """
    async with opened(cluster) as backend:
        refs = [JobRef(namespace, f"job-{number}", str(uuid.uuid4())) for number in range(3 * LARGEST + 2)]
        for ref in refs:
            backend.attend(ref)
        await until(lambda: sum(map(len, leases(cluster, namespace).values())) == len(refs))
        found = leases(cluster, namespace)
        assert sorted(map(len, found.values())) == [2, *[LARGEST] * 3]
        assert set().union(*found.values()) == {ref.uid for ref in refs}
        for ref in refs[: 2 * LARGEST]:
            backend.leave(ref, ended=True)
        await until(lambda: len(leases(cluster, namespace)) == 2)
        for ref in refs[2 * LARGEST :]:
            backend.leave(ref, ended=True)
    assert leases(cluster, namespace) == {}


async def test_a_renewal_in_the_future_counts_from_its_arrival(cluster: Access, namespace: str) -> None:
    metadata = {
        "name": "ahead",
        "namespace": namespace,
        "labels": {"app.kubernetes.io/managed-by": "trainjob"},
        "annotations": {JOBS: '{"a": null, "b": "2998-01-01T00:00:00.000000Z"}'},
    }
    times = {"acquireTime": "2999-01-01T00:00:00.000000Z", "renewTime": "2999-01-01T00:00:00.000000Z"}
    cluster.api.create({"apiVersion": LEASES, "kind": "Lease", "metadata": metadata, "spec": times})
    async with opened(cluster) as backend:
        (first,) = await backend.waiters(namespace)
        assert abs(backend.now() - first.renewed) < timedelta(seconds=10)
        assert first.jobs == {"a": first.renewed, "b": first.renewed}
        await anyio.sleep(2.5)
        assert await backend.waiters(namespace) == [first], "not the time of the reading"


async def test_a_lease_is_deleted_when_its_jobs_end(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
        ref = await launched(backend, namespace, "a", spec(env=simulate(run="2s")))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, backend, ref)
            await until(lambda: list(leases(cluster, namespace).values()) == [{ref.uid}])
            (lease,) = cluster.api.find(LEASES, "Lease", namespace)
            assert [each["uid"] for each in lease["metadata"]["ownerReferences"]] == [ref.uid], (
                "the job's deletion deletes the Lease of a process that died"
            )
    assert leases(cluster, namespace) == {}


async def test_an_unattended_job_is_suspended_and_the_next_waiter_resumes_it(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
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


async def test_launching_the_key_again_resumes_the_job(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
        ref = await launched(backend, namespace, "a")
        await until_unattended()
        assert len(await reaped(backend, namespace)) == 1
        with counted_from_now(cluster, backend, ref):
            assert await launch(backend, spec(), "a", namespace=namespace) == ref
            await until_phase(backend, ref, Phase.RUNNING)


async def test_jobs_suspended_by_a_person_are_kept(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
        paused, deleting = [
            await launched(backend, namespace, key, spec(action))
            for key, action in (("paused", "suspend"), ("deleting", "cancel"))
        ]
        for ref in (paused, deleting):
            await backend.patch(ref, {"spec": {"suspend": True}})
        await until_unattended()
        assert await reaped(backend, namespace) == []
        with counted_from_now(cluster, backend, paused):
            await backend.patch(paused, {"spec": {"suspend": False}})
            await until_phase(backend, paused, Phase.RUNNING)


@pytest.mark.parametrize("why", ["asked", "kueue", "runtime-gone"])
async def test_a_job_that_cannot_be_suspended_is_deleted(
    cluster: Access, namespace: str, why: str, needs: Callable[[str], None]
) -> None:
    asked = spec("cancel")
    if why == "kueue":
        needs("kueue")
        asked = spec(labels={kueue.QUEUE_LABEL: "gpus"})
    if why == "runtime-gone":
        runtime = cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", "torch-distributed")
        assert runtime is not None
        own = {"name": "own", "namespace": namespace}
        cluster.api.create(
            {**runtime, "kind": "TrainingRuntime", "metadata": {**own, "labels": runtime["metadata"]["labels"]}}
        )
        asked = spec(runtime={"name": "own", "kind": "TrainingRuntime"})
    async with opened(cluster) as backend:
        ref = await launched(backend, namespace, "a", asked)
        await until_phase(backend, ref, Phase.RUNNING)
        if why == "runtime-gone":
            cluster.api.delete(TRAINER, "TrainingRuntime", namespace, "own")
        await until_unattended()
        (done,) = await reaped(backend, namespace)
        assert done.done == "deleted"
        assert {"asked": "", "kueue": "Kueue would resume it", "runtime-gone": "could not be suspended"}[
            why
        ] in done.reason
        assert await backend.get(namespace, ref.name) is None


async def test_jobs_of_a_process_without_permission_for_leases_are_kept(
    cluster: Access, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    kubeconfig = cluster.kubeconfig_for(RULES, namespace)
    async with opened(cluster, str(kubeconfig)) as backend, opened(cluster) as other:
        ref = await launched(backend, namespace, "a")
        with caplog.at_level(logging.WARNING):
            async with waited_for(backend, ref):
                await until(lambda: LABEL not in job(cluster, ref)["metadata"]["labels"])
        assert "permission for Leases is missing, so unattended jobs are kept" in caplog.text
        await until_unattended()
        assert await reaped(other, namespace) == []


async def test_reapers_finish_the_work_of_a_cancelled_one(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as first, opened(cluster) as second:
        refs = [await launched(first, namespace, key) for key in "abcdef"]
        await until_unattended()
        dying = asyncio.create_task(reaped(first, namespace))
        await anyio.sleep(GRACE + 2 * LOOK)
        dying.cancel()
        await asyncio.wait({dying})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reaped, first, namespace)
            tasks.start_soon(reaped, second, namespace)
        assert all(job(cluster, ref)["spec"]["suspend"] for ref in refs)
        for ref in refs:
            await cancel(first, ref)


async def test_the_leases_of_processes_that_died_are_removed(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
        ref = await launched(backend, namespace, "a")
        old = {"acquireTime": "2026-01-01T00:00:00.000000Z", "renewTime": "2026-01-01T00:00:00.000000Z"}
        for name, uid in (("forgotten", "0"), ("of-one-that-runs", ref.uid)):
            labels = {"app.kubernetes.io/managed-by": "trainjob"}
            metadata = {
                "name": name,
                "namespace": namespace,
                "labels": labels,
                "annotations": {JOBS: f'{{"{uid}": null}}'},
            }
            cluster.api.create({"apiVersion": LEASES, "kind": "Lease", "metadata": metadata, "spec": old})
        someone = {"name": "another-program", "namespace": namespace}
        cluster.api.create({"apiVersion": LEASES, "kind": "Lease", "metadata": someone, "spec": old})
        assert await reaped(backend, namespace) == []
        names = {each["metadata"]["name"] for each in cluster.api.find(LEASES, "Lease", namespace)}
        assert names == {"of-one-that-runs", "another-program"}


# ---------------------------------------------------------------- jobs left suspended


async def test_leftovers_are_removed(cluster: Access, namespace: str) -> None:
    async with opened(cluster) as backend:
        old = {
            why: await launched(backend, namespace, why)
            for why in ("cancelled", "given-up", "reaped", "again", "waits")
        }
        running = await launched(backend, namespace, "running")
        await cancel(backend, old["cancelled"], "suspend")
        await cancel(backend, old["waits"], "suspend")
        suspended = {"suspend": True}
        await backend.patch(old["given-up"], {"metadata": {"annotations": {GIVEN_UP: "{}"}}, "spec": suspended})
        for why in ("reaped", "again"):
            await backend.patch(old[why], {"metadata": {"annotations": {CANCELLED: "unattended"}}, "spec": suspended})
        for suspend in (False, True):  # by a person: the mark stays
            cluster.api.patch(TRAINER, "TrainJob", namespace, old["again"].name, {"spec": {"suspend": suspend}})
        record = JobRef.of(await backend.create(failure_record(job(cluster, running), "{}")))
        person = await launched(backend, namespace, "person")
        cluster.api.patch(TRAINER, "TrainJob", namespace, person.name, {"spec": suspended})
        async with waited_for(backend, old["waits"]):
            await until(lambda: {old["waits"].uid} in leases(cluster, namespace).values())
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
