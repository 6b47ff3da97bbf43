"""Objects of Trainer 2.1.0, 2.2.1 and 2.3.0 from a real cluster, including transient states."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, strategies as st

from trainjob._support.kube_objects import parse_time
from trainjob.status import CANCELLED, QUEUE_LABEL, Blocker, Observation, Phase, observe

CREATED, QUEUED, RESUMED, ENDED = (f"2026-11-21T{hour}:00:00Z" for hour in ("10", "11", "12", "13"))


def at(hour: int) -> datetime:
    return datetime(2026, 11, 21, hour, tzinfo=UTC)


def condition(kind: str, value: str, reason: str, message: str = "", time: str = ENDED) -> dict[str, str]:
    return {"type": kind, "status": value, "reason": reason, "message": message, "lastTransitionTime": time}


SUSPENDED = condition("Suspended", "True", "Suspended", "TrainJob is suspended", QUEUED)
RESUMED_CONDITION = condition("Suspended", "False", "Resumed", "TrainJob is resumed", RESUMED)
COMPLETE = condition("Complete", "True", "AllJobsCompleted", "jobset completed successfully")
FAILED = condition(
    "Failed", "True", "FailedJobs", "jobset failed due to one or more job failures (first failed job: x-node-0)"
)


def counts(name: str = "node", **counters: int) -> dict[str, Any]:
    zero = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0)
    return {"name": name, **zero, **counters}


def job(
    *jobs: dict[str, Any], conditions: Any = (), suspend: bool | None = None, queue: str = "", **status: Any
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "x",
            "creationTimestamp": CREATED,
            **({"labels": {QUEUE_LABEL: queue}} if queue else {}),
        },
        "spec": {} if suspend is None else {"suspend": suspend},
        "status": {
            **({"conditions": list(conditions)} if conditions else {}),
            **({"jobsStatus": list(jobs)} if jobs else {}),
            **status,
        },
    }


@pytest.mark.parametrize(
    ("trainjob", "phase"),
    [
        ({"metadata": {}, "spec": {}}, Phase.NOT_STARTED),
        (job(), Phase.NOT_STARTED),
        (job(counts()), Phase.NOT_STARTED),
        (job(counts(active=1)), Phase.STARTING),
        (job(counts(active=1, ready=1)), Phase.RUNNING),
        (job(counts(ready=1)), Phase.RUNNING),
        (job(counts("dataset-initializer", active=1), counts()), Phase.INITIALIZING),
        (
            job(counts("dataset-initializer", ready=1), counts("model-initializer", succeeded=1), counts()),
            Phase.INITIALIZING,
        ),
        (job(counts("dataset-initializer", succeeded=1), counts("node", active=1)), Phase.STARTING),
        (job(counts("dataset-initializer", succeeded=1), counts("node", ready=1)), Phase.RUNNING),
        (job(counts("node", ready=1), counts("launcher")), Phase.RUNNING),
        (job(counts("node", succeeded=1), counts("launcher", active=1)), Phase.RUNNING),
        (job(suspend=True), Phase.SUSPENDED),
        (job(counts(suspended=1), conditions=[SUSPENDED], suspend=True), Phase.SUSPENDED),
        (job(counts(active=1, suspended=1), conditions=[SUSPENDED], suspend=True), Phase.SUSPENDED),
        (job(counts(active=1, ready=1), suspend=True), Phase.SUSPENDED),
        (job(suspend=True, queue="team-a"), Phase.QUEUED),
        (job(counts(suspended=1), conditions=[SUSPENDED], suspend=True, queue="team-a"), Phase.QUEUED),
        (job(counts(suspended=1), conditions=[SUSPENDED], suspend=False, queue="team-a"), Phase.STARTING),
        (job(counts(active=1), conditions=[RESUMED_CONDITION], suspend=False), Phase.STARTING),
        (job(counts(ready=1), conditions=[RESUMED_CONDITION], suspend=False), Phase.RUNNING),
        (job(counts(succeeded=1), conditions=[COMPLETE]), Phase.COMPLETE),
        (job(counts(succeeded=1), conditions=[RESUMED_CONDITION, COMPLETE], suspend=False), Phase.COMPLETE),
        (job(counts(failed=1), conditions=[FAILED]), Phase.FAILED),
        (job(counts(), conditions=[condition("Failed", "True", "DeadlineExceeded")]), Phase.FAILED),
        (job(conditions=[FAILED], suspend=True), Phase.FAILED),
        (job(counts(active=1), conditions=[{**FAILED, "status": "False"}]), Phase.STARTING),
        (None, Phase.DELETED),
    ],
)
def test_phase_follows_from_the_status(trainjob: dict[str, Any] | None, phase: Phase) -> None:
    assert observe(trainjob).phase is phase


def test_suspended_phase_has_reason_and_message_of_its_condition() -> None:
    early = observe(job(suspend=True))
    assert (early.reason, early.message) == ("Suspended", "the TrainJob is suspended")
    by_hand = condition("Suspended", "True", "ByHand", "until Monday", QUEUED)
    later = observe(job(suspend=True, conditions=[by_hand]))
    assert (later.reason, later.message) == ("ByHand", "until Monday")


def test_final_phases() -> None:
    assert {phase for phase in Phase if phase.terminal} == {
        Phase.COMPLETE,
        Phase.FAILED,
        Phase.CANCELLED,
        Phase.DELETED,
    }


def test_final_phase_has_reason_and_message_of_its_condition() -> None:
    observation = observe(job(counts(failed=1), conditions=[FAILED]))
    assert observation.reason == "FailedJobs"
    assert observation.message == "jobset failed due to one or more job failures (first failed step: node)"
    assert observation.finished == at(13)
    assert observe(job(counts(active=1))).finished is None


@pytest.mark.parametrize(
    ("trainjob", "admitted", "waiting_since"),
    [
        (job(counts(active=1)), 10, None),
        (job(suspend=True), None, 10),
        (job(conditions=[SUSPENDED], suspend=True, queue="q"), None, 11),
        (job(counts(active=1), conditions=[RESUMED_CONDITION], suspend=False), 12, None),
        # Outdated for about 10 ms, until the controller has processed the request.
        (job(counts(suspended=1), conditions=[SUSPENDED], suspend=False, queue="q"), None, None),
        (job(counts(ready=1), conditions=[RESUMED_CONDITION], suspend=True, queue="q"), None, None),
        (job(conditions=[RESUMED_CONDITION, COMPLETE]), 12, None),
        (job(conditions=[SUSPENDED, FAILED], suspend=True), None, None),
    ],
)
def test_created_admitted_and_waiting_times(
    trainjob: dict[str, Any], admitted: int | None, waiting_since: int | None
) -> None:
    observation = observe(trainjob)
    assert observation.created == at(10)
    assert observation.admitted == (at(admitted) if admitted else None)
    assert observation.waiting_since == (at(waiting_since) if waiting_since else None)


def test_a_preempted_job_is_queued_again() -> None:
    running = observe(job(counts(ready=1), conditions=[RESUMED_CONDITION], suspend=False, queue="team-a"))
    assert running.has_run
    queued = observe(job(counts(suspended=1), conditions=[SUSPENDED], suspend=True, queue="team-a"), running)
    assert queued.phase is Phase.QUEUED
    assert queued.message == "preempted, waiting again in queue team-a"
    assert observe(job(suspend=True, queue="team-a")).message == "waiting for admission in queue team-a"
    restarting = observe(job(counts(active=1), conditions=[RESUMED_CONDITION], suspend=False, queue="team-a"), queued)
    assert (restarting.phase, restarting.has_run) == (Phase.RESTARTING, True)


def test_counters_of_zero_keep_the_running_phase() -> None:
    running = observe(job(counts(ready=1)))
    between = observe(job(counts()), running)
    assert between.phase is Phase.RUNNING
    assert observe(job(counts(active=1)), between).phase is Phase.RESTARTING
    assert observe(job(counts()), observe(job(counts(active=1)))).phase is Phase.NOT_STARTED


ACTIVE, READY, LAST = counts(active=1), counts(active=1, ready=1), counts(ready=1)


@pytest.mark.parametrize(
    ("recorded", "phases"),
    [
        pytest.param([ACTIVE, READY, ACTIVE, LAST, "Complete"], "Starting Running Complete", id="one rank"),
        pytest.param(
            [ACTIVE, READY, ACTIVE, READY, ACTIVE, LAST, "Complete"],
            "Starting Running Complete",
            id="two ranks, the second ends 6 s after the first",
        ),
        pytest.param(
            [counts(), ACTIVE, READY, ACTIVE, counts(), "Failed"], "NotStarted Starting Running Failed", id="fails"
        ),
        pytest.param(
            [ACTIVE, READY, ACTIVE, counts(), counts(failed=1), counts(), ACTIVE, READY, ACTIVE, LAST, "Complete"],
            "Starting Running Restarting Running Complete",
            id="a rank is killed, the JobSet restarts",
        ),
        pytest.param(
            [ACTIVE, READY, ACTIVE, counts(), ACTIVE, READY],
            "Starting Running Restarting Running",
            id="the same, with fewer observations",
        ),
        pytest.param([ACTIVE, READY, ACTIVE, READY], "Starting Running", id="a rank restarts in place"),
    ],
)
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
    running = observe(job(counts("dataset-initializer", succeeded=1), counts(ready=1)))
    initializing = observe(job(counts("dataset-initializer", active=1), counts()), running)
    assert (initializing.phase, initializing.has_run) == (Phase.INITIALIZING, True)
    assert observe(job(counts("dataset-initializer", active=1), counts())).has_run is False


def test_the_first_final_phase_stays() -> None:
    """Trainer up to 2.3 removes Failed if the JobSet is deleted, and trains again (kubeflow/trainer#3891)."""
    failed = observe(job(conditions=[FAILED]))
    for later in (job(counts(active=1)), job(conditions=[COMPLETE]), None):
        assert observe(later, failed) == failed


def test_deleted_phase_keeps_earlier_values() -> None:
    running = observe(job(counts(ready=1), trainerStatus={"progressPercentage": 40}))
    gone = observe(None, running)
    assert (gone.phase, gone.reason, gone.progress, gone.created) == (Phase.DELETED, "Deleted", 40, at(10))
    assert gone.message == "the TrainJob was deleted while it was waited for"


def test_deletion_after_a_cancel_has_the_reason() -> None:
    cancelled = job(counts(ready=1))
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
    running = observe(job(counts(ready=1), trainerStatus=status))
    assert (running.progress, running.remaining_seconds) == (40, 90)
    assert running.metrics == {"loss": 0.5, "epoch": 3}
    ended = observe(job(conditions=[COMPLETE]), running)
    assert (ended.progress, ended.remaining_seconds, ended.metrics) == (40, 90, running.metrics)
    assert observe(job(counts(ready=1))).progress is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-21T10:00:00Z", at(10)),
        ("2026-11-21T11:00:00+01:00", at(10)),
        ("2026-11-21T10:00:00.5Z", at(10).replace(microsecond=500_000)),
        ("2026-11-21T10:00:00.123456789Z", at(10).replace(microsecond=123_456)),
        ("", None),
        (None, None),
        ("yesterday", None),
        ("0001-01-01T00:00:00+23:00", None),
        (5, None),
    ],
)
def test_times_are_parsed(text: object, expected: datetime | None) -> None:
    assert parse_time(text) == expected


# ---------------------------------------------------------------- arbitrary objects

NAMES = st.sampled_from(
    [
        "metadata",
        "spec",
        "status",
        "conditions",
        "jobsStatus",
        "trainerStatus",
        "metrics",
        "name",
        "value",
        "type",
        "reason",
        "message",
        "suspend",
        "labels",
        "creationTimestamp",
        "lastTransitionTime",
        "progressPercentage",
        "ready",
        "active",
        QUEUE_LABEL,
    ]
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["True", "False", "Complete", "Failed", "Suspended", "node", "dataset-initializer", CREATED, "x"])
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=20)
ODD = st.dictionaries(NAMES, JSON)


@st.composite
def damaged(draw: st.DrawFn) -> dict[str, Any]:
    """A realistic object with one part removed or replaced."""
    trainjob = job(
        counts("dataset-initializer", succeeded=1),
        counts(active=1),
        conditions=[RESUMED_CONDITION, draw(st.sampled_from([COMPLETE, FAILED, SUSPENDED]))],
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


@given(st.lists(ODD | damaged() | st.none(), min_size=1, max_size=4))
def test_observe_never_raises_and_final_phases_stay(objects: list[dict[str, Any] | None]) -> None:
    seen: list[Observation] = []
    for trainjob in objects:
        seen.append(observe(trainjob, seen[-1] if seen else None))
    for earlier, later in itertools.pairwise(seen):
        assert later.has_run or not earlier.has_run
        if earlier.phase.terminal:
            assert later == earlier
