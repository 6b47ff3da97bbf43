"""Triggers: a deferred task waits here, at the cost of one coroutine.

A triggerer may stop at any instant and another one start the same trigger again, so a trigger knows nothing but its
arguments, and they are all that the next one needs. They are stored as plain JSON in Airflow's database: no secrets.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainjob import WaitOptions
from trainjob_airflow.events import pack
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import states_of
from trainjob_airflow.running import progress_logger
from trainjob_airflow.states import Wanted

if TYPE_CHECKING:
    from trainjob import Backend, JobRef, Observation
    from trainjob.diagnosis import Evidence
    from trainjob.progress_log import ProgressLogger

_TAIL = 200  # lines of each rank from before this trigger started; after a restart these are shown twice
_LAST_LOOK = 5.0  # seconds after a deadline that nobody was there to see: the job may have ended before it
_KILLED = "__airflow_user_action__"  # what Airflow cancels a trigger with when a person has ended its task (3.3)
_KILL = 25.0  # Airflow gives on_kill() 30 s ([triggerer] on_kill_timeout)

_BACKGROUND: set[asyncio.Task[Any]] = set()  # an event loop holds its tasks weakly


class TrainJobTrigger(BaseTrigger):
    """Waits for the end of one TrainJob. Yields one event and never raises.

    The event's payload is ``{"status": …, "message": …, "retryable": …, "namespace", "name", "uid", "attempt", …}``
    with status

    * ``complete`` or ``failed``: the job ended; ``final`` is its last observation and ``crash`` the evidence of its
      first crash, of which `trainjob.waiting.conclude` makes a result or a diagnosis,
    * ``crashed``: a rank did, ``fail_on_first_crash`` was asked for, and the job goes on; ``diagnosis`` says why,
    * ``timeout``: a budget ran out and the job goes on,
    * ``error``: it could not be watched any longer and goes on, as far as is known.

    Args:
        trainjob_conn_id: Connection, resolved in the triggerer if `target` is left out.
        namespace: Of the job.
        name: Of the job.
        uid: Of the job; another job of the same name is not this one.
        attempt: Ordinal of the job.
        deadline: ISO 8601 time in UTC at which the task's ``execution_timeout`` is over; None: never.
        on_kill_action: ``cancel``, ``suspend`` or ``keep``: what becomes of the job when a person kills the task.
        get_logs: Whether lines of the ranks go to the task's log.
        resumed: How often the task was deferred again after an error.
        target: What the connection says, if it holds no secret: `TrainJobHook.target`.
        **wait_options: `trainjob.WaitOptions.as_json`.
    """

    _has_asked = False  # any trigger of this process

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
        **wait_options: Any,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trainjob_conn_id = trainjob_conn_id
        self.namespace = namespace
        self.name = name
        self.uid = uid
        self.attempt = attempt
        self.wait_options = WaitOptions.from_json(wait_options)
        self.deadline = deadline
        self.on_kill_action = on_kill_action
        self.get_logs = get_logs
        self.resumed = resumed
        self.target = target
        self._waiting = self._killed = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            *("trainjob_conn_id", "namespace", "name", "uid", "attempt"),
            *("deadline", "on_kill_action", "get_logs", "resumed", "target"),
        )
        arguments = {name: getattr(self, name) for name in names} | self.wait_options.as_json()
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; see the class."""
        self._waiting = True
        try:
            event = await self._outcome()  # no event is yielded from inside a cancel scope or task group
        except asyncio.CancelledError as error:
            self._killed = error.args == (_KILLED,)
            raise
        self._waiting = False
        job = {"namespace": self.namespace, "name": self.name, "uid": self.uid, "attempt": self.attempt}
        yield TriggerEvent(event | job | {"resumed": self.resumed})  # type: ignore[no-untyped-call]

    async def _outcome(self) -> dict[str, Any]:
        await asyncio.to_thread(_load)
        if self.task_instance is not None and not TrainJobTrigger._has_asked:
            # At the first question Airflow (3.3.2) starts its API inside the triggerer, for 4 s of one core, and many
            # more where that is busy. So the first one is not that of `on_kill`, which ends after 30 s.
            TrainJobTrigger._has_asked = True
            _begin(self._is_wanted())
        from trainjob.errors import RankCrashed, TimedOut, TrainJobError
        from trainjob.serialization import pack_diagnosis, pack_evidence

        limit: asyncio.Timeout | None = None
        try:
            async with TrainJobHook(self.trainjob_conn_id, self.target).shared_backend() as backend:
                async with asyncio.timeout(self._seconds_left()) as limit:
                    final, crash = await self._wait(backend)
        except RankCrashed as error:
            crashed = _event("crashed", error.diagnosis.summary, retryable=error.retry.retryable)
            return crashed | {"diagnosis": pack_diagnosis(error.diagnosis)}
        except TimedOut as error:
            return _event("timeout", str(error), retryable=error.retry.retryable)
        except TrainJobError as error:
            return _event("error", str(error), retryable=error.retry.retryable)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit is not None and limit.expired():
                return _event("timeout", f"TrainJob {self.namespace}/{self.name} did not end within execution_timeout")
            self.log.exception("the trigger failed")
            return _event("error", f"{type(error).__name__}: {error}", retryable=False)
        status = "complete" if final.phase.value == "Complete" else "failed"
        ended = {"final": pack(final), "crash": pack_evidence(crash)}
        return _event(status, f"the job ended: {final.phase}") | ended

    async def _wait(self, backend: Backend) -> tuple[Observation, Evidence | None]:
        from trainjob.errors import BackendUnavailable
        from trainjob.waiting import attend

        say = progress_logger(self.log)
        read = (lambda: self._read(backend, say)) if self.get_logs else None
        options, ref = self.wait_options, self._ref()
        final, crash = await attend(backend, ref, options, on_change=say.change, on_crash=say.crash, read=read)
        if final is None:
            raise BackendUnavailable("the watch ended before it said anything")
        return final, crash

    async def _read(self, backend: Backend, say: ProgressLogger) -> None:
        from trainjob.logs import Throttle

        throttle = Throttle(say.line)
        try:
            async with aclosing(backend.logs(self._ref(), follow=True, tail=_TAIL)) as lines:
                async for line in lines:
                    throttle.line(line)
                    await asyncio.sleep(0)  # many lines at once must not hold up the other triggers
            throttle.end()  # before the line about lines that were left out
            say.end()
        except Exception as error:  # noqa: BLE001 - logs are a service; that they fail is no verdict on the job
            self.log.warning("no more log lines from here on: %s: %s", type(error).__name__, error)
        finally:
            throttle.end()

    async def on_kill(self) -> None:
        """A person marked the task or cleared it (Airflow 3.3): do with the job what ``on_kill_action`` says.

        Airflow (3.3.2) cancels this again each second until it has ended (`TriggerRunnerSupervisor.cancelling_triggers`
        goes along with every sync), and a request to a cluster can take longer.
        """
        self._killed = False
        ending = _begin(self._end())
        while not ending.done():
            with suppress(asyncio.CancelledError):
                await asyncio.shield(ending)

    async def _end(self) -> None:
        from trainjob.lifecycle import cancel

        # Airflow says the same to a triggerer that was taken for dead and wakes up when another one has its triggers:
        # all that are not its own any more are cancelled alike (3.3.2, `TriggerRunnerSupervisor.update_triggers`).
        if self.task_instance is not None and await self._is_wanted():
            self.log.info("TrainJob %s/%s goes on: its task still waits for it", self.namespace, self.name)
            return
        if self.on_kill_action == "keep":
            self.log.info("TrainJob %s/%s goes on (on_kill_action='keep')", self.namespace, self.name)
            return
        backend = await TrainJobHook(self.trainjob_conn_id, self.target).backend()
        try:
            action: Literal["delete", "suspend"] = "suspend" if self.on_kill_action == "suspend" else "delete"
            ended = await cancel(backend, self._ref(), action, timeout_seconds=_KILL)
            what = "has ended" if ended else "was told to end"
            self.log.info("the task was killed: TrainJob %s/%s %s (%s)", self.namespace, self.name, what, action)
        finally:
            await backend.aclose()

    async def cleanup(self) -> None:
        """Do what `on_kill` does where that was not called.

        Before Airflow 3.3 nothing tells a trigger of a kill but its end, which may have other reasons as well. Since
        then a cancellation says so, but a second one, a second later, can hit Airflow (3.3.2) while it still writes a
        line to the log about the first, and `on_kill` is left out.
        """
        untold = not hasattr(BaseTrigger, "on_kill") and self._waiting and self.task_instance is not None
        if untold or self._killed:
            await self.on_kill()

    async def _is_wanted(self) -> bool:
        """Whether the task is still deferred: a triggerer that stops hands its triggers on."""
        from asgiref.sync import sync_to_async

        try:
            states = await sync_to_async(states_of)(self.task_instance)
        except Exception:  # noqa: BLE001 - whatever it is: to keep a job does less harm than to end one
            return True
        return "deferred" in states

    def _ref(self) -> JobRef:
        from trainjob import JobRef

        return JobRef(self.namespace, self.name, self.uid, self.attempt)

    def _seconds_left(self) -> float | None:
        """Of ``execution_timeout``, which Airflow itself does not enforce on a deferred task (apache/airflow#69678)."""
        if self.deadline is None:
            return None
        left = (datetime.fromisoformat(self.deadline) - datetime.now(UTC)).total_seconds()
        return left if left > 0 else _LAST_LOOK


class TrainJobStateTrigger(BaseTrigger):
    """Waits until a job is in one of some phases, or has passed it, or has a condition. One event; never raises.

    The event's payload is ``{"status": "reached" | "ended" | "error", "message": …, "retryable": …}``.

    Args:
        trainjob_conn_id: Connection, resolved in the triggerer if `target` is left out.
        namespace: Of the job; the connection's if None.
        name: Of the job, which need not exist yet; empty if `labels` say which.
        labels: Labels of the job.
        phases: Names of the phases.
        condition: Type of a condition, instead of phases.
        poll_interval: Seconds between two looks whether a job that does not exist yet does.
        target: See `TrainJobTrigger`.
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
        super().__init__()  # type: ignore[no-untyped-call]
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
        """Wait; see the class."""
        yield TriggerEvent(await self._outcome())  # type: ignore[no-untyped-call]

    async def _outcome(self) -> dict[str, Any]:
        await asyncio.to_thread(_load)
        from trainjob import TrainJobError

        hook = TrainJobHook(self.trainjob_conn_id, self.target)
        try:
            async with hook.shared_backend() as backend:
                namespace = self.namespace or await hook.namespace() or backend.default_namespace
                return await self._wait(backend, namespace)
        except TrainJobError as error:
            return _event("error", str(error), retryable=error.retry.retryable)
        except Exception as error:
            self.log.exception("the trigger failed")
            return _event("error", f"{type(error).__name__}: {error}", retryable=False)

    async def _wait(self, backend: Backend, namespace: str) -> dict[str, Any]:
        from trainjob import JobRef
        from trainjob.status import observe

        sought = Wanted(self.name, self.labels, tuple(self.phases), self.condition)
        while (trainjob := await sought.find(backend, namespace)) is None:  # noqa: ASYNC110 - nobody can tell
            await asyncio.sleep(self.poll_interval)
        say, latest, name = progress_logger(self.log), None, f"TrainJob {JobRef.of(trainjob)}"
        async with aclosing(backend.watch(JobRef.of(trainjob))) as snapshots:
            async for snapshot in snapshots:
                observation: Observation = observe(snapshot.trainjob, latest, snapshot.blocker)
                if observation != latest or snapshot.notice:
                    say.change(observation, snapshot.notice)
                latest = observation
                if sought.reached(snapshot.trainjob, observation):
                    job = {"namespace": namespace, "job": trainjob["metadata"]["name"]}
                    return _event("reached", f"{name} is {observation.phase}") | job
                if observation.phase.terminal:
                    break
        ended = f"is {latest.phase}" if latest is not None else "is gone"
        return _event("ended", f"{name} {ended} and will never {sought.state}")


@cache
def _load() -> None:
    """Import what a trigger needs, in a thread: in the loop all triggers would stand still for half a second.

    A full garbage collection over Airflow's own modules takes 0.2 to 0.4 s of the loop, once in some hundred triggers,
    whatever they do (3.3.2). What is imported by now stays until the end of the process, and is not looked at again.
    """
    import trainjob.progress_log
    import trainjob.serialization
    import trainjob.waiting

    with suppress(ImportError):  # of the extra, which the local backend does without
        import trainjob.backends.kubernetes.backend  # noqa: F401 - so that it is there before the freeze

    gc.freeze()


def _begin(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Do something in the background."""
    task = asyncio.create_task(work)
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)
    return task


def _event(status: str, message: str, *, retryable: bool = True) -> dict[str, Any]:
    return {"status": status, "message": message, "retryable": retryable}
