"""Wait for a job to finish, and return its result or raise its diagnosis. Uses any `Backend`.

A waiter remembers nothing that the job does not say itself: one that is started again goes on where the first one was.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import anyio

from trainjob import progress, unattended, volumes
from trainjob.backends.base import Backend, TrainJob
from trainjob.diagnosis import Category, Diagnosis, Evidence, diagnose
from trainjob.errors import (
    BackendUnavailable,
    NotFound,
    QueueTimeout,
    RankCrashed,
    Rejected,
    RunTimeout,
    StartTimeout,
    Stuck,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.kube_objects import mapping, mappings, rank_of
from trainjob.logs import STATE_SECONDS, LogLine, Throttle
from trainjob.manifest import JobRef
from trainjob.status import Observation, Phase, observe
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)

_CRASHES = 32  # whose evidence is kept
_LAST_LINES_SECONDS = 10.0  # for what the ranks wrote last, after the job has ended


@dataclass(frozen=True)
class TrainJobResult:
    """What a finished job leaves to its workflow.

    Attributes:
        namespace: Where the job is.
        name: Its name.
        uid: Its UID.
        attempt: Ordinal of the attempt.
        metrics: The training script's metrics: truth values, numbers, text.
        outputs: The script's outputs: name -> URI, other text, a number or a truth value.
        seconds: From creation to the end: ``queued``, ``total``.
        returned: What a function trainer (`TrainJobSpec.func`) returned on rank 0, a JSON value; None if it returned
            nothing.
        history: Metric -> its values over time, oldest first: step, Unix time in seconds, value. 256 points of all
            metrics together at most; how they are chosen: `trainjob.progress`.
    """

    namespace: str
    name: str
    uid: str
    attempt: int
    metrics: Mapping[str, bool | float | str] = field(default_factory=dict)
    outputs: Mapping[str, bool | float | str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    returned: Any = None
    history: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON and XCom, which know no NaN and no infinity: such metrics become text.

        ``returned`` and ``history`` are left out where there is none. A point of the history is a list.
        """
        finite = {
            name: value if isinstance(value, str) or math.isfinite(value) else str(value)
            for name, value in self.metrics.items()
        }
        values = {**asdict(self), "metrics": finite, "history": history_as_json(self.history)}
        if self.returned is None:
            del values["returned"]
        if not self.history:
            del values["history"]
        return values


def history_as_json(history: Mapping[str, Sequence[tuple[int, float, float]]]) -> dict[str, list[list[float]]]:
    """A history in lists, the same before and after JSON and XCom: ``{"loss": [[step, time, value], ...]}``."""
    return {name: [list(point) for point in points] for name, points in history.items()}


async def follow(
    backend: Backend, ref: JobRef, options: WaitOptions | None = None
) -> AsyncGenerator[tuple[Observation, str]]:
    """Watch a job to its end: each new observation, with a notice for people where there is one.

    The last observation is final. An outage is never one: it shows as notices, until the backend gives up.

    Raises:
        QueueTimeout, StartTimeout, RunTimeout, Stuck: a budget ran out; the job goes on.
        BackendUnavailable: an outage outlasted its budgets; the job goes on.
    """
    options = options or WaitOptions()
    observation: Observation | None = None
    while True:
        async with aclosing(_changes(backend, ref, options, observation)) as changes:
            try:
                async for observation, notice in changes:
                    yield observation, notice
                return
            except StartTimeout:
                # A waiter that is younger than the job may have missed the start.
                if observation is None or not await backend.has_run(ref):
                    raise
        starting = observation.phase in (Phase.NOT_STARTED, Phase.STARTING)
        observation = replace(observation, has_run=True, phase=Phase.RESTARTING if starting else observation.phase)
        yield observation, "a rank has been running before, so start_timeout does not apply"


async def _changes(
    backend: Backend, ref: JobRef, options: WaitOptions, observation: Observation | None
) -> AsyncGenerator[tuple[Observation, str]]:
    """The same, given what is known of the job already."""
    attended, resumed = False, ""
    try:
        async with aclosing(backend.watch(ref)) as snapshots:
            while True:
                # The clock runs for one look only: it must not stay open over a yield. A cancel scope of anyio's would
                # cost each waiter 2 KB.
                try:
                    async with asyncio.timeout(_seconds_left(observation, options)) as clock:
                        snapshot = await anext(snapshots, None)
                except TimeoutError:
                    if observation is None or not clock.expired():
                        raise
                    raise _timeout(ref, observation, options) from None
                if snapshot is None:
                    raise BackendUnavailable(f"TrainJob {ref}: the backend stopped watching before the job's end")
                notice = snapshot.notice
                if snapshot.trainjob is not None and unattended.policy_of(snapshot.trainjob) is not None:
                    if not attended:
                        attended = True
                        backend.attend(ref)
                    before, resumed = resumed, await _resumed(backend, ref, snapshot.trainjob)
                    notice = resumed if resumed and resumed != before else notice
                latest = observe(snapshot.trainjob, observation, snapshot.blocker)
                changed = latest != observation
                observation = latest
                if changed or notice:
                    yield observation, notice
                if observation.phase.terminal:
                    return
                if observation.stuck and options.fail_fast:
                    advice = f"\nwhat to do: {observation.advice}" if observation.advice else ""
                    raise Stuck(
                        f"TrainJob {ref} is {observation.phase} and will stay so: {observation.message}{advice}"
                    )
    finally:
        if attended:
            backend.leave(ref, ended=observation is not None and observation.phase.terminal)


async def _resumed(backend: Backend, ref: JobRef, trainjob: TrainJob) -> str:
    """Resume a job that was suspended because nobody waited for it; the notice about that, empty if there is none."""
    if not unattended.marked(trainjob):
        return ""
    patch = unattended.resuming(trainjob)
    try:
        await backend.patch(ref, patch)
    except (NotFound, Rejected) as error:
        return f"it was suspended because nobody waited for it, and cannot be resumed: {error}"
    return "it was suspended because nobody waited for it; it is resumed" if "spec" in patch else ""


def _patience(observation: Observation, options: WaitOptions) -> tuple[datetime, str] | None:
    """When the first budget of this phase runs out, and which one."""
    if observation.admitted is None:
        # A suspended job counts, too: it waits until a person or a program resumes it.
        limits = [(observation.waiting_since, options.queue_timeout, "queue")]
    else:
        limits = [(observation.admitted, options.run_timeout, "run")]
        if not observation.has_run:
            limits.append((observation.admitted, options.start_timeout, "start"))
    ends = [(since + budget, name) for since, budget, name in limits if since is not None and budget is not None]
    return min(ends, default=None)


def _seconds_left(observation: Observation | None, options: WaitOptions) -> float | None:
    end = _patience(observation, options) if observation is not None else None
    return (end[0] - datetime.now(UTC)).total_seconds() if end else None


def _timeout(ref: JobRef, observation: Observation, options: WaitOptions) -> Exception:
    end = _patience(observation, options)
    name = end[1] if end else "run"
    state = f"TrainJob {ref} is {observation.phase}" + (f": {observation.message}" if observation.message else "")
    if name == "queue":
        happened = "resumed" if observation.phase is Phase.SUSPENDED else "admitted"
        return QueueTimeout(f"{state}; it was not {happened} within queue_timeout of {options.queue_timeout}")
    if name == "start":
        return StartTimeout(f"{state}; no rank was running within start_timeout of {options.start_timeout}")
    return RunTimeout(f"{state}; it did not end within run_timeout of {options.run_timeout}")


async def wait(
    backend: Backend,
    ref: JobRef,
    options: WaitOptions | None = None,
    *,
    on_change: Callable[[Observation, str], None] | None = None,
    on_log: Callable[[LogLine], None] | None = None,
    on_crash: Callable[[Diagnosis], None] | None = None,
    state_seconds: float = STATE_SECONDS,
) -> TrainJobResult:
    """Wait for the end of a job.

    Args:
        backend: Where it is.
        ref: The job.
        options: When to stop waiting earlier; never if left out.
        on_change: Called with each new observation and its notice.
        on_log: Called with each line of every rank as it is written.
        on_crash: Called with the diagnosis of ranks that crash while the job goes on, see `attend`.
        state_seconds: Seconds between two states of a progress bar for `on_log`; 0 for each one, see `LogLine`.

    Raises:
        TrainJobFailed: with the diagnosis.
        RankCrashed: likewise, at the first crash; the job goes on.
        TimedOut: a budget ran out; the job goes on.
        BackendUnavailable: an outage outlasted its budgets; the job goes on.
    """
    read = None if on_log is None else lambda: _forward(backend, ref, on_log, state_seconds)
    final, crash = await attend(backend, ref, options, on_change=on_change, on_crash=on_crash, read=read)
    return await conclude(backend, ref, final, crash)


async def attend(
    backend: Backend,
    ref: JobRef,
    options: WaitOptions | None = None,
    *,
    on_change: Callable[[Observation, str], None] | None = None,
    on_crash: Callable[[Diagnosis], None] | None = None,
    read: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Observation | None, Evidence | None]:
    """Follow a job to its end and look after its ranks meanwhile: what `wait` does before it draws conclusions.

    Args:
        backend: Where it is.
        ref: The job.
        options: When to stop waiting earlier; never if left out.
        on_change: Called with each new observation and its notice.
        on_crash: Called with the diagnosis of ranks that crash before the job has ended: the shipped runtimes restart
            them, and the job fails minutes later if at all.
        read: Reads the ranks' lines; cancelled a moment after the job's end, when they should have been read.

    Returns:
        The final observation, and the evidence of the first crashes, both for `conclude`: pods that crashed may be gone
        when the job has failed.

    Raises:
        RankCrashed, TimedOut, BackendUnavailable: see `wait`.
    """
    final: Observation | None = None
    crashed: list[Evidence] = []
    try:
        async with anyio.create_task_group() as tasks:
            read_out = anyio.Event()

            async def reading() -> None:
                try:
                    if read is not None:
                        await read()
                finally:
                    read_out.set()

            tasks.start_soon(reading)
            fatal = options is not None and options.fail_on_first_crash
            tasks.start_soon(_look_out, backend, ref, crashed, on_crash, fatal)
            async with aclosing(follow(backend, ref, options)) as changes:
                async for final, notice in changes:
                    if on_change is not None:
                        on_change(final, notice)
            with anyio.move_on_after(_LAST_LINES_SECONDS):
                await read_out.wait()
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:  # so a task group wraps whatever happens inside it
        raise group.exceptions[0] from None
    return final, crashed[0].with_earlier(*crashed[1:]) if crashed else None


async def _forward(backend: Backend, ref: JobRef, on_log: Callable[[LogLine], None], state_seconds: float) -> None:
    throttle = Throttle(on_log, state_seconds) if state_seconds else None
    take = throttle.line if throttle is not None else on_log
    try:
        async with aclosing(backend.logs(ref, follow=True)) as lines:
            while True:
                try:
                    line = await anext(lines, None)
                except TrainJobError as error:  # lines are a service; that they fail is no verdict on the job
                    take(LogLine("", "trainjob", f"no more log lines from here on: {error}"))
                    return
                if line is None:
                    return
                take(line)
    finally:
        if throttle is not None:
            throttle.end()


async def _look_out(
    backend: Backend, ref: JobRef, crashed: list[Evidence], on_crash: Callable[[Diagnosis], None] | None, fatal: bool
) -> None:
    """Keep the evidence of the first crashes, and report each; at the first one give up if it is `fatal`.

    Not only of one: which rank brought the others down is not told by whose end is heard of first.
    """
    try:
        async with aclosing(backend.crashes(ref)) as found:
            async for evidence in found:
                if len(crashed) < _CRASHES:
                    crashed.append(evidence)
                diagnosis = replace(diagnose(evidence, Observation(Phase.FAILED)), job=str(ref))
                if fatal and diagnosis.category not in (Category.PREEMPTED, Category.NODE_LOST):
                    raise RankCrashed(diagnosis)
                if on_crash is not None:
                    on_crash(diagnosis)
    except RankCrashed:
        raise
    except TrainJobError as error:
        _log.warning("crashes of ranks of TrainJob %s cannot be seen while it goes on: %s", ref, error)


async def conclude(
    backend: Backend, ref: JobRef, final: Observation | None = None, earlier: Evidence | None = None
) -> TrainJobResult:
    """The result of a job that has ended.

    Args:
        backend: Where it is.
        ref: The job.
        final: The final observation that a waiter made: it stands, also where the job was deleted since.
        earlier: Evidence of the first crashes, taken while the job went on: its pods may be gone.

    Raises:
        TrainJobFailed: it failed or is gone; with the diagnosis.
    """
    evidence = await backend.evidence(ref)
    observation = observe(evidence.trainjob, final)
    if observation.phase is not Phase.COMPLETE:
        if earlier is not None:
            evidence = evidence.with_earlier(earlier)
        raise TrainJobFailed(replace(diagnose(evidence, final), job=str(ref)))
    return result_of(ref, evidence, observation)


def result_of(ref: JobRef, evidence: Evidence, observation: Observation) -> TrainJobResult:
    """What a job has left so far."""
    report = _report(evidence)
    created = observation.created
    times = {"queued": (created, observation.admitted), "total": (created, observation.finished)}
    return TrainJobResult(
        ref.namespace,
        ref.name,
        ref.uid,
        ref.attempt,
        metrics={**observation.metrics, **report.metrics},
        outputs={
            name: volumes.as_claim(value) if isinstance(value, str) else value for name, value in report.outputs.items()
        },
        seconds={name: (end - begin).total_seconds() for name, (begin, end) in times.items() if begin and end},
        returned=report.returned,
        history=report.history,
    )


def _report(evidence: Evidence) -> progress.Report:
    """What rank 0 left in its latest termination message; with MPI that is the launcher's."""
    latest = sorted(evidence.pods, key=lambda pod: str(mapping(pod, "metadata").get("creationTimestamp")), reverse=True)
    for rank in ("launcher-0", "node-0"):
        for pod in latest:
            for status in mappings(pod, "status", "containerStatuses") if rank_of(pod) == rank else ():
                message = mapping(status, "state", "terminated").get("message")
                if report := progress.read(str(message)):
                    return report
    return progress.Report()
