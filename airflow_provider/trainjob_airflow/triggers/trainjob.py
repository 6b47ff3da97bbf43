"""The trigger of a deferred task that waits for its TrainJob."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from trainjob_airflow.stats import send_goodput
from trainjob_airflow.step import Step
from trainjob_airflow.training import KEY, Task, Training
from trainjob_airflow.triggers.base import STORES, WRITER, TaskTrigger, load
from trainjob_airflow.triggers.lines import Lines

if TYPE_CHECKING:
    from trainjob import Backend, JobRef

_TAIL = 200  # log lines of each rank from before this trigger started; after a restart they are logged again
_KILL = 25.0  # Airflow gives on_kill() 30 s ([triggerer] on_kill_timeout)


class TrainJobTrigger(TaskTrigger):
    """Waits for the end of one TrainJob, and ends it if the task fails before. Yields one event and never raises.

    If the job is gone or was given up, and another attempt of its key counts, the trigger waits for that one.

    The event's payload is what `Step.outcome` returns, ``result`` or ``error`` and ``page``, with the identity of the
    attempt that counts: ``{"job": [namespace, name, UID, attempt], "followed": …, "key": …, "resumed": …}``.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        job: Namespace, name, UID and attempt of the job; another job with the same name is not watched.
        key: Key of the job, for a kill and for the worker that continues the task.
        policy: Fields of the `StepPolicy`: what becomes of the job if the task fails before it has ended.
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
        job: list[Any],
        key: str,
        policy: dict[str, Any],
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
        self.job = job
        self.key = key
        self.policy = policy
        self.wait_options = WaitOptions.from_json(wait_options)
        self.get_logs = get_logs
        self.resumed = resumed
        self.stored = stored
        self._step: Step | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            *("trainjob_conn_id", "job", "key", "policy", "deadline", "on_kill_action", "get_logs"),
            *("resumed", "target", "stored"),
        )
        arguments = {name: getattr(self, name) for name in names} | self.wait_options.as_json()
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    def identity(self) -> dict[str, Any]:
        """The attempt that counts."""
        ref = self._ref()
        job = [ref.namespace, ref.name, ref.uid, ref.attempt]
        return {"job": job, "followed": job != self.job, "key": self.key, "resumed": self.resumed}

    def launched(self) -> str:
        """The attempt that counts."""
        return f"TrainJob {self._ref()}"

    async def outcome(self) -> dict[str, Any]:
        """Wait for the end of the job."""
        await asyncio.to_thread(load)
        from trainjob._jobs.steps import StepPolicy

        training, lines = self._training(), Lines(self.log)
        step = self._step = Step(
            self._ref(), self.key, self.wait_options, StepPolicy(**self.policy), lines,
            get_logs=self.get_logs, training=training, tail=_TAIL,
        )  # fmt: skip
        stored = training if self.task_instance is not None and STORES else None
        if stored is not None:
            step.on_change = lambda: WRITER.add(stored)
            step.earlier = lambda: _stored(stored)
        try:
            return await self.connected(lambda backend: step.outcome(backend, self.seconds_left()))
        finally:
            if stored is not None:
                WRITER.discard(stored)
                await WRITER.until_written(stored)
            await lines.written()

    def _training(self) -> Training | None:
        """What this task stores about the job; None if it stores nothing."""
        if self.stored is None:
            return None
        ti = self.task_instance  # None in `dag.test()`; the worker stores the task
        task = Task(self.trainjob_conn_id, 0, "", "", "", -1) if ti is None else Task.of(ti, self.trainjob_conn_id)
        return Training(self._ref(), task, key=self.key, phase=self.stored)

    async def cancel(self, backend: Backend) -> str:
        """Cancel or suspend all attempts of the key, unless a later try has adopted the job: a kill may arrive late."""
        from trainjob._jobs.steps import stop
        from trainjob._manifest.attempts import stops_by, try_of

        ref, tried = self._ref(), self.policy["tried"]
        present = await backend.get(ref.namespace, ref.name)
        if present is not None and try_of(present) > tried:
            return f"{self.launched()} keeps running: try {try_of(present)} has adopted it"
        action, training = stops_by(self.on_kill_action), self._step.training if self._step is not None else None
        history = None if training is None else training.history
        stopped = await stop(
            backend, self.key, action, _KILL, namespace=ref.namespace, tried=tried, ref=ref, history=history
        )
        if stopped.spent is not None and self.task_instance is not None:
            send_goodput(self.task_instance, stopped.spent.summary())
        return f"{self.launched()} {'has ended' if stopped.ended else 'is terminating'} ({action})"

    def _ref(self) -> JobRef:
        from trainjob import JobRef

        return self._step.ref if self._step is not None else JobRef(*self.job)


async def _stored(training: Training) -> Mapping[str, Any]:
    """What earlier tries have stored; nothing for a first attempt, of which many may end at once."""
    from airflow.providers.common.compat.sdk import XCom
    from asgiref.sync import sync_to_async

    if training.ref.attempt <= 1:
        return {}
    stored: object = None
    with suppress(Exception):  # of Airflow: the page of this attempt is then made without them
        stored = await sync_to_async(XCom.get_one)(key=KEY, **training.task.place)
    return stored if isinstance(stored, Mapping) else {}
