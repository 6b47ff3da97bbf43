"""What a run of the reaper ends; the policy for unattended jobs, unattended time, and records of waiters."""

from __future__ import annotations

import json
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import active, annotations_of, attempt, attempts, cancels, launch, once, refuse

from trainjob import InvalidSpec, JobRef, TrainJobSpec, WaitOptions
from trainjob._jobs.cancellation import cancel_key
from trainjob._jobs.following import follow
from trainjob._jobs.reaper import Reaped, reap
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import LAUNCHED, REPLACES
from trainjob._manifest.render import render
from trainjob._manifest.unattended import (
    AFTER,
    LABEL,
    MARK,
    SUSPEND,
    Policy,
    marked,
    policy_of,
    resuming,
    runs,
    unattended_for,
)
from trainjob.errors import StartTimeout
from trainjob.job import TRY, spec_hash
from trainjob.status import CANCELLED, QUEUE_LABEL, observe

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
        (["running", "failed"], True, "deleted 1: it ran again after another attempt of its key had followed", []),
        (["given up", "running"], False, "", [2]),
    ],
    ids=["launchers were killed", "came back after another one", "given up"],
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


async def test_attempts_of_different_keys_and_foreign_jobs_are_kept(backend: DirectBackend) -> None:
    attempt(backend)
    attempt(backend, 2, "another")
    backend.change(attempt(backend, 3), {"metadata": {"labels": None}})
    backend.end(attempt(backend, 4, "delivered"))
    assert await run(backend) == []
    assert len(backend.jobs) == 4


IN_QUEUE = {"labels": {QUEUE_LABEL: "main"}}
KUEUE = "; it could not be suspended, because Kueue would resume it"


@pytest.mark.parametrize(
    ("action", "killed", "tried", "since", "fields", "done"),
    [
        ("cancel", None, 1, -1, {}, "deleted 1: its key was cancelled"),
        ("suspend", None, 1, -1, {}, "suspended 1: its key was cancelled"),
        ("suspend", None, 1, -1, IN_QUEUE, f"deleted 1: its key was cancelled{KUEUE}"),
        ("suspend", None, 1, -1, {"suspend": True}, ""),
        ("cancel", None, 1, 0, {}, ""),
        ("cancel", None, 1, None, {}, ""),
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


async def test_a_job_that_changed_since_it_was_read_is_not_ended(backend: DirectBackend, unattended: JobRef) -> None:
    def adopted() -> None:
        backend.change(unattended, {"metadata": {"annotations": {"trainjob.dev/adopted": "x"}}})
        backend.waits(unattended)

    once(backend, "PATCH trainjobs", adopted)
    assert await run(backend) == []
    assert not backend.job(unattended)["spec"].get("suspend")


async def test_an_adoption_restarts_the_grace_period(backend: DirectBackend, unattended: JobRef) -> None:
    """The process that has adopted the job writes its Lease within the grace period, not within an instant."""
    adopted_at = 0

    async def adopt() -> None:
        nonlocal adopted_at
        assert await launch(backend, fields=UNATTENDED) == unattended
        adopted_at = len(backend.requests)

    def look(request: str) -> None:
        looks = backend.requests[adopted_at:].count("LIST leases")
        if request == "LIST leases" and adopted_at and looks == 3:
            backend.waits(unattended)

    backend.before = look
    once(backend, "LIST leases", adopt, skip=5)
    assert await run(backend, grace=0.3, interval=0.05) == []
    assert adopted_at
    assert left(backend) == [1]


async def test_a_job_that_cannot_be_suspended_is_deleted(backend: DirectBackend, unattended: JobRef) -> None:
    refuse(backend, "PATCH trainjobs")
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


NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


def job(*conditions: objects.Object, **fields: Any) -> objects.Object:
    """A job that was created at noon."""
    metadata = {"creationTimestamp": "2026-11-25T12:00:00Z", **fields.pop("metadata", {})}
    return objects.trainjob(*conditions, metadata=metadata, **fields)


def rendered(origin: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
    return render(TrainJobSpec.parse({"runtime": "torch-distributed", **asked}), "a", 1, "ns", origin=origin)


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("origin", "asked", "policy"),
    [
        ({}, {}, None),
        ({}, {"unattended": "keep"}, None),
        ({}, {"unattended": "cancel"}, Policy("cancel", timedelta(hours=1))),
        ({}, {"unattended": "suspend", "unattended_after": "PT2H"}, Policy("suspend", timedelta(hours=2))),
        (dict(SUSPEND), {}, Policy("suspend", timedelta(hours=1))),
        (dict(SUSPEND), {"unattended_after": 600}, Policy("suspend", timedelta(minutes=10))),
        (dict(SUSPEND), {"unattended": "keep"}, None),
    ],
)
def test_jobs_are_kept_and_those_of_workflows_suspended_by_default(
    origin: dict[str, str], asked: dict[str, Any], policy: Policy | None
) -> None:
    assert policy_of(rendered(origin, **asked)) == policy


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"unattended": "stop"}, "unattended"),
        ({"unattended": "suspend", "unattended_after": 59}, "unattended_after"),
        ({"unattended": "suspend", "unattended_after": 8 * 24 * 3600}, "unattended_after"),
        ({"unattended": "keep", "unattended_after": 3600}, "unattended_after"),
    ],
)
def test_invalid_policies_are_rejected(asked: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        TrainJobSpec.parse({"runtime": "torch-distributed", **asked})
    assert [problem.path for problem in refused.value.problems] == [path]


def test_policy_does_not_change_the_spec_hash() -> None:
    assert spec_hash(rendered()) == spec_hash(rendered(unattended="cancel", unattended_after=600))


@pytest.mark.parametrize("after", ["", "soon", "1e999", None])
def test_an_invalid_annotation_gives_the_default(after: object) -> None:
    changed = job(labels={LABEL: "suspend"}, annotations={AFTER: after})
    assert policy_of(changed) == Policy("suspend", timedelta(hours=1))


# ---------------------------------------------------------------- unattended time


def test_unattended_time_starts_at_the_last_wait_creation_or_resume() -> None:
    assert unattended_for(job(), None, NOON + timedelta(minutes=5)) == timedelta(minutes=5)
    later = NOON + timedelta(hours=1)
    assert unattended_for(job(), later, later + timedelta(minutes=2)) == timedelta(minutes=2)
    assert unattended_for(job(), NOON - timedelta(hours=1), later) == timedelta(hours=1)
    resumed = objects.condition("Suspended", value="False", time="2026-11-25T12:30:00Z")
    assert unattended_for(job(resumed), NOON, later) == timedelta(minutes=30)
    assert unattended_for({"metadata": {}}, None, NOON) == timedelta(0), "a job without times is not ended"


def test_suspended_and_finished_jobs_do_not_run() -> None:
    assert runs(job())
    assert not runs(job(spec={"suspend": True}))
    assert not runs(job(metadata={"deletionTimestamp": "2026-11-25T12:00:00Z"}))
    assert not runs(job(objects.COMPLETE))
    assert not runs(job(objects.FAILED))


@pytest.mark.parametrize(
    ("annotations", "ours", "message"),
    [
        ({CANCELLED: MARK}, True, "nobody waited for it"),
        ({CANCELLED: "true"}, False, "cancelled with trainjob"),
        ({}, False, "suspended"),
    ],
)
def test_suspensions_by_a_person_are_distinguished(annotations: dict[str, str], ours: bool, message: str) -> None:
    suspended = job(annotations=annotations, spec={"suspend": True})
    assert marked(suspended) is ours
    assert message in observe(suspended).message


def test_a_job_that_is_resumed_has_no_mark() -> None:
    patch = {"metadata": {"annotations": {CANCELLED: None}}}
    by_hand, suspended = (job(annotations={CANCELLED: MARK}, spec={"suspend": each}) for each in (False, True))
    assert resuming(by_hand) == patch, "the job is running already"
    assert resuming(suspended) == {**patch, "spec": {"suspend": False}}


# ---------------------------------------------------------------- waiters


@pytest.fixture
def records(backend: DirectBackend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobRef, bool | None]]:
    """The jobs that this process begins to wait for (None), and those that it stops to wait for: whether they ended."""
    found: list[tuple[JobRef, bool | None]] = []
    monkeypatch.setattr(backend, "attend", lambda ref: found.append((ref, None)))
    monkeypatch.setattr(backend, "leave", lambda ref, *, ended: found.append((ref, ended)))
    return found


async def test_waiters_of_a_job_with_a_policy_are_recorded_during_their_wait(
    backend: DirectBackend, records: list[tuple[JobRef, bool | None]]
) -> None:
    kept = await launch(backend, "kept")
    backend.end(kept)
    await wait(backend, kept)
    assert records == []
    ref = await launch(backend, fields={"unattended": "suspend"})
    async with aclosing(follow(backend, ref)) as changes:
        await anext(changes)
        assert records == [(ref, None)]
    with pytest.raises(StartTimeout):
        await wait(backend, ref, WaitOptions(start_timeout=timedelta(0)))
    backend.end(ref)
    await wait(backend, ref)
    assert records == [(ref, None), (ref, False)] * 2 + [(ref, None), (ref, True)]


async def test_a_waiter_removes_the_mark_of_a_manually_resumed_job(backend: DirectBackend) -> None:
    """Otherwise a later suspension by a person would count as the reaper's and be resumed."""
    ref = await launch(backend, fields={"unattended": "suspend"})
    await backend.patch(ref, {"metadata": {"annotations": {CANCELLED: MARK}}})
    async with aclosing(follow(backend, ref)) as changes:
        _, notice = await anext(changes)
    assert notice == ""
    assert CANCELLED not in annotations_of(backend, ref)
