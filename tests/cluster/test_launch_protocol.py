"""The launch protocol on the real API server with Trainer, JobSet and their webhooks: one key has one training."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
import pytest
from tests.certificates import Authority
from tests.cluster.waits import until, until_phase
from tests.testcluster.access import JOBSET, Access
from tests.testcluster.nodes import simulate
from tests.testcluster.slow_webhook import slow_changes

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec, cancel, cancel_key
from trainjob._backends.base import TrainJob
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.reaper import reap
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import REPLACES, work_of
from trainjob._support.kube_objects import name_of
from trainjob.errors import RanksRemain
from trainjob.job import labels_of
from trainjob.status import observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

KEY = "nightly/train"
LONG = simulate(run="10m")


@pytest.fixture
async def backend(cluster: Access) -> AsyncIterator[KubernetesBackend]:
    opened = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    yield opened
    await opened.aclose()


class Frozen(KubernetesBackend):
    """The backend of a process that is frozen before it sends its create, until `thaw`."""

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials)
        self.creating, self.thaw = anyio.Event(), anyio.Event()

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        self.creating.set()
        await self.thaw.wait()
        return await super().create(trainjob, dry_run=dry_run)


@pytest.fixture
async def frozen(cluster: Access) -> AsyncIterator[Frozen]:
    opened = Frozen(Credentials(kubeconfig=str(cluster.kubeconfig)))
    yield opened
    await opened.aclose()


def spec(env: Sequence[dict[str, str]] = LONG, **fields: Any) -> TrainJobSpec:
    # Its runtime fails at the first exit code of a program.
    return TrainJobSpec.parse({"runtime": "torch-resilient", "num_nodes": 1, "env": list(env), **fields})


async def active(backend: KubernetesBackend, namespace: str) -> list[str]:
    """Names of the jobs of the key that run or are about to."""
    jobs = await backend.find(namespace, labels_of(KEY))
    running = [job for job in jobs if not job["spec"].get("suspend") and not observe(job).phase.terminal]
    return sorted(job["metadata"]["name"] for job in running if "deletionTimestamp" not in job["metadata"])


async def failed_attempt(backend: KubernetesBackend, namespace: str) -> JobRef:
    """Attempt 1, which has failed."""
    ref = await launch(backend, spec(simulate(run="200ms", exit_code=3)), KEY, namespace=namespace)
    with anyio.fail_after(240), pytest.raises(TrainJobFailed):
        await wait(backend, ref)
    return ref


async def test_a_deleted_attempt_is_not_created_again_beside_the_next_one(
    backend: KubernetesBackend, namespace: str
) -> None:
    first = await failed_attempt(backend, namespace)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    await until_phase(backend, second, Phase.RUNNING)
    await backend.delete(first)
    assert await launch(backend, spec(), KEY, namespace=namespace) == second
    assert await active(backend, namespace) == [second.name]


async def test_a_failed_attempt_whose_jobset_is_deleted_does_not_train_again(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    first = await failed_attempt(backend, namespace)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    await until_phase(backend, second, Phase.RUNNING)
    cluster.api.delete(JOBSET, "JobSet", namespace, first.name)

    def recreated() -> bool:
        return cluster.api.get(JOBSET, "JobSet", namespace, first.name) is not None

    with suppress(TimeoutError):  # Trainer 2.3 creates it again
        await until(recreated, seconds=20)
    await anyio.sleep(2)  # a training would have pods by now
    assert await backend.remaining_pods(namespace, [first.name]) == []
    assert await active(backend, namespace) == [second.name]
    present = await backend.get(namespace, second.name)
    assert present is not None
    assert present["metadata"]["annotations"][REPLACES] == first.uid


async def test_a_process_that_was_frozen_before_its_create_adopts_the_other_attempt(
    cluster: Access, backend: KubernetesBackend, frozen: Frozen, namespace: str
) -> None:
    refs: list[JobRef] = []

    async def late() -> None:
        refs.append(await launch(frozen, spec(), KEY, namespace=namespace, tried=1))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late)
        await frozen.creating.wait()
        first = await failed_attempt(backend, namespace)
        second = await launch(backend, spec(), KEY, namespace=namespace, tried=2)
        await backend.delete(first)  # the name that the frozen process has chosen is free again
        await until(lambda: cluster.api.get(JOBSET, "JobSet", namespace, first.name) is None)
        await anyio.sleep(1.1)  # creationTimestamp has whole seconds
        frozen.thaw.set()
    assert len(await active(backend, namespace)) == 1, "one of the two attempts was ended"
    assert refs == [JobRef.of(await present(backend, namespace, refs[0].name))]
    assert second.uid == refs[0].uid, "the attempt that was created first counts"


async def present(backend: KubernetesBackend, namespace: str, name: str) -> TrainJob:
    found = await backend.get(namespace, name)
    assert found is not None
    return found


async def test_many_launches_of_a_key_at_once_are_one_job(cluster: Access, namespace: str) -> None:
    refs: list[JobRef] = []

    async def one() -> None:
        own = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
        try:
            refs.append(await launch(own, spec(), KEY, namespace=namespace))
        finally:
            await own.aclose()

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(one)
    assert len({ref.uid for ref in refs}) == 1


@pytest.mark.parametrize("by", ["name", "key"])
async def test_a_cancel_needs_no_webhook(
    by: str, cluster: Access, backend: KubernetesBackend, authority: Authority, namespace: str
) -> None:
    ref = await launch(backend, spec(), KEY, namespace=namespace)
    await until_phase(backend, ref, Phase.RUNNING)
    with slow_changes(cluster.api, authority, namespace, 6):
        began = time.monotonic()
        if by == "name":
            await cancel(backend, ref, timeout_seconds=0)
        else:
            await cancel_key(backend, KEY, namespace=namespace, timeout_seconds=0)
        assert await backend.get(namespace, ref.name) is None
        assert time.monotonic() - began < 5


async def test_a_launch_obeys_a_cancel_that_came_before_its_create(
    backend: KubernetesBackend, frozen: Frozen, namespace: str
) -> None:
    async with anyio.create_task_group() as tasks:

        async def late() -> None:
            with pytest.raises(TrainJobFailed, match="its key was cancelled while it was launched"):
                await launch(frozen, spec(), KEY, namespace=namespace)

        tasks.start_soon(late)
        await frozen.creating.wait()
        await cancel_key(backend, KEY, namespace=namespace)
        frozen.thaw.set()
    assert await active(backend, namespace) == []
    again = await launch(backend, spec(), KEY, namespace=namespace)
    assert await active(backend, namespace) == [again.name], "a later launch resumes it"


async def test_the_reaper_ends_what_a_launch_created_that_did_not_see_the_cancel(
    backend: KubernetesBackend, frozen: Frozen, namespace: str
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(launch_only_creates, frozen, namespace)
        await frozen.creating.wait()
        await cancel_key(backend, KEY, namespace=namespace)
        frozen.thaw.set()
    (created,) = await backend.find(namespace, labels_of(KEY))  # its launcher was killed before its second look
    await until_phase(backend, JobRef.of(created), Phase.RUNNING)  # until then its controllers change it
    (ended,) = await reap(backend, namespace)
    assert "its key was cancelled" in str(ended)
    assert await active(backend, namespace) == []


async def launch_only_creates(backend: Frozen, namespace: str) -> None:
    """A launch whose process is killed after its create."""
    created = anyio.Event()
    create = backend.create

    async def creating(trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        stored = await create(trainjob, dry_run=dry_run)
        created.set()
        await anyio.sleep_forever()
        return stored

    backend.create = creating  # type: ignore[method-assign] # this object only
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: launch(backend, spec(), KEY, namespace=namespace))
        await created.wait()
        tasks.cancel_scope.cancel()


async def test_the_next_attempt_of_a_cancelled_key_gets_its_own_jobset(
    backend: KubernetesBackend, namespace: str
) -> None:
    first = await launch(backend, spec(simulate(run="1s")), KEY, namespace=namespace)
    with anyio.fail_after(240):
        await wait(backend, first)
    await backend.delete(first)
    second = await launch(backend, spec(), KEY, namespace=namespace)  # while the JobSet is still there
    await until_phase(backend, second, Phase.RUNNING)
    assert work_of(second.name) == work_of(first.name)
    assert await backend.has_own_jobset(second)


async def test_the_next_attempt_waits_for_the_ranks_of_the_earlier_one(
    cluster: Access, backend: KubernetesBackend, namespace: str
) -> None:
    first = await launch(backend, spec(simulate(run="10m", stop="10m")), KEY, namespace=namespace)
    await until_phase(backend, first, Phase.RUNNING)
    (rank,) = await backend.remaining_pods(namespace, [first.name])
    await cancel_key(backend, KEY, namespace=namespace, timeout_seconds=0)
    with pytest.raises(RanksRemain):
        await launch(backend, spec(), KEY, namespace=namespace, wait_for_ranks=False)
    assert await active(backend, namespace) == []
    cluster.api.delete("v1", "Pod", namespace, name_of(rank), grace=0)
    second = await launch(backend, spec(), KEY, namespace=namespace)
    assert second.uid != first.uid
    left = map(name_of, await backend.remaining_pods(namespace, [first.name]))
    assert name_of(rank) not in left


@pytest.fixture
def requests_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[KubernetesBackend], list[str]]:
    """Records the requests of a backend."""

    def record(backend: KubernetesBackend) -> list[str]:
        found: list[str] = []
        stream = backend._client.stream

        def recorded(request: Any) -> Any:
            found.append(f"{request.method} {request.path.rpartition('/namespaces/')[2].partition('/')[2]}")
            return stream(request)

        monkeypatch.setattr(backend._client, "stream", recorded)
        return found

    return record


async def test_what_a_launch_costs(
    backend: KubernetesBackend, namespace: str, requests_of: Callable[[KubernetesBackend], list[str]]
) -> None:
    """The figures of docs/concepts/identity-and-retries.md."""
    requests = requests_of(backend)
    ref = await launch(backend, spec(), KEY, namespace=namespace)
    look = ["GET leases", "GET trainjobs"]
    assert sorted(requests[:4]) == sorted([*look, "GET pods", f"GET jobsets/{ref.name}"])
    assert requests[4] == "POST trainjobs"
    assert sorted(requests[5:]) == look
    await until_phase(backend, ref, Phase.RUNNING)  # until then its controllers change it
    requests.clear()
    assert await launch(backend, spec(), KEY, namespace=namespace, tried=2) == ref
    assert (sorted(requests[:2]), requests[2:]) == (look, [f"PATCH trainjobs/{ref.name}"])
    requests.clear()
    await launch(backend, spec(), f"{KEY}-2", namespace=namespace, is_new=True)
    assert (requests[:1], sorted(requests[1:])) == (["POST trainjobs"], look)
