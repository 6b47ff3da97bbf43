"""The trigger of a deferred task that waits for its TrainJob."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger

from trainjob_airflow.events import pack
from trainjob_airflow.running import stop_key
from trainjob_airflow.stats import send_goodput
from trainjob_airflow.tasklog import progress_logger
from trainjob_airflow.training import Task, Training
from trainjob_airflow.triggers.base import WRITER, TaskTrigger, event_of, load

if TYPE_CHECKING:
    from trainjob import Backend, Evidence, JobRef, Observation
    from trainjob._jobs.progress_log import ProgressLogger

_TAIL = 200  # log lines of each rank from before this trigger started; after a restart they are logged again
_POINTS = 512  # of all metrics in an event, which Airflow stores in its database: about 20 KB
_KILL = 25.0  # Airflow gives on_kill() 30 s ([triggerer] on_kill_timeout)


class TrainJobTrigger(TaskTrigger):
    """Waits for the end of one TrainJob. Yields one event and never raises.

    If the job is gone or was given up, and another attempt of its key counts, the trigger waits for that one.

    The event's payload is ``{"status": …, "message": …, "retryable": …, "namespace", "name", "uid", "attempt", …}``
    with the identity of the attempt that counts at the end (``followed`` if that is another one), and status

    * ``complete`` or ``failed``: the job ended; ``final`` is its last observation and ``crash`` the evidence of its
      first crash, from which `trainjob._jobs.results.conclude` makes a result or a diagnosis,
    * ``crashed``: a rank crashed, `fail_on_first_crash` is set, and the job keeps running; ``diagnosis`` has the cause,
    * ``given_up``: another process has given up the job; ``diagnosis`` has the recorded cause,
    * ``timeout``: a timeout expired and the job keeps running,
    * ``error``: the job could not be watched any longer; it may still be running.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        namespace: Namespace of the job.
        name: Name of the job.
        uid: UID of the job; another job with the same name is not watched.
        attempt: Ordinal of the job.
        key: Key of the job, for a kill and for the worker that continues the task.
        tried: Number of the task's try, which ends if a person kills the task.
        deadline: ISO 8601 time in UTC at which the task's ``execution_timeout`` expires; None: no limit.
        on_kill_action: ``cancel``, ``suspend`` or ``keep``: action on the job when a person kills the task.
        get_logs: Whether to copy log lines of the ranks to the task's log.
        resumed: How often the task was deferred again after an error.
        target: Settings of the connection, if they hold no secret: the result of `TrainJobHook.target`.
        stored: Phase in the document that the task has stored, empty if unknown; None: the task stores no document.
        **wait_options: The waiting options, as `trainjob.WaitOptions.as_json` returns them.
    """

    def __init__(
        self,
        *,
        trainjob_conn_id: str,
        namespace: str,
        name: str,
        uid: str,
        attempt: int,
        key: str,
        tried: int,
        deadline: str | None = None,
        on_kill_action: str = "suspend",
        get_logs: bool = True,
        resumed: int = 0,
        target: dict[str, Any] | None = None,
        stored: str | None = None,
        **wait_options: Any,
    ) -> None:
        from trainjob import WaitOptions  # here, so that an import of this module does not import `trainjob`

        super().__init__(
            trainjob_conn_id=trainjob_conn_id, deadline=deadline, on_kill_action=on_kill_action, target=target
        )
        self.namespace = namespace
        self.name = name
        self.uid = uid
        self.attempt = attempt
        self.wait_options = WaitOptions.from_json(wait_options)
        self.get_logs = get_logs
        self.resumed = resumed
        self.stored = stored
        self.key = key
        self.tried = tried
        self._page: Training | None = None
        self._followed: JobRef | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            *("trainjob_conn_id", "namespace", "name", "uid", "attempt", "key", "tried"),
            *("deadline", "on_kill_action", "get_logs", "resumed", "target", "stored"),
        )
        arguments = {name: getattr(self, name) for name in names} | self.wait_options.as_json()
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    def identity(self) -> dict[str, Any]:
        """The attempt that counts."""
        ref = self._ref()
        job = {"namespace": ref.namespace, "name": ref.name, "uid": ref.uid, "attempt": ref.attempt}
        followed = {"followed": True} if self._followed is not None else {}
        return job | {"key": self.key, "resumed": self.resumed} | followed

    def launched(self) -> str:
        """The attempt that counts."""
        return f"TrainJob {self._ref()}"

    async def outcome(self) -> dict[str, Any]:
        """Wait for the end of the job."""
        await asyncio.to_thread(load)
        training = self._page = self._training()
        if training is None:
            return await self._watched(None)
        try:
            event = await self._watched(training)
        finally:
            WRITER.discard(training)
        await WRITER.until_written(training)
        seen = training.history
        event["phases"] = [[time, str(phase)] for time, phase in seen.phases]
        return event | ({"history": seen.points(_POINTS)} if seen else {})

    def _training(self) -> Training | None:
        """What this trigger stores about the job; None if it stores nothing, as before Airflow 3.3.

        Older triggerers cannot write XComs (3.0), or end if a write fails because the database cannot be reached.
        """
        if self.stored is None or self.task_instance is None or not hasattr(BaseTrigger, "on_kill"):
            return None
        task = Task.of(self.task_instance, self.trainjob_conn_id)
        return Training(self._ref(), task, key=self.key, phase=self.stored)

    async def _watched(self, training: Training | None) -> dict[str, Any]:
        from trainjob import RankCrashed, TrainJobFailed
        from trainjob._diagnosis.serialization import pack_diagnosis, pack_evidence

        async def wait(backend: Backend) -> dict[str, Any]:
            try:
                final, crash = await self._wait(backend, training)
            except RankCrashed as error:
                crashed = event_of("crashed", error.diagnosis.summary, retryable=error.retry.retryable)
                return crashed | {"diagnosis": pack_diagnosis(error.diagnosis)}
            except TrainJobFailed as error:
                given_up = event_of("given_up", error.diagnosis.summary, retryable=error.retry.retryable)
                return given_up | {"diagnosis": pack_diagnosis(error.diagnosis)}
            status = "complete" if final.phase.value == "Complete" else "failed"
            ended = {"final": pack(final), "crash": pack_evidence(crash)}
            return event_of(status, f"the job ended: {final.phase}") | ended

        return await self.connected(wait)

    async def _wait(self, backend: Backend, training: Training | None) -> tuple[Observation, Evidence | None]:
        from trainjob import BackendUnavailable
        from trainjob._jobs.waiting import attend

        progress = progress_logger(self.log)
        read = (lambda job: self._read(backend, progress, job)) if self.get_logs else None
        options, ref = self.wait_options, self._ref()

        def on_change(observation: Observation, notice: str) -> None:
            progress.change(observation, notice)
            if training is not None:
                training.observe(observation, backend.now())
                WRITER.add(training)

        def on_follow(job: JobRef) -> None:
            self.log.warning("TrainJob %s is gone or was given up; the task waits for TrainJob %s", self._ref(), job)
            self._followed = job
            if training is not None:
                training.follow(job)

        _, final, crash = await attend(
            backend, ref, options, on_change=on_change, on_crash=progress.crash, on_follow=on_follow, read=read
        )
        if final is None:
            raise BackendUnavailable(f"the watch of TrainJob {self._ref()} ended without an event")
        return final, crash

    async def _read(self, backend: Backend, progress: ProgressLogger, ref: JobRef) -> None:
        from trainjob._support.log_lines import Throttle

        throttle = Throttle(progress.line)
        try:
            async with aclosing(backend.logs(ref, follow=True, tail=_TAIL)) as lines:
                async for line in lines:
                    throttle.line(line)
                    await asyncio.sleep(0)  # many lines at once must not delay other triggers
            throttle.end()  # before the line about dropped lines
            progress.end()
        except Exception as error:  # noqa: BLE001 - log streaming is best effort; its failure must not fail the job
            self.log.warning("log streaming failed, no further log lines follow: %s: %s", type(error).__name__, error)
        finally:
            throttle.end()

    async def cancel(self, backend: Backend) -> str:
        """Cancel or suspend all attempts of the key, unless a later try has adopted the job: a kill may arrive late."""
        from trainjob._jobs.results import spent_so_far
        from trainjob._jobs.telemetry import record_goodput
        from trainjob._manifest.attempts import stops_by, try_of

        action = stops_by(self.on_kill_action)
        ref, history = self._ref(), self._page.history if self._page is not None else None
        present = await backend.get(ref.namespace, ref.name)
        if present is not None and try_of(present) > self.tried:
            return f"{self.launched()} keeps running: try {try_of(present)} has adopted it"
        measuring = asyncio.create_task(spent_so_far(backend, ref, history))  # beside the cancel: it must not wait
        try:
            ended = await stop_key(backend, self.key, action, _KILL, namespace=ref.namespace, tried=self.tried, ref=ref)
            if measuring.done():
                record_goodput(ref, measuring.result())
                if self.task_instance is not None:
                    send_goodput(self.task_instance, measuring.result().summary())
        finally:
            measuring.cancel()
        return f"{self.launched()} {'has ended' if ended else 'is terminating'} ({action})"

    def _ref(self) -> JobRef:
        from trainjob import JobRef

        return self._followed or JobRef(self.namespace, self.name, self.uid, self.attempt)
