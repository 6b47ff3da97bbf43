"""The job that a task handles in this process; a signal handler can interrupt the launch and the wait."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob_airflow.exceptions import TrainJobFatal, airflow_error
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.tasklog import progress_logger

if TYPE_CHECKING:
    from trainjob import Diagnosis, JobRef, TrainJobClient, TrainJobResult, TrainJobSpec, WaitOptions
    from trainjob.integration import CrashAction
    from trainjob_airflow.tasklog import Log


_REPLY_SECONDS = 1.0  # of the 5 s that a killed task has left


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


class DeadlineReached(Exception):
    """The task's ``execution_timeout`` expired; the job keeps running."""


class RunningJob:
    """The job of one key. All calls run on the client's event loop, so that `cancel` works while `wait` is blocked.

    Args:
        client: Client of the job's backend and namespace.
        key: The identity of the task.
        ref: The job, if it is known already.
    """

    def __init__(self, client: TrainJobClient, key: str, ref: JobRef | None = None) -> None:
        self.client = client
        self.key = key
        self.ref = ref
        self._launching: Future[JobRef] | None = None
        self._waiting: Future[TrainJobResult] | None = None
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

        Raises:
            DeadlineReached: `seconds` have passed.
            concurrent.futures.CancelledError: `stop_waiting` was called.
        """
        from trainjob import wait

        progress, backend = progress_logger(log), self.client.backend
        on_log = progress.line if logs else None
        end = self._waiting = self.client.start(
            lambda: wait(backend, ref, options, on_change=progress.change, on_log=on_log, on_crash=progress.crash)
        )
        if self._killed:
            end.cancel()
        try:
            return end.result(seconds)
        except TimeoutError:
            if end.done():
                raise  # a TimeoutError of the backend
            end.cancel()
            raise DeadlineReached from None
        finally:
            progress.end()

    def has_ended(self) -> bool:
        """Whether the job has ended or was deleted."""
        from trainjob.integration import observe

        trainjob = self.client.get(self.ref) if self.ref else None
        return trainjob is None or observe(trainjob).phase.terminal

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
