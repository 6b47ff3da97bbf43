"""What a task stores about its study: the XCom `trainjob_airflow.training.KEY`, as a task stores a training.

The document is stored at the begin, while trials change at most each 10 s (later each 5 % of the study's age, at most
each 120 s), and at the end. The journal of the study has everything else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainjob_airflow.training import LIMIT, Task, TaskXCom, interval

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob.tuning import Study, StudyState, Trial

_SIZES = ((256, 2000), (50, 500), (10, 250), (4, 100), (0, 50), (0, 10))  # values of a trial, trials


class StudyPage:
    """A study as its launcher observes it, and when its document is due.

    Args:
        task: The task instance.
        study: What is searched.
        key: Key of the study.
        namespace: Namespace of the trials.
        journal: Location of the journal.
    """

    def __init__(self, task: Task, study: Study, *, key: str, namespace: str, journal: str) -> None:
        self.task = task
        self.key = key
        self.namespace = namespace
        self.journal = journal
        self.stores_changes = True
        self.due: float | None = None  # monotonic time
        self._study = study
        self._trials: Sequence[Trial] = ()
        self._since = self._stored = time.monotonic()

    def observe(self, trials: Sequence[Trial]) -> None:
        """Note the trials after a change."""
        self._trials = trials
        if self.due is None and self.stores_changes:
            self.due = self._stored + interval(time.monotonic() - self._since)

    def take(self) -> Sequence[Trial] | None:
        """The trials, which are then no longer due."""
        self.due, self._stored = None, time.monotonic()
        return self._trials

    def complete(self, stored: object, document: Sequence[Trial]) -> dict[str, Any]:
        """What to store; the stored document has nothing that the trials lack."""
        del stored
        return self._made(self._state(document), {})

    def _state(self, trials: Sequence[Trial]) -> StudyState:
        from trainjob.tuning import StudyState

        fields = self._study.model_dump(mode="json")
        return StudyState(self.key, self.namespace, fields, trials)

    def _made(self, state: StudyState, importances: Mapping[str, float]) -> dict[str, Any]:
        from trainjob._pages.study import document_of_study

        document = bounded(document_of_study(state, importances=False))
        document["importances"] = dict(importances)
        return {**document, "airflow": {**self.task._asdict(), "journal": self.journal}}


class TaskStudy(StudyPage):
    """The study of a task in its worker. Only the main thread stores: the connection to Airflow is not thread-safe.

    Args:
        context: Of the task.
        conn_id: The task's connection.
        study: What is searched.
        **where: ``key``, ``namespace`` and ``journal``, as in `StudyPage`.
    """

    def __init__(self, context: Context, conn_id: str, study: Study, **where: str) -> None:
        super().__init__(Task.of(context["ti"], conn_id), study, **where)
        self._xcom = TaskXCom(context["ti"])
        # As of a training: before Airflow 3.3 a write that fails ends the handling of the task's requests.
        self.stores_changes = context.get("task_state_store") is not None

    def store(self) -> None:
        """Store the trials as they were observed last."""
        with self._xcom.logged():
            self._xcom.push(self.complete(None, self.take() or ()))

    def end(self, state: StudyState | None, importances: Mapping[str, float]) -> None:
        """Store the last document of a try.

        Args:
            state: The study as its journal has it; None if it cannot be read.
            importances: Parameter -> its importance; empty if the study has failed.
        """
        with self._xcom.logged():
            made = self._state(self.take() or ()) if state is None else state
            self._xcom.push(self._made(made, importances))


def bounded(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with at most 100 KB of JSON: with fewer values of each trial, and fewer trials."""
    import json

    made = dict(document)
    for points, count in _SIZES:
        made = _sized(document, points, count)
        if len(json.dumps(made)) <= LIMIT:
            break
    return made


def _sized(document: Mapping[str, Any], points: int, count: int) -> dict[str, Any]:
    trials, notes = document["trials"], [*document["notes"]]
    if len(trials) > count:
        ended = [each for each in trials if each["state"] == "complete" and each["value"] is not None]
        ended.sort(key=lambda each: each["value"], reverse=document["direction"] == "maximize")
        kept = {each["number"] for each in (*ended[: count // 2], *trials[-(count // 2) :])}
        trials = [each for each in trials if each["number"] in kept]
        notes.append(
            f"{len(trials)} of {len(document['trials'])} trials are stored in Airflow: the best and the latest."
        )
    if any(len(each["values"]) > points for each in trials):
        notes.append(f"The values during a trial are thinned to {points} points: each n-th and the latest.")
    return {**document, "notes": notes, "trials": [{**each, "values": _values(each, points)} for each in trials]}


def _values(trial: Mapping[str, Any], limit: int) -> list[list[Any]]:
    values: list[list[Any]] = trial["values"]
    if len(values) <= limit:
        return values
    step = -(-len(values) // max(1, limit))
    return [*values[:-1:step], values[-1]][-limit:] if limit else []
