"""The watches of a backend: how waiters share them, and that nothing waits or runs when they end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.server import Event, Refused
from tests.unit.launches import attempt
from tests.unit.virtually import virtually

from trainjob import JobRef, WaitOptions
from trainjob._backends.base import Backend
from trainjob._backends.kubernetes.errors import Forbidden
from trainjob._jobs.following import follow
from trainjob._jobs.waiting import wait
from trainjob.errors import BackendUnavailable
from trainjob.status import observe

READERS: dict[str, Callable[[DirectBackend, JobRef], AsyncGenerator[Any]]] = {
    "states": lambda backend, ref: backend.watch(ref),
    "crashes": lambda backend, ref: backend.crashes(ref),
    "lines": lambda backend, ref: backend.logs(ref, follow=True),
    "a wait": lambda backend, ref: follow(backend, ref, WaitOptions()),
}
"""What waits for a job."""

each_scope = pytest.mark.parametrize("shared", [False, True], ids=["one job", "all jobs"])
each_reader = pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
LINGER = 30


@pytest.fixture
def backend() -> DirectBackend:
    return DirectBackend(shared=True)


async def exhaust(items: AsyncGenerator[Any]) -> list[Any]:
    async with aclosing(items):
        return [item async for item in items]


def running() -> set[str]:
    """What still runs beside the test."""
    return {str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()}


# ---------------------------------------------------------------- the end of a watch


@each_scope
@each_reader
@pytest.mark.parametrize("seconds", [0, 0.001, 1, 45])
@virtually
async def test_closing_a_backend_ends_whatever_waits(
    shared: bool, read: Callable[[Backend, JobRef], AsyncGenerator[Any]], seconds: float
) -> None:
    backend = DirectBackend(shared=shared)
    ref = attempt(backend, unattended="suspend")
    backend.running(ref)
    reading = asyncio.create_task(exhaust(read(backend, ref)))
    await asyncio.sleep(seconds)
    await backend.aclose()
    with pytest.raises(BackendUnavailable, match="was closed"):
        await asyncio.wait_for(reading, 60)
    await asyncio.sleep(60)
    assert running() == set()


@each_reader
@pytest.mark.parametrize("turns", range(8))
@virtually
async def test_a_waiter_cancelled_as_its_job_is_deleted_leaves_nothing_running(
    backend: DirectBackend, read: Callable[[Backend, JobRef], AsyncGenerator[Any]], turns: int
) -> None:
    ref = attempt(backend)
    backend.pod(ref)
    reading = asyncio.create_task(exhaust(read(backend, ref)))
    await asyncio.sleep(1)
    backend.store.delete("trainjobs", ref.name, {}, "Background", ref.namespace)
    await asyncio.sleep(0.005)
    for _ in range(turns):
        await asyncio.sleep(0)
    reading.cancel()
    await asyncio.sleep(LINGER + 1)
    backend.requests.clear()
    await asyncio.sleep(5)
    assert (running(), backend.requests) == (set(), [])


@each_reader
@virtually
async def test_a_quiet_namespace_closes_its_watch_soon_after_its_last_waiter(
    backend: DirectBackend, read: Callable[[Backend, JobRef], AsyncGenerator[Any]]
) -> None:
    ref = attempt(backend)
    for pause, lists in ((0, 1), (LINGER - 1, 1), (LINGER + 1, 2)):
        await asyncio.sleep(pause)
        reading = asyncio.create_task(exhaust(read(backend, ref)))
        await asyncio.sleep(1)
        reading.cancel()
        counts = Counter(backend.requests)
        assert max(counts["LIST trainjobs"], counts["LIST pods"]) == lists
    await asyncio.sleep(LINGER - 1)
    assert running()
    await asyncio.sleep(2)
    assert running() == set()


@virtually
async def test_watches_of_jobs_that_have_ended_are_forgotten() -> None:
    backend = DirectBackend()
    for number in range(1, 20):
        ref = attempt(backend, number)
        backend.end(ref)
        await wait(backend, ref, on_log=lambda _: None)
    assert len(backend._job_watches) + len(backend._pod_watches) <= 4
    assert running() == set()


# ---------------------------------------------------------------- sharing


@each_scope
@virtually
async def test_a_wait_with_logs_has_one_watch_of_jobs_and_one_of_pods(shared: bool) -> None:
    """13 requests in 14 s: two lists, two watches, and three look-ups of what blocks the job."""
    backend = DirectBackend(shared=shared)
    ref = attempt(backend)
    waiting = asyncio.create_task(wait(backend, ref, on_log=lambda _: None))
    await asyncio.sleep(14)
    waiting.cancel()
    assert Counter(backend.requests) == {
        "LIST trainjobs": 1,
        "WATCH trainjobs": 1,
        "LIST pods": 1 + 3,
        "WATCH pods": 1,
        "LIST events": 3,
        "GET clustertrainingruntimes": 3,
    }


@virtually
async def test_further_waiters_cost_no_request(backend: DirectBackend) -> None:
    refs = [attempt(backend, key=f"key-{number}") for number in range(50)]
    for ref in refs:
        backend.running(ref)
    waiting = [asyncio.create_task(wait(backend, ref, on_log=lambda _: None)) for ref in refs]
    await asyncio.sleep(20)
    assert Counter(backend.requests) == {
        f"{verb} {kind}": 1 for verb in ("LIST", "WATCH") for kind in ("trainjobs", "pods")
    }
    for ref in refs:
        backend.end(ref)
    assert [result.uid for result in await asyncio.gather(*waiting)] == [ref.uid for ref in refs]


@virtually
async def test_a_waiter_after_a_change_sees_the_change() -> None:
    """Of one job each wait lists anew: this process may have resumed a job that was cancelled."""
    backend = DirectBackend()
    ref = attempt(backend)
    for suspend in (True, False, True):
        await backend.patch(ref, {"spec": {"suspend": suspend}})
        async with aclosing(backend.watch(ref)) as snapshots:
            first = (await anext(snapshots)).trainjob
        assert first is not None
        assert first["spec"]["suspend"] is suspend


# ---------------------------------------------------------------- errors, and what is certain


@each_scope
@each_reader
@virtually
async def test_without_permission_to_list_a_waiter_gets_the_servers_message(
    shared: bool, read: Callable[[Backend, JobRef], AsyncGenerator[Any]]
) -> None:
    backend = DirectBackend(shared=shared)
    ref = attempt(backend)
    backend.store.forbidden = (frozenset({"trainjobs", "pods"}), frozenset())
    with pytest.raises(Forbidden, match="is forbidden: this account may not GET it"):
        await asyncio.wait_for(exhaust(read(backend, ref)), 60)


def _not_deleted(backend: DirectBackend, ref: JobRef) -> None:
    """A DELETED event of a job that exists: a selector that matches it no more, a proxy."""
    store = backend.store
    store.version += 1
    store.history.append(Event(store.version, "trainjobs", "DELETED", backend.job(ref)))


@each_scope
@pytest.mark.parametrize("failures", [0, 3])
@virtually
async def test_a_deleted_event_is_confirmed_by_a_read(shared: bool, failures: int) -> None:
    backend = DirectBackend(shared=shared)
    ref = attempt(backend)
    backend.running(ref)
    refusals = [Refused(503, "", "busy")] * failures

    def refuse(request: str) -> None:
        if request == "GET trainjobs" and refusals:
            raise refusals.pop()

    backend.before = refuse
    reading = asyncio.create_task(exhaust(backend.watch(ref)))
    await asyncio.sleep(1)
    _not_deleted(backend, ref)
    await asyncio.sleep(60)
    assert not reading.done()
    backend.end(ref)
    backend.store.delete("trainjobs", ref.name, {}, "Background", ref.namespace)
    *states, gone = await asyncio.wait_for(reading, 60)
    assert gone.trainjob is None
    assert observe(states[-1].trainjob).phase.terminal, "its last state comes first"


@virtually
async def test_pods_that_cannot_be_listed_delay_no_wait(backend: DirectBackend) -> None:
    ref = attempt(backend)
    backend.running(ref)

    def refuse(request: str) -> None:
        if request == "LIST pods":
            raise Refused(503, "", "busy")

    backend.before = refuse
    reading = asyncio.create_task(exhaust(follow(backend, ref)))
    crashes = asyncio.create_task(exhaust(backend.crashes(ref)))
    await asyncio.sleep(300)
    backend.condition(ref, "Complete", "AllJobsCompleted")
    observation, _ = (await asyncio.wait_for(reading, 0.1))[-1]
    assert observation.phase.terminal
    crashes.cancel()


@virtually
async def test_each_crash_of_a_rank_that_is_restarted_in_place_is_reported_once(
    backend: DirectBackend, prompt: None
) -> None:
    ref = attempt(backend)
    pod = backend.pod(ref)
    reported: list[str] = []

    async def report() -> None:
        async for evidence in backend.crashes(ref):
            (status,) = evidence.pods[0]["status"]["containerStatuses"]
            reported.append(status["lastState"]["terminated"]["finishedAt"])

    reporting = asyncio.create_task(report())
    times = [f"2026-11-21T10:00:{second:02}Z" for second in range(10, 20)]
    for time in times:
        crashed = objects.pod(0, last=objects.ended(3, finishedAt=time), job=ref.name)
        for _ in range(2):
            pod = backend.store.put("pods", {**pod, "status": crashed["status"]})
        await asyncio.sleep(5)
    reporting.cancel()
    assert reported == times
