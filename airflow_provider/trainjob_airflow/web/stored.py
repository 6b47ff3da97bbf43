"""What tasks have stored about their trainings, in Airflow's database. All functions block."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeGuard

from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from airflow.providers.common.compat.sdk import XCom, conf
from airflow.utils.session import create_session
from sqlalchemy import Text, cast, select

from trainjob import JobRef, Observation, Phase
from trainjob._pages.documents import VERSION
from trainjob._pages.documents.training import observed_document
from trainjob._pages.study import document_of_study
from trainjob._support.foreign import Limits, Unreadable, json_of
from trainjob._support.formats import wrong_format
from trainjob._support.kube_objects import mapping
from trainjob.tuning import StudyState
from trainjob_airflow.training import KEY

_log = logging.getLogger(__name__)

RUNS = 20
"""Earlier runs that are searched for a training to compare with."""
_TRAININGS = 64  # of one run
_SIBLINGS = 100
_PROMOTED = 20  # return values that may be of an export
_LIMITS = Limits(16 << 20, values=500_000, finite=False, of="an XCom")
# As text: where the driver of the database decodes values, one that is nested too deeply ends the query for all.
_VALUE = cast(XComModel.value, Text)
_ACTIVE = ("running", "deferred")
_WAITING = ("", "None", "scheduled", "queued", "up_for_retry", "up_for_reschedule", "restarting")


@dataclass(frozen=True)
class Place:
    """A task instance.

    Attributes:
        dag_id: Its DAG.
        run_id: Its DAG run.
        task_id: Its task.
        map_index: Its map index; -1 if it is not mapped.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1


@dataclass(frozen=True)
class Stored:
    """A task instance and the document that it has stored.

    Attributes:
        place: The task instance.
        state: Its state in Airflow.
        try_number: Its latest try.
        document: The document; None if it has stored none.
        unreadable: Why the document cannot be read; empty if it can.
    """

    place: Place
    state: str
    try_number: int
    document: dict[str, Any] | None = None
    unreadable: str = ""

    @property
    def active(self) -> bool:
        """Whether a worker or a trigger waits for the job."""
        return self.state in _ACTIVE

    @property
    def unfinished(self) -> bool:
        """Whether the task runs or will run."""
        return self.active or self.state in _WAITING


@dataclass(frozen=True)
class Related:
    """What other tasks have stored that a page of a training shows.

    Attributes:
        compared: Label -> task instance and document, such as the ``previous run``.
        outputs: Outputs that the other tasks of the run returned.
    """

    compared: Mapping[str, tuple[Place, dict[str, Any]]] = field(default_factory=dict)
    outputs: tuple[dict[str, Any], ...] = ()


def training(place: Place) -> Stored | None:
    """The task instance with its document; None if it does not exist."""
    with create_session() as session:
        found = session.execute(
            select(TaskInstance.state, TaskInstance.try_number).where(
                TaskInstance.dag_id == place.dag_id,
                TaskInstance.run_id == place.run_id,
                TaskInstance.task_id == place.task_id,
                TaskInstance.map_index == place.map_index,
            )
        ).first()
        if found is None:
            return None
        value = session.scalar(
            select(_VALUE).where(
                XComModel.dag_id == place.dag_id,
                XComModel.run_id == place.run_id,
                XComModel.task_id == place.task_id,
                XComModel.map_index == place.map_index,
                XComModel.key == KEY,
            )
        )
    document, unreadable = _document(value)
    return Stored(place, str(found[0] or ""), found[1] or 0, document, unreadable)


def trainings(dag_id: str, run_id: str) -> tuple[list[tuple[Place, dict[str, Any]]], bool] | None:
    """The documents of a run, and whether it has more than are read; None if the run does not exist."""
    with create_session() as session:
        if session.scalar(select(DagRun.id).where(DagRun.dag_id == dag_id, DagRun.run_id == run_id)) is None:
            return None
        rows = session.execute(
            select(XComModel.task_id, XComModel.map_index, _VALUE)
            .where(XComModel.dag_id == dag_id, XComModel.run_id == run_id, XComModel.key == KEY)
            .order_by(XComModel.timestamp, XComModel.task_id, XComModel.map_index)
            .limit(_TRAININGS + 1)
        ).all()
    found = [(Place(dag_id, run_id, task, index), _document(value)[0]) for task, index, value in rows[:_TRAININGS]]
    return [(place, document) for place, document in found if _is_training(document)], len(rows) > _TRAININGS


def related(place: Place) -> Related:
    """What the page of a training shows of other tasks: bounded, by at most five queries."""
    with create_session() as session:
        started = session.scalar(
            select(DagRun.run_after).where(DagRun.dag_id == place.dag_id, DagRun.run_id == place.run_id)
        )
        siblings = session.scalars(
            select(_VALUE)
            .where(
                XComModel.dag_id == place.dag_id,
                XComModel.run_id == place.run_id,
                XComModel.key == "return_value",
                _VALUE.like("%outputs%"),
            )
            .limit(_SIBLINGS)
        ).all()
        compared = dict(_compared(session, place, started)) if started is not None else {}
    outputs = tuple(found for value in siblings if (found := _outputs(value)))
    return Related(compared, outputs)


def _compared(session: Any, place: Place, started: datetime) -> Iterator[tuple[str, tuple[Place, dict[str, Any]]]]:
    earlier = (
        select(DagRun.run_id)
        .where(DagRun.dag_id == place.dag_id, DagRun.run_after < started)
        .order_by(DagRun.run_after.desc())
        .limit(RUNS)
        .subquery()
    )
    joined = select(DagRun.run_id, _VALUE).join(
        XComModel, (XComModel.dag_id == DagRun.dag_id) & (XComModel.run_id == DagRun.run_id)
    )
    of_runs = joined.where(DagRun.dag_id == place.dag_id).order_by(DagRun.run_after.desc())
    documents = of_runs.where(
        XComModel.task_id == place.task_id, XComModel.map_index == place.map_index, XComModel.key == KEY
    )

    def found(query: Any) -> tuple[Place, dict[str, Any]] | None:
        row = session.execute(query.limit(1)).first()
        document = _document(row[1])[0] if row is not None else None
        if not _is_training(document):
            return None
        return Place(place.dag_id, row[0], place.task_id, place.map_index), document

    recent = DagRun.run_id.in_(select(earlier.c.run_id))
    if previous := found(documents.where(recent)):
        yield "previous run" if place.map_index < 0 else f"previous run, index {place.map_index}", previous
    values = session.execute(
        of_runs.where(recent, XComModel.key == "return_value", _VALUE.like("%promoted%")).limit(_PROMOTED)
    ).all()
    promoting = next((run_id for run_id, value in values if _outputs(value).get("promoted") is True), None)
    if promoting is not None and (champion := found(documents.where(DagRun.run_id == promoting))):
        yield "champion", champion


def _is_training(document: dict[str, Any] | None) -> TypeGuard[dict[str, Any]]:
    return document is not None and document["kind"] == "training"


def _outputs(text: str) -> dict[str, Any]:
    try:
        return dict(mapping(_decoded(text)[1], "outputs"))
    except Unreadable:
        return {}


def _document(text: str | None) -> tuple[dict[str, Any] | None, str]:
    """The document in the value of an XCom, and why it cannot be read."""
    if text is None:
        return None, ""
    try:
        value, loaded = _decoded(text)
    except Unreadable as error:
        return None, f"{error}."
    if isinstance(loaded, str) and _may_call_backend():  # a custom XCom backend stores a reference in the database
        try:
            loaded = XCom.deserialize_value(SimpleNamespace(value=value, key=KEY))
        except Exception as error:  # noqa: BLE001 - any error of the user's backend
            _log.warning("the XCom backend cannot read %s", KEY, exc_info=True)
            return None, f"The XCom backend cannot read it: {type(error).__name__}, see the log of the API server."
    if document := _valid(loaded):
        problem = wrong_format(f"The document of the XCom {KEY}", document.get("version"), VERSION)
        return (None, f"{problem}.") if problem else (document, "")
    if isinstance(loaded, str):
        return (
            None,
            "The XCom backend stores it elsewhere. Set [trainjob] xcom_backend_in_api_server = True to show it.",
        )
    return None, "" if value is None else f"The XCom {KEY} has another format."


def _valid(loaded: Any) -> dict[str, Any] | None:
    """The document with all keys; None if it is none. Everyone who may write XComs can have changed it."""
    kind = loaded.get("kind") if isinstance(loaded, Mapping) else None
    if not isinstance(loaded, Mapping) or kind not in _NEEDED:
        return None
    if not all(isinstance(loaded.get(name), str) and loaded[name] for name in _NEEDED[kind]):
        return None
    empty = _empty() if kind == "training" else _empty_study()
    parts = {
        name: value
        for name, value in loaded.items()
        if not isinstance(empty.get(name), dict | list | str) or isinstance(value, type(empty[name]))
    }
    return {**empty, **parts}


_NEEDED = {"training": ("namespace", "name", "uid", "phase"), "study": ("namespace", "key", "metric", "state")}
"""Kind of a document -> what is never empty."""


@cache
def _empty_study() -> dict[str, Any]:
    """A document of a study with all keys."""
    fields = {"metric": "value", "direction": "minimize", "space": {}}
    return document_of_study(StudyState("", "", fields, ()), importances=False)


@cache
def _empty() -> dict[str, Any]:
    """A document with all keys: a stored one may lack those that were added within its version."""
    return observed_document(JobRef("", "", ""), Observation(Phase.NOT_STARTED), datetime.fromtimestamp(0, UTC))


def _may_call_backend() -> bool:
    """Whether the API server may deserialize XComs: that can create objects of classes that a DAG author chose."""
    return bool(conf.getboolean("trainjob", "xcom_backend_in_api_server", fallback=False))


def _decoded(text: str) -> tuple[Any, Any]:
    """The value of an XCom as it is stored, and without objects: Airflow 3.0 stores JSON as text.

    Raises:
        Unreadable: The value exceeds a limit.
    """
    value = json_of(text, f"The XCom {KEY}", _LIMITS)
    if not isinstance(value, str):
        return value, value
    with suppress(Unreadable):
        return value, json_of(value, f"The XCom {KEY}", _LIMITS)
    return value, value
