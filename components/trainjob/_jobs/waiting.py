"""Wait for a job to finish, and return its result or raise its diagnosis. Works with any `Backend`.

A waiter keeps no state: after a restart it reads everything from the job and continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from importlib import import_module

import anyio

from trainjob._backends.base import Backend
from trainjob._diagnosis import diagnosis_of, with_change
from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.history import MetricHistory
from trainjob._jobs.following import follow
from trainjob._jobs.results import TrainJobResult, conclude, spent_so_far
from trainjob._jobs.successors import JobReplaced
from trainjob._support.log_lines import STATE_SECONDS, LogLine, Throttle
from trainjob._support.threads import JUDGING
from trainjob.errors import Category, Diagnosis, JobHung, RankCrashed, TimedOut, TrainJobError, TrainJobFailed
from trainjob.job import JobRef
from trainjob.progress.message import MAX_POINTS
from trainjob.status import Observation, Phase
from trainjob.wait_options import WaitOptions

_log = logging.getLogger(__name__)

_CRASHES = 32  # crashes whose evidence is kept
# Of a job whose training keeps no history itself, for its result. A process that waits for 1,000 jobs has 58 MB, and
# this is at most 7 KB for each job.
_HISTORY_POINTS = MAX_POINTS // 2
_LAST_LINES_SECONDS = 10.0  # for reading the ranks' last lines after the job has ended


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
    seconds: float | None = None,
    tail: int | None = None,
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
        on_evidence: Called at the end of the wait with the evidence of the job, if it can be read.
        on_follow: Called with the attempt that is waited for from now on, if that changes.
        state_seconds: Seconds between two states of a progress bar that `on_log` gets; 0 for each state, see `LogLine`.
        seconds: Limit of the wait itself, Airflow's ``execution_timeout``; no limit if left out.
        tail: Lines of each rank from before the wait that `on_log` gets; all of them if left out.

    Raises:
        TrainJobFailed: the job failed; has the diagnosis.
        RankCrashed: a rank crashed, and `fail_on_first_crash` is set; has the diagnosis. The job keeps running.
        JobHung: no rank made progress for the job's `stall_timeout`; has the diagnosis. The job keeps running.
        TimedOut: a timeout or `seconds` expired, or `fail_fast` is set and the job is blocked; the job keeps running.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.

    The errors of a failed, hung or timed-out job have its goodput. A job that ended is recorded by `telemetry`; after
    another error the caller records ``error.spent`` if it ends the job, since another waiter may follow otherwise.
    """
    read = None if on_log is None else lambda job: _forward(backend, job, on_log, state_seconds, tail)
    history = MetricHistory(_HISTORY_POINTS)

    def change(observation: Observation, notice: str) -> None:
        history.observe(observation, backend.now().timestamp())
        if on_change is not None:
            on_change(observation, notice)

    def follows(job: JobRef) -> None:
        nonlocal ref, history
        ref, history = job, MetricHistory(_HISTORY_POINTS)
        if on_follow is not None:
            on_follow(job)

    try:
        async with within(seconds, lambda: f"TrainJob {ref}"):
            _, final, crash = await attend(
                backend, ref, options, on_change=change, on_crash=on_crash, on_follow=follows, read=read
            )
    except (TrainJobFailed, TimedOut) as error:
        hangs = isinstance(error, JobHung)
        error.spent = await spent_so_far(backend, ref, history, hangs=hangs, on_evidence=on_evidence)
        error.goodput = error.spent.summary()
        raise
    return await conclude(backend, ref, final, crash, history, on_evidence=on_evidence)


@asynccontextmanager
async def within(seconds: float | None, what: Callable[[], str]) -> AsyncIterator[None]:
    """Limit the wait of a step.

    Args:
        seconds: The limit, Airflow's ``execution_timeout``; no limit if None.
        what: Names what the step waits for.

    Raises:
        TimedOut: the limit expired.
    """
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise TimedOut(f"{what()} did not end within execution_timeout") from None


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
            async with aclosing(follow(backend, ref, options, notify=notify, compares=True)) as changes:
                async for final, notice in changes:
                    notify(final, notice)
            with anyio.move_on_after(_LAST_LINES_SECONDS):
                await read_to_end.wait()
            tasks.cancel_scope.cancel()
    except ExceptionGroup as group:  # a task group wraps every exception
        raise group.exceptions[0] from None
    return final, crashed[0].with_earlier(*crashed[1:]) if crashed else None


async def _forward(
    backend: Backend, ref: JobRef, on_log: Callable[[LogLine], None], state_seconds: float, tail: int | None
) -> None:
    throttle = Throttle(on_log, state_seconds) if state_seconds else None
    take = throttle.line if throttle is not None else on_log
    try:
        async with aclosing(backend.logs(ref, follow=True, tail=tail)) as lines:
            while True:
                try:
                    line = await anext(lines, None)
                except TrainJobError as error:  # log streaming is best effort: its failure must not fail the job
                    take(LogLine("", "trainjob", f"no more log lines from here on: {error}"))
                    return
                if line is None:
                    return
                take(line)
                await asyncio.sleep(0)  # many lines at once must not delay other waits of the same event loop
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
                found_cause = await JUDGING.call(diagnosis_of, evidence, Observation(Phase.FAILED))
                diagnosis = replace(found_cause, job=str(ref))
                is_crash = diagnosis.pod and diagnosis.category not in (Category.PREEMPTED, Category.NODE_LOST)
                if fatal and is_crash:
                    raise RankCrashed(with_change(diagnosis, await backend.get(ref.namespace, ref.name)))
                if on_crash is not None:
                    on_crash(diagnosis)
    except RankCrashed:
        raise
    except TrainJobError as error:
        _log.warning("crashes of ranks of TrainJob %s cannot be reported while it runs: %s", ref, error)


def preload() -> None:
    """Import the modules that a wait uses. The first wait would import them, and block its event loop for 0.5 s."""
    import_module("trainjob._diagnosis.serialization")
    import_module("trainjob._jobs.progress_log")
    with suppress(ImportError):  # of the extra `kubernetes`, which the local backend does not need
        import_module("trainjob._backends.kubernetes.backend")
