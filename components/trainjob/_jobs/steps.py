"""A TrainJob as a step of a workflow: waits for the job, and ends it if the step fails before.

Airflow's workers and triggerers, KFP's steps and ``trainjob run`` await `finish`; `stop` is for a step that a person
has ended. The errors of a step as JSON reach another process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from trainjob._backends.base import Backend
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.serialization import pack_diagnosis, unpack_diagnosis
from trainjob._goodput.history import MetricHistory
from trainjob._jobs import telemetry
from trainjob._jobs.cancellation import CrashAction, cancel, cancel_key, give_up
from trainjob._jobs.results import TrainJobResult, spent_so_far
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import CancelAction, is_replaced, work_of
from trainjob._support.kube_objects import mapping
from trainjob._support.log_lines import STATE_SECONDS, LogLine
from trainjob.errors import (
    BackendUnavailable,
    Diagnosis,
    JobHung,
    QueueTimeout,
    RankCrashed,
    RetryVerdict,
    RunTimeout,
    StartTimeout,
    Stuck,
    StudyFailed,
    TimedOut,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.goodput import Goodput
from trainjob.job import JobRef
from trainjob.status import Observation, Phase
from trainjob.wait_options import WaitOptions

_KINDS: Mapping[str, type[TrainJobError]] = {
    kind.__name__: kind
    for kind in (
        *(TrainJobFailed, RankCrashed, JobHung, TimedOut, QueueTimeout, StartTimeout, RunTimeout, Stuck),
        *(StudyFailed, BackendUnavailable),
    )
}


_GONE = (Phase.CANCELLED, Phase.DELETED)


@dataclass(frozen=True)
class StepPolicy:
    """What becomes of the job of a step that fails before the job has ended; `KEEP` keeps it.

    Attributes:
        on_crash: After the crash of a rank with `fail_on_first_crash`, and after a hang.
        cancel_on_timeout: Whether a timeout, or a blocker with `fail_fast`, cancels the job.
        tried: The step's try, for a cancel: the job of a later try does not obey. None: it does.
        is_retried: Whether another try follows a timeout. A job without capacity that `on_retry` changes is left to it.
    """

    on_crash: CrashAction = "suspend"
    cancel_on_timeout: bool = True
    tried: int | None = None
    is_retried: bool = False

    def ends(self, error: TrainJobError) -> bool:
        """Whether the job has ended with a step that failed by `error`."""
        if isinstance(error, RankCrashed):
            return self.on_crash != "keep"
        return isinstance(error, TrainJobFailed) or (isinstance(error, TimedOut) and self.cancel_on_timeout)


KEEP = StepPolicy("keep", cancel_on_timeout=False)
"""A step that only waits."""


async def finish(
    backend: Backend,
    ref: JobRef,
    options: WaitOptions,
    policy: StepPolicy,
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
    """Wait until a job ends, as `wait` does. If the step fails before, the job is ended as `policy` says.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        options: When the step fails before the job has ended.
        policy: What becomes of the job then.
        on_change: As for `wait`.
        on_log: As for `wait`.
        on_crash: As for `wait`.
        on_evidence: As for `wait`: before the job is ended.
        on_follow: As for `wait`.
        state_seconds: As for `wait`.
        seconds: As for `wait`.
        tail: As for `wait`.

    Raises:
        TrainJobFailed: the job failed.
        RankCrashed, JobHung, TimedOut: as `wait`; a note of the error says what became of the job.
        BackendUnavailable: an outage outlasted the retry budget; the job keeps running.
    """

    def follow(job: JobRef) -> None:
        nonlocal ref
        ref = job
        if on_follow is not None:
            on_follow(job)

    try:
        return await wait(
            backend,
            ref,
            options,
            on_change=on_change,
            on_log=on_log,
            on_crash=on_crash,
            on_evidence=on_evidence,
            on_follow=follow,
            state_seconds=state_seconds,
            seconds=seconds,
            tail=tail,
        )
    except TrainJobFailed as error:
        if not isinstance(error, RankCrashed):
            if error.diagnosis.phase in _GONE and await _was_ended(backend, ref, policy):
                raise TimedOut(f"TrainJob {ref} was cancelled by this try of its step, after a timeout") from None
            raise
        error.add_note(await give_up(backend, ref, error.diagnosis, policy.on_crash))
        if policy.ends(error):
            telemetry.record_goodput(ref, error.spent)
        raise
    except TimedOut as error:
        error.add_note(await _end_after(backend, ref, error, policy))
        raise


async def _was_ended(backend: Backend, ref: JobRef, policy: StepPolicy) -> bool:
    """Whether this try has cancelled the job: a triggerer that ended meanwhile has lost the reason."""
    if policy.tried is None or not (work := work_of(ref.name)):
        return False
    with suppress(TrainJobError):
        _, cancels = await backend.cancels(ref.namespace, work)
        return any(each.uid == ref.uid and each.tried == policy.tried for each in cancels)
    return False


async def _end_after(backend: Backend, ref: JobRef, error: TimedOut, policy: StepPolicy) -> str:
    """End a job whose step has failed by a timeout, as `policy` says; returns what was done, as text.

    Never raises because of the job or an outage: the step fails anyway, and the timeout is the reason.
    """
    if policy.is_retried and error.retry is not RetryVerdict.CONFIGURATION and await _is_replaced(backend, ref):
        telemetry.record_goodput(ref, error.spent)
        return "the next try replaces it by a job with the changes of on_retry"
    if not policy.cancel_on_timeout:
        return "it keeps running"
    try:
        ended = await cancel(backend, ref, tried=policy.tried)
    except TrainJobError as failure:
        return f"it could not be cancelled and keeps running: {failure}"
    telemetry.record_goodput(ref, error.spent)
    return "it was cancelled" if ended else "it was cancelled and is still terminating"


async def _is_replaced(backend: Backend, ref: JobRef) -> bool:
    """Whether the next launch replaces the job, which got no capacity, by one with the changes of `on_retry`."""
    with suppress(TrainJobError):
        trainjob = await backend.get(ref.namespace, ref.name)
        return trainjob is not None and trainjob["metadata"]["uid"] == ref.uid and is_replaced(trainjob)
    return False


@dataclass(frozen=True)
class Stopped:
    """What `stop` did.

    Attributes:
        ended: Whether nothing of the attempts runs any longer; False if they are still terminating.
        spent: How the time of the job was spent; None if it could not be measured meanwhile.
    """

    ended: bool
    spent: Goodput | None = None


async def stop(
    backend: Backend,
    key: str,
    action: CancelAction,
    seconds: float,
    *,
    namespace: str,
    tried: int,
    ref: JobRef | None = None,
    history: MetricHistory | None = None,
    look: float = 0.0,
) -> Stopped:
    """Stop all attempts of a key, also one whose launch is on its way, unless a later try has launched or adopted it.

    Args:
        backend: Backend that runs the jobs.
        key: The key.
        action: ``cancel`` or ``suspend``.
        seconds: How long to wait for the last pod.
        namespace: Namespace of the jobs.
        tried: Number of the try that is ended.
        ref: The attempt that counts, if it is known; how its time was spent is recorded.
        history: Metrics and phases of that attempt that a waiter has collected.
        look: How long to look for an active attempt before that, in seconds.
    """
    deadline = monotonic() + look + seconds
    # Beside the cancel, which must not wait.
    measuring = None if ref is None else asyncio.create_task(spent_so_far(backend, ref, history))
    try:
        stopped = await cancel_key(
            backend, key, namespace=namespace, action=action, timeout_seconds=seconds, tried=tried, look_seconds=look
        )
        ended = stopped.ended
        if ref is not None and ref.uid not in {each.uid for each in stopped.jobs}:
            # Its deletion was requested before, or its key is that of an earlier name of a deployment of Airflow.
            left = max(0.0, deadline - monotonic())
            ended = await cancel(backend, ref, action, timeout_seconds=left, tried=tried) and ended
        spent = measuring.result() if measuring is not None and measuring.done() else None
    finally:
        if measuring is not None:
            measuring.cancel()
    if ref is not None:
        telemetry.record_goodput(ref, spent)
    return Stopped(ended, spent)


def pack_error(error: Exception) -> dict[str, Any]:
    """The error of a step as JSON values, at most 20 KB.

    An error that is not of `trainjob`, a fault of the process that waits, has its class in the message.
    """
    name = type(error).__name__
    if not isinstance(error, TrainJobError):
        error = TrainJobError(f"{name}: {error}")
    notes = [*getattr(error, "__notes__", ())]
    packed: dict[str, Any] = {"type": name, "message": str(error), "retry": str(error.retry), "notes": notes}
    if isinstance(error, TrainJobFailed):
        packed["diagnosis"] = pack_diagnosis(error.diagnosis)
    if isinstance(error, TrainJobFailed | TimedOut):
        packed["goodput"] = error.goodput
    return packed


def unpack_error(packed: object) -> TrainJobError:
    """The inverse of `pack_error`; an error of another class becomes a `TrainJobError` with the same verdict.

    Tolerates values of another version.
    """
    values = mapping(packed)
    kind = _KINDS.get(str(values.get("type")), TrainJobError)
    error: TrainJobError
    if issubclass(kind, TrainJobFailed):
        error = kind(unpack_diagnosis(values.get("diagnosis")), mapping(values, "goodput"))
    else:
        error = kind(str(values.get("message") or "the reason is unknown"))
        with suppress(ValueError):
            error.retry = RetryVerdict(str(values.get("retry")))
        if isinstance(error, TimedOut):
            error.goodput = mapping(values, "goodput")
    for note in values.get("notes") or ():
        error.add_note(str(note))
    return error
