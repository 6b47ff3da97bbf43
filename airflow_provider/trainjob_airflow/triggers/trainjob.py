"""Triggers: a deferred task waits in one, at the cost of one coroutine.

A triggerer may stop at any instant, and another one then starts the same trigger. So the arguments are the whole state
of a trigger. Airflow stores them unencrypted in its database: they must not contain secrets.
"""

from __future__ import annotations

import asyncio
import gc
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainjob_airflow.events import pack
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import states_of
from trainjob_airflow.running import seconds_to_wait
from trainjob_airflow.states import Wanted
from trainjob_airflow.stats import send_goodput
from trainjob_airflow.tasklog import progress_logger
from trainjob_airflow.training import Task, Training, Writer

if TYPE_CHECKING:
    from trainjob import Backend, Evidence, JobRef, Observation
    from trainjob.integration import ProgressLogger, Snapshot

_TAIL = 200  # log lines of each rank from before this trigger started; after a restart they are logged again
_POINTS = 512  # of all metrics in an event, which Airflow stores in its database: about 20 KB
_KILLED = "__airflow_user_action__"  # message of the cancellation when a person has ended the task (Airflow 3.3)
_KILL = 25.0  # Airflow gives on_kill() 30 s ([triggerer] on_kill_timeout)

_BACKGROUND: set[asyncio.Task[Any]] = set()  # an event loop holds its tasks weakly
WRITER = Writer()


class TaskTrigger(BaseTrigger):
    """Waits for what a task has launched, and cancels it when a person kills the task. Yields one event, never raises.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        deadline: ISO 8601 time in UTC at which the task's ``execution_timeout`` expires; None: no limit.
        on_kill_action: ``cancel``, ``suspend`` or ``keep``: action when a person kills the task.
        target: Settings of the connection, if they hold no secret: the result of `TrainJobHook.target`.
    """

    _has_called_airflow = False  # whether any trigger of this class has, in this process

    def __init__(
        self, *, trainjob_conn_id: str, deadline: str | None, on_kill_action: str, target: dict[str, Any] | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's has no types
        self.trainjob_conn_id = trainjob_conn_id
        self.deadline = deadline
        self.on_kill_action = on_kill_action
        self.target = target
        self._waiting = self._killed = False

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What each event has, whatever its status."""

    @abstractmethod
    def launched(self) -> str:
        """What the task has launched, in the words of a message."""

    @abstractmethod
    async def outcome(self) -> dict[str, Any]:
        """Wait for the end; returns an event."""

    @abstractmethod
    async def cancel(self, backend: Backend) -> str:
        """Apply `on_kill_action`, which is not ``keep``; returns what was done."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the end, and yield one event."""
        self._waiting = True
        try:
            event = await self.outcome()  # no event is yielded from inside a cancel scope or task group
        except asyncio.CancelledError as error:
            self._killed = error.args == (_KILLED,)
            raise
        self._waiting = False
        yield TriggerEvent(event | self.identity())  # type: ignore[no-untyped-call]  # Airflow's has no types

    async def connected(self, wait: Callable[[Backend], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Call `wait` with the shared backend until the deadline; errors become events."""
        if self.task_instance is not None and not self._has_called_airflow:
            # The first call starts Airflow's API (3.3.2) inside the triggerer, which takes 4 s of one core, and more on
            # a busy machine. So the first call must not be that of `on_kill`, which Airflow ends after 30 s.
            type(self)._has_called_airflow = True
            _run_in_background(self._is_wanted())
        from trainjob import TimedOut, TrainJobError

        limit: asyncio.Timeout | None = None
        try:
            async with TrainJobHook(self.trainjob_conn_id, self.target).shared_backend() as backend:
                async with asyncio.timeout(self._seconds_left()) as limit:
                    return await wait(backend)
        except TimedOut as error:
            return event_of("timeout", str(error), retryable=error.retry.retryable)
        except TrainJobError as error:
            return event_of("error", str(error), retryable=error.retry.retryable)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit is not None and limit.expired():
                return event_of("timeout", f"{self.launched()} did not end within execution_timeout")
            self.log.exception("the trigger failed")
            return event_of("error", f"{type(error).__name__}: {error}", retryable=False)

    async def on_kill(self) -> None:
        """Apply `on_kill_action` after a person has marked or cleared the task; Airflow 3.3 calls it.

        Airflow (3.3.2) cancels this coroutine again each second until it ends, with every sync
        (`TriggerRunnerSupervisor.cancelling_triggers`), and a request to a cluster can take longer.
        """
        self._killed = False
        action = _run_in_background(self._apply_kill_action())
        while not action.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(action)

    async def _apply_kill_action(self) -> None:
        # Airflow also cancels the triggers of a triggerer that counted as dead and wakes up when another one runs its
        # triggers (3.3.2, `TriggerRunnerSupervisor.update_triggers`), with the same message.
        if self.task_instance is not None and await self._is_wanted():
            self.log.info("%s keeps running: its task still waits for it", self.launched())
            return
        if self.on_kill_action == "keep":
            self.log.info("%s keeps running (on_kill_action='keep')", self.launched())
            return
        backend = await TrainJobHook(self.trainjob_conn_id, self.target).backend()
        try:
            self.log.info("the task was killed: %s", await self.cancel(backend))
        finally:
            await backend.aclose()

    async def cleanup(self) -> None:
        """Call `on_kill` if Airflow has not.

        Before Airflow 3.3 a trigger notices a kill only by its cancellation, which may have other reasons. Since 3.3
        the cancellation has a message, but a second one, a second later, can interrupt Airflow (3.3.2) while it logs
        the first, and then it does not call `on_kill`.
        """
        may_be_killed = not hasattr(BaseTrigger, "on_kill") and self._waiting and self.task_instance is not None
        if may_be_killed or self._killed:
            await self.on_kill()

    async def _is_wanted(self) -> bool:
        """Whether the task is still deferred: a stopping triggerer leaves its triggers to another one."""
        from asgiref.sync import sync_to_async

        try:
            states = await sync_to_async(states_of)(self.task_instance)
        except Exception:  # noqa: BLE001 - any error; keeping a job does less harm than ending it
            return True
        return "deferred" in states

    def _seconds_left(self) -> float | None:
        """Rest of ``execution_timeout``, which Airflow does not enforce for deferred tasks (apache/airflow#69678)."""
        return seconds_to_wait(datetime.fromisoformat(self.deadline) if self.deadline is not None else None)


class TrainJobTrigger(TaskTrigger):
    """Waits for the end of one TrainJob. Yields one event and never raises.

    The event's payload is ``{"status": …, "message": …, "retryable": …, "namespace", "name", "uid", "attempt", …}``
    with status

    * ``complete`` or ``failed``: the job ended; ``final`` is its last observation and ``crash`` the evidence of its
      first crash, from which `trainjob.waiting.conclude` makes a result or a diagnosis,
    * ``crashed``: a rank crashed, `fail_on_first_crash` is set, and the job keeps running; ``diagnosis`` has the cause,
    * ``timeout``: a timeout expired and the job keeps running,
    * ``error``: the job could not be watched any longer; it may still be running.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        namespace: Namespace of the job.
        name: Name of the job.
        uid: UID of the job; another job with the same name is not watched.
        attempt: Ordinal of the job.
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
        deadline: str | None = None,
        on_kill_action: str = "cancel",
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
        self._page: Training | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            *("trainjob_conn_id", "namespace", "name", "uid", "attempt"),
            *("deadline", "on_kill_action", "get_logs", "resumed", "target", "stored"),
        )
        arguments = {name: getattr(self, name) for name in names} | self.wait_options.as_json()
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    def identity(self) -> dict[str, Any]:
        """The job."""
        job = {"namespace": self.namespace, "name": self.name, "uid": self.uid, "attempt": self.attempt}
        return job | {"resumed": self.resumed}

    def launched(self) -> str:
        """The job."""
        return f"TrainJob {self.namespace}/{self.name}"

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
        return Training(self._ref(), Task.of(self.task_instance, self.trainjob_conn_id), phase=self.stored)

    async def _watched(self, training: Training | None) -> dict[str, Any]:
        from trainjob import RankCrashed
        from trainjob.integration import pack_diagnosis, pack_evidence

        async def wait(backend: Backend) -> dict[str, Any]:
            try:
                final, crash = await self._wait(backend, training)
            except RankCrashed as error:
                crashed = event_of("crashed", error.diagnosis.summary, retryable=error.retry.retryable)
                return crashed | {"diagnosis": pack_diagnosis(error.diagnosis)}
            status = "complete" if final.phase.value == "Complete" else "failed"
            ended = {"final": pack(final), "crash": pack_evidence(crash)}
            return event_of(status, f"the job ended: {final.phase}") | ended

        return await self.connected(wait)

    async def _wait(self, backend: Backend, training: Training | None) -> tuple[Observation, Evidence | None]:
        from trainjob import BackendUnavailable
        from trainjob.integration import attend

        progress = progress_logger(self.log)
        read = (lambda: self._read(backend, progress)) if self.get_logs else None
        options, ref = self.wait_options, self._ref()

        def on_change(observation: Observation, notice: str) -> None:
            progress.change(observation, notice)
            if training is not None:
                training.observe(observation)
                WRITER.add(training)

        final, crash = await attend(backend, ref, options, on_change=on_change, on_crash=progress.crash, read=read)
        if final is None:
            raise BackendUnavailable(f"the watch of TrainJob {self._ref()} ended without an event")
        return final, crash

    async def _read(self, backend: Backend, progress: ProgressLogger) -> None:
        from trainjob.integration import Throttle

        throttle = Throttle(progress.line)
        try:
            async with aclosing(backend.logs(self._ref(), follow=True, tail=_TAIL)) as lines:
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
        """Cancel or suspend the job."""
        from trainjob import cancel
        from trainjob.integration import record_goodput, spent_so_far

        action: Literal["delete", "suspend"] = "suspend" if self.on_kill_action == "suspend" else "delete"
        ref, history = self._ref(), self._page.history if self._page is not None else None
        measuring = asyncio.create_task(spent_so_far(backend, ref, history))  # beside the cancel: it must not wait
        try:
            ended = await cancel(backend, ref, action, timeout_seconds=_KILL)
            if measuring.done():
                record_goodput(ref, measuring.result())
                if self.task_instance is not None:
                    send_goodput(self.task_instance, measuring.result().summary())
        finally:
            measuring.cancel()
        return f"{self.launched()} {'has ended' if ended else 'is terminating'} ({action})"

    def _ref(self) -> JobRef:
        from trainjob import JobRef

        return JobRef(self.namespace, self.name, self.uid, self.attempt)


class TrainJobStateTrigger(BaseTrigger):
    """Waits until a job reaches one of several phases or a condition. Yields one event and never raises.

    The event's payload is ``{"status": "reached" | "ended" | "hung" | "error", "message": …, "retryable": …}``. With
    ``hung``, by the ``stall_timeout`` of the job, it has a ``diagnosis``.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        namespace: Namespace of the job; the connection's if None.
        name: Name of the job, which need not exist yet; empty if `labels` select the job.
        labels: Labels of the job.
        phases: Names of the phases.
        condition: Type of a status condition, instead of phases.
        poll_interval: Seconds between two checks whether the job exists.
        target: Settings of the connection, if they hold no secret: the result of `TrainJobHook.target`.
    """

    def __init__(
        self,
        *,
        trainjob_conn_id: str,
        namespace: str | None,
        name: str = "",
        labels: dict[str, str] | None = None,
        phases: list[str],
        condition: str = "",
        poll_interval: float = 10,
        target: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # Airflow's has no types
        self.trainjob_conn_id = trainjob_conn_id
        self.namespace = namespace
        self.name = name
        self.labels = labels
        self.phases = phases
        self.condition = condition
        self.poll_interval = poll_interval
        self.target = target

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("trainjob_conn_id", "namespace", "name", "labels", "phases", "condition", "poll_interval", "target")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait for the phase or condition, and yield one event."""
        yield TriggerEvent(await self._outcome())  # type: ignore[no-untyped-call]  # Airflow's has no types

    async def _outcome(self) -> dict[str, Any]:
        await asyncio.to_thread(load)
        from trainjob import JobHung, TrainJobError
        from trainjob.integration import pack_diagnosis

        hook = TrainJobHook(self.trainjob_conn_id, self.target)
        try:
            async with hook.shared_backend() as backend:
                namespace = self.namespace or await hook.namespace() or backend.default_namespace
                return await self._wait(backend, namespace)
        except JobHung as error:
            return event_of("hung", str(error)) | {"diagnosis": pack_diagnosis(error.diagnosis)}
        except TrainJobError as error:
            return event_of("error", str(error), retryable=error.retry.retryable)
        except Exception as error:
            self.log.exception("the trigger failed")
            return event_of("error", f"{type(error).__name__}: {error}", retryable=False)

    async def _wait(self, backend: Backend, namespace: str) -> dict[str, Any]:
        from trainjob import JobRef
        from trainjob.integration import observe, until_hung

        sought = Wanted(self.name, self.labels, tuple(self.phases), self.condition)
        while (trainjob := await sought.find(backend, namespace)) is None:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(self.poll_interval)
        ref, progress, latest = JobRef.of(trainjob), progress_logger(self.log), None

        async def observations() -> AsyncGenerator[tuple[Observation, Snapshot]]:
            before = None
            async with aclosing(backend.watch(ref)) as snapshots:
                async for snapshot in snapshots:
                    before = observe(snapshot.trainjob, before, snapshot.blocker)
                    yield before, snapshot

        name = f"TrainJob {ref}"
        watched = observations()
        if sought.is_end:
            watched = until_hung(backend, ref, watched, progress.change)
        async with aclosing(watched) as changes:
            async for observation, snapshot in changes:
                if observation != latest or snapshot.notice:
                    progress.change(observation, snapshot.notice)
                latest = observation
                if sought.reached(snapshot.trainjob, observation):
                    job = {"namespace": namespace, "job": trainjob["metadata"]["name"]}
                    return event_of("reached", f"{name} is {observation.phase}") | job
                if observation.phase.terminal:
                    break
        ended = f"is {latest.phase}" if latest is not None else "was deleted"
        return event_of("ended", f"{name} {ended}; it can no longer {sought.state}")


@cache
def load() -> None:
    """Import what a trigger needs, in a thread: in the event loop it would block all triggers for half a second.

    A full garbage collection over Airflow's modules blocks the loop for 0.2 to 0.4 s, once in some hundred triggers
    (3.3.2). Objects that exist now stay until the end of the process, so the collector need not check them again.
    """
    from trainjob.integration import preload

    preload()
    gc.freeze()


def _run_in_background(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(coroutine)
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)
    return task


def event_of(status: str, message: str, *, retryable: bool = True) -> dict[str, Any]:
    """The payload of an event."""
    return {"status": status, "message": message, "retryable": retryable}
