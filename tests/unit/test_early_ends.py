"""The goodput of waits that end before their job: timeouts, hangs, crashes; and of jobs that were deleted."""

from __future__ import annotations

import math
import pickle
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from hypothesis import given, strategies as st
from tests.contract.memory import MemoryBackend
from tests.unit.test_first_crash import crashed

from trainjob import JobRef, TrainJobFailed, TrainJobSpec, WaitOptions
from trainjob._backends.base import Snapshot
from trainjob._goodput import measure
from trainjob._goodput.history import MetricHistory
from trainjob._jobs import launching as flow, results, telemetry, waiting
from trainjob._jobs.cancellation import cancel
from trainjob._support.log_lines import LogLine
from trainjob.errors import (
    BackendUnavailable,
    JobHung,
    QueueTimeout,
    RankCrashed,
    RunTimeout,
    StartTimeout,
    Stuck,
)
from trainjob.goodput import Activity, Goodput
from trainjob.status import QUEUE_LABEL, Blocker, Observation, Phase, observe
from trainjob.verdicts import Evidence

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

HOUR = 3600.0


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


async def launched(backend: MemoryBackend, age: float = HOUR, **fields: Any) -> JobRef:
    """A job that was created `age` seconds ago."""
    spec = TrainJobSpec.parse({"runtime": "r", "command": ["x"], **fields})
    ref = await flow.launch(backend, spec, "key", namespace="ns")
    backend.job(ref)["metadata"]["creationTimestamp"] = (datetime.now(UTC) - timedelta(seconds=age)).isoformat()
    return ref


def at(seconds: float) -> datetime:
    return datetime.now(UTC) - timedelta(seconds=seconds)


def stuck(backend: MemoryBackend) -> None:
    watch = backend.watch

    async def watched(ref: JobRef) -> AsyncGenerator[Snapshot]:
        async with aclosing(watch(ref)) as snapshots:
            async for snapshot in snapshots:
                yield Snapshot(snapshot.trainjob, blocker=Blocker("Inadmissible", "no queue", permanent=True))

    backend.watch = watched  # type: ignore[method-assign]


def runs(backend: MemoryBackend, ref: JobRef) -> None:
    backend.running(ref)


def crashes(backend: MemoryBackend, ref: JobRef) -> None:
    backend.running(ref)
    backend.crashed[ref.uid] = [Evidence(None, [crashed()])]


QUEUED = {"suspend": True, "labels": {QUEUE_LABEL: "q"}}
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("kind", "fields", "options", "prepare", "activity"),
    [
        (QueueTimeout, QUEUED, WaitOptions(queue_timeout=SECOND), None, "queued"),
        (StartTimeout, {}, WaitOptions(start_timeout=SECOND), None, "starting"),
        (RunTimeout, {}, WaitOptions(run_timeout=SECOND), runs, "training"),
        (Stuck, QUEUED, WaitOptions(fail_fast=True), None, "queued"),
        (RankCrashed, {}, WaitOptions(fail_on_first_crash=True), crashes, "training"),
    ],
)
async def test_an_error_that_leaves_the_job_running_has_its_goodput(
    backend: MemoryBackend,
    kind: type[Any],
    fields: dict[str, Any],
    options: WaitOptions,
    prepare: Callable[[MemoryBackend, JobRef], None] | None,
    activity: str,
) -> None:
    ref = await launched(backend, **fields)
    if prepare is not None:
        prepare(backend, ref)
    if kind is Stuck:
        stuck(backend)
    with pytest.raises(kind) as caught:
        await waiting.wait(backend, ref, options)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        seconds = error.goodput["seconds"]
        assert math.fsum(seconds.values()) == pytest.approx(HOUR, abs=30)
        assert seconds[activity] == pytest.approx(HOUR, abs=30)
        assert error.goodput["ratio"] == pytest.approx(1 if activity == "training" else 0, abs=0.01)


async def test_a_hang_has_its_goodput(backend: MemoryBackend) -> None:
    ref = await launched(backend, age=100, stall_timeout=1)
    backend.running(ref)
    for rank in (0, 1):
        text = f'trainjob.rank {{"rank": {rank}, "world": 2, "count": 3, "step": 3, "stalled_seconds": 0.5}}'
        backend.lines.append(LogLine("2026-11-21T10:00:00Z", f"node-{rank}", text))
    with pytest.raises(JobHung) as caught:
        await waiting.wait(backend, ref)
    assert caught.value.goodput["seconds"]["training"] == pytest.approx(100, abs=30)


async def test_the_time_after_the_last_step_of_a_hang_is_stalled(backend: MemoryBackend) -> None:
    """The waiter has seen the steps, and the job has stood still since."""
    ref = await launched(backend, age=4000)
    backend.running(ref)
    history = MetricHistory()
    begin = at(4000).timestamp()
    history.merge_phases([[begin, "Running"]])
    for step in range(1, 101):
        history.add(begin + 10 * step, {"loss": 1 / step}, step)
    backend.status(ref, trainerStatus={"metrics": [], "lastUpdatedTime": at(3000).isoformat()})
    spent = await results.spent_so_far(backend, ref, history)
    assert spent.phase is Phase.RUNNING
    assert spent.seconds[Activity.TRAINING] == pytest.approx(1000, abs=30)
    assert spent.seconds[Activity.STALLED] == pytest.approx(3000, abs=30)


@pytest.mark.parametrize("trouble", ["slow", "outage", "bug"])
async def test_measuring_neither_delays_nor_replaces_the_reason(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, trouble: str
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


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_deleted_job_has_the_goodput_that_its_waiter_observed(backend: MemoryBackend, cancelled: bool) -> None:
    ref = await launched(backend, age=0, **QUEUED)

    async def admitted_and_deleted() -> None:
        await anyio.sleep(0.3)
        backend.job(ref)["spec"]["suspend"] = False
        backend.running(ref)
        await anyio.sleep(0.6)
        await (cancel(backend, ref) if cancelled else backend.delete(ref))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(admitted_and_deleted)
        with pytest.raises(TrainJobFailed) as caught:
            await waiting.wait(backend, ref)
    assert observe(None).phase is Phase.DELETED
    seconds = caught.value.goodput["seconds"]
    assert seconds["queued"] >= 0.2
    assert seconds["training"] >= 0.5
    assert math.fsum(seconds.values()) == pytest.approx(seconds["queued"] + seconds["training"], abs=0.2)


async def test_a_deleted_job_that_nobody_observed_has_no_goodput(backend: MemoryBackend) -> None:
    ref = await launched(backend)
    await backend.delete(ref)
    backend.last.clear()
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref)
    assert caught.value.goodput == {}


@pytest.mark.parametrize("code", [0, 3])
async def test_a_result_is_measured_once(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    ref = await launched(backend)
    backend.end(ref, code)
    calls: list[object] = []
    recorded: list[dict[str, Any]] = []

    def counted(*given: Any) -> Goodput:
        calls.append(given)
        return measure(*given)

    monkeypatch.setattr(results, "measure", counted)
    monkeypatch.setattr(telemetry, "record_goodput", lambda _, goodput: recorded.append(goodput.summary()))
    try:
        spent = (await waiting.wait(backend, ref)).goodput
    except TrainJobFailed as error:
        spent = error.goodput
    assert len(calls) == 1
    assert recorded == [spent]


async def test_a_job_that_keeps_running_is_recorded_by_the_wait_for_its_end(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = []
    monkeypatch.setattr(telemetry, "record_goodput", lambda *given: recorded.append(given))
    ref = await launched(backend)
    with pytest.raises(StartTimeout):
        await waiting.wait(backend, ref, WaitOptions(start_timeout=SECOND))
    assert recorded == []
    backend.end(ref)
    await waiting.wait(backend, ref)
    assert len(recorded) == 1


PHASES = st.lists(st.tuples(st.floats(0, 1e5), st.sampled_from([*Phase])), max_size=10)


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
    spent = results.measured(JobRef("ns", "x", "uid", 3), Evidence(None), history, final)
    assert all(segment.seconds > 0 for segment in spent.segments)
    assert {segment.attempt for segment in spent.segments} <= {3}
    if phases:
        assert spent.phase is ended
        lasted = 2e5 if ended is Phase.DELETED else max(0.0, finished)
        assert spent.wall_seconds == pytest.approx(lasted, abs=30)
        assert math.fsum(spent.seconds.values()) == pytest.approx(spent.wall_seconds, abs=0.01)
    else:
        assert spent.segments == ()
