"""The base class of triggers that wait for what a task has launched, and what all triggers share.

A triggerer may stop at any instant, and another one then starts the same trigger. So the arguments are the whole state
of a trigger. Airflow stores them unencrypted in its database: they must not contain secrets.
"""

from __future__ import annotations

import asyncio
import gc
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from datetime import datetime
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from trainjob_airflow.hooks.trainjob import TrainJobHook
from trainjob_airflow.identity import states_of
from trainjob_airflow.running import seconds_to_wait
from trainjob_airflow.training import Writer

if TYPE_CHECKING:
    from trainjob import Backend

_KILLED = "__airflow_user_action__"  # message of the cancellation when a person has ended the task (Airflow 3.3)

STORES = hasattr(BaseTrigger, "on_kill")
"""Whether triggers store documents: those before Airflow 3.3 cannot write XComs (3.0), or end if a write fails."""

_BACKGROUND: set[asyncio.Task[Any]] = set()  # an event loop holds its tasks weakly
WRITER = Writer()


class Trigger(BaseTrigger):
    """Airflow's trigger with a typed constructor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # BaseTrigger's has no types


class Fired(TriggerEvent):
    """The event of a trigger. Airflow logs its text, which leaves the document of a page out: up to 100 KB."""

    def __repr__(self) -> str:
        """The payload, without a document."""
        shown = {name: value for name, value in self.payload.items() if name != "page"}
        return f"TriggerEvent<{shown!r}>"


class TaskTrigger(Trigger):
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
        super().__init__()
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
        yield Fired(payload=event | self.identity())

    async def connected(self, wait: Callable[[Backend], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Call `wait` with the shared backend; an error becomes the ``error`` of an event."""
        if self.task_instance is not None and not self._has_called_airflow:
            # The first call starts Airflow's API (3.3.2) inside the triggerer, which takes 4 s of one core, and more on
            # a busy machine. So the first call must not be that of `on_kill`, which Airflow ends after 30 s.
            type(self)._has_called_airflow = True
            _run_in_background(self._call_airflow())
        from trainjob import TrainJobError
        from trainjob._jobs.steps import pack_error

        try:
            async with TrainJobHook(self.trainjob_conn_id, self.target).shared_backend() as backend:
                return await wait(backend)
        except TrainJobError as error:
            return {"error": pack_error(error), "page": None}
        except Exception as error:
            self.log.exception("the trigger failed")
            return {"error": pack_error(error), "page": None}

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
        may_be_killed = not STORES and self._waiting and self.task_instance is not None
        if may_be_killed or self._killed:
            await self.on_kill()

    async def _call_airflow(self) -> None:
        """Call Airflow for the first time, which loads its API; see `load` for what is loaded."""
        await self._is_wanted()
        gc.freeze()

    async def _is_wanted(self) -> bool:
        """Whether the task is still deferred: a stopping triggerer leaves its triggers to another one."""
        from asgiref.sync import sync_to_async

        with suppress(Exception):  # keeping a job does less harm than ending it
            return "deferred" in await sync_to_async(states_of)(self.task_instance)
        return True

    def seconds_left(self) -> float | None:
        """Rest of ``execution_timeout``, which Airflow does not enforce for deferred tasks (apache/airflow#69678)."""
        return seconds_to_wait(datetime.fromisoformat(self.deadline) if self.deadline is not None else None)


@cache
def load() -> None:
    """Import what a trigger needs, in a thread: in the event loop it would block all triggers for half a second.

    A full garbage collection over Airflow's modules blocks the loop for 0.2 to 0.4 s, once in some hundred triggers
    (3.3.2). Objects that exist now stay until the end of the process, so the collector need not check them again.
    """
    from trainjob._jobs.waiting import preload

    preload()
    for name in ("trainjob._jobs.steps", "trainjob._pages.documents.training", "trainjob._pages.documents.merging"):
        import_module(name)
    gc.freeze()


def _run_in_background(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    task = asyncio.create_task(coroutine)
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)
    return task


def event_of(status: str, message: str, *, retryable: bool = True) -> dict[str, Any]:
    """The payload of an event."""
    return {"status": status, "message": message, "retryable": retryable}
