"""Wait for a job to finish, and return its result or raise its diagnosis. Works with any `Backend`.

A waiter keeps no state: after a restart it reads everything from the job and continues.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import anyio

from trainjob import progress
from trainjob._backends.base import Backend, Snapshot, TrainJob
from trainjob._diagnosis import Category, Diagnosis, Evidence, diagnose, with_change
from trainjob._goodput.history import MetricHistory
from trainjob._jobs.records import record_failure
from trainjob._jobs.results import TrainJobResult, conclude, spent_so_far
from trainjob._jobs.stalls import StallWatch
from trainjob._jobs.successors import JobReplaced, check_given_up, check_verdict, last_observation, resume_if_stale
from trainjob._manifest import retry_changes, unattended
from trainjob._manifest.attempts import NOT_STARTED
from trainjob._manifest.render import JobRef
from trainjob._support.kube_objects import mapping, parse_time
from trainjob._support.log_lines import STATE_SECONDS, LogLine, Throttle
from trainjob.errors import (
    BackendUnavailable,
    JobHung,
    QueueTimeout,
    RankCrashed,
    RunTimeout,
    StartTimeout,
    Stuck,
    TimedOut,
    TrainJobError,
)
from trainjob.status import Observation, Phase, observe
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)
T = TypeVar("T")

_CRASHES = 32  # crashes whose evidence is kept
# Of a job whose training keeps no history itself, for its result. A process that waits for 1,000 jobs has 58 MB, and
# this is at most 7 KB for each job.
_HISTORY_POINTS = progress.MAX_POINTS // 2
_LAST_LINES_SECONDS = 10.0  # for reading the ranks' last lines after the job has ended
_DELETION_SECONDS = 90.0  # Kubernetes' default grace period and 60 s: then a node does not answer


async def follow(
    backend: Backend, ref: JobRef, options: WaitOptions | None = None
) -> AsyncGenerator[tuple[Observation, str]]:
    """Watch a job until it ends. Yields each new observation with a notice for people, which may be empty.

    The last observation is final. An outage yields notices only, until the backend gives up.

    Raises:
        QueueTimeout, StartTimeout, RunTimeout: the timeout expired; the job keeps running.
        Stuck: the job is blocked by something that cannot resolve itself, and `fail_fast` is set.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.
        TrainJobFailed: another waiter has given up the job; has the diagnosis that it recorded.
        JobReplaced: the job is gone or was given up, and another attempt of its key counts.
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
    trainjob: TrainJob | None = None
    try:
        async with aclosing(backend.watch(ref)) as snapshots:
            while True:
                snapshot = await _next(ref, snapshots, observation, options, trainjob)
                notice = snapshot.notice
                if snapshot.trainjob is None:
                    observation = await last_observation(backend, ref, observation, trainjob)
                else:
                    trainjob = snapshot.trainjob
                    await check_given_up(backend, ref, trainjob)
                    if not attended and unattended.policy_of(trainjob) is not None:
                        attended = True
                        backend.attend(ref)
                    before, resumed = resumed, await resume_if_stale(backend, ref, trainjob)
                    notice = resumed if resumed and resumed != before else notice
                    if observation is None:
                        notice = "; ".join(filter(None, (notice, retry_changes.notice(trainjob))))
                latest = observe(snapshot.trainjob, observation, snapshot.blocker)
                await check_verdict(backend, ref, latest)
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


async def _next(
    ref: JobRef,
    snapshots: AsyncGenerator[Snapshot],
    observation: Observation | None,
    options: WaitOptions,
    trainjob: TrainJob | None,
) -> Snapshot:
    """The next snapshot. A job whose deletion does not end counts as gone.

    Raises:
        QueueTimeout, StartTimeout, RunTimeout: the timeout of the latest observation expired.
        BackendUnavailable: the watch ended.
    """
    expiry = None if observation is None else _first_expiry(observation, options, trainjob)
    try:
        # The timeout covers one snapshot. A cancel scope of anyio would cost each waiter 2 KB.
        async with asyncio.timeout(_seconds_until(expiry)) as clock:
            snapshot = await anext(snapshots, None)
    except TimeoutError:
        if observation is None or expiry is None or not clock.expired():
            raise
        if expiry[1] != "deletion":
            raise _timeout(ref, observation, options, expiry[1]) from None
        return Snapshot(None, f"TrainJob {ref} is still being deleted: a node may not answer, and may still write")
    if snapshot is None:
        raise BackendUnavailable(f"TrainJob {ref}: the backend ended the watch before the job ended")
    return snapshot


def _first_expiry(
    observation: Observation, options: WaitOptions, trainjob: TrainJob | None
) -> tuple[datetime, str] | None:
    """When the first timeout of this phase expires, and which one; ``deletion`` is that of a job being deleted."""
    if observation.admitted is None:
        # Counts for a suspended job, too: it waits until a person or a program resumes it.
        limits = [(observation.waiting_since, options.queue_timeout, "queue")]
    else:
        limits = [(observation.admitted, options.run_timeout, "run")]
        if not observation.has_run:
            limits.append((observation.admitted, options.start_timeout, "start"))
    deleted = parse_time(mapping(trainjob, "metadata").get("deletionTimestamp"))
    if deleted is not None:
        limits.append((deleted, timedelta(seconds=_DELETION_SECONDS), "deletion"))
    expiries = [(since + limit, name) for since, limit, name in limits if since is not None and limit is not None]
    return min(expiries, default=None)


def _seconds_until(expiry: tuple[datetime, str] | None) -> float | None:
    return (expiry[0] - datetime.now(UTC)).total_seconds() if expiry else None


def _timeout(ref: JobRef, observation: Observation, options: WaitOptions, name: str) -> Exception:
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
    on_follow: Callable[[JobRef], None] | None = None,
    state_seconds: float = STATE_SECONDS,
) -> TrainJobResult:
    """Wait until a job ends, and return its result.

    If the job is gone or was given up, and another attempt of its key counts, that one is waited for.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        options: When to stop waiting before the job has ended; never if left out.
        on_change: Called with each new observation and its notice.
        on_log: Called with each line of every rank as it is written.
        on_crash: Called with the diagnosis of each rank that crashes while the job keeps running.
        on_evidence: Called at the end of the job with the evidence of the result or of the diagnosis.
        on_follow: Called with the attempt that is waited for from now on, if that changes.
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
    read = None if on_log is None else lambda job: _forward(backend, job, on_log, state_seconds)
    history = MetricHistory(_HISTORY_POINTS)

    def change(observation: Observation, notice: str) -> None:
        history.observe(observation, time.time())
        if on_change is not None:
            on_change(observation, notice)

    def follows(job: JobRef) -> None:
        nonlocal ref, history
        ref, history = job, MetricHistory(_HISTORY_POINTS)
        if on_follow is not None:
            on_follow(job)

    try:
        _, final, crash = await attend(
            backend, ref, options, on_change=change, on_crash=on_crash, on_follow=follows, read=read
        )
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
    on_follow: Callable[[JobRef], None] | None = None,
    read: Callable[[JobRef], Awaitable[None]] | None = None,
) -> tuple[JobRef, Observation | None, Evidence | None]:
    """Watch a job and its ranks until the job ends. `wait` is this and `conclude`.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        options: When to stop waiting before the job has ended; never if left out.
        on_change: Called with each new observation and its notice.
        on_crash: Called with the diagnosis of each rank that crashes before the job has ended: the shipped runtimes
            restart it, and the job fails minutes later if at all.
        on_follow: Called with the attempt that is watched from now on, if that changes.
        read: Reads the ranks' lines of a job; cancelled shortly after its end, when they should have been read.

    Returns:
        The attempt that was watched last, its final observation, and the evidence of its first crashes: when a job has
        failed, the pods that crashed may be gone.

    Raises:
        RankCrashed: a rank crashed, and `fail_on_first_crash` is set; the job keeps running.
        JobHung: no rank made progress for the job's `stall_timeout`; the job keeps running.
        TimedOut: a timeout expired, or `fail_fast` is set and the job is blocked; the job keeps running.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.
    """
    while True:
        try:
            final, crash = await _attend(backend, ref, options, on_change=on_change, on_crash=on_crash, read=read)
        except JobReplaced as replaced:
            ref = replaced.by
            if on_follow is not None:
                on_follow(ref)
        else:
            return ref, final, crash


async def _attend(
    backend: Backend,
    ref: JobRef,
    options: WaitOptions | None,
    *,
    on_change: Callable[[Observation, str], None] | None,
    on_crash: Callable[[Diagnosis], None] | None,
    read: Callable[[JobRef], Awaitable[None]] | None,
) -> tuple[Observation | None, Evidence | None]:
    """`attend` of one attempt."""
    final: Observation | None = None
    crashed: list[Evidence] = []
    try:
        async with anyio.create_task_group() as tasks:
            read_to_end = anyio.Event()

            async def reading() -> None:
                try:
                    if read is not None:
                        await read(ref)
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
