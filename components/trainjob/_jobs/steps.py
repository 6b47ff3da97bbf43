"""A TrainJob as a step of a workflow: waits for the job, and ends it if the step fails before.

A KFP step and ``trainjob run`` await `finish`. What a person's kill does is `cancellation`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainjob._backends.base import Backend
from trainjob._jobs import telemetry
from trainjob._jobs.cancellation import CrashAction, cancel, give_up
from trainjob._jobs.results import TrainJobResult
from trainjob._jobs.waiting import wait
from trainjob._support.log_lines import STATE_SECONDS, LogLine
from trainjob.errors import Diagnosis, RankCrashed, TimedOut, TrainJobError
from trainjob.job import JobRef
from trainjob.status import Observation
from trainjob.wait_options import WaitOptions


@dataclass(frozen=True)
class StepPolicy:
    """What becomes of the job of a step that fails before the job has ended; `KEEP` keeps it.

    Attributes:
        on_crash: After the crash of a rank with `fail_on_first_crash`, and after a hang.
        cancel_on_timeout: Whether a timeout, or a blocker with `fail_fast`, cancels the job.
    """

    on_crash: CrashAction = "suspend"
    cancel_on_timeout: bool = True


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
    on_follow: Callable[[JobRef], None] | None = None,
    state_seconds: float = STATE_SECONDS,
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
        on_follow: As for `wait`.
        state_seconds: As for `wait`.

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
            on_follow=follow,
            state_seconds=state_seconds,
        )
    except RankCrashed as error:
        error.add_note(await give_up(backend, ref, error.diagnosis, policy.on_crash))
        if policy.on_crash != "keep":
            telemetry.record_goodput(ref, error.spent)
        raise
    except TimedOut as error:
        error.add_note(await _end_after(backend, ref, error, policy))
        raise


async def _end_after(backend: Backend, ref: JobRef, error: TimedOut, policy: StepPolicy) -> str:
    """End a job whose step has failed by a timeout, as `policy` says; returns what was done, as text.

    Never raises because of the job or an outage: the step fails anyway, and the timeout is the reason.
    """
    if not policy.cancel_on_timeout:
        return "it keeps running"
    try:
        ended = await cancel(backend, ref)
    except TrainJobError as failure:
        return f"it could not be cancelled and keeps running: {failure}"
    telemetry.record_goodput(ref, error.spent)
    return "it was cancelled" if ended else "it was cancelled and is still terminating"
