"""The wait of a task for its job: the same in a worker and in the triggerer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainjob_airflow.tasklog import progress_logger

if TYPE_CHECKING:
    from trainjob import Backend, Diagnosis, Evidence, JobRef, Observation, TrainJobError, WaitOptions
    from trainjob._jobs.steps import StepPolicy
    from trainjob_airflow.tasklog import Log
    from trainjob_airflow.training import Training

_READ_SECONDS = 5.0  # for the earlier attempts of the key, at the end


class Step:
    """Waits for the end of one job, ends it if the task fails before, and tells how it ended.

    Args:
        ref: The job.
        key: Its key.
        options: When the task fails before the job has ended.
        policy: What becomes of the job then.
        log: The log of the task, which gets the progress of the job.
        get_logs: Whether to copy log lines of the ranks to it.
        tail: Lines of each rank from before this wait that are copied; all of them if left out.
        training: What the task stores about the job; None if it stores nothing.

    Attributes:
        ref: The attempt that counts: another one if the job is gone or was given up.
        on_change: Called, in the event loop, when the job or the attempt that counts has changed.
        earlier: Reads what earlier tries have stored.
    """

    def __init__(
        self,
        ref: JobRef,
        key: str,
        options: WaitOptions,
        policy: StepPolicy,
        log: Log,
        *,
        get_logs: bool,
        training: Training | None,
        tail: int | None = None,
    ) -> None:
        self.ref = ref
        self.key = key
        self.training = training
        self.on_change: Callable[[], None] = lambda: None
        self.earlier: Callable[[], Awaitable[Mapping[str, Any]]] = _nothing
        self._options, self._policy = options, policy
        self._log, self._get_logs, self._tail = log, get_logs, tail
        self._evidence: Evidence | None = None

    async def outcome(self, backend: Backend, seconds: float | None) -> dict[str, Any]:
        """Wait for at most `seconds`.

        Returns:
            JSON values: ``result``, as `TrainJobResult.as_dict` returns it, or ``error``, as `pack_error` does; and
            ``page``, the last document of the task about its job, None if it stores none.
        """
        from trainjob import TrainJobError, TrainJobFailed
        from trainjob._jobs.steps import finish, pack_error

        progress = progress_logger(self._log)
        failure: TrainJobError | None = None

        def change(observation: Observation, notice: str) -> None:
            progress.change(observation, notice)
            if self.training is not None:
                self.training.observe(observation, backend.now())
                self.on_change()

        try:
            result = await finish(
                backend,
                self.ref,
                self._options,
                self._policy,
                on_change=change,
                on_log=progress.line if self._get_logs else None,
                on_crash=progress.crash,
                on_evidence=self._keep,
                on_follow=self._follow,
                seconds=seconds,
                tail=self._tail,
            )
        except TrainJobError as error:
            failure = error
        finally:
            progress.end()
        ended = {"result": result.as_dict()} if failure is None else {"error": pack_error(failure)}
        diagnosis = failure.diagnosis if isinstance(failure, TrainJobFailed) else None
        return ended | {"page": await self._page(backend, diagnosis)}

    def _keep(self, evidence: Evidence) -> None:
        self._evidence = evidence

    def _follow(self, ref: JobRef) -> None:
        self._log.warning("TrainJob %s is gone or was given up; the task waits for TrainJob %s", self.ref, ref)
        self.ref, self._evidence = ref, None
        if self.training is not None:
            self.training.follow(ref)
        self.on_change()

    async def _page(self, backend: Backend, diagnosis: Diagnosis | None) -> dict[str, Any] | None:
        """The last document about the job; what was observed, if its evidence could not be read."""
        from trainjob._support.threads import JUDGING

        training, evidence = self.training, self._evidence
        if training is None or evidence is None:
            return None if training is None else training.take()
        try:
            earlier, attempts = await self.earlier(), await self._attempts(backend)
            return await JUDGING.call(training.document_of, evidence, backend.now(), earlier, diagnosis, attempts)
        except Exception as error:  # noqa: BLE001 - of Airflow, too: the end of the job is more important
            self._log.warning("the page of the training cannot be made: %s: %s", type(error).__name__, error)
            return None

    async def _attempts(self, backend: Backend) -> Sequence[Evidence]:
        """The attempts of the key that still exist; none for the first one, or if they cannot be read in 5 s."""
        import anyio

        from trainjob import TrainJobError
        from trainjob._pages.live import read_attempts

        if self.ref.attempt <= 1:
            return ()
        with suppress(TrainJobError), anyio.move_on_after(_READ_SECONDS):
            return await read_attempts(backend, self.ref, self.key)
        return ()


async def _nothing() -> Mapping[str, Any]:
    return {}


def outage_of(event: Mapping[str, Any], log: Log) -> TrainJobError | None:
    """Why the triggerer could not wait until the end; None if it could.

    If no other wait there can succeed, the triggerer lacks what this worker may have: a package, a file, a permission.
    """
    from trainjob import TimedOut, TrainJobFailed
    from trainjob._jobs.steps import unpack_error
    from trainjob.errors import StudyFailed

    error = unpack_error(event["error"]) if "error" in event else None
    if error is None or isinstance(error, TrainJobFailed | TimedOut | StudyFailed):
        return None
    instead = "" if error.retry.retryable else "; waiting in this worker instead"
    log.warning("the triggerer could not wait for %s (%s)%s", event["key"], error, instead)
    return error
