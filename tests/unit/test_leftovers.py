"""Jobs left suspended on a cluster: which are removed, and what happens beside a removal."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.objects import Object
from tests.unit.launches import once
from tests.unit.program import exit_of

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.base import Waiter
from trainjob._jobs.leftovers import KEEP_FOR, Leftover, leftover, remove_leftovers
from trainjob._manifest.attempts import ADOPTED, failure_record
from trainjob._manifest.render import render
from trainjob.job import MANAGED_BY
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL

pytestmark = pytest.mark.anyio

NOW = datetime(2026, 11, 28, 12, tzinfo=UTC)
DAY = timedelta(days=1)
OLD, NEW = NOW - 40 * DAY, NOW - 20 * DAY

MARKS: Mapping[str, dict[str, str]] = {
    "given up": {GIVEN_UP: "{}"},
    "cancel of a key": {CANCELLED: "4711"},
    "kill of a try": {CANCELLED: "try:2"},
    "reaper": {CANCELLED: "unattended"},
    "cancel of an older version": {CANCELLED: "true"},
}


def text(time: datetime) -> str:
    return f"{time:%Y-%m-%dT%H:%M:%SZ}"


def condition(kind: str, time: datetime = OLD, status: str = "True") -> Object:
    return objects.condition(kind, value=status, time=text(time))


def job(
    key: str = "a",
    *,
    mark: Mapping[str, str] | None = None,
    conditions: tuple[Object, ...] = (condition("Suspended"),),
    suspend: bool = True,
    manager: str = "trainjob",
    **metadata: Any,
) -> dict[str, Any]:
    """A job of 50 days ago that was suspended 40 days ago."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], "suspend": suspend})
    made = render(spec, key, 1, "default")
    made["metadata"]["annotations"] |= MARKS["reaper"] if mark is None else mark
    fields = {"manager": manager, "fieldsV1": {"f:spec": {"f:suspend": {}}}}
    other = {"manager": "trainer", "fieldsV1": {"f:status": {}}}
    own = {"uid": f"uid-{key}", "creationTimestamp": text(NOW - 50 * DAY), "resourceVersion": "1"}
    made["metadata"] |= {**own, "managedFields": [other, fields], **metadata}
    made["status"] = {"conditions": list(conditions)}
    return made


def record() -> dict[str, Any]:
    made = failure_record(job(), "{}")
    made["metadata"] |= {"uid": "uid-record", "creationTimestamp": text(OLD), "resourceVersion": "1"}
    return made


def removed(trainjob: Mapping[str, Any], *waiters: Waiter, keep_for: timedelta = KEEP_FOR) -> Leftover | None:
    return leftover(trainjob, waiters, NOW, keep_for)


def waiter(renewed: datetime, at: datetime | None = None, uid: str = "uid-a") -> Waiter:
    """The Lease of a process that waits for the job, or has left it at a time."""
    return Waiter("x", renewed, {uid: at or renewed}, frozenset() if at else frozenset({uid}))


# ---------------------------------------------------------------- the rule


REASONS = {
    "its step gave it up": job(mark=MARKS["given up"]),
    "it was cancelled": job(mark=MARKS["cancel of a key"]),
    "it was suspended because no process waited for it": job(mark=MARKS["reaper"]),
    "it failed": job(mark=MARKS["given up"], conditions=(condition("Failed"),)),
    "it records why a deleted job failed": record(),
}


@pytest.mark.parametrize("reason", REASONS)
def test_the_reason_of_a_removal_is_reported(reason: str) -> None:
    found, ref = removed(REASONS[reason]), JobRef.of(REASONS[reason])
    assert found is not None
    assert (found.since, found.age) == (OLD, 40 * DAY)
    assert str(found) == f"TrainJob {ref} was removed: {reason}, not used for 40d00h"
    assert found.as_dict() == {"job": str(ref), "done": "removed", "reason": reason, "unused": 40 * 24 * 3600.0}
    assert removed(REASONS[reason], keep_for=41 * DAY) is None


KEPT = {
    "suspended by Kueue without a queue label": job(manager="kueue"),
    "suspended just now": job(conditions=(condition("Suspended", status="False"),)),
    "not seen by Trainer": job(conditions=()),
    "failed 20 days ago": job(conditions=(condition("Suspended"), condition("Failed", NEW))),
    "being deleted": job(deletionTimestamp=text(OLD)),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_jobs_are_kept(name: str) -> None:
    assert removed(KEPT[name]) is None


def test_jobs_that_are_waited_for_are_kept() -> None:
    assert removed(job(), waiter(NOW)) is None
    assert removed(job(), waiter(NOW - timedelta(hours=23)), keep_for=timedelta(0)) is None, "an outage of the server"
    assert removed(job(), waiter(NOW - timedelta(hours=1), NOW - 20 * DAY)) is None, "left 20 days ago"
    assert removed(job(), waiter(NOW - 31 * DAY)) is not None, "the process died 31 days ago"
    assert removed(job(), waiter(NOW, NOW - 31 * DAY)) is not None, "left 31 days ago by a process that lives"
    assert removed(job(), waiter(NOW, uid="another")) is not None


LABELS = st.fixed_dictionaries(
    {}, optional={MANAGED_BY: st.sampled_from(["trainjob", "another"]), QUEUE_LABEL: st.just("gpus")}
)
DAYS = st.integers(0, 60)


@given(
    suspend=st.booleans(),
    mark=st.sampled_from([{}, *MARKS.values()]),
    labels=LABELS,
    manager=st.sampled_from(["trainjob", "kubectl-edit", None]),
    ended=st.sampled_from(["Failed", "Complete", None]),
    days=st.tuples(DAYS, DAYS | st.none(), DAYS),
    waits=st.booleans(),
)
def test_what_is_removed_was_suspended_by_trainjob_and_not_used_since(
    suspend: bool, mark: Any, labels: dict[str, str], manager: str | None, ended: str | None, days: Any, waits: bool
) -> None:
    """`days`: since its latest change and its last waiter, and for how many an unused job is kept."""
    changed, attended, keep_for = days
    conditions = (condition(ended or "Suspended", NOW - changed * DAY),)
    trainjob = job(mark=mark, suspend=suspend, conditions=conditions, manager=manager or "", labels=labels)
    if manager is None:
        del trainjob["metadata"]["managedFields"]
    times = [] if attended is None else [NOW - attended * DAY]
    found = leftover(trainjob, [waiter(time) if waits else waiter(NOW, time) for time in times], NOW, keep_for * DAY)
    ours = suspend and bool(mark) and labels.get(MANAGED_BY) == "trainjob" and manager in ("trainjob", None)
    idle = ended == "Failed" or (ended is None and QUEUE_LABEL not in labels)
    used = min(50, changed, *([] if attended is None else [attended]))
    assert (found is not None) == (ours and idle and used > keep_for and not (waits and attended == 0))


# ---------------------------------------------------------------- removal


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> DirectBackend:
    """A cluster at that time, with a job that was given up and one that a person suspended; for the command, too."""
    made = DirectBackend()
    made.store.ahead = NOW - datetime.now(UTC)
    store(made, job("old", mark=MARKS["given up"]), job("person", mark={}))
    monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: made)
    return made


def store(backend: DirectBackend, *jobs: dict[str, Any]) -> None:
    for each in jobs:
        backend.store.put("trainjobs", each, "ADDED")


OLD_JOB, PERSONS = JobRef.of(job("old")), JobRef.of(job("person"))


def left(backend: DirectBackend) -> list[JobRef]:
    return [JobRef.of(each) for each in backend.jobs.values()]


async def test_leftovers_are_removed_and_nothing_else(backend: DirectBackend) -> None:
    gone = [job("cancelled"), record()]
    store(backend, *gone, job("again", manager="kubectl-patch"), job("new", conditions=(condition("Suspended", NEW),)))
    names = {OLD_JOB.name, *(JobRef.of(each).name for each in gone)}
    would = await remove_leftovers(backend, "default", KEEP_FOR, dry_run=True)
    assert ({each.ref.name for each in would}, len(backend.jobs)) == (names, 6)
    shown: list[Leftover] = []
    assert await remove_leftovers(backend, "default", KEEP_FOR, on_removed=shown.append) == shown
    assert {each.ref.name for each in shown} == names
    assert left(backend) == [PERSONS, JobRef.of(job("again")), JobRef.of(job("new"))]
    assert await remove_leftovers(backend, "default", KEEP_FOR) == []


ADOPTION = {"metadata": {"annotations": {GIVEN_UP: None, ADOPTED: "f00d"}}}
CHANGES: dict[str, Callable[[DirectBackend], object]] = {
    "adopted": lambda backend: backend.change(OLD_JOB, ADOPTION),
    "resumed": lambda backend: backend.change(OLD_JOB, {"spec": {"suspend": False}}),
    "replaced": lambda backend: backend.change(OLD_JOB, {"metadata": {"uid": "uid-b"}}),
    "waited for": lambda backend: backend.waits(OLD_JOB),
    "deleted": lambda backend: backend.store.delete_job(backend.job(OLD_JOB), ""),
}


@pytest.mark.parametrize("moment", ["LIST leases", "GET trainjobs", "DELETE trainjobs"])
@pytest.mark.parametrize("change", CHANGES)
async def test_a_job_that_is_used_meanwhile_is_kept(backend: DirectBackend, moment: str, change: str) -> None:
    """Whatever happens before each request; a wait alone changes nothing on the job."""

    once(backend, moment, lambda: CHANGES[change](backend))
    found = await remove_leftovers(backend, "default", KEEP_FOR)
    kept = [each.uid for each in left(backend)]
    assert backend.turn is None, "it happened"
    if change == "deleted":
        assert kept == [PERSONS.uid]
    elif change == "replaced":
        assert kept == ["uid-b", PERSONS.uid]
    elif (change, moment) != ("waited for", "DELETE trainjobs"):
        assert (kept, found) == ([OLD_JOB.uid, PERSONS.uid], [])


# ---------------------------------------------------------------- the command


def test_gc_removes_leftovers_of_a_cluster(backend: DirectBackend, capsys: pytest.CaptureFixture[str]) -> None:
    would = f"would remove {OLD_JOB}: its step gave it up, 40d00h ago\n"
    nothing = "no job in namespace default was left suspended by trainjob for more than 41d00h\n"
    assert exit_of(capsys, "gc", "--dry-run")[:2] == (0, would)
    assert exit_of(capsys, "gc", "--older-than", "41d")[1:] == ("", nothing)
    assert left(backend) == [OLD_JOB, PERSONS]
    answer = json.loads(exit_of(capsys, "gc", "--older-than", "30d", "--json")[1])
    assert (answer["dry_run"], answer["leftovers"]) == (False, [])
    assert [(each["name"], each["phase"]) for each in answer["removed"]] == [(OLD_JOB.name, "Suspended")]
    assert left(backend) == [PERSONS]


def test_reap_removes_leftovers_on_request(
    backend: DirectBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object, **__: object) -> list[object]:
        return []

    monkeypatch.setattr("trainjob._jobs.reaper.reap", nothing)
    assert exit_of(capsys, "reap")[:2] == (0, "")
    assert exit_of(capsys, "reap", "--keep-for", "P41D")[:2] == (0, "")
    assert len(backend.jobs) == 2
    code, out, _ = exit_of(capsys, "reap", "--keep-for", "P30D", "--json")
    assert (code, json.loads(out)["job"]) == (0, str(OLD_JOB))
    assert left(backend) == [PERSONS]


@pytest.mark.parametrize("command", ["reap", "install"])
@pytest.mark.parametrize("words", ["P1M", "30", "PT59M", "-1d", "soon"])
def test_too_short_and_invalid_times_are_refused(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = exit_of(capsys, command, f"--keep-for={words}")
    assert (code, out) == (2, "")
    assert "--keep-for" in err
