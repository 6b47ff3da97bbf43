"""What a run of the reaper ends."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.server import Refused
from tests.unit.launches import active, annotations_of, attempt, attempts, cancels, launch, once, refuse

from trainjob import JobRef
from trainjob._jobs.cancellation import cancel_key, request_cancel
from trainjob._jobs.reaper import Reaped, reap
from trainjob._manifest.attempts import LAUNCHED, REPLACES
from trainjob._manifest.unattended import MARK
from trainjob.job import TRY
from trainjob.status import CANCELLED, QUEUE_LABEL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


async def run(backend: DirectBackend, **options: Any) -> list[str]:
    """What one run reports: what was done, number of the attempt and reason."""
    seen: list[Reaped] = []
    found = await reap(backend, "ns", **{"grace": 0, "interval": 0, **options}, on_reaped=seen.append)
    assert found == seen
    return [f"{each.done} {each.job.rpartition('-')[2]}: {each.reason}" for each in found]


def left(backend: DirectBackend) -> list[int]:
    return sorted(ref.attempt for ref in active(backend))


async def stop(backend: DirectBackend, action: Any = "cancel", tried: int | None = None) -> int:
    """Cancel the key; the version of the record."""
    await cancel_key(backend, "key", namespace="ns", action=action, tried=tried, timeout_seconds=0)
    (record,) = await cancels(backend)
    return record.version


# ---------------------------------------------------------------- two active attempts of a key


COUNTS = "another attempt of its key counts"


@pytest.mark.parametrize(
    ("states", "replaces", "done", "left_over"),
    [
        (["running", "running"], False, f"deleted 2: {COUNTS} (1)", [1]),
        (["complete", "running"], False, f"deleted 2: {COUNTS} (1)", []),
        (["running", "running"], True, f"deleted 1: {COUNTS} (2)", [2]),
        (["running", "failed"], True, "deleted 1: it ran again after another attempt of its key had followed", []),
        (["given up", "running"], False, "", [2]),
    ],
    ids=["launchers were killed", "beside a result", "came back", "came back after another one", "given up"],
)
async def test_of_two_attempts_the_one_that_does_not_count_ends(
    backend: DirectBackend, states: list[str], replaces: bool, done: str, left_over: list[int]
) -> None:
    """At once, and without a policy for unattended jobs."""
    first, second = await attempts(backend, *states)
    if replaces:
        backend.change(second, {"metadata": {"annotations": {REPLACES: first.uid}}})
    found = await run(backend, grace=90)
    numbered = [text.replace(first.name, "1").replace(second.name, "2") for text in found]
    assert (numbered, left(backend)) == ([done] if done else [], left_over)


@pytest.mark.parametrize("followed_by", ["ended", "suspended", "running"])
@pytest.mark.parametrize(("age", "waits"), [(1800, True), (4000, False)])
async def test_what_came_back_is_left_while_a_process_waits_for_it(
    backend: DirectBackend, followed_by: str, age: float, waits: bool
) -> None:
    """A person has resumed it. It ends all the same if the one that followed runs."""
    first = attempt(backend)
    second = attempt(backend, 2, annotations={REPLACES: first.uid})
    if followed_by == "ended":
        backend.end(second, 3)
    elif followed_by == "suspended":
        await request_cancel(backend, backend.job(second), "suspend", "1")
    backend.waits(first, age=age)
    await run(backend)
    assert (1 in left(backend)) is (waits and followed_by != "running")


async def test_attempts_of_different_keys_and_foreign_jobs_are_kept(backend: DirectBackend) -> None:
    attempt(backend)
    attempt(backend, 2, "another")
    backend.change(attempt(backend, 3), {"metadata": {"labels": None}})
    backend.end(attempt(backend, 4, "delivered"))
    assert await run(backend) == []
    assert len(backend.jobs) == 4


async def test_a_job_that_changed_since_the_look_is_kept_and_not_reported(backend: DirectBackend) -> None:
    """It has completed, or somebody has adopted it."""
    first, second = attempt(backend), attempt(backend, 2)

    once(backend, "DELETE trainjobs", lambda: backend.end(second))
    assert await run(backend) == []
    assert [JobRef.of(job) for job in backend.jobs.values()] == [first, second]
    (done,) = await run(backend)
    assert done.startswith("deleted 1: "), "the next run decides again: the complete one counts"


# ---------------------------------------------------------------- cancelled keys

IN_QUEUE = {"labels": {QUEUE_LABEL: "main"}}
KUEUE = "; it could not be suspended, because Kueue would resume it"


@pytest.mark.parametrize(
    ("action", "killed", "tried", "since", "fields", "done"),
    [
        ("cancel", None, 1, -1, {}, "deleted 1: its key was cancelled"),
        ("suspend", None, 1, -1, {}, "suspended 1: its key was cancelled"),
        ("suspend", None, 1, -1, IN_QUEUE, f"deleted 1: its key was cancelled{KUEUE}"),
        ("suspend", None, 1, -1, {**IN_QUEUE, "suspend": True}, f"deleted 1: its key was cancelled{KUEUE}"),
        ("cancel", None, 1, -1, {"suspend": True}, "deleted 1: its key was cancelled"),
        ("suspend", None, 1, -1, {"suspend": True}, ""),
        ("cancel", None, 1, 0, {}, ""),
        ("cancel", None, 1, None, {}, ""),
        ("suspend", 2, 1, -1, {}, "suspended 1: its key was cancelled"),
        ("suspend", 2, 2, -1, {}, "suspended 1: its key was cancelled"),
        ("suspend", 2, 3, -1, {}, ""),
    ],
)
async def test_what_a_dead_launch_left_of_a_cancelled_key_ends(
    backend: DirectBackend,
    action: Any,
    killed: int | None,
    tried: int,
    since: int | None,
    fields: dict[str, Any],
    done: str,
) -> None:
    """The launch was killed before it read the record. `since`: when it began, after the cancel; None if unknown."""
    version = await stop(backend, action, killed)
    (record,) = await cancels(backend)
    began = {} if since is None else {LAUNCHED: str(version + since)}
    ref = attempt(backend, annotations={TRY: str(tried), **began}, **fields)
    assert await run(backend, grace=90) == ([done] if done else [])
    if not done.startswith("deleted"):
        assert annotations_of(backend, ref).get(CANCELLED) == (record.mark if done else None)
        assert await run(backend) == [], "once"


# ---------------------------------------------------------------- unattended jobs

UNATTENDED: dict[str, Any] = {"unattended": "suspend", "unattended_after": 60}


@pytest.fixture
async def unattended(backend: DirectBackend) -> JobRef:
    """A job that nobody has waited for since ten minutes."""
    ref = await launch(backend, fields=UNATTENDED)
    backend.store.ahead = timedelta(minutes=10)
    await backend.get("ns", ref.name)  # a reply has the time of the API server
    return ref


async def test_an_unattended_job_ends_by_its_policy(backend: DirectBackend, unattended: JobRef) -> None:
    (done,) = await reap(backend, "ns", grace=0, interval=0)
    assert done.done == "suspended"
    assert done.reason.startswith("no process had waited for it for 10m0")
    assert done.unattended is not None
    assert annotations_of(backend, unattended)[CANCELLED] == MARK
    assert json.dumps(done.as_dict())


async def test_the_leases_are_read_again_before_the_request(backend: DirectBackend, unattended: JobRef) -> None:
    """An adoption whose PATCH was refused shows in the Lease of the waiter only."""

    once(backend, "GET trainjobs", lambda: backend.waits(unattended))
    assert await run(backend) == []
    assert left(backend) == [1]


async def test_a_job_that_cannot_be_suspended_is_deleted(backend: DirectBackend, unattended: JobRef) -> None:
    refuse(backend, "PATCH trainjobs", error=Refused(403, "Forbidden", "its runtime is gone"))
    (done,) = await run(backend)
    assert done.startswith("deleted 1: no process had waited for it")
    assert done.endswith(f"it could not be suspended: TrainJob {unattended} could not be changed: its runtime is gone")


# ---------------------------------------------------------------- old records


@pytest.mark.parametrize(("minutes", "is_kept"), [(59, True), (61, False)])
async def test_records_of_cancels_are_removed_after_an_hour(
    backend: DirectBackend, minutes: int, is_kept: bool
) -> None:
    await stop(backend)
    await cancel_key(backend, "key", namespace="elsewhere", timeout_seconds=0)
    backend.store.ahead = timedelta(minutes=minutes)
    await run(backend)
    assert (len(await cancels(backend)), len(await backend.all_cancels("elsewhere"))) == (is_kept, 1)


async def test_leases_of_processes_that_ended_long_ago_are_removed(backend: DirectBackend) -> None:
    runs = attempt(backend, **UNATTENDED)
    done = attempt(backend, 1, "done", **UNATTENDED)
    backend.end(done)
    day = 24 * 3600
    backend.waits(runs, lease="of a job that runs", age=2 * day)
    backend.waits(done, lease="of one that has ended", age=2 * day)
    backend.waits(done, lease="of today", age=0.8 * day)
    backend.waits(runs, lease="present")
    await run(backend)
    assert {waiter.lease for waiter in await backend.waiters("ns")} == {"of a job that runs", "of today", "present"}
