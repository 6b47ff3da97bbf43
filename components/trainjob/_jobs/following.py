"""Watch a job until it ends: its observations, and the timeouts of a wait. Works with any `Backend`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial

from trainjob._backends.base import Backend, Snapshot, TrainJob
from trainjob._diagnosis import with_change
from trainjob._jobs.records import record_failure
from trainjob._jobs.stalls import StallWatch
from trainjob._jobs.successors import check_given_up, check_verdict, last_observation, resume_if_stale
from trainjob._manifest import retry_notice, unattended
from trainjob._manifest.attempts import NOT_STARTED
from trainjob._support.display import short
from trainjob._support.kube_objects import mapping, parse_time
from trainjob.errors import (
    BackendUnavailable,
    Category,
    Diagnosis,
    QueueTimeout,
    RunTimeout,
    StartTimeout,
    Stuck,
    TimedOut,
)
from trainjob.job import JobRef
from trainjob.status import Observation, Phase, observe
from trainjob.wait_options import WaitOptions

_DELETION_SECONDS = 90.0  # Kubernetes' default grace period and 60 s: then a node does not answer


async def follow(
    backend: Backend,
    ref: JobRef,
    options: WaitOptions | None = None,
    *,
    notify: Callable[[Observation, str], None] | None = None,
    compares: bool = False,
) -> AsyncGenerator[tuple[Observation, str]]:
    """Watch a job until it ends. Yields each new observation with a notice for people, which may be empty.

    The last observation is final. An outage yields notices only, until the backend gives up.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        options: When to stop waiting before the job has ended; never if left out.
        notify: Called with the latest observation and each notice about the progress of a job with a `stall_timeout`.
        compares: Whether to compare the ranks of such a job, too, and to record stragglers on it.

    Raises:
        JobHung: no rank made progress for the job's `stall_timeout`; the job keeps running.
        QueueTimeout, StartTimeout, RunTimeout: the timeout expired; the job keeps running.
        Stuck: the job is blocked by something that cannot resolve itself, and `fail_fast` is set.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.
        TrainJobFailed: another waiter has given up the job; has the diagnosis that it recorded.
        JobReplaced: the job is gone or was given up, and another attempt of its key counts.
    """
    options = options or WaitOptions()
    observation: Observation | None = None
    trainjob: TrainJob | None = None
    checks = partial(StallWatch, backend, ref, notify or (lambda *_: None), compares=compares)
    while True:
        async with aclosing(_changes(backend, ref, options, observation, checks)) as changes:
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
    backend: Backend,
    ref: JobRef,
    options: WaitOptions,
    observation: Observation | None,
    checks: Callable[[], StallWatch],
) -> AsyncGenerator[tuple[Observation, str, TrainJob | None]]:
    """Watch a job as `follow` does, starting from its latest `observation`. Yields the object, too."""
    attended, resumed = False, ""
    trainjob: TrainJob | None = None
    stalls: StallWatch | None = None  # a job without a `stall_timeout` costs nothing
    try:
        async with aclosing(backend.watch(ref)) as snapshots:
            while True:
                snapshot = await _next(backend, ref, snapshots, observation, options, trainjob, stalls)
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
                        notice = "; ".join(filter(None, (notice, retry_notice.notice(trainjob))))
                latest = observe(snapshot.trainjob, observation, snapshot.blocker)
                await check_verdict(backend, ref, latest)
                changed = latest != observation
                observation = latest
                stalls = _observed(stalls, observation, checks)
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
        if stalls is not None:
            await stalls.aclose()
        if attended:
            backend.leave(ref, ended=observation is not None and observation.phase.terminal)


def _observed(
    stalls: StallWatch | None, observation: Observation, checks: Callable[[], StallWatch]
) -> StallWatch | None:
    """The checks of a job with a `stall_timeout`, which have got the observation."""
    if stalls is None and observation.stall_timeout is not None:
        stalls = checks()
    if stalls is not None:
        stalls.observe(observation)
        stalls.schedule()
    return stalls


async def _next(
    backend: Backend,
    ref: JobRef,
    snapshots: AsyncGenerator[Snapshot],
    observation: Observation | None,
    options: WaitOptions,
    trainjob: TrainJob | None,
    stalls: StallWatch | None,
) -> Snapshot:
    """The next snapshot. A job whose deletion does not end counts as gone.

    Raises:
        JobHung: `stalls` has found that the job hangs.
        QueueTimeout, StartTimeout, RunTimeout: the timeout of the latest observation expired.
        BackendUnavailable: the watch ended.
    """
    expiry = None if observation is None else _first_expiry(observation, options, trainjob)
    try:
        # The timeout covers one snapshot. A cancel scope of anyio would cost each waiter 2 KB.
        async with asyncio.timeout(_seconds_until(expiry, backend.now())) as clock:
            with stalls.within(clock) if stalls is not None else nullcontext():
                snapshot = await anext(snapshots, None)
    except TimeoutError:
        if stalls is not None:
            stalls.raise_failure()
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


def _seconds_until(expiry: tuple[datetime, str] | None, now: datetime) -> float | None:
    return (expiry[0] - now).total_seconds() if expiry else None


def _timeout(ref: JobRef, observation: Observation, options: WaitOptions, name: str) -> Exception:
    state = f"TrainJob {ref} is {observation.phase}" + (f": {observation.message}" if observation.message else "")
    limit = f"{name}_timeout of {short(getattr(options, f'{name}_timeout'))}"
    if name == "queue":
        happened = "resumed" if observation.phase is Phase.SUSPENDED else "admitted"
        return QueueTimeout(f"{state}; it was not {happened} within {limit}")
    if name == "start":
        return StartTimeout(f"{state}; no rank was running within {limit}")
    return RunTimeout(f"{state}; it did not end within {limit}")
