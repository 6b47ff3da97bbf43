"""Objects of Trainer 2.1.0, 2.2.1 and 2.3.0 from a real cluster, including transient states."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.objects import COMPLETE, CREATED, FAILED, RESUMED, SUSPENDED, Object, condition, counts, trainjob
from tests.unit.odd_objects import JSON, OBJECTS

from trainjob._support.kube_objects import parse_time
from trainjob.status import CANCELLED, QUEUE_LABEL, Blocker, Observation, Phase, observe

ACTIVE, READY, LAST = counts(active=1), counts(active=1, ready=1), counts(ready=1)
FETCHES, FETCHED = counts("dataset-initializer", active=1), counts("dataset-initializer", succeeded=1)
QUEUED = SUSPENDED | {"lastTransitionTime": "2026-11-21T10:03:00Z"}


def at(minute: int) -> datetime:
    return datetime(2026, 11, 21, 10, minute, tzinfo=UTC)


def job(*jobs: Object, conditions: Any = (), suspend: bool | None = None, queue: str = "", **status: Any) -> Object:
    status |= {"jobsStatus": list(jobs)} if jobs else {}
    spec = {} if suspend is None else {"suspend": suspend}
    return trainjob(*conditions, spec=spec, labels={QUEUE_LABEL: queue} if queue else {}, **status)


@pytest.mark.parametrize(
    ("trainjob", "phase"),
    [
        ({"metadata": {}, "spec": {}}, Phase.NOT_STARTED),
        (job(), Phase.NOT_STARTED),
        (job(ACTIVE), Phase.STARTING),
        (job(READY), Phase.RUNNING),
        (job(LAST), Phase.RUNNING),
        (job(FETCHES, counts()), Phase.INITIALIZING),
        (job(FETCHED, ACTIVE), Phase.STARTING),
        (job(LAST, counts("launcher")), Phase.RUNNING),
        (job(counts("node", succeeded=1), counts("launcher", active=1)), Phase.RUNNING),
        (job(suspend=True), Phase.SUSPENDED),
        (job(counts(active=1, suspended=1), conditions=[SUSPENDED], suspend=True), Phase.SUSPENDED),
        (job(READY, suspend=True), Phase.SUSPENDED),
        (job(counts(suspended=1), conditions=[SUSPENDED], suspend=True, queue="team-a"), Phase.QUEUED),
        (job(counts(suspended=1), conditions=[SUSPENDED], suspend=False, queue="team-a"), Phase.STARTING),
        (job(ACTIVE, conditions=[RESUMED], suspend=False), Phase.STARTING),
        (job(LAST, conditions=[RESUMED], suspend=False), Phase.RUNNING),
        (job(counts(succeeded=1), conditions=[RESUMED, COMPLETE], suspend=False), Phase.COMPLETE),
        (job(counts(failed=1), conditions=[FAILED]), Phase.FAILED),
        (job(conditions=[FAILED], suspend=True), Phase.FAILED),
        (job(ACTIVE, conditions=[{**FAILED, "status": "False"}]), Phase.STARTING),
        (None, Phase.DELETED),
    ],
)  # fmt: skip
def test_phase_follows_from_the_status(trainjob: Object | None, phase: Phase) -> None:
    assert observe(trainjob).phase is phase


def test_final_phases() -> None:
    assert {phase for phase in Phase if phase.terminal} == {"Complete", "Failed", "Cancelled", "Deleted"}


FIRST_FAILED = condition("Failed", "FailedJobs", message="one or more jobs failed (first failed job: x-node-0)")


@pytest.mark.parametrize(
    ("trainjob", "reason", "message"),
    [
        (job(suspend=True), "Suspended", "the TrainJob is suspended"),
        (job(suspend=True, conditions=[condition("Suspended", "ByHand", message="until Monday")]), "ByHand",
         "until Monday"),
        (job(conditions=[condition("Suspended", "WaitingInQueue", message="for GPUs")]), "WaitingInQueue", "for GPUs"),
        (job(conditions=[FIRST_FAILED]), "FailedJobs", "one or more jobs failed (first failed step: node)"),
    ],
)  # fmt: skip
def test_a_phase_has_reason_and_message_of_its_condition(trainjob: Object, reason: str, message: str) -> None:
    observation = observe(trainjob)
    assert (observation.reason, observation.message) == (reason, message)
    assert observation.finished == (at(5) if reason == "FailedJobs" else None)


@pytest.mark.parametrize(
    ("trainjob", "admitted", "waiting_since"),
    [
        (job(ACTIVE), 0, None),
        (job(suspend=True), None, 0),
        (job(conditions=[QUEUED], suspend=True, queue="q"), None, 3),
        (job(ACTIVE, conditions=[RESUMED], suspend=False), 1, None),
        # Outdated for about 10 ms, until the controller has processed the request.
        (job(counts(suspended=1), conditions=[QUEUED], suspend=False, queue="q"), None, None),
        (job(LAST, conditions=[RESUMED], suspend=True, queue="q"), None, None),
        (job(conditions=[RESUMED, COMPLETE]), 1, None),
        (job(conditions=[QUEUED, FAILED], suspend=True), None, None),
    ],
)
def test_created_admitted_and_waiting_times(trainjob: Object, admitted: int | None, waiting_since: int | None) -> None:
    observation = observe(trainjob)
    assert observation.created == at(0)
    assert observation.admitted == (None if admitted is None else at(admitted))
    assert observation.waiting_since == (None if waiting_since is None else at(waiting_since))


def test_a_preempted_job_is_queued_again() -> None:
    running = observe(job(LAST, conditions=[RESUMED], suspend=False, queue="team-a"))
    assert running.has_run
    queued = observe(job(counts(suspended=1), conditions=[SUSPENDED], suspend=True, queue="team-a"), running)
    assert queued.phase is Phase.QUEUED
    assert queued.message == "preempted, waiting again in queue team-a"
    assert observe(job(suspend=True, queue="team-a")).message == "waiting for admission in queue team-a"
    restarting = observe(job(ACTIVE, conditions=[RESUMED], suspend=False, queue="team-a"), queued)
    assert (restarting.phase, restarting.has_run) == (Phase.RESTARTING, True)


@pytest.mark.parametrize(
    ("recorded", "phases"),
    [
        ([ACTIVE, READY, ACTIVE, LAST, "Complete"], "Starting Running Complete"),
        # Two ranks, the second ends 6 s after the first.
        ([ACTIVE, READY, ACTIVE, READY, ACTIVE, LAST, "Complete"], "Starting Running Complete"),
        ([counts(), ACTIVE, READY, ACTIVE, counts(), "Failed"], "NotStarted Starting Running Failed"),
        # A rank is killed, and the JobSet restarts; the same with fewer observations; a rank restarts in place.
        ([ACTIVE, READY, ACTIVE, counts(), counts(failed=1), counts(), ACTIVE, READY, ACTIVE, LAST, "Complete"],
         "Starting Running Restarting Running Complete"),
        ([ACTIVE, READY, ACTIVE, counts(), ACTIVE, READY], "Starting Running Restarting Running"),
        # Counters of zero keep the running phase, but are none before it.
        ([LAST, counts(), ACTIVE], "Running Restarting"),
        ([ACTIVE, counts()], "Starting NotStarted"),
    ],
)  # fmt: skip
def test_phases_of_recorded_jobs(recorded: list[Any], phases: str) -> None:
    """Recorded from Trainer 2.3 on the real node."""
    seen: list[Observation] = []
    for step in recorded:
        over = {"Complete": [COMPLETE], "Failed": [FAILED]}
        latest = job(conditions=over[step]) if isinstance(step, str) else job(step)
        seen.append(observe(latest, seen[-1] if seen else None))
    assert " ".join(phase for phase, _ in itertools.groupby(each.phase for each in seen)) == phases


def test_a_pending_replacement_pod_blocks_a_restarting_job() -> None:
    running = observe(job(READY))
    pending = Blocker("Unschedulable", "pod x is not scheduled: no room")
    restarting = observe(job(ACTIVE), running, pending)
    assert (restarting.phase, restarting.message) == (Phase.RESTARTING, "pod x is not scheduled: no room")
    assert observe(job(ACTIVE), restarting).phase is Phase.RESTARTING
    assert observe(job(READY), restarting).phase is Phase.RUNNING


def test_a_restarted_job_is_initializing_again() -> None:
    running = observe(job(FETCHED, LAST))
    initializing = observe(job(FETCHES, counts()), running)
    assert (initializing.phase, initializing.has_run) == (Phase.INITIALIZING, True)
    assert observe(job(FETCHES, counts())).has_run is False


def test_the_first_final_phase_stays() -> None:
    """Trainer up to 2.3 removes Failed if the JobSet is deleted, and trains again (kubeflow/trainer#3891)."""
    failed = observe(job(conditions=[FAILED]))
    for later in (job(ACTIVE), job(conditions=[COMPLETE]), None):
        assert observe(later, failed) == failed


def test_deleted_phase_keeps_earlier_values() -> None:
    running = observe(job(LAST, trainerStatus={"progressPercentage": 40}))
    gone = observe(None, running)
    assert (gone.phase, gone.reason, gone.progress, gone.created) == (Phase.DELETED, "Deleted", 40, at(0))
    assert gone.message == "the TrainJob was deleted while it was waited for"
    cancelled = job(LAST)
    cancelled["metadata"]["annotations"] = {CANCELLED: "true"}
    gone = observe(None, observe(cancelled))
    assert (gone.phase, gone.reason) == (Phase.DELETED, "Cancelled")
    assert gone.message == "the TrainJob was cancelled with trainjob while it was waited for"


def test_reported_progress_and_metrics_are_kept() -> None:
    status = {
        "progressPercentage": 40,
        "estimatedRemainingSeconds": 90,
        "metrics": [{"name": "loss", "value": "0.5"}, {"name": "epoch", "value": "3"}],
        "lastUpdatedTime": CREATED,
    }
    running = observe(job(LAST, trainerStatus=status))
    assert (running.progress, running.remaining_seconds) == (40, 90)
    assert running.metrics == {"loss": 0.5, "epoch": 3}
    ended = observe(job(conditions=[COMPLETE]), running)
    assert (ended.progress, ended.remaining_seconds, ended.metrics) == (40, 90, running.metrics)
    assert observe(job(LAST)).progress is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T11:00:00+01:00", at(0)),
        ("2026-11-21T10:00:00.5Z", at(0).replace(microsecond=500_000)),
        ("2026-11-21T10:00:00.123456789Z", at(0).replace(microsecond=123_456)),
        ("", None),
        (None, None),
        ("yesterday", None),
        ("0001-01-01T00:00:00+23:00", None),
        (5, None),
    ],
)
def test_times_are_parsed(text: object, expected: datetime | None) -> None:
    assert parse_time(text) == expected


@st.composite
def damaged(draw: st.DrawFn) -> Object:
    """A realistic object with one part removed or replaced."""
    trainjob = job(
        FETCHED,
        ACTIVE,
        conditions=[RESUMED, draw(st.sampled_from([COMPLETE, FAILED, SUSPENDED]))],
        suspend=draw(st.booleans()),
        queue=draw(st.sampled_from(["", "q"])),
        trainerStatus={"progressPercentage": 1, "metrics": [{"name": "a", "value": "b"}]},
    )
    part: Any = trainjob
    while True:
        place = draw(st.sampled_from(list(part) if isinstance(part, dict) else list(range(len(part)))))
        if not isinstance(part[place], dict | list) or not part[place] or draw(st.booleans()):
            break
        part[place] = part = part[place].copy()
    if draw(st.booleans()):
        part[place] = draw(JSON)
    else:
        del part[place]
    return trainjob


@settings(max_examples=60)
@given(st.lists(OBJECTS | damaged() | st.none(), min_size=1, max_size=4))
def test_observe_never_raises_and_final_phases_stay(objects: list[Object | None]) -> None:
    seen: list[Observation] = []
    for each in objects:
        seen.append(observe(each, seen[-1] if seen else None))
    for earlier, later in itertools.pairwise(seen):
        assert later.has_run or not earlier.has_run
        if earlier.phase.terminal:
            assert later == earlier
