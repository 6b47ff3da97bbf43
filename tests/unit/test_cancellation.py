"""Stop a job or all attempts of a key: the order of the requests, the record that is left, and the wait for ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.server import Refused
from tests.unit.launches import (
    WHY,
    Clock,
    active,
    annotations_of,
    attempt,
    attempts,
    cancels,
    launch,
    once,
    refuse,
    running,
)

from trainjob import InvalidSpec, JobRef
from trainjob._jobs import cancellation
from trainjob._jobs.cancellation import cancel, cancel_key, give_up, request_cancel
from trainjob._manifest.attempts import LAUNCHED
from trainjob.errors import BackendUnavailable, TrainJobError
from trainjob.status import CANCELLED

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
async def ref(backend: DirectBackend) -> JobRef:
    """A job that was just launched."""
    made = await launch(backend)
    backend.store.log.clear()
    return made


def jobs(backend: DirectBackend) -> list[JobRef]:
    return [JobRef.of(job) for job in backend.jobs.values()]


def stops(backend: DirectBackend) -> list[str]:
    """What was stopped and recorded, in order: ``delete 1``, ``suspend 2``, ``record``."""
    found = []
    for each in backend.store.log:
        number = each.name.rpartition("-")[2]
        if each.suspends() or (each.method, each.plural) == ("DELETE", "trainjobs"):
            found.append(f"{'delete' if each.method == 'DELETE' else 'suspend'} {number}")
        elif (each.method, each.plural) == ("POST", "leases"):
            found.append("record")
    return found


async def stop(backend: DirectBackend, action: Any = "cancel", **options: Any) -> list[int]:
    """Stop the key; the numbers of the attempts that were stopped."""
    done = await cancel_key(backend, "key", namespace="ns", action=action, **{"timeout_seconds": 0, **options})
    return sorted(ref.attempt for ref in done.jobs)


# ---------------------------------------------------------------- all attempts of a key


@pytest.mark.parametrize(
    ("states", "action", "stopped", "first", "then"),
    [
        (["given up", "running", "suspended", "queued"], "cancel", [1, 2, 3, 4], {2, 3, 4}, ["delete 1"]),
        (["failed", "complete", "running"], "cancel", [3], {3}, ["suspend 1"]),  # Trainer 2.3 can take Failed back
        (["running", "queued", "given up", "suspended"], "suspend", [1, 2], {2}, ["suspend 1"]),
        (["complete", "deleting"], "cancel", [], set(), []),
        ([], "cancel", [], set(), []),
    ],
    ids=["given up last", "failed last", "Kueue would resume", "ended", "no job"],
)
async def test_attempts_are_deleted_beside_the_record_and_others_follow(
    backend: DirectBackend, states: list[str], action: Any, stopped: list[int], first: set[int], then: list[str]
) -> None:
    """A deletion is not preceded by a mark, and one that a person suspended gets none: a launch would resume it."""
    other = attempt(backend, 1, "another key")
    refs = await attempts(backend, *states)
    before = backend.jobs
    assert await stop(backend, action) == stopped
    deletions = {"record", *(f"delete {number}" for number in first)}
    assert set(stops(backend)[: len(deletions)]) == deletions
    assert stops(backend)[len(deletions) :] == then
    untouched = [ref for ref in refs if ref.attempt not in stopped and f"suspend {ref.attempt}" not in then]
    for ref in [other, *untouched]:
        assert backend.job(ref) == before["ns", ref.name]
    (record,) = await cancels(backend)
    assert (record.tried, record.uid, record.action) == (None, "", action)


async def test_a_blank_key_is_refused(backend: DirectBackend) -> None:
    with pytest.raises(InvalidSpec):
        await cancel_key(backend, " ", namespace="ns")
    assert backend.requests == []


@pytest.mark.parametrize("action", ["cancel", "suspend"])
@pytest.mark.parametrize(
    "error", [Refused(422, "Invalid", "a policy refused the Lease"), BackendUnavailable("Leases hang")], ids=str
)
async def test_a_job_is_stopped_although_the_record_is_refused(
    backend: DirectBackend, action: Any, error: Exception
) -> None:
    first, _ = await attempts(backend, "running", "given up")
    refuse(backend, "POST leases", error=error)
    with pytest.raises(TrainJobError, match=r"Leases hang|refused the Lease"):
        await stop(backend, action)
    if action == "cancel":
        assert backend.jobs == {}
    else:
        assert backend.job(first)["spec"]["suspend"]
        assert annotations_of(backend, first)[CANCELLED].startswith("unknown:")


async def test_one_job_that_cannot_be_stopped_does_not_keep_the_others(backend: DirectBackend) -> None:
    refs = await attempts(backend, "running", "running", "given up")

    def lose(request: str) -> None:
        if request == "DELETE trainjobs" and backend.requests.count(request) == 1:
            raise BackendUnavailable("no reply")

    backend.before = lose
    with pytest.raises(BackendUnavailable):
        await stop(backend)
    assert jobs(backend) == refs[:1]


# ---------------------------------------------------------------- launches on their way


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_it_looks_until_a_launch_on_its_way_is_known(backend: DirectBackend, action: Any) -> None:
    """The process is killed during its own launch: the create arrives later."""

    once(backend, "LIST trainjobs", lambda: attempt(backend, annotations={LAUNCHED: "0"}), skip=4)
    assert await stop(backend, action, look_seconds=30) == [1]
    assert backend.requests.count("LIST trainjobs") == 5, "it looks no longer"
    assert running(backend) == []


@pytest.mark.parametrize("states", [(), ("given up",)], ids=["nothing", "given up"])
async def test_it_looks_no_longer_than_it_may(
    backend: DirectBackend, monkeypatch: pytest.MonkeyPatch, states: tuple[str, ...]
) -> None:
    """A given-up attempt is not the launch on its way."""
    clock = Clock()
    monkeypatch.setattr(cancellation, "time", clock)
    monkeypatch.setattr(anyio, "sleep", clock.sleep)
    await attempts(backend, *states)
    assert await stop(backend, look_seconds=0.3) == [1] * len(states)
    assert 0.3 <= clock.now < 0.4
    assert backend.requests.count("LIST trainjobs") == 2 + round(clock.now / 0.05)


# ---------------------------------------------------------------- one job


async def test_a_cancel_of_one_job_leaves_a_record_with_its_uid_and_other_attempts(backend: DirectBackend) -> None:
    first, second = await attempts(backend, "running", "running")
    assert await cancel(backend, first, tried=2)
    assert (stops(backend), jobs(backend)) == (["delete 1", "record"], [second])
    (record,) = await cancels(backend)
    assert (record.uid, record.tried) == (first.uid, 2)


@pytest.mark.parametrize(
    ("happens", "stopped"),
    [
        (lambda backend, ref: backend.change(ref, {"metadata": {"labels": None}}), ["delete 1"]),
        (lambda backend, ref: backend.change(ref, {"metadata": {"uid": "another"}}), []),
        (lambda backend, ref: backend.store.delete_job(backend.job(ref), ""), []),
        (lambda backend, ref: backend.end(ref), []),
        (lambda backend, ref: backend.end(ref, 3), []),
    ],
    ids=["launched by others: without a record", "of another UID", "deleted", "complete", "failed"],
)
async def test_jobs_that_are_not_recorded_or_left_alone(
    backend: DirectBackend, ref: JobRef, happens: Callable[[DirectBackend, JobRef], object], stopped: list[str]
) -> None:
    happens(backend, ref)
    before = [] if stopped else [*backend.jobs.values()]
    assert await cancel(backend, ref)
    assert (stops(backend), [*backend.jobs.values()]) == (stopped, before)
    assert await cancel(backend, ref, "suspend")
    assert [*backend.jobs.values()] == before


async def test_a_job_that_cannot_be_suspended_is_deleted(backend: DirectBackend, ref: JobRef) -> None:
    refuse(backend, "PATCH trainjobs")
    text = await give_up(backend, ref, WHY)
    refused = f"TrainJob {ref} could not be changed: its runtime is gone"
    assert text == f"{ref} was deleted: it could not be suspended: {refused}"
    assert active(backend) == []


async def test_a_job_that_vanishes_is_stopped(backend: DirectBackend, ref: JobRef) -> None:
    job = backend.job(ref)
    await backend.delete(ref)
    await request_cancel(backend, job, "suspend")
    assert stops(backend) == ["delete 1", "suspend 1"], "its deletion, and a request that finds nothing"


# ---------------------------------------------------------------- the wait for ranks


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_cancel_waits_for_the_last_pod(
    backend: DirectBackend, ref: JobRef, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    looks = 0

    def look(request: str) -> None:
        nonlocal looks
        looks += request == "LIST pods"
        if looks == 3:
            backend.remove_pods()

    monkeypatch.setattr(cancellation, "_POLL", (0, 0))
    keep_pod(backend, ref)
    backend.before = look
    assert await cancel(backend, ref, action)
    assert looks == 3
    assert (jobs(backend) == [ref]) is (action == "suspend")


def keep_pod(backend: DirectBackend, ref: JobRef) -> None:
    """A pod of the job outlives its deletion or suspension."""
    stopping = ("DELETE trainjobs", "PATCH trainjobs")
    backend.after = lambda request: backend.pod(ref) if request in stopping else None


@pytest.mark.parametrize("lasts", [True, False])
@pytest.mark.parametrize("of_key", [True, False])
async def test_a_cancel_reports_whether_the_ranks_have_ended(
    backend: DirectBackend, ref: JobRef, lasts: bool, of_key: bool
) -> None:
    if lasts:
        keep_pod(backend, ref)
    if of_key:
        done = await cancel_key(backend, "key", namespace="ns", timeout_seconds=0.1)
        assert (done.jobs, done.ended) == ((ref,), not lasts)
    else:
        assert await cancel(backend, ref, timeout_seconds=0.1) is not lasts
