"""Triggers: a deferred task waits here, at the cost of one coroutine.

A triggerer may stop at any instant and another one start the same trigger again, so a trigger knows nothing but its
arguments, and they are all that the next one needs. They are stored as plain JSON in Airflow's database: no secrets.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainjob_airflow.events import pack
from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.narrator import Narrator, has_reached

if TYPE_CHECKING:
    from trainjob import Backend, JobRef, Observation
    from trainjob.diagnosis import Evidence

_TAIL = 200  # lines of each rank from before this trigger started; after a restart these are shown twice
_LAST_LOOK = 5.0  # seconds after a deadline that nobody was there to see: the job may have ended before it
_KILL = 25.0  # Airflow gives on_kill() 30 s ([triggerer] on_kill_timeout)


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
        trainjob_conn_id: Connection, resolved in the triggerer.
        namespace: Of the job.
        name: Of the job.
        uid: Of the job; another job of the same name is not this one.
        attempt: Ordinal of the job.
        queue_timeout: Seconds to wait for admission; None: for ever.
        start_timeout: Seconds from admission to the first running rank; None: for ever.
        fail_fast: Whether to give up on what only a person can change.
        fail_on_first_crash: Whether to give up as soon as a rank has crashed.
        deadline: ISO 8601 time in UTC at which the task's ``execution_timeout`` is over; None: never.
        on_kill_action: ``cancel``, ``suspend`` or ``keep``: what becomes of the job when a person kills the task.
        get_logs: Whether lines of the ranks go to the task's log.
        resumed: How often the task was deferred again after an error.
    """

    def __init__(
        self,
        *,
        trainjob_conn_id: str,
        namespace: str,
        name: str,
        uid: str,
        attempt: int,
        queue_timeout: float | None = None,
        start_timeout: float | None = None,
        fail_fast: bool = False,
        fail_on_first_crash: bool = False,
        deadline: str | None = None,
        on_kill_action: str = "cancel",
        get_logs: bool = True,
        resumed: int = 0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trainjob_conn_id = trainjob_conn_id
        self.namespace = namespace
        self.name = name
        self.uid = uid
        self.attempt = attempt
        self.queue_timeout = queue_timeout
        self.start_timeout = start_timeout
        self.fail_fast = fail_fast
        self.fail_on_first_crash = fail_on_first_crash
        self.deadline = deadline
        self.on_kill_action = on_kill_action
        self.get_logs = get_logs
        self.resumed = resumed

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            *("trainjob_conn_id", "namespace", "name", "uid", "attempt", "queue_timeout", "start_timeout"),
            *("fail_fast", "fail_on_first_crash", "deadline", "on_kill_action", "get_logs", "resumed"),
        )
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; see the class."""
        event = await self._outcome()  # no event is yielded from inside a cancel scope or task group
        job = {"namespace": self.namespace, "name": self.name, "uid": self.uid, "attempt": self.attempt}
        yield TriggerEvent(event | job | {"resumed": self.resumed})  # type: ignore[no-untyped-call]

    async def _outcome(self) -> dict[str, Any]:
        from trainjob.crashes import pack_diagnosis, pack_evidence  # noqa: PLC0415
        from trainjob.errors import RankCrashed, TimedOut, TrainJobError  # noqa: PLC0415

        limit: asyncio.Timeout | None = None
        try:
            async with TrainJobHook(self.trainjob_conn_id).shared_backend() as backend:
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
        from trainjob.errors import BackendUnavailable  # noqa: PLC0415
        from trainjob.waiting import Budgets, attend  # noqa: PLC0415

        say = Narrator(self.log)
        budgets = Budgets(
            _delta(self.queue_timeout),
            _delta(self.start_timeout),
            fail_fast=self.fail_fast,
            fail_on_first_crash=self.fail_on_first_crash,
        )
        read = (lambda: self._read(backend, say)) if self.get_logs else None
        final, crash = await attend(backend, self._ref(), budgets, on_change=say.change, on_crash=say.crash, read=read)
        if final is None:
            raise BackendUnavailable("the watch ended before it said anything")
        return final, crash

    async def _read(self, backend: Backend, say: Narrator) -> None:
        try:
            async with aclosing(backend.logs(self._ref(), follow=True, tail=_TAIL)) as lines:
                async for line in lines:
                    say.line(line)
                    await asyncio.sleep(0)  # many lines at once must not hold up the other triggers
            say.end()
        except Exception as error:  # noqa: BLE001 - logs are a service; that they fail is no verdict on the job
            self.log.warning("no more log lines from here on: %s: %s", type(error).__name__, error)

    async def on_kill(self) -> None:
        """A person marked the task or cleared it (Airflow 3.3): do with the job what ``on_kill_action`` says."""
        from trainjob.launch import cancel  # noqa: PLC0415

        if self.on_kill_action == "keep":
            self.log.info("TrainJob %s/%s goes on (on_kill_action='keep')", self.namespace, self.name)
            return
        backend = await TrainJobHook(self.trainjob_conn_id).backend()
        try:
            action: Literal["delete", "suspend"] = "suspend" if self.on_kill_action == "suspend" else "delete"
            ended = await cancel(backend, self._ref(), action, timeout_seconds=_KILL)
            what = "has ended" if ended else "was told to end"
            self.log.info("the task was killed: TrainJob %s/%s %s (%s)", self.namespace, self.name, what, action)
        finally:
            await backend.aclose()

    def _ref(self) -> JobRef:
        from trainjob import JobRef  # noqa: PLC0415

        return JobRef(self.namespace, self.name, self.uid, self.attempt)

    def _seconds_left(self) -> float | None:
        """Of ``execution_timeout``, which Airflow itself does not enforce on a deferred task (apache/airflow#69678)."""
        if self.deadline is None:
            return None
        left = (datetime.fromisoformat(self.deadline) - datetime.now(UTC)).total_seconds()
        return left if left > 0 else _LAST_LOOK


class TrainJobPhaseTrigger(BaseTrigger):
    """Waits until the job of a name is in one of some phases, or has passed it. Yields one event and never raises.

    Args:
        trainjob_conn_id: Connection, resolved in the triggerer.
        namespace: Of the job; the connection's if None.
        name: Of the job; it need not exist yet.
        phases: Names of the phases.
        poll_interval: Seconds between two looks whether a job that does not exist yet does.
    """

    def __init__(
        self, *, trainjob_conn_id: str, namespace: str | None, name: str, phases: list[str], poll_interval: float = 10
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trainjob_conn_id = trainjob_conn_id
        self.namespace = namespace
        self.name = name
        self.phases = phases
        self.poll_interval = poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = ("trainjob_conn_id", "namespace", "name", "phases", "poll_interval")
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; see the class."""
        yield TriggerEvent(await self._outcome())  # type: ignore[no-untyped-call]

    async def _outcome(self) -> dict[str, Any]:
        from trainjob import JobRef, TrainJobError  # noqa: PLC0415
        from trainjob.waiting import follow  # noqa: PLC0415

        hook = TrainJobHook(self.trainjob_conn_id)
        try:
            async with hook.shared_backend() as backend:
                namespace = self.namespace or await hook.namespace() or backend.default_namespace
                while (trainjob := await backend.get(namespace, self.name)) is None:  # noqa: ASYNC110 - nobody can tell
                    await asyncio.sleep(self.poll_interval)
                say = Narrator(self.log)
                async with aclosing(follow(backend, JobRef.of(trainjob))) as changes:
                    async for observation, notice in changes:
                        say.change(observation, notice)
                        if has_reached(observation, self.phases):
                            return _event("reached", observation.phase.value)
                return _event("ended", f"TrainJob {namespace}/{self.name} ended: {observation.phase}")
        except TrainJobError as error:
            return _event("error", str(error), retryable=error.retry.retryable)
        except Exception as error:
            self.log.exception("the trigger failed")
            return _event("error", f"{type(error).__name__}: {error}", retryable=False)


def _event(status: str, message: str, *, retryable: bool = True) -> dict[str, Any]:
    return {"status": status, "message": message, "retryable": retryable}


def _delta(seconds: float | None) -> timedelta | None:
    return None if seconds is None else timedelta(seconds=seconds)
