"""Reads running jobs and studies for their pages, once for all viewers of this API server process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow.models.connection import Connection
from airflow.models.dag import DagModel
from airflow.providers.common.compat.sdk import AirflowNotFoundException, conf

from trainjob import Backend, NotFound, TrainJobError, connect
from trainjob._jobs.waiting import preload
from trainjob._pages.live import LiveReader
from trainjob._pages.study import document_of_study, find_study
from trainjob.job import key_hash
from trainjob.tuning.journal import journal_location
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook
from trainjob_airflow.web.stored import Place

_log = logging.getLogger(__name__)

_SECONDS = 3.0  # of one read
_LINES = 200
_IDLE = 60.0  # after which a connection is closed
_STUDY_SECONDS = 5.0  # between two reads of a study: one of 1,000 trials has 2,000 files
_STUDIES = 100  # in memory


class Unavailable(Exception):
    """The job cannot be read; the message is shown on the page and contains no address and no secret."""


class _ServerHook(TrainJobHook):
    """Looks connections up in the API server, where the Task SDK has no supervisor.

    Args:
        conn_id: The connection.
        dag_id: The DAG that uses it; with several teams, it may only use connections of its team.
    """

    def __init__(self, conn_id: str, dag_id: str) -> None:
        super().__init__(conn_id)
        self._dag_id = dag_id

    def settings(self) -> Target:
        """The settings of the connection. Blocks."""
        preload()
        return self._resolve()

    def _look_up(self) -> Any:
        team = conf.getboolean("core", "multi_team", fallback=False)  # Airflow 3.2
        of_team = {"team_name": DagModel.get_team_name(self._dag_id)} if team else {}
        return Connection.get_connection_from_secrets(self.trainjob_conn_id, **of_team)


@dataclass
class _Open:
    """A backend with its reader, in use."""

    backend: Backend
    reader: LiveReader
    used: float


class LiveJobs:
    """The jobs that are read, on one event loop. Backends stay open for a minute after their last use."""

    def __init__(self) -> None:
        self._open: dict[Target, _Open] = {}
        self._closing: asyncio.Task[None] | None = None

    async def document(self, stored: Mapping[str, Any], place: Place, rank: str, *, logs: bool) -> dict[str, Any]:
        """The document of the job that a task waits for.

        Args:
            stored: What the task has stored.
            place: The task instance, to which the job must belong.
            rank: Show log lines of this rank only; empty: of failed ranks and rank 0.
            logs: Whether to read log lines.

        Raises:
            Unavailable: The job cannot be read from here, or it is another one.
        """
        try:
            async with asyncio.timeout(_SECONDS):
                reader = await self._reader(str(stored["airflow"]["conn_id"]), place.dag_id)
                namespace, name, tail = str(stored["namespace"]), str(stored["name"]), _LINES if logs else 0
                document = await reader.document(namespace, name, rank=rank, tail=tail, task=place.task_id)
        except TimeoutError:
            raise Unavailable(f"it did not answer within {_SECONDS:.0f} s") from None
        except NotFound:
            raise Unavailable("it was deleted, or it runs on another machine") from None
        except (TrainJobError, AirflowNotFoundException, KeyError, TypeError) as error:
            _log.info("the job of %s cannot be read: %s", place, error)
            raise Unavailable(f"{type(error).__name__}, see the log of the API server") from None
        except Exception as error:  # noqa: BLE001 - of a user's secrets backend: the page shows what is stored
            _log.exception("the job of %s cannot be read", place)
            raise Unavailable(f"{type(error).__name__}, see the log of the API server") from None
        # Everyone who may write XComs can name any job there. The key is an annotation of the job.
        if document["uid"] != stored["uid"]:
            raise Unavailable("it was deleted, and another job has its name")
        if not _is_key_of(str(document["key"]), place):
            raise Unavailable("it belongs to another task")
        return document

    async def _reader(self, conn_id: str, dag_id: str) -> LiveReader:
        target = await asyncio.to_thread(_ServerHook(conn_id, dag_id).settings)
        found = self._open.get(target)
        if found is None:
            backend = connect(target.backend, credentials=target.credentials)
            found = self._open[target] = _Open(backend, LiveReader(backend), 0.0)
        found.used = time.monotonic()
        if self._closing is None or self._closing.done():
            self._closing = asyncio.create_task(self._close_idle())
        return found.reader

    async def _close_idle(self) -> None:
        while self._open:
            await asyncio.sleep(_IDLE / 4)
            idle = [target for target, each in self._open.items() if time.monotonic() - each.used > _IDLE]
            for target in idle:
                await self._open.pop(target).backend.aclose()

    async def aclose(self) -> None:
        """Close all backends."""
        if self._closing is not None:
            self._closing.cancel()
        while self._open:
            await self._open.popitem()[1].backend.aclose()


class LiveStudies:
    """The studies whose journals are in the workspace of this API server; each is read at most once in 5 s."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, asyncio.Task[dict[str, Any] | None]]] = {}

    async def document(self, stored: Mapping[str, Any], place: Place) -> dict[str, Any]:
        """The document of the study of a task, from its journal.

        Only the workspace of this server is read: everyone who may write XComs can name any location there.

        Args:
            stored: What the task has stored.
            place: The task instance, to which the study must belong.

        Raises:
            Unavailable: The journal cannot be read from here.
        """
        key = str(stored["key"])
        if not _is_key_of(key, place):
            raise Unavailable("the key of the study was set by the argument key")
        hashed = key_hash(key)
        try:
            if stored["airflow"]["journal"] != journal_location(hashed):
                raise Unavailable("its journal is not in the workspace of the API server (TRAINJOB_WORKSPACE)")
            read_at, task = self._read.get(key, (0.0, None))
            if task is None or (task.done() and time.monotonic() - read_at > _STUDY_SECONDS):
                task = asyncio.create_task(asyncio.to_thread(_study, hashed))
                self._read.pop(key, None)
                self._read[key] = (time.monotonic(), task)
                if len(self._read) > _STUDIES:
                    del self._read[next(iter(self._read))]
            async with asyncio.timeout(_SECONDS):
                document = await asyncio.shield(task)
        except TimeoutError:
            raise Unavailable(f"the workspace did not answer within {_SECONDS:.0f} s") from None
        except (TrainJobError, KeyError, TypeError) as error:
            _log.info("the study of %s cannot be read: %s", place, error)
            raise Unavailable(f"{type(error).__name__}, see the log of the API server") from None
        if document is None:
            raise Unavailable("the journal was removed, or it is on another machine")
        return document


def _study(hashed: str) -> dict[str, Any] | None:
    state = find_study(hashed)
    return None if state is None else document_of_study(state, importances=False)


def _is_key_of(key: str, place: Place) -> bool:
    """Whether a task launched the job of this key: ``airflow/<deployment>/<dag>/<run>/<index>[/<loop>]/<task>``."""
    begin, end = f"/{place.dag_id}/{place.run_id}/{place.map_index}/", f"/{place.task_id}"
    return key.startswith("airflow/") and begin in key and key.endswith(end)
