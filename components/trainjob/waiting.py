"""Wait for a job to finish, and return its result or raise its diagnosis. Works with any `Backend`.

A waiter keeps no state: after a restart it reads everything from the job and continues.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import anyio

from trainjob import progress, retry_changes, telemetry, unattended, volumes
from trainjob.backends.base import Backend, TrainJob
from trainjob.diagnosis import ON_RETRY, Category, Diagnosis, Evidence, diagnose, with_change
from trainjob.diagnosis.stragglers import stragglers_of
from trainjob.errors import (
    BackendUnavailable,
    JobHung,
    NotFound,
    QueueTimeout,
    RankCrashed,
    Rejected,
    RunTimeout,
    StartTimeout,
    Stuck,
    TimedOut,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.goodput import Attempt, Goodput, measure
from trainjob.history import CHECKPOINT, MetricHistory, thinned
from trainjob.kube_objects import mapping, mappings, rank_of
from trainjob.lifecycle import NOT_STARTED, record_failure
from trainjob.logs import STATE_SECONDS, LogLine, Throttle
from trainjob.manifest import ATTEMPT, JobRef
from trainjob.stalls import StallWatch
from trainjob.status import Observation, Phase, observe
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)
T = TypeVar("T")

_CRASHES = 32  # crashes whose evidence is kept
# Of a job whose training keeps no history itself, for its result. A process that waits for 1,000 jobs has 58 MB, and
# this is at most 7 KB for each job.
_HISTORY_POINTS = progress.MAX_POINTS // 2
_LAST_LINES_SECONDS = 10.0  # for reading the ranks' last lines after the job has ended
_MEASURE_SECONDS = 5.0  # for reading a job whose wait has failed: the reason is known and must not be delayed for long


@dataclass(frozen=True)
class TrainJobResult:
    """The result of a job that completed.

    Attributes:
        namespace: Namespace of the job.
        name: Name of the job.
        uid: UID of the job.
        attempt: Ordinal of the attempt.
        metrics: Metrics of the training script: booleans, numbers, text.
        outputs: Outputs of the training script: name -> URI, other text, a number or a boolean.
        seconds: ``queued``, from creation to admission, and ``total``, from creation to the end.
        returned: Value that a function trainer (`TrainJobSpec.func`) returned on rank 0, as JSON; None if it returned
            nothing.
        history: Metric -> its values over time, oldest first: step, Unix time in seconds, value. At most 256 points of
            all metrics together; `trainjob.progress` documents how they are chosen.
        checkpoints: Steps and Unix times of the checkpoints that the training reported, oldest first.
        goodput: How the time of this attempt was spent, see `trainjob.goodput`: ``ratio``, 0 to 1; ``seconds`` by
            activity; ``gpu_hours`` by activity, if the number of GPUs is known. Empty if the job was deleted
            before its end was read, unless its waiter observed its phases. ``trainjob goodput`` shows all attempts
            together.
        stragglers: Ranks that the waiters of a job with a ``stall_timeout`` found to be slower than the others:
            ``rank``, ``number``, ``name``, ``node``, ``seconds`` of work per step and its ``median`` of all ranks,
            ``step_seconds``, ``loading`` and a ``summary``.
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
    checkpoints: Sequence[tuple[int, float]] = ()
    goodput: Mapping[str, Any] = field(default_factory=dict)
    stragglers: Sequence[Mapping[str, Any]] = ()

    def as_dict(self) -> dict[str, Any]:
        """The result as a dict for JSON and XCom. NaN and infinity become text, since JSON has neither.

        ``returned``, ``history``, ``checkpoints``, ``goodput`` and ``stragglers`` are left out if they are empty. A
        point of the history is a list.
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
        if self.checkpoints:
            values["checkpoints"] = [list(each) for each in self.checkpoints]
        else:
            del values["checkpoints"]
        if not self.goodput:
            del values["goodput"]
        if not self.stragglers:
            del values["stragglers"]
        return values

    def _repr_html_(self) -> str:
        """The result in a notebook."""
        from trainjob.notebook import result_html  # noqa: PLC0415 - for notebooks only

        return result_html(self)


def history_as_json(history: Mapping[str, Sequence[tuple[int, float, float]]]) -> dict[str, list[list[float]]]:
    """A history as lists, which JSON and XCom do not change: ``{"loss": [[step, time, value], ...]}``."""
    return {name: [list(point) for point in points] for name, points in history.items()}


async def follow(
    backend: Backend, ref: JobRef, options: WaitOptions | None = None
) -> AsyncGenerator[tuple[Observation, str]]:
    """Watch a job until it ends. Yields each new observation with a notice for people, which may be empty.

    The last observation is final. An outage yields notices only, until the backend gives up.

    Raises:
        QueueTimeout, StartTimeout, RunTimeout: the timeout expired; the job keeps running.
        Stuck: the job is blocked by something that cannot resolve itself, and `fail_fast` is set.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.
    """
    options = options or WaitOptions()
    observation: Observation | None = None
    trainjob: TrainJob | None = None
    while True:
        async with aclosing(_changes(backend, ref, options, observation)) as changes:
            try:
                async for observation, notice, present in changes:
                    trainjob = present
                    yield observation, notice
                return
            except QueueTimeout as error:
                await _record_timeout(backend, ref, error, observation, trainjob)
                raise
            except StartTimeout as error:
                # A waiter that started after the job may have missed that a rank was running.
                if observation is None or not await backend.has_run(ref):
                    await _record_timeout(backend, ref, error, observation, trainjob)
                    raise
        starting = observation.phase in (Phase.NOT_STARTED, Phase.STARTING)
        observation = replace(observation, has_run=True, phase=Phase.RESTARTING if starting else observation.phase)
        yield observation, "a rank has been running before, so start_timeout does not apply"


async def _record_timeout(
    backend: Backend, ref: JobRef, error: TimedOut, observation: Observation | None, trainjob: TrainJob | None
) -> None:
    """Record on the job that it did not start in time, if a rule of its `on_retry` changes the next attempt then."""
    if observation is not None and observation.phase in NOT_STARTED:
        category = Category.QUOTA if isinstance(error, QueueTimeout) else Category.SCHEDULING
        timed_out = Diagnosis(category, error.retry, str(error), job=str(ref), phase=observation.phase)
        if (diagnosis := with_change(timed_out, trainjob)).change:
            await record_failure(backend, ref, diagnosis)


async def _changes(
    backend: Backend, ref: JobRef, options: WaitOptions, observation: Observation | None
) -> AsyncGenerator[tuple[Observation, str, TrainJob | None]]:
    """Watch a job as `follow` does, starting from its latest `observation`. Yields the object, too."""
    attended, resumed = False, ""
    try:
        async with aclosing(backend.watch(ref)) as snapshots:
            while True:
                # The timeout covers one snapshot: it must not stay open across a yield. A cancel scope of anyio would
                # cost each waiter 2 KB.
                try:
                    async with asyncio.timeout(_seconds_left(observation, options)) as clock:
                        snapshot = await anext(snapshots, None)
                except TimeoutError:
                    if observation is None or not clock.expired():
                        raise
                    raise _timeout(ref, observation, options) from None
                if snapshot is None:
                    raise BackendUnavailable(f"TrainJob {ref}: the backend ended the watch before the job ended")
                notice = snapshot.notice
                if snapshot.trainjob is not None and unattended.policy_of(snapshot.trainjob) is not None:
                    if not attended:
                        attended = True
                        backend.attend(ref)
                    before, resumed = resumed, await _resumed(backend, ref, snapshot.trainjob)
                    notice = resumed if resumed and resumed != before else notice
                if observation is None and snapshot.trainjob is not None:
                    notice = "; ".join(filter(None, (notice, retry_changes.notice(snapshot.trainjob))))
                latest = observe(snapshot.trainjob, observation, snapshot.blocker)
                changed = latest != observation
                observation = latest
                if changed or notice:
                    yield observation, notice, snapshot.trainjob
                if observation.phase.terminal:
                    return
                if observation.stuck and options.fail_fast:
                    advice = f"\nwhat to do: {observation.advice}" if observation.advice else ""
                    raise Stuck(
                        f"TrainJob {ref} is {observation.phase} and cannot proceed: {observation.message}{advice}"
                    )
    finally:
        if attended:
            backend.leave(ref, ended=observation is not None and observation.phase.terminal)


async def _resumed(backend: Backend, ref: JobRef, trainjob: TrainJob) -> str:
    """Resume a job that was suspended because nobody waited for it. Returns a notice about it, or an empty text."""
    if not unattended.marked(trainjob):
        return ""
    patch = unattended.resuming(trainjob)
    try:
        await backend.patch(ref, patch)
    except (NotFound, Rejected) as error:
        return f"it was suspended because nobody waited for it, and cannot be resumed: {error}"
    return "it was suspended because nobody waited for it; it is resumed" if "spec" in patch else ""


def _first_expiry(observation: Observation, options: WaitOptions) -> tuple[datetime, str] | None:
    """When the first timeout of this phase expires, and which one."""
    if observation.admitted is None:
        # Counts for a suspended job, too: it waits until a person or a program resumes it.
        limits = [(observation.waiting_since, options.queue_timeout, "queue")]
    else:
        limits = [(observation.admitted, options.run_timeout, "run")]
        if not observation.has_run:
            limits.append((observation.admitted, options.start_timeout, "start"))
    expiries = [(since + limit, name) for since, limit, name in limits if since is not None and limit is not None]
    return min(expiries, default=None)


def _seconds_left(observation: Observation | None, options: WaitOptions) -> float | None:
    expiry = _first_expiry(observation, options) if observation is not None else None
    return (expiry[0] - datetime.now(UTC)).total_seconds() if expiry else None


def _timeout(ref: JobRef, observation: Observation, options: WaitOptions) -> Exception:
    expiry = _first_expiry(observation, options)
    name = expiry[1] if expiry else "run"
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
    on_evidence: Callable[[Evidence], None] | None = None,
    state_seconds: float = STATE_SECONDS,
) -> TrainJobResult:
    """Wait until a job ends, and return its result.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        options: When to stop waiting before the job has ended; never if left out.
        on_change: Called with each new observation and its notice.
        on_log: Called with each line of every rank as it is written.
        on_crash: Called with the diagnosis of each rank that crashes while the job keeps running.
        on_evidence: Called at the end of the job with the evidence of the result or of the diagnosis.
        state_seconds: Seconds between two states of a progress bar that `on_log` gets; 0 for each state, see `LogLine`.

    Raises:
        TrainJobFailed: the job failed; has the diagnosis.
        RankCrashed: a rank crashed, and `fail_on_first_crash` is set; has the diagnosis. The job keeps running.
        JobHung: no rank made progress for the job's `stall_timeout`; has the diagnosis. The job keeps running.
        TimedOut: a timeout expired, or `fail_fast` is set and the job is blocked; the job keeps running.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.

    The errors of a failed, hung or timed-out job have its goodput. A job that ended is recorded by `telemetry`; after
    another error the caller records ``error.spent`` if it ends the job, since another waiter may follow otherwise.
    """
    read = None if on_log is None else lambda: _forward(backend, ref, on_log, state_seconds)
    history = MetricHistory(_HISTORY_POINTS)

    def change(observation: Observation, notice: str) -> None:
        history.observe(observation, time.time())
        if on_change is not None:
            on_change(observation, notice)

    try:
        final, crash = await attend(backend, ref, options, on_change=change, on_crash=on_crash, read=read)
    except (RankCrashed, TimedOut) as error:
        error.spent = await spent_so_far(backend, ref, history, hangs=isinstance(error, JobHung))
        error.goodput = error.spent.summary()
        raise
    return await conclude(backend, ref, final, crash, history, on_evidence=on_evidence)


async def attend(
    backend: Backend,
    ref: JobRef,
    options: WaitOptions | None = None,
    *,
    on_change: Callable[[Observation, str], None] | None = None,
    on_crash: Callable[[Diagnosis], None] | None = None,
    read: Callable[[], Awaitable[None]] | None = None,
) -> tuple[Observation | None, Evidence | None]:
    """Watch a job and its ranks until the job ends. `wait` is this and `conclude`.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        options: When to stop waiting before the job has ended; never if left out.
        on_change: Called with each new observation and its notice.
        on_crash: Called with the diagnosis of each rank that crashes before the job has ended: the shipped runtimes
            restart it, and the job fails minutes later if at all.
        read: Reads the ranks' lines; cancelled shortly after the job's end, when they should have been read.

    Returns:
        The final observation and the evidence of the first crashes, both for `conclude`: when a job has failed, the
        pods that crashed may be gone.

    Raises:
        RankCrashed: a rank crashed, and `fail_on_first_crash` is set; the job keeps running.
        JobHung: no rank made progress for the job's `stall_timeout`; the job keeps running.
        TimedOut: a timeout expired, or `fail_fast` is set and the job is blocked; the job keeps running.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.
    """
    final: Observation | None = None
    crashed: list[Evidence] = []
    try:
        async with anyio.create_task_group() as tasks:
            read_to_end = anyio.Event()

            async def reading() -> None:
                try:
                    if read is not None:
                        await read()
                finally:
                    read_to_end.set()

            tasks.start_soon(reading)
            fatal = options is not None and options.fail_on_first_crash
            tasks.start_soon(_watch_crashes, backend, ref, crashed, on_crash, fatal)
            notify = on_change or (lambda *_: None)
            followed = follow(backend, ref, options)
            async with aclosing(until_hung(backend, ref, followed, notify, compares=True)) as changes:
                async for final, notice in changes:
                    notify(final, notice)
            with anyio.move_on_after(_LAST_LINES_SECONDS):
                await read_to_end.wait()
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:  # a task group wraps every exception
        raise group.exceptions[0] from None
    return final, crashed[0].with_earlier(*crashed[1:]) if crashed else None


async def until_hung(
    backend: Backend,
    ref: JobRef,
    changes: AsyncGenerator[tuple[Observation, T]],
    notify: Callable[[Observation, str], None],
    *,
    first: tuple[Observation, T] | None = None,
    compares: bool = False,
) -> AsyncGenerator[tuple[Observation, T]]:
    """Pass on observations of a job, and check its `stall_timeout` while it runs. A job without one costs nothing.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        changes: Each observation, with anything else.
        notify: Called with each notice about what measures progress, and the latest observation.
        first: What the caller has taken from `changes`; it is passed on, too.
        compares: Whether to compare the ranks, too, and to record stragglers on the job.

    Raises:
        JobHung: no rank made progress for the timeout; the job keeps running.
    """
    stalls: StallWatch | None = None
    checking: asyncio.Task[None] | None = None
    async with aclosing(changes):
        found = first
        try:
            while True:
                if found is None:
                    following = anext(changes, None)
                    found = await (following if checking is None else _before(checking, following))
                if found is None:
                    return
                observation = found[0]
                if observation.stall_timeout is not None:
                    stalls = stalls or StallWatch(backend, ref, notify, compares=compares)
                    stalls.observe(observation)
                    if observation.phase is not Phase.RUNNING:
                        await _end(checking)
                        checking = None
                    elif checking is None:
                        checking = asyncio.create_task(stalls.run())
                yield found
                found = None
        finally:
            await _end(checking)


async def _before(checking: asyncio.Task[None], following: Awaitable[T]) -> T:
    """The result of `following`, or the error of `checking` if that ends before."""
    step = asyncio.ensure_future(following)
    try:
        await asyncio.wait({step, checking}, return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            await checking
        return await step
    finally:
        await _end(step)


async def _end(task: asyncio.Future[Any] | None) -> None:
    """Cancel a task unless it is done, and wait until it is. Its error is not needed any more."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _forward(backend: Backend, ref: JobRef, on_log: Callable[[LogLine], None], state_seconds: float) -> None:
    throttle = Throttle(on_log, state_seconds) if state_seconds else None
    take = throttle.line if throttle is not None else on_log
    try:
        async with aclosing(backend.logs(ref, follow=True)) as lines:
            while True:
                try:
                    line = await anext(lines, None)
                except TrainJobError as error:  # log streaming is best effort: its failure must not fail the job
                    take(LogLine("", "trainjob", f"no more log lines from here on: {error}"))
                    return
                if line is None:
                    return
                take(line)
    finally:
        if throttle is not None:
            throttle.end()


async def _watch_crashes(
    backend: Backend, ref: JobRef, crashed: list[Evidence], on_crash: Callable[[Diagnosis], None] | None, fatal: bool
) -> None:
    """Keep the evidence of the first crashes and report each; raise at the first one if crashes are `fatal`.

    Keeps several: the first crash reported need not be the root cause.
    """
    try:
        async with aclosing(backend.crashes(ref)) as found:
            async for evidence in found:
                if len(crashed) < _CRASHES:
                    crashed.append(evidence)
                diagnosis = replace(diagnose(evidence, Observation(Phase.FAILED)), job=str(ref))
                if fatal and diagnosis.category not in (Category.PREEMPTED, Category.NODE_LOST):
                    raise RankCrashed(with_change(diagnosis, await backend.get(ref.namespace, ref.name)))
                if on_crash is not None:
                    on_crash(diagnosis)
    except RankCrashed:
        raise
    except TrainJobError as error:
        _log.warning("crashes of ranks of TrainJob %s cannot be reported while it runs: %s", ref, error)


async def conclude(
    backend: Backend,
    ref: JobRef,
    final: Observation | None = None,
    earlier: Evidence | None = None,
    history: MetricHistory | None = None,
    *,
    on_evidence: Callable[[Evidence], None] | None = None,
) -> TrainJobResult:
    """The result of a job that has ended.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        final: Final observation of a waiter. It counts even if the job was deleted since.
        earlier: Evidence of the first crashes, taken while the job was running: the pods may be gone.
        history: Metrics and phases that a waiter has collected: the result has the metrics that the training did not
            keep itself.
        on_evidence: Called with the evidence of the result or of the diagnosis.

    Raises:
        TrainJobFailed: the job failed or was deleted; has the diagnosis.
    """
    evidence = await backend.evidence(ref)
    observation = observe(evidence.trainjob, final)
    if observation.phase is not Phase.COMPLETE and earlier is not None:
        evidence = evidence.with_earlier(earlier)
    if on_evidence is not None:
        on_evidence(evidence)
    spent = measured(ref, evidence, history, observation)
    telemetry.record_goodput(ref, spent)
    if observation.phase is not Phase.COMPLETE:
        diagnosis = replace(diagnose(evidence, final), job=str(ref))
        if observation.phase is Phase.FAILED and ON_RETRY in mapping(evidence.trainjob, "metadata", "annotations"):
            await record_failure(backend, ref, diagnosis)
        raise TrainJobFailed(diagnosis, spent.summary())
    return result_of(ref, evidence, observation, history, spent)


def result_of(
    ref: JobRef,
    evidence: Evidence,
    observation: Observation,
    collected: MetricHistory | None = None,
    spent: Goodput | None = None,
) -> TrainJobResult:
    """The result of a job as far as it is known.

    Args:
        ref: The job.
        evidence: Evidence of the job.
        observation: Its state.
        collected: Completes what the training and its pods have kept.
        spent: How its time was spent; measured if left out.
    """
    if spent is None and observation.phase.terminal:
        spent = measured(ref, evidence, collected, observation)
    report = _report(evidence)
    history = {name: points for name, points in report.history.items() if not name.startswith(progress.RESERVED)}
    if collected:
        missing = {
            name: points
            for name, points in collected.points().items()
            if name not in report.history and len(points) > 1
        }
        room = progress.MAX_POINTS - sum(map(len, history.values()))
        for name, points in thinned(missing, room).items() if room >= 4 * len(missing) else ():
            steps = [number if step is None else int(step) for number, (step, _, _) in enumerate(points, 1)]
            history[name] = [(step, point[1], point[2]) for step, point in zip(steps, points, strict=True)]
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
        history={name: points for name, points in history.items() if not name.startswith(progress.RESERVED)},
        checkpoints=[(step, time) for step, time, _ in report.history.get(CHECKPOINT, ())],
        goodput=spent.summary() if spent is not None else {},
        stragglers=[each.as_dict() for each in stragglers_of(evidence.trainjob)],
    )


async def spent_so_far(
    backend: Backend, ref: JobRef, history: MetricHistory | None = None, *, hangs: bool = False
) -> Goodput:
    """How the time of a job was spent until now, with what a waiter has collected, and whether it found that it hangs.

    Never raises, and takes at most 5 s: nothing is known of a job that cannot be read in that time.
    """
    try:
        with anyio.move_on_after(_MEASURE_SECONDS):
            return measured(ref, await backend.state(ref), history, hangs=hangs)
    except Exception as error:  # noqa: BLE001 - of any backend: the reason why the wait has ended is more important
        _log.warning("the goodput of TrainJob %s cannot be measured: %s: %s", ref, type(error).__name__, error)
    return measure([], datetime.now(UTC))


def measured(
    ref: JobRef,
    evidence: Evidence,
    collected: MetricHistory | None,
    final: Observation | None = None,
    *,
    hangs: bool = False,
) -> Goodput:
    """How the time of an attempt was spent; of a deleted job, by the phases that its waiter has observed."""
    collected = collected if collected is not None else MetricHistory()
    if evidence.trainjob is not None or final is None or final.created is None or not collected.phases:
        return measure([Attempt(evidence, collected.phases, collected.points(), hangs)], datetime.now(UTC))
    metadata = {
        "namespace": ref.namespace,
        "name": ref.name,
        "labels": {ATTEMPT: str(ref.attempt)},
        "creationTimestamp": final.created.isoformat(),
    }
    end = datetime.now(UTC) if final.finished is None else final.finished
    seen = Evidence({"metadata": metadata}, evidence.pods, reported=evidence.reported)
    return replace(measure([Attempt(seen, collected.phases, collected.points())], end), phase=final.phase)


def _report(evidence: Evidence) -> progress.Report:
    """The report in the latest termination message of rank 0; with MPI, of the launcher."""
    latest = sorted(evidence.pods, key=lambda pod: str(mapping(pod, "metadata").get("creationTimestamp")), reverse=True)
    for rank in ("launcher-0", "node-0"):
        for pod in latest:
            for status in mappings(pod, "status", "containerStatuses") if rank_of(pod) == rank else ():
                message = mapping(status, "state", "terminated").get("message")
                if report := progress.read(str(message)):
                    return report
    return progress.read(evidence.reported) or progress.Report()
