"""What a task stores about its training: the XCom `KEY`, from which Airflow's UI shows the training.

The document outlives the job and its pods. It is stored after the launch, when the phase changes, while metrics change
at most each 10 s (later each 5 % of the job's age, at most each 120 s), and at the end. Nothing is stored for a job
whose state does not change.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from trainjob import Diagnosis, Evidence, JobRef, Observation

_log = logging.getLogger(__name__)

KEY = "trainjob_training"
_ATTEMPTS = "trainjob_attempts"  # in Airflow's task state, which a new try does not clear
_FIRST, _SHARE, _LONGEST = 10.0, 0.05, 120.0
_POINTS = 512  # of one waiting job in memory: at most 25 KB
LIMIT = 100_000
"""Bytes of a document as JSON."""
_SIZES = ((1500, 100, 256), (700, 50, 128), (300, 20, 64), (100, 5, 16), (0, 0, 0))  # points, events, ranks
_EARLIER_POINTS = 500
_PAUSE = 1.0  # seconds between two calls of Airflow by all triggers of a process
_LAST_WRITE = 5.0


class Task(NamedTuple):
    """The task instance, in the document under ``airflow``: the page reads the job with it while the task runs."""

    conn_id: str
    try_number: int
    dag_id: str
    run_id: str
    task_id: str
    map_index: int

    @classmethod
    def of(cls, ti: Any, conn_id: str) -> Task:
        """The task of a task instance."""
        index = -1 if ti.map_index is None else ti.map_index
        return cls(conn_id, ti.try_number, ti.dag_id, ti.run_id, ti.task_id, index)

    @property
    def place(self) -> dict[str, Any]:
        """Arguments that identify the task instance in calls of `XCom`."""
        return {name: getattr(self, name) for name in ("dag_id", "run_id", "task_id", "map_index")}


class Training:
    """A job as its waiter observes it, and when its document is due.

    Args:
        ref: The job.
        task: The task instance.
        key: Key of the job; empty if it is unknown.
        phase: Phase in the document that is stored already; empty if it is unknown.
    """

    __slots__ = (
        "_now",
        "_since",
        "_stored",
        "due",
        "history",
        "key",
        "observation",
        "phase",
        "ref",
        "stores_metrics",
        "task",
    )

    def __init__(self, ref: JobRef, task: Task, key: str = "", phase: str = "") -> None:
        from trainjob._goodput.history import MetricHistory

        self.ref = ref
        self.task = task
        self.key = key
        self.phase = phase
        self.history = MetricHistory(_POINTS)
        self.observation: Observation | None = None
        self.stores_metrics = True
        self.due: float | None = None  # monotonic time
        self._since = self._stored = time.monotonic()

    def observe(self, observation: Observation, now: datetime) -> None:
        """Note an observation of the waiter, made at `now`, by `Backend.now`."""
        before, self.observation, self._now = self.observation, observation, now
        changed = self.history.observe(observation, now.timestamp())
        phase = str(observation.phase)
        if observation.phase.terminal or not (self.stores_metrics or phase != self.phase):
            self.due = None  # the end is stored by the worker, with ranks and diagnosis
        elif phase != self.phase:
            if self.phase:
                self.due = time.monotonic()
            else:
                self.phase = phase
        elif self.due is None and (changed or (before is not None and before.progress != observation.progress)):
            self.due = self._stored + self._interval(observation)

    def follow(self, ref: JobRef) -> None:
        """Continue with another attempt of the key. The next observation is stored at once."""
        from trainjob import Phase
        from trainjob._goodput.history import MetricHistory

        self.ref, self.observation, self.due = ref, None, None
        self.history, self.phase = MetricHistory(_POINTS), str(Phase.DELETED)

    def _interval(self, observation: Observation) -> float:
        age = time.monotonic() - self._since
        if observation.created is not None:
            age = max(age, (self._now - observation.created).total_seconds())
        return interval(age)

    def take(self) -> dict[str, Any] | None:
        """The current document, which is then no longer due; None before the first observation."""
        from trainjob._pages.documents.training import observed_document

        self.due, observation = None, self.observation
        if observation is None:
            return None
        self._stored, self.phase = time.monotonic(), str(observation.phase)
        return observed_document(
            self.ref, observation, self._now, key=self.key, history=self.history, task=self.task.task_id
        )

    def complete(self, stored: object, document: dict[str, Any]) -> dict[str, Any]:
        """What to store: `document`, with what only the stored document has."""
        return _complete(stored if isinstance(stored, Mapping) else {}, document, self.task)

    def document_of(
        self,
        evidence: Evidence,
        now: datetime,
        earlier: Mapping[str, Any],
        diagnosis: Diagnosis | None = None,
        attempts: Sequence[Evidence] = (),
    ) -> dict[str, Any]:
        """The document of the job by its evidence, of bounded size.

        Args:
            evidence: Of the job.
            now: The current time, by `Backend.now`.
            earlier: What earlier tries have stored.
            diagnosis: Why the job failed; None if it did not.
            attempts: The attempts of the key that still exist.
        """
        from trainjob._jobs.report import examine
        from trainjob._pages.documents.training import training_document
        from trainjob.status import observe

        report = examine(self.ref, evidence, now, diagnosis)
        if self.observation is not None:  # what a waiter knows of a job that was deleted
            report = replace(report, observation=observe(evidence.trainjob, self.observation))
        self.observation, self._now = report.observation, now
        self.due, self._stored, self.phase = None, time.monotonic(), str(report.observation.phase)
        document = training_document(
            report,
            history=self.history,
            attempts=attempts,
            source="kept",
            task=self.task.task_id,
            histories={each["uid"]: each["history"] for each in earlier.get("attempts") or ()},
        )
        return bounded(document)


class TaskXCom:
    """The XCom `KEY` of a task in its worker. Only the main thread may use it.

    Args:
        ti: The task instance.
    """

    def __init__(self, ti: Any) -> None:
        self._ti = ti
        self._failed = False

    def push(self, document: Mapping[str, Any]) -> None:
        """Store a document."""
        with self.logged(), _no_timer():
            self._ti.xcom_push(key=KEY, value=document)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Log the first error: a document that is not stored does not fail the task."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - of Airflow, of its XCom backend
            if not self._failed:
                _log.warning("the page of the training cannot be stored: %s: %s", type(error).__name__, error)
            self._failed = True


class TaskTraining(Training):
    """The training of a task in its worker. Only the main thread stores: the connection to Airflow is not thread-safe.

    Args:
        context: Of the task.
        ref: The job.
        conn_id: The task's connection.
        key: Key of the job.
    """

    __slots__ = ("_document", "_state", "_ti", "_xcom")

    def __init__(self, context: Context, ref: JobRef, conn_id: str, key: str) -> None:
        self._ti = context["ti"]
        self._xcom = TaskXCom(self._ti)
        super().__init__(ref, Task.of(self._ti, conn_id), key)
        self._state: Any = context.get("task_state_store")  # None before Airflow 3.3
        # Before, a write that fails because the API server cannot be reached ends the supervisor's handling of all
        # requests of the task (`WatchedSubprocess.handle_requests` catches only `ServerResponseError`).
        self.stores_metrics = self._state is not None
        self._document: Mapping[str, Any] = {}

    def begin(self, evidence: Evidence, now: datetime) -> None:
        """Store the first document of a try, from the TrainJob alone."""
        with self._xcom.logged():
            earlier = self._state.get(_ATTEMPTS) if self._state is not None else None
            self._document = earlier if isinstance(earlier, Mapping) else {}
            self._write(self.document_of(evidence, now, self._document))

    def resume(self) -> None:
        """Continue with what is stored, after the trigger's event."""
        with self._xcom.logged():
            stored = self._ti.xcom_pull(task_ids=self.task.task_id, key=KEY, map_indexes=self.task.map_index)
            self._document = stored if isinstance(stored, Mapping) else {}

    async def stored(self) -> Mapping[str, Any]:
        """What earlier tries have stored."""
        return self._document

    def store(self) -> None:
        """Store the latest observation and the collected metrics."""
        document = self.take()
        if document is not None:
            self._write(document)

    def end(self, document: Mapping[str, Any] | None) -> None:
        """Store the last document of a try; only what the next try needs of the stored one if it is None."""
        if document is not None:
            # What a try stored of its attempt stays: the pods and logs of an ended job may be gone.
            kept = self._document.get("attempts") or ()
            ended = {each["uid"] for each in kept if each["finished"] and each["uid"] != document["uid"]}
            attempts = [each for each in document["attempts"] if each["uid"] not in ended]
            self._write({**document, "notes": _unread(document, kept), "attempts": attempts})
        if self._state is not None and self._document:
            with self._xcom.logged():
                self._state.set(_ATTEMPTS, _compact(self._document))

    def _write(self, document: dict[str, Any]) -> None:
        with self._xcom.logged():
            self._document = self.complete(self._document, document)
            self._xcom.push(self._document)


def _unread(document: Mapping[str, Any], kept: Sequence[Mapping[str, Any]]) -> list[str]:
    """A note about earlier attempts that could not be measured together with the latest one of a document."""
    read = {each["uid"]: each["attempt"] for each in document["attempts"]}
    earlier = [each for each in kept if each["attempt"] < read.get(document["uid"], 0)]
    complete = [i for i, each in enumerate(earlier) if each["phase"] == "Complete"]  # of earlier work
    unread = [each["name"] for each in earlier[complete[-1] + 1 if complete else 0 :] if each["uid"] not in read]
    if not unread:
        return []
    why = f"earlier attempts were deleted or could not be read ({', '.join(unread)})"
    return [f"{why}: steps that were repeated after them count as training"]


class Page(Protocol):
    """What a trigger stores about its job or study, and when that is due."""

    due: float | None
    task: Task

    def take(self) -> Any:
        """The current state, which is then no longer due; None if there is none yet."""

    def complete(self, stored: object, document: Any) -> dict[str, Any]:
        """What to store: the state that `take` returned, with what only the stored document has. Called in a thread."""


class Writer:
    """Stores the documents of all triggers of a process: at most one call of Airflow per second."""

    def __init__(self) -> None:
        self._waiting: set[Page] = set()
        self._current: Page | None = None
        self._running: asyncio.Task[None] | None = None
        self._failed = False

    def add(self, page: Page) -> None:
        """Store the document of a page when it is due."""
        if page.due is None:
            return
        self._waiting.add(page)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    def discard(self, page: Page) -> None:
        """Store nothing more of a page: the worker stores its end."""
        self._waiting.discard(page)
        page.due = None

    async def until_written(self, page: Page) -> None:
        """Wait for a call in progress, at most 5 s, so that it does not overwrite what the worker stores."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WRITE):
                while self._current is page:
                    await asyncio.sleep(0.05)

    async def _run(self) -> None:
        while self._waiting:
            now = time.monotonic()
            due = [(each.due, each) for each in self._waiting if each.due is not None and each.due <= now]
            if due:
                self._current = min(due, key=lambda each: each[0])[1]
                self._waiting.discard(self._current)
                try:
                    await self._write(self._current)
                except Exception as error:  # noqa: BLE001 - of Airflow: it must not fail a trigger
                    if not self._failed:
                        _log.warning("pages of trainings cannot be stored: %s: %s", type(error).__name__, error)
                    self._failed = True
                finally:
                    self._current = None
            await asyncio.sleep(_PAUSE)

    async def _write(self, page: Page) -> None:
        """Complete what is stored: another triggerer may have stored it, and memory holds no history twice."""
        from airflow.providers.common.compat.sdk import XCom
        from asgiref.sync import sync_to_async

        place = page.task.place
        stored = await sync_to_async(XCom.get_one)(key=KEY, **place)
        await asyncio.sleep(_PAUSE)
        document = page.take()
        if document is not None:

            def write() -> None:
                XCom.set(key=KEY, value=page.complete(stored, document), **place)

            await sync_to_async(write)()


def interval(age: float) -> float:
    """Seconds between two documents of a job or study of this age."""
    return min(_LONGEST, max(_FIRST, _SHARE * age))


def _complete(stored: Mapping[str, Any], document: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The document with what only the stored one has, of bounded size."""
    from trainjob._pages.documents.merging import merge_documents

    return bounded({**merge_documents(stored, document), "airflow": task._asdict()})


def bounded(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document with at most 100 KB of JSON: without log lines, and with fewer points, events and ranks."""
    import json

    made: dict[str, Any] = {}
    for points, events, ranks in _SIZES:
        made = _sized(document, points, events, ranks)
        if len(json.dumps(made)) <= LIMIT:
            break
    return made


def _sized(document: Mapping[str, Any], points: int, events: int, ranks: int) -> dict[str, Any]:
    from trainjob._pages.documents.attempts import with_segments

    attempts, every = document["attempts"], document["ranks"]
    share = min(points, _EARLIER_POINTS) // max(1, len(attempts))
    important = sorted(every, key=lambda rank: not (rank["culprit"] or rank["bad"]))[:ranks]
    hidden = len(every) - len(important)
    return {
        **document,
        "logs": [],
        "history": _thinned(document["history"], points),
        "attempts": [
            each
            | {"history": _thinned(each["history"], share)}
            | ({"goodput": with_segments(each["goodput"], share // 10)} if each.get("goodput") else {})
            for each in attempts
        ],
        "events": document["events"][-events:] if events else [],
        "ranks": [rank for rank in every if rank in important] if hidden else every,
        "unseen": [*document["unseen"], *([f"{hidden} more ranks"] if hidden else [])],
    }


def _compact(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the next try needs of a document: its attempts with thinned histories."""
    return {
        "uid": document["uid"],
        "history": _thinned(document["history"], _EARLIER_POINTS // 2),
        "attempts": document["attempts"],
    }


def _thinned(points: object, limit: int) -> dict[str, Any]:
    from trainjob._goodput.history import MetricHistory

    return MetricHistory.of(points).points(limit) if points and limit else {}


@contextmanager
def _no_timer() -> Iterator[None]:
    """Delay the timer of ``execution_timeout``: an exception during a call of Airflow leaves its reply unread."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    begun = time.monotonic()
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - begun)))
