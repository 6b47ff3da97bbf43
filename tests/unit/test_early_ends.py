"""The goodput of waits that end before their job: timeouts, hangs, crashes; and of jobs that were deleted."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from hypothesis import given, settings, strategies as st
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import block, launch

from trainjob import JobRef, TrainJobFailed, WaitOptions
from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput import measure
from trainjob._goodput.history import MetricHistory
from trainjob._jobs import results, telemetry, waiting
from trainjob.errors import BackendUnavailable, JobHung, QueueTimeout, RankCrashed, RunTimeout, StartTimeout, Stuck
from trainjob.goodput import Activity, Goodput
from trainjob.status import QUEUE_LABEL, Blocker, Observation, Phase

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

HOUR = 3600.0


async def launched(backend: DirectBackend, age: float = HOUR, **fields: Any) -> JobRef:
    """A job that was created `age` seconds ago."""
    ref = await launch(backend, fields=fields)
    created = backend.ago(age)
    backend.change(ref, {"metadata": {"creationTimestamp": created}})
    if fields.get("suspend"):
        backend.condition(ref, "Suspended", "Suspended", time=created)
    return ref


def at(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


def is_stuck(backend: DirectBackend, _: JobRef) -> None:
    block(backend, Blocker("Inadmissible", "no queue", permanent=True))


def runs(backend: DirectBackend, ref: JobRef) -> None:
    backend.running(ref)


def crashes(backend: DirectBackend, ref: JobRef) -> None:
    backend.running(ref)
    backend.pod(ref, last=objects.ended(3))


def hangs(backend: DirectBackend, ref: JobRef) -> None:
    backend.running(ref)
    backend.pod(ref)
    report = b'{"rank": 0, "world": 1, "count": 3, "step": 3, "stalled_seconds": 0.5}'
    backend.store.logs = b"2026-11-21T10:00:00Z trainjob.rank " + report + b"\n"


def waits(backend: DirectBackend, ref: JobRef) -> None: ...


QUEUED = {"suspend": True, "labels": {QUEUE_LABEL: "q"}}
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("kind", "fields", "options", "prepare", "activity"),
    [
        (QueueTimeout, QUEUED, WaitOptions(queue_timeout=SECOND), waits, "queued"),
        (RunTimeout, {}, WaitOptions(run_timeout=SECOND), runs, "training"),
        (Stuck, QUEUED, WaitOptions(fail_fast=True), is_stuck, "queued"),
        (RankCrashed, {}, WaitOptions(fail_on_first_crash=True), crashes, "training"),
        (JobHung, {"stall_timeout": 1}, WaitOptions(), hangs, "training"),
    ],
)
async def test_an_error_that_leaves_the_job_running_has_its_goodput(
    backend: DirectBackend,
    kind: type[Any],
    fields: dict[str, Any],
    options: WaitOptions,
    prepare: Callable[[DirectBackend, JobRef], None],
    activity: str,
) -> None:
    ref = await launched(backend, **fields)
    prepare(backend, ref)
    with pytest.raises(kind) as caught:
        await waiting.wait(backend, ref, options)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        seconds = error.goodput["seconds"]
        assert math.fsum(seconds.values()) == pytest.approx(HOUR, abs=60)
        assert seconds[activity] == pytest.approx(HOUR, abs=60)
        assert error.goodput["ratio"] == pytest.approx(1 if activity == "training" else 0, abs=0.02)


async def test_the_time_after_the_last_step_of_a_hang_is_stalled(backend: DirectBackend) -> None:
    """The waiter has seen the steps, and the job has stood still since."""
    ref = await launched(backend, age=4000)
    backend.running(ref)
    history = MetricHistory()
    begin = at(4000).timestamp()
    history.merge_phases([[begin, "Running"]])
    for step in range(1, 101):
        history.add(begin + 10 * step, {"loss": 1 / step}, step)
    backend.status(ref, trainerStatus={"metrics": [], "lastUpdatedTime": backend.ago(3000)})
    spent = await results.spent_so_far(backend, ref, history)
    assert spent.phase is Phase.RUNNING
    assert spent.seconds[Activity.TRAINING] == pytest.approx(1000, abs=30)
    assert spent.seconds[Activity.STALLED] == pytest.approx(3000, abs=30)


@pytest.mark.parametrize("trouble", ["slow", "outage", "bug"])
async def test_measuring_neither_delays_nor_replaces_the_reason(
    backend: DirectBackend, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    ref = await launched(backend)

    async def state(_: JobRef) -> Evidence:
        if trouble == "slow":
            await anyio.sleep_forever()
        raise BackendUnavailable("no") if trouble == "outage" else AttributeError("no")

    monkeypatch.setattr(backend, "state", state)
    monkeypatch.setattr(results, "_MEASURE_SECONDS", 0.05)
    with pytest.raises(StartTimeout) as caught:
        await waiting.wait(backend, ref, WaitOptions(start_timeout=SECOND))
    assert caught.value.goodput == {}


async def test_a_deleted_job_has_the_goodput_that_its_waiter_observed(
    backend: DirectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued for 100 s, and has run for 200 s."""
    ref = await launched(backend, age=300, **QUEUED)
    times = {Phase.QUEUED: at(300), Phase.RUNNING: at(200), Phase.DELETED: at(0)}
    seen: list[Phase] = []

    def change(observation: Observation, _: str) -> None:
        seen.append(observation.phase)
        if observation.phase is Phase.QUEUED:
            backend.change(ref, {"spec": {"suspend": False}, "status": {"conditions": None}})
            backend.running(ref)
        elif observation.phase is Phase.RUNNING:
            backend.store.delete_job(backend.job(ref), "")

    def now() -> datetime:
        return [*times.values()][min(len(seen), len(times) - 1)]

    monkeypatch.setattr(backend, "now", now)
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref, on_change=change)
    assert seen == [*times]
    seconds = caught.value.goodput["seconds"]
    assert seconds["queued"] == pytest.approx(100, abs=1)
    assert seconds["training"] == pytest.approx(200, abs=30)
    assert math.fsum(seconds.values()) == pytest.approx(seconds["queued"] + seconds["training"], abs=0.2)


@pytest.mark.parametrize("code", [0, 3])
async def test_a_result_is_measured_and_recorded_once(
    backend: DirectBackend, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """By the wait for the end of the job, not by one that leaves it running."""
    ref = await launched(backend)
    recorded: list[dict[str, Any]] = []
    monkeypatch.setattr(telemetry, "record_goodput", lambda _, goodput: recorded.append(goodput.summary()))
    with pytest.raises(StartTimeout):
        await waiting.wait(backend, ref, WaitOptions(start_timeout=SECOND))
    assert recorded == []
    calls: list[object] = []

    def counted(*given: Any) -> Goodput:
        calls.append(given)
        return measure(*given)

    monkeypatch.setattr(results, "measure", counted)
    backend.end(ref, code)
    try:
        spent = (await waiting.wait(backend, ref)).goodput
    except TrainJobFailed as error:
        spent = error.goodput
    assert (len(calls), recorded) == (1, [spent])


PHASES = st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from([*Phase])), max_size=10)


@settings(max_examples=50)
@given(PHASES, st.sampled_from([Phase.DELETED, Phase.COMPLETE, Phase.FAILED]), st.floats(-100, 1e5))
def test_the_time_of_a_deleted_job_sums_to_its_wall_time(
    phases: list[tuple[float, Phase]], ended: Phase, finished: float
) -> None:
    created = at(2e5)
    history = MetricHistory()
    history.merge_phases([(created.timestamp() + second, str(phase)) for second, phase in phases])
    final = Observation(ended, created=created)
    if ended is not Phase.DELETED:
        final = replace(final, finished=created + timedelta(seconds=finished))
    spent = results.measured(
        JobRef("ns", "x", "uid", 3), Evidence(None), history, created + timedelta(seconds=2e5), final
    )
    assert all(segment.seconds > 0 for segment in spent.segments)
    assert {segment.attempt for segment in spent.segments} <= {3}
    if phases:
        assert spent.phase is ended
        lasted = 2e5 if ended is Phase.DELETED else max(0.0, finished)
        assert spent.wall_seconds == pytest.approx(lasted, abs=30)
        assert math.fsum(spent.seconds.values()) == pytest.approx(spent.wall_seconds, abs=0.01)
    else:
        assert spent.segments == ()
