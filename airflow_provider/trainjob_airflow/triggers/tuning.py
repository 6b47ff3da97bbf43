"""The trigger of hyperparameter searches: all studies of a triggerer share one watch of their trials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from trainjob_airflow.running_study import launching
from trainjob_airflow.study import StudyPage
from trainjob_airflow.tasklog import StudyLog
from trainjob_airflow.training import Task
from trainjob_airflow.triggers.base import STORES, WRITER, TaskTrigger, load

if TYPE_CHECKING:
    from trainjob import Backend, TrainJobSpec
    from trainjob.tuning import Study, Trial


class TrainJobStudyTrigger(TaskTrigger):
    """Runs a study: asks for parameters, launches trials, prunes them and records their outcomes.

    The state of the study is its journal. So a triggerer that starts the same trigger continues with the same trials.

    The event's payload has ``namespace``, ``key`` and ``resumed``, and ``result``, as
    `trainjob.tuning.StudyResult.summary` returns it, or ``error``: the study has failed, it could not be continued, or
    ``execution_timeout`` expired; trials may still be running.

    Args:
        trainjob_conn_id: Connection, which the triggerer looks up if `target` is left out.
        namespace: Namespace of the trials.
        key: Key of the study.
        journal: Location of the journal.
        study: Fields of the study.
        template: Fields of the spec of the trials.
        origin: Labels of the trials' jobs.
        deadline: ISO 8601 time in UTC at which the task's ``execution_timeout`` expires; None: no limit.
        on_kill_action: ``cancel`` or ``keep``: action on the running trials when a person kills the task.
        resumed: How often the task was deferred again after an error.
        target: Settings of the connection, if they hold no secret: the result of `TrainJobHook.target`.
        stored: Whether the task stores a document of the study.
        **wait_options: The waiting options of a trial, as `trainjob.WaitOptions.as_json` returns them.
    """

    def __init__(
        self,
        *,
        trainjob_conn_id: str,
        namespace: str,
        key: str,
        journal: str,
        study: dict[str, Any],
        template: dict[str, Any],
        origin: dict[str, str],
        deadline: str | None = None,
        on_kill_action: str = "cancel",
        resumed: int = 0,
        target: dict[str, Any] | None = None,
        stored: bool = True,
        **wait_options: Any,
    ) -> None:
        from trainjob import WaitOptions  # here, so that an import of this module does not import `trainjob`

        super().__init__(
            trainjob_conn_id=trainjob_conn_id, deadline=deadline, on_kill_action=on_kill_action, target=target
        )
        self.namespace = namespace
        self.key = key
        self.journal = journal
        self.study = study
        self.template = template
        self.origin = origin
        self.wait_options = WaitOptions.from_json(wait_options)
        self.resumed = resumed
        self.stored = stored
        self._page: StudyPage | None = None
        self._launching: frozenset[int] = frozenset()

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            *("trainjob_conn_id", "namespace", "key", "journal", "study", "template", "origin"),
            *("deadline", "on_kill_action", "resumed", "target", "stored"),
        )
        arguments = {name: getattr(self, name) for name in names} | self.wait_options.as_json()
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    def identity(self) -> dict[str, Any]:
        """The study."""
        return {"namespace": self.namespace, "key": self.key, "resumed": self.resumed}

    def launched(self) -> str:
        """The study."""
        return f"study {self.key}"

    async def outcome(self) -> dict[str, Any]:
        """Run the study until it ends."""
        await asyncio.to_thread(load)
        event = await self.connected(self._tune)
        if self._page is not None:
            await WRITER.until_written(self._page)
        return event

    def _parsed(self) -> tuple[Study, TrainJobSpec]:
        from trainjob import TrainJobSpec
        from trainjob.tuning import Study

        return Study.read(self.study), TrainJobSpec.parse(self.template)

    def _page_of(self, study: Study) -> StudyPage | None:
        """What this trigger stores about the study; None if it stores nothing, as before Airflow 3.3."""
        if not self.stored or self.task_instance is None or not STORES:
            return None
        task = Task.of(self.task_instance, self.trainjob_conn_id)
        return StudyPage(task, study, key=self.key, namespace=self.namespace, journal=self.journal)

    async def _tune(self, backend: Backend) -> dict[str, Any]:
        from trainjob._jobs.waiting import within
        from trainjob.tuning import tune

        study, template = await asyncio.to_thread(self._parsed)
        log, page = StudyLog(self.log, study.metric), self._page_of(study)
        self._page = page

        def on_change(trials: Sequence[Trial]) -> None:
            log.change(trials)
            self._launching = launching(trials)
            if page is not None:
                page.observe(trials)
                WRITER.add(page)

        try:
            async with _opened(self.journal) as journal, within(self.seconds_left(), self.launched):
                result = await tune(
                    backend,
                    study,
                    template,
                    self.key,
                    journal,
                    namespace=self.namespace,
                    origin=self.origin,
                    options=self.wait_options,
                    on_change=on_change,
                )
        finally:
            if page is not None:
                WRITER.discard(page)
        return {"result": result.summary()}

    async def cancel(self, backend: Backend) -> str:
        """Cancel the running trials."""
        from trainjob.tuning import cancel_trials

        count = await cancel_trials(backend, self.key, namespace=self.namespace, launching=self._launching)
        return f"{count} trials of {self.launched()} are terminating"


@asynccontextmanager
async def _opened(location: str) -> AsyncIterator[Any]:
    """Open a journal: in threads, since stores block."""
    from trainjob.tuning.journal import open_journal

    stack = ExitStack()
    journal = await asyncio.to_thread(stack.enter_context, open_journal(location))
    try:
        yield journal
    finally:
        await asyncio.to_thread(stack.close)
