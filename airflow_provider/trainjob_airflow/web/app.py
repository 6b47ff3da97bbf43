"""The application of the pages: ``…/page`` is HTML and ``…/document`` the JSON document that it shows.

Airflow authenticates and authorizes each request. A viewer needs the permission to read task instances and XComs of the
DAG, and for log lines also that for task logs.
"""

from __future__ import annotations

import asyncio
import html
import logging
import time
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any
from urllib.parse import quote

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_dag
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as AnyHTTPException

from trainjob._pages.documents.additions import with_comparison, with_lineage
from trainjob._pages.documents.jobs import workflow_document
from trainjob._pages.documents.merging import merge_documents
from trainjob._pages.page import page_html
from trainjob_airflow.addresses import root
from trainjob_airflow.web import stored
from trainjob_airflow.web.live import LiveJobs, LiveStudies, Unavailable
from trainjob_airflow.web.stored import Place, Related, Stored

_log = logging.getLogger(__name__)

_SECONDS = 2  # between two reads of a page
_RUN_SECONDS = 10
_RELATED_SECONDS = 10.0  # age at which other tasks and runs are read again
_CACHED = 200  # task instances whose related trainings are in memory
_FINAL = ("Complete", "Failed", "Cancelled", "Deleted")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'self'",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}

_router = APIRouter()
_TASK = "/dags/{dag_id}/runs/{run_id}/tasks/{task_id}/{map_index}"
_RUN = "/dags/{dag_id}/runs/{run_id}"


@cache
def app() -> FastAPI:
    """The application, without documentation pages."""
    made = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    made.include_router(_router)
    made.add_exception_handler(AnyHTTPException, _error)
    made.state.live = LiveJobs()
    made.state.studies = LiveStudies()
    made.state.related = {}
    return made


def _may_read_logs(request: Request, user: GetUserDep) -> bool:
    """Authorize the viewer for the DAG of the path; return whether log lines may be shown, too.

    Raises:
        HTTPException: The viewer may not read task instances or XComs of the DAG (403).
    """
    for entity in (DagAccessEntity.TASK_INSTANCE, DagAccessEntity.XCOM):
        requires_access_dag("GET", entity)(request, user)
    try:
        requires_access_dag("GET", DagAccessEntity.TASK_LOGS)(request, user)
    except HTTPException:
        return False
    return True


def _place(dag_id: str, run_id: str, task_id: str, map_index: str) -> Place:
    """The task instance of an address. Airflow leaves the placeholder of the map index if the task is not mapped."""
    index = int(map_index) if map_index.isdecimal() and len(map_index) < 10 else -1
    return Place(dag_id, run_id, task_id, index)


_Logs = Annotated[bool, Depends(_may_read_logs)]
_Task = Annotated[Place, Depends(_place)]


@_router.get(_TASK + "/page")
async def task_page(request: Request, logs: _Logs, place: _Task) -> Response:
    """The page of a training."""
    found = await _task(place)
    if found.document is None:
        return _message(*_without_document(found), refresh=found.unfinished)
    document = await _training(request, found, logs=logs)
    live = {"document": "document", "seconds": _SECONDS} if found.unfinished else None
    return HTMLResponse(await asyncio.to_thread(page_html, document, live), headers=_HEADERS)


@_router.get(_TASK + "/document")
async def task_document(request: Request, logs: _Logs, place: _Task, rank: str = "") -> Response:
    """The document of a training."""
    found = await _task(place)
    if found.document is None:
        raise HTTPException(404, " ".join(_without_document(found)))
    return JSONResponse(await _training(request, found, rank[:100], logs=logs), headers=_HEADERS)


@_router.get(_RUN + "/page")
async def run_page(_: _Logs, dag_id: str, run_id: str) -> Response:
    """The page of all trainings of a DAG run."""
    document = await _workflow(dag_id, run_id)
    if not document["trainings"]:
        text = "The page shows them once a task of this DAG run has launched a TrainJob."
        return _message("This DAG run has no trainings.", text, refresh=True)
    ended = all(each["phase"] in _FINAL for each in document["trainings"])
    live = None if ended else {"document": "document", "seconds": _RUN_SECONDS}
    return HTMLResponse(await asyncio.to_thread(page_html, document, live), headers=_HEADERS)


@_router.get(_RUN + "/document")
async def run_document(_: _Logs, dag_id: str, run_id: str) -> Response:
    """The document of all trainings of a DAG run."""
    return JSONResponse(await _workflow(dag_id, run_id), headers=_HEADERS)


async def _task(place: Place) -> Stored:
    found = await asyncio.to_thread(stored.training, place)
    if found is None:
        raise HTTPException(404, "There is no such task instance.")
    return found


def _without_document(found: Stored) -> tuple[str, str]:
    if found.unreadable:
        return "The training cannot be shown.", found.unreadable
    if found.unfinished:
        return (
            "This task has no TrainJob yet.",
            "The page shows the training once a TrainJob operator has launched it. Other tasks have no TrainJob.",
        )
    return (
        "This task has no TrainJob.",
        "The tab shows the training of tasks that use TrainJobOperator or another operator of trainjob, with "
        "do_xcom_push=True, which is the default.",
    )


async def _training(request: Request, found: Stored, rank: str = "", *, logs: bool) -> dict[str, Any]:
    """The document of a task: the stored one, completed by the job itself while the task is not finished."""
    try:
        if found.document is not None and found.document["kind"] == "study":
            return await _study(request, found)
        return await _completed(request, found, rank, logs=logs)
    except (AttributeError, KeyError, TypeError, ValueError):  # everyone who may write XComs can have changed it
        _log.warning("the document of %s is invalid", found.place, exc_info=True)
        raise HTTPException(422, "The document that the task has stored is invalid.") from None


async def _completed(request: Request, found: Stored, rank: str, *, logs: bool) -> dict[str, Any]:
    document = dict(found.document or {})
    notes = []
    if found.unfinished and document["phase"] not in _FINAL:
        try:
            live = await request.app.state.live.document(document, found.place, rank, logs=logs)
        except Unavailable as error:
            notes.append(
                f"The job cannot be read from Airflow's API server: {error}. This is the state that the task has "
                f"stored at {document['taken']}."
            )
        else:
            document = merge_documents(document, live)
    elif document["phase"] not in _FINAL:
        notes.append(f"The task is {found.state}. The last state of its job that is known is from {document['taken']}.")
    elif found.unfinished and found.state not in ("running", "deferred"):
        notes.append(f"The task is {found.state or 'not scheduled yet'}: this is the training of its latest try.")
    if not logs:
        document = _without_logs(document)
        notes.append("Log lines are not shown: they need the permission to read task logs of this DAG.")
    document = _with_related(document, await _related(request, found.place))
    document.pop("airflow", None)
    return {**document, "notes": [*document["notes"], *notes]}


async def _study(request: Request, found: Stored) -> dict[str, Any]:
    """The document of a study: the stored one, or the journal's while the task is not finished."""
    document = dict(found.document or {})
    notes = []
    if found.unfinished and document["state"] != "ended":
        try:
            live = await request.app.state.studies.document(document, found.place)
        except Unavailable as error:
            notes.append(
                f"The study cannot be read from Airflow's API server: {error}. This is the state that the task has "
                f"stored at {document['taken']}."
            )
        else:
            document = _with_values(live, document)
    elif document["state"] != "ended":
        notes.append(f"The task is {found.state}. The study can be continued: clear the task.")
    document.pop("airflow", None)
    return {**document, "notes": [*document["notes"], *notes]}


def _with_values(live: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of the journal, with the values of running trials, which only their launcher has."""
    known = {each["number"]: each for each in document["trials"] if each["state"] == "running"}
    trials = [
        known[each["number"]] if each["state"] == "running" and each["number"] in known else each
        for each in live["trials"]
    ]
    return {**live, "trials": trials}


def _without_logs(document: Mapping[str, Any]) -> dict[str, Any]:
    diagnosis = document["diagnosis"]
    return {**document, "logs": [], "diagnosis": {**diagnosis, "log": []} if diagnosis else diagnosis}


async def _related(request: Request, place: Place) -> Related:
    known: dict[Place, tuple[float, Related]] = request.app.state.related
    read_at, found = known.get(place, (0.0, None))
    if found is None or time.monotonic() - read_at > _RELATED_SECONDS:
        found = await asyncio.to_thread(stored.related, place)
        known.pop(place, None)
        known[place] = (time.monotonic(), found)
        if len(known) > _CACHED:
            del known[next(iter(known))]
    return found


def _with_related(document: dict[str, Any], found: Related) -> dict[str, Any]:
    document = with_lineage(document, found.outputs)
    for label, (other, compared) in found.compared.items():
        document = with_comparison(document, label, compared, _address(other))
    return document


async def _workflow(dag_id: str, run_id: str) -> dict[str, Any]:
    found = await asyncio.to_thread(stored.trainings, dag_id, run_id)
    if found is None:
        raise HTTPException(404, "There is no such DAG run.")
    trainings, more = found
    shown = []
    for place, document in trainings:
        index = f" [{place.map_index}]" if place.map_index >= 0 else ""
        document.pop("airflow", None)
        shown.append({**document, "task": f"{place.task_id}{index}", "href": _address(place)})
    notes = [f"The page shows the first {len(shown)} trainings of this DAG run."] if more else []
    return workflow_document(f"{dag_id}, {run_id}", shown, notes)


def _address(place: Place) -> str:
    """Path of the page of a training."""
    dag_id, run_id, task_id = (quote(text, safe="") for text in (place.dag_id, place.run_id, place.task_id))
    return f"{root()}/dags/{dag_id}/runs/{run_id}/tasks/{task_id}/{place.map_index}/page"


async def _error(request: Request, error: Exception) -> Response:
    """An error as a page, which a frame of the UI shows, or as JSON."""
    if not isinstance(error, AnyHTTPException):  # FastAPI calls it with no other
        raise error
    if not request.url.path.endswith("/page"):
        return JSONResponse({"detail": error.detail}, error.status_code, headers=_HEADERS)
    titles = {401: "You are not logged in.", 403: "You may not read this training.", 404: "There is no such page."}
    text = "" if error.status_code == 403 else str(error.detail)
    if error.status_code == 403:
        text = "It needs the permissions to read task instances and XComs of this DAG."
    return _message(titles.get(error.status_code, "The page cannot be shown."), text, error.status_code)


_MESSAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
{refresh}<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 3rem auto; max-width: 40rem; padding: 0 1rem }}
h1 {{ font-size: 1.25rem }}
</style>
</head>
<body><main><h1>{title}</h1><p>{text}</p></main></body>
</html>
"""


def _message(title: str, text: str, status: int = 200, *, refresh: bool = False) -> Response:
    """A page with a message instead of a training."""
    again = f'<meta http-equiv="refresh" content="{_RUN_SECONDS}">\n' if refresh else ""
    page = _MESSAGE.format(refresh=again, title=html.escape(title), text=html.escape(text))
    return HTMLResponse(page, status, headers=_HEADERS)
