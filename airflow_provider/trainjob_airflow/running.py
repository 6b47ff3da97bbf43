"""The job that a task handles in this process; a signal handler can interrupt the launch and the wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob_airflow.exceptions import TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.tasklog import StudyLog, progress_logger

if TYPE_CHECKING:
    from trainjob import (
        Diagnosis,
        Evidence,
        JobRef,
        Observation,
        TrainJobClient,
        TrainJobResult,
        TrainJobSpec,
        WaitOptions,
    )
    from trainjob.integration import CrashAction, Goodput, Study, StudyResult, TrainJob, Trial
    from trainjob_airflow.study import TaskStudy
    from trainjob_airflow.tasklog import Log
    from trainjob_airflow.training import TaskTraining

_T = TypeVar("_T")

_REPLY_SECONDS = 1.0  # of the 5 s that a killed task has left
_EVIDENCE_SECONDS = 5.0
_LAST_LOOK = 5.0  # seconds to observe a job whose deadline passed while nothing waited: it may have ended before


@contextmanager
def connected(trainjob_conn_id: str, namespace: str | None) -> Iterator[TrainJobClient]:
    """Open a client of the connection and convert errors to Airflow's.

    Raises:
        TrainJobFatal: The connection does not exist, or another try cannot succeed.
        TrainJobFailure: Another try may succeed.
    """
    from trainjob import TrainJobError

    try:
        with TrainJobHook(trainjob_conn_id).client(namespace) as client:
            yield client
    except AirflowNotFoundException as error:
        raise TrainJobFatal(str(error)) from None
    except TrainJobError as error:
        raise airflow_error(error) from None


def has_ended(trainjob: TrainJob | None) -> bool:
    """Whether a job has ended or was deleted."""
    from trainjob.integration import observe

    return trainjob is None or observe(trainjob).phase.terminal


def seconds_to_wait(deadline: datetime | None, margin: float = 0.0) -> float | None:
    """Seconds until `margin` before the deadline; 5 s if that has passed, None without a deadline."""
    if deadline is None:
        return None
    left = (deadline - datetime.now(UTC)).total_seconds() - margin
    return left if left > 0 else _LAST_LOOK


class DeadlineReached(Exception):
    """The task's ``execution_timeout`` expired; the job keeps running."""


class RunningJob:
    """The job of one key. All calls run on the client's event loop, so that `cancel` works while `wait` is blocked.

    Args:
        client: Client of the job's backend and namespace.
        key: The identity of the task.
        ref: The job, if it is known already.

    Attributes:
        evidence: Evidence of the job; None if it was not read.
        training: What the task stores about the job; None if it stores nothing.
    """

    def __init__(self, client: TrainJobClient, key: str, ref: JobRef | None = None) -> None:
        self.client = client
        self.key = key
        self.ref = ref
        self.evidence: Evidence | None = None
        self.training: TaskTraining | None = None
        self._launching: Future[JobRef] | None = None
        self._waiting: Future[Any] | None = None
        self._killed = False

    def __str__(self) -> str:
        return f"TrainJob {self.ref}" if self.ref else f"the TrainJob of {self.key}"

    def launch(self, spec: TrainJobSpec, first_attempt: int, origin: dict[str, str]) -> JobRef:
        """Launch or adopt the job of the key.

        Raises:
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob import launch

        client = self.client
        self._launching = client.start(
            lambda: launch(
                client.backend,
                spec,
                self.key,
                namespace=client.namespace,
                first_attempt=first_attempt,
                origin=origin,
            )
        )
        self.ref = self._launching.result()
        if self._killed:
            raise CancelledError
        return self.ref

    def wait(self, ref: JobRef, options: WaitOptions, log: Log, *, logs: bool, seconds: float | None) -> TrainJobResult:
        """Wait for the end of the job for at most `seconds`; log changes, crashes and, with `logs`, the ranks' lines.

        Meanwhile this thread stores what `training` has to store: no other thread may call Airflow.

        Raises:
            DeadlineReached: `seconds` have passed.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob import wait

        progress, backend = progress_logger(log), self.client.backend
        on_log = progress.line if logs else None
        changes = SimpleQueue[None]()  # its `put` may interrupt its `get`: a signal handler cancels the wait

        def on_change(observation: Observation, notice: str) -> None:
            progress.change(observation, notice)
            if self.training is not None:
                self.training.observe(observation)
                changes.put(None)

        end: Future[TrainJobResult] = self.client.start(
            lambda: wait(
                backend,
                ref,
                options,
                on_change=on_change,
                on_log=on_log,
                on_crash=progress.crash,
                on_evidence=self.keep_evidence,
            )
        )
        self._waiting = end
        try:
            return self.result_of(end, changes, seconds, self.training)
        finally:
            progress.end()

    def result_of(
        self, end: Future[_T], changes: SimpleQueue[None], seconds: float | None, page: TaskTraining | TaskStudy | None
    ) -> _T:
        """Wait for `end` for at most `seconds`, and store `page` when it is due, which each of `changes` may change.

        Raises:
            DeadlineReached: `seconds` have passed.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        end.add_done_callback(lambda _: changes.put(None))
        if self._killed:
            end.cancel()
        deadline = None if seconds is None else monotonic() + seconds
        while not end.done():
            now = monotonic()
            if deadline is not None and now >= deadline:
                end.cancel()
                raise DeadlineReached
            due = page.due if page is not None else None
            if page is not None and due is not None and due <= now:
                page.store()
                continue
            times = [time for time in (deadline, due) if time is not None]
            with suppress(Empty):
                changes.get(timeout=min(times) - now if times else None)
        return end.result()

    def keep_evidence(self, evidence: Evidence) -> None:
        """Keep the evidence of the job's end."""
        self.evidence = evidence

    def read_evidence(self) -> Evidence | None:
        """Evidence of the job, read now if that was not done before; None if it cannot be read in 5 s."""
        import anyio

        from trainjob import TrainJobError

        async def read(ref: JobRef) -> Evidence | None:
            with anyio.move_on_after(_EVIDENCE_SECONDS):
                return await self.client.backend.evidence(ref)
            return None

        ref = self.ref
        if self.evidence is None and ref is not None:
            with suppress(TrainJobError):
                self.evidence = self.client.call(lambda: read(ref))
        return self.evidence

    def read_attempts(self) -> Sequence[Evidence] | None:
        """The attempts of the key that still exist; none for the first one, None if they cannot be read in 5 s."""
        import anyio

        from trainjob import TrainJobError
        from trainjob.integration import read_attempts

        async def read(ref: JobRef) -> Sequence[Evidence] | None:
            with anyio.move_on_after(_EVIDENCE_SECONDS):
                return await read_attempts(self.client.backend, ref, self.key)
            return None

        ref = self.ref
        if ref is None or ref.attempt <= 1:
            return ()
        with suppress(TrainJobError):
            return self.client.call(lambda: read(ref))
        return None

    def measure(self, *, hangs: bool = False) -> Goodput | None:
        """How the time of the job was spent until now; None if it cannot be read in 5 s, or is a study.

        Args:
            hangs: Whether it has been found that the job hangs.
        """
        from trainjob.integration import measured

        evidence, history = self.read_evidence(), self.training.history if self.training is not None else None
        if self.ref is None or evidence is None:
            return None
        return measured(self.ref, evidence, history, hangs=hangs)

    def start_measuring(self) -> Future[Goodput] | None:
        """The same in the background, while the job is being cancelled."""
        from trainjob.integration import spent_so_far

        ref, client, history = self.ref, self.client, self.training.history if self.training is not None else None
        return None if ref is None else client.start(lambda: spent_so_far(client.backend, ref, history))

    def look(self) -> TrainJob | None:
        """The job as it is now; None if it was deleted."""
        return self.client.get(self.ref) if self.ref else None

    def has_ended(self) -> bool:
        """Whether the job has ended or was deleted."""
        return has_ended(self.look())

    def is_replaced(self) -> bool:
        """Whether the next launch replaces the job, which got no capacity, by one with the changes of `on_retry`."""
        from trainjob import TrainJobError
        from trainjob.integration import is_replaced

        with suppress(TrainJobError):
            trainjob = self.look()
            return trainjob is not None and is_replaced(trainjob)
        return False

    def give_up(self, ref: JobRef, diagnosis: Diagnosis, action: CrashAction) -> str:
        """Apply `action` to a job that failed its task; return what was done."""
        from trainjob.integration import give_up

        client = self.client
        return client.call(lambda: give_up(client.backend, ref, diagnosis, action))

    def cancel(self, action: Literal["delete", "suspend"], seconds: float) -> bool:
        """Stop the job, also if the launch has not returned it.

        Returns:
            True if nothing of the job runs any longer; False if it is still terminating.
        """
        return self.client.start(lambda: self._stop(action, seconds)).result(seconds)

    async def _stop(self, action: Literal["delete", "suspend"], seconds: float) -> bool:
        from trainjob import JobRef, cancel
        from trainjob.integration import labels_of

        refs = [self.ref] if self.ref else []
        if not refs:
            jobs = await self.client.backend.find(self.client.namespace, labels_of(self.key))
            refs = [JobRef.of(job) for job in jobs]
        # Half the time, so that the result arrives before `cancel` stops waiting for it.
        ended = [await cancel(self.client.backend, ref, action, timeout_seconds=seconds / 2) for ref in refs]
        return all(ended)

    def stop_waiting(self) -> None:
        """Make `wait` and `launch` raise CancelledError; called by a signal handler that interrupts them."""
        self._killed = True
        if self._launching is not None:
            wait([self._launching], _REPLY_SECONDS)  # the reply to a creation in progress names the job
            self._launching.cancel()
        if self._waiting is not None:
            self._waiting.cancel()


class RunningStudy(RunningJob):
    """The study of one key.

    Attributes:
        page: What the task stores about the study; None if it stores nothing.
    """

    def __init__(self, client: TrainJobClient, key: str) -> None:
        super().__init__(client, key)
        self.page: TaskStudy | None = None
        self._ended = Event()
        self._ended.set()

    def __str__(self) -> str:
        return f"study {self.key}"

    def tune(
        self,
        study: Study,
        template: TrainJobSpec,
        journal: str,
        options: WaitOptions,
        log: Log,
        *,
        origin: Mapping[str, str],
        seconds: float | None,
    ) -> StudyResult:
        """Run the study for at most `seconds`; log each trial.

        Raises:
            DeadlineReached: `seconds` have passed.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob.integration import open_journal, tune

        lines, changes, client = StudyLog(log, study.metric), SimpleQueue[None](), self.client

        def on_change(trials: Sequence[Trial]) -> None:
            lines.change(trials)
            if self.page is not None:
                self.page.observe(trials)
                changes.put(None)

        async def run() -> StudyResult:
            try:
                return await tune(
                    client.backend,
                    study,
                    template,
                    self.key,
                    opened,
                    namespace=client.namespace,
                    origin=origin,
                    options=options,
                    on_change=on_change,
                )
            finally:
                self._ended.set()

        with open_journal(journal) as opened:
            self._ended.clear()
            end: Future[StudyResult] = client.start(run)
            self._waiting = end
            return self.result_of(end, changes, seconds, self.page)

    def cancel(self, action: Literal["delete", "suspend"], seconds: float) -> bool:
        """Cancel the running trials.

        Returns:
            False: they may still be terminating.
        """
        from trainjob.integration import cancel_trials

        del action
        self._ended.wait(min(_REPLY_SECONDS, seconds / 2))  # a launch in progress creates a trial to cancel
        client = self.client
        client.start(lambda: cancel_trials(client.backend, self.key, namespace=client.namespace)).result(seconds)
        return False
