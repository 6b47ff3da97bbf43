"""A launcher that is killed, and what others do between its requests: one key, one training.

Random orders of all processes are those of `tests/simulation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import (
    FIRST,
    LATER,
    LONG_AGO,
    LOOK,
    STATES,
    Killing,
    active,
    annotations_of,
    attempt,
    cancels,
    deleted,
    finish,
    launch,
    once,
    running,
)

from trainjob import JobRef, Phase, TrainJobFailed
from trainjob._jobs.cancellation import cancel_key
from trainjob._manifest.attempts import LAUNCHED, may_run
from trainjob.job import TRY, job_name
from trainjob.status import GIVEN_UP, observe
from trainjob.verdicts import Category

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("no_pauses")]


def cancelling(
    backend: DirectBackend, action: Any = "cancel", tried: int | None = None
) -> Callable[[], Awaitable[object]]:
    """A cancel of the key that waits for no pod."""
    return lambda: cancel_key(backend, "key", namespace="ns", action=action, tried=tried, timeout_seconds=0)


# ---------------------------------------------------------------- a launcher that is killed


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("state", STATES)
async def test_the_next_launch_repairs_what_a_killed_launcher_left(state: str, when: str) -> None:
    """The first launcher is killed before each of its requests, or after it was served."""
    found: Any = None
    number = -1
    while not isinstance(found, JobRef):
        number += 1
        backend = DirectBackend()
        await STATES[state](backend)
        Killing(backend, number, when)
        (found,) = await asyncio.gather(launch(backend), return_exceptions=True)
        backend.before = backend.after = lambda _: None
        assert isinstance(found, JobRef | asyncio.CancelledError)
        ref = await launch(backend)
        assert active(backend) == ([] if state == "undelivered" else [ref]), number
        assert await launch(backend) == ref
    assert found == ref
    assert number >= len(LOOK)


# ---------------------------------------------------------------- what changes between two looks


def only(backend: DirectBackend) -> JobRef:
    (job,) = backend.jobs.values()
    return JobRef.of(job)


async def delete_own(backend: DirectBackend) -> None:
    """The JobSet is left, which the first look cannot have found."""
    await backend.delete(only(backend))
    backend.jobset(job_name("key", 1), "ns")


async def delete_what_counts(backend: DirectBackend) -> None:
    """The launch has ended its own attempt, whose name may still be in use: pods end after the object."""
    other = attempt(backend, 7, created=LONG_AGO)
    once(backend, "PATCH trainjobs", lambda: backend.delete(other))


async def train_twice(backend: DirectBackend) -> None:
    """The launcher is frozen while others do its work, and new work of the key begins."""
    await finish(backend, await launch(backend))
    backend.running(await launch(backend))


def give_up_own(backend: DirectBackend) -> None:
    backend.change(only(backend), {"metadata": {"annotations": {GIVEN_UP: "{}"}}, "spec": {"suspend": True}})


LIST, PATCH = "LIST trainjobs", "PATCH trainjobs"
CHANGES: dict[str, tuple[str, str, int, Callable[[DirectBackend], object], int, list[int]]] = {
    "another attempt counts": ("nothing", LIST, 1, lambda backend: attempt(backend, 7, created=LONG_AGO), 7, [1]),
    "another one does not count": ("nothing", LIST, 1, lambda backend: attempt(backend, 7, created=LATER), 1, [7]),
    "what counts is deleted": ("nothing", LIST, 1, delete_what_counts, 2, [1, 7]),
    "its own one is deleted": ("nothing", LIST, 1, delete_own, 2, [1]),
    "its own one fails": ("nothing", LIST, 1, lambda backend: backend.end(only(backend), 3), 1, []),
    "its own one completes": ("nothing", LIST, 1, lambda backend: backend.end(only(backend)), 1, []),
    "its own one is given up": ("nothing", LIST, 1, give_up_own, 1, []),
    "pods show an attempt": ("nothing", "LIST pods", 0, lambda backend: backend.pod(attempt(backend, 3)), 3, []),
    "another one is followed": ("nothing", "POST trainjobs", 0, train_twice, 2, []),
    "the failed one runs": ("failed", PATCH, 0, lambda backend: backend.status(only(backend), conditions=[]), 1, []),
    "the adopted one is deleted": ("runs", PATCH, 0, lambda backend: backend.delete(only(backend)), 1, [1]),
    "the adopted one is delivered": ("runs", PATCH, 0, lambda backend: finish(backend, only(backend)), 1, []),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_a_launch_looks_again_after_a_change(backend: DirectBackend, change: str) -> None:
    """State of the key, request and how many before, what happens then; number of the attempt, those that are ended."""
    state, request, skip, happens, counts, ended = CHANGES[change]
    await STATES[state](backend)
    once(backend, request, lambda: happens(backend), skip=skip)
    ref = await launch(backend)
    assert ref.attempt == counts
    assert active(backend) == ([ref] if may_run(backend.job(ref)) else [])
    assert [name for name, _ in deleted(backend)] == [job_name("key", number) for number in ended]


async def test_the_own_attempt_of_a_generated_key_is_not_followed_under_its_name(backend: DirectBackend) -> None:
    once(backend, LIST, lambda: delete_own(backend))
    assert (await launch(backend, is_new=True)).attempt == 2


async def test_a_loser_that_has_completed_meanwhile_is_kept(
    backend: DirectBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The job has its result: it counts now, and the other one ends. Both are deleted by UID and version."""

    def completes(request: str) -> None:
        if request == "DELETE trainjobs":
            backend.before = lambda _: None
            backend.end(next(ref for ref in active(backend) if ref.attempt == 1))

    once(backend, "LIST trainjobs", lambda: attempt(backend, 7, created=LONG_AGO), skip=1)
    backend.before = completes
    assert (await launch(backend)).attempt == 1
    assert active(backend) == []
    assert [name for name, version in deleted(backend) if version] == [job_name("key", 1), job_name("key", 7)]
    assert "is deleted: another attempt of its key counts" in caplog.text


async def test_an_adopted_job_that_changes_meanwhile_is_looked_at_again(backend: DirectBackend) -> None:
    ref = await launch(backend)
    once(backend, "PATCH trainjobs", lambda: backend.running(ref))
    backend.requests.clear()
    assert await launch(backend) == ref
    assert backend.requests == [*FIRST, "PATCH trainjobs", *LOOK, "PATCH trainjobs"]


# ---------------------------------------------------------------- a cancel beside a launcher


@pytest.mark.parametrize("action", ["cancel", "suspend"])
@pytest.mark.parametrize(
    ("state", "options"),
    [
        *((state, {}) for state in ("nothing", "failed", "runs", "suspended by a cancel", "two run")),
        ("deleted, with pods on a lost node", {}),
        ("nothing", {"is_new": True}),
    ],
)
async def test_a_launch_obeys_a_cancel_at_each_point(state: str, options: dict[str, Any], action: Any) -> None:
    number, waits = -1, False
    first = 0 if options else len(FIRST)  # each cancel is newer than the launch of a generated key
    while not waits:
        number += 1
        backend = DirectBackend()
        await STATES[state](backend)
        before = await cancels(backend)
        once(backend, number, cancelling(backend, action))
        (found,) = await asyncio.gather(launch(backend, **options), return_exceptions=True)
        waits, backend.turn = backend.turn is not None, None  # it has sent fewer requests
        versions = [each.version for each in await cancels(backend) if each not in before]
        assert bool(versions) is not waits
        if isinstance(found, JobRef):
            if versions and found in running(backend):
                assert number < first, "the launch began after the cancel"
                assert int(annotations_of(backend, found)[LAUNCHED]) >= versions[0]
            assert len(running(backend)) <= 1
        else:
            check_obeyed(found)
            assert running(backend) == []
    assert number > first


def check_obeyed(error: object) -> None:
    assert isinstance(error, TrainJobFailed)
    assert error.diagnosis.category is Category.DELETED
    assert "its key was cancelled while it was launched" in str(error)


async def test_a_complete_job_is_kept_by_a_launch_that_obeys(backend: DirectBackend) -> None:
    once(backend, "POST trainjobs", cancelling(backend))
    backend.after = lambda request: backend.end(active(backend)[0]) if request == "POST trainjobs" else None
    ref = await launch(backend)
    assert observe(backend.job(ref)).phase is Phase.COMPLETE


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_launch_that_counts_no_tries_is_later_than_each_kill_before_it(
    backend: DirectBackend, action: Any
) -> None:
    first = await launch(backend, tried=1)
    await cancelling(backend, action, 3)()
    ref = await launch(backend)
    assert running(backend) == [ref]
    assert (ref == first) == (action == "suspend")
    assert annotations_of(backend, ref)[TRY] == "4"
