"""`trainjob ui`: the pages of the jobs of one namespace, served on this machine.

The address has a random token, and the server listens on 127.0.0.1 only: other users of the machine can connect, but do
not know the token. A request with another Host header is refused, since a website could have its name resolved to
127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

import anyio
import anyio.to_thread

from trainjob import names
from trainjob._backends.base import TrainJob
from trainjob._goodput.history import MetricHistory
from trainjob._manifest.workflow_labels import STUDY, Study, latest_attempts, studies
from trainjob._pages.document import list_document, workflow_document
from trainjob._pages.live import SECONDS, LiveReader
from trainjob._pages.page import page_html, page_json
from trainjob._pages.registered import Champion
from trainjob._pages.study import document_of_study, find_study
from trainjob._support.control_characters import one_line
from trainjob.client import TrainJobClient
from trainjob.errors import ConfigurationError, NotFound, TrainJobError
from trainjob.status import Phase, observe

HOST = "127.0.0.1"
POLL_SECONDS = 1.0
"""Time between two requests of a page: with `SECONDS`, the age of a read, a page is at most three seconds old."""
MAX_TRAININGS = 50
"""Trainings that one page compares, the newest."""

LINES = 200
"""Log lines of a page, of all shown ranks together."""

_ANSWER_SECONDS = 8.0  # after which a page is shown what was read last; the page itself waits for 15 s
_ENDED_SECONDS = 30.0  # age at which a job that has ended is read again
_SHARED_SECONDS = 0.2  # for which viewers share a document that was made from what has been read
_COLLECT_SECONDS = 10.0  # between two reads of the list for the history of metrics
_LOAD = 20  # a list whose read takes long is read less often: at most a twentieth of the time
_HISTORIES, _POINTS = 1000, 512  # jobs whose history is collected, and points of each: 25 KB
_THREADS = 64  # requests at the same time
_IDLE_SECONDS = 10.0  # for the request of a connection
_AT_ONCE = 8  # reads for one workflow
_MESSAGE = 500  # characters of an error
_RANK = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class _Read:
    """The outcome of a read: the latest document, and why there is no newer one."""

    document: dict[str, Any] | None
    error: Exception | None
    until: float


class Documents:
    """The documents of the jobs of one namespace for any number of viewers, all on one event loop.

    Args:
        client: Client of the backend; stays open.
        seconds: Age in seconds at which a job is read again.
        champion: Adds the champion of a model to the trainings.
    """

    def __init__(self, client: TrainJobClient, seconds: float = SECONDS, champion: Champion | None = None) -> None:
        self._namespace = client.namespace
        self._champion = champion
        self._seconds = seconds
        self._reader = LiveReader(client.backend, seconds)
        self._reads: OrderedDict[tuple[str, ...], _Read] = OrderedDict()
        self._reading: dict[tuple[str, ...], asyncio.Task[_Read]] = {}
        self._histories: OrderedDict[str, tuple[str, MetricHistory]] = OrderedDict()  # by name, with the UID

    async def listed(self) -> dict[str, Any]:
        """The document of all jobs."""

        async def read() -> dict[str, Any]:
            jobs = await self._jobs()
            document = list_document(jobs, self._namespace)
            runs = {name: study for study in studies(jobs) for name in study.names}
            for job in document["jobs"]:
                job["href"] = f"jobs/{job['name']}/"
                if (study := runs.get(job["name"])) is not None:
                    job["workflow"], job["workflow_href"] = one_line(study.title, _MESSAGE), f"runs/{_id_of(study)}/"
            return document

        try:
            return await self._shared(("list",), read)
        except ConfigurationError:
            raise
        except TrainJobError as error:  # the page stays open until the jobs can be read
            return list_document([], self._namespace, [_note(error)])

    async def training(self, name: str, rank: str = "", *, tail: int = LINES) -> dict[str, Any]:
        """The document of one job.

        Raises:
            NotFound: The job does not exist.
            TrainJobError: The job cannot be read.
        """

        async def read() -> dict[str, Any]:
            _, history = self._histories.get(name, ("", None))
            found = await self._reader.document(self._namespace, name, history=history, rank=rank, tail=tail)
            for each in found["compare"]:
                if each["label"] == "previous run" and names.JOB.fullmatch(each["name"]):
                    each["href"] = f"../{each['name']}/"
            return found if self._champion is None else await anyio.to_thread.run_sync(self._champion.add, found)

        return await self._shared(("job", name, rank, str(tail)), read)

    async def workflow(self, study_id: str) -> dict[str, Any]:
        """The document of the trainings of one workflow, or of the jobs whose keys have the same prefix.

        Raises:
            NotFound: No job belongs to it.
            TrainJobError: The jobs cannot be read.
        """

        async def read() -> dict[str, Any]:
            jobs = await self._jobs()
            study = next((each for each in studies(jobs) if _id_of(each) == study_id), None)
            if study is None:
                raise NotFound(f"no TrainJob in namespace {self._namespace} belongs to this workflow any more")
            members = [each for each in jobs if each["metadata"]["name"] in study.names]
            if (searched := await self._searched(members)) is not None:
                return searched
            return await compared(
                study.title,
                members,
                lambda each: self.training(each["metadata"]["name"], tail=0),
                lambda name: f"../../jobs/{name}/",
            )

        return await self._shared(("run", study_id), read)

    async def _searched(self, jobs: Sequence[TrainJob]) -> dict[str, Any] | None:
        """The document of a hyperparameter search, if the jobs are trials and its journal is in the workspace."""
        found = {str(each["metadata"].get("labels", {}).get(STUDY) or "") for each in jobs}
        if len(found) != 1 or not (key_hash := found.pop()):
            return None
        state = await anyio.to_thread.run_sync(find_study, key_hash)
        if state is None or state.namespace != self._namespace:
            return None
        present = {each["metadata"]["name"] for each in jobs}
        make = partial(
            document_of_study,
            state,
            importances=state.ended,  # takes too long for each read of a study that is running
            href=lambda trial: f"../../jobs/{trial.job}/" if trial.job in present else "",
        )
        return await anyio.to_thread.run_sync(make)

    async def collect(self) -> None:
        """Collect the metrics of running jobs until cancelled, also while no page is open."""
        while True:
            began = time.monotonic()
            with suppress(TrainJobError):
                await self._jobs()
            took = time.monotonic() - began
            await anyio.sleep(max(_COLLECT_SECONDS, _LOAD * took))

    async def _jobs(self) -> list[TrainJob]:
        jobs = await self._reader.jobs(self._namespace)
        now = time.time()
        for each in jobs:
            name, uid, observation = each["metadata"]["name"], each["metadata"]["uid"], observe(each)
            kept, history = self._histories.get(name, (uid, MetricHistory(_POINTS)))
            if kept != uid:  # another job has the name of a deleted one
                history = MetricHistory(_POINTS)
            if observation.metrics and not observation.phase.terminal:
                history.observe(observation, now)
                self._histories[name] = (uid, history)
            elif kept != uid:
                del self._histories[name]
        while len(self._histories) > _HISTORIES:
            self._histories.popitem(last=False)
        return jobs

    async def _shared(
        self, key: tuple[str, ...], read: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        """The document of `key`, read once for all viewers; what was read last, with a note, if that fails now."""
        kept = self._reads.get(key)
        if kept is None or time.monotonic() >= kept.until:
            task = self._reading.get(key)
            if task is None:
                task = self._reading[key] = asyncio.create_task(self._read(read, kept))
                task.add_done_callback(lambda _: self._reading.pop(key, None))
            try:
                async with asyncio.timeout(_ANSWER_SECONDS):
                    kept = await asyncio.shield(task)
                self._reads[key] = kept
                self._reads.move_to_end(key)
                while len(self._reads) > _HISTORIES:
                    self._reads.popitem(last=False)
            except TimeoutError:
                late = TrainJobError(f"no answer within {_ANSWER_SECONDS:.0f} s")
                kept = _Read(kept.document if kept else None, late, 0.0)
        if kept.error is None and kept.document is not None:
            return kept.document
        if kept.document is None:
            raise kept.error or NotFound("there is no document")
        if isinstance(kept.error, NotFound) and kept.document["kind"] == "training":
            notes = [*kept.document["notes"], "The TrainJob was deleted. This is the state that was read last."]
            ended = Phase(kept.document["phase"]).terminal
            return kept.document | {"notes": notes} | ({} if ended else {"phase": str(Phase.DELETED)})
        return kept.document | {"notes": [*kept.document["notes"], _note(kept.error)]}

    async def _read(self, read: Callable[[], Coroutine[Any, Any, dict[str, Any]]], before: _Read | None) -> _Read:
        began = time.monotonic()
        try:
            document = await read()
            if document.get("phase") == Phase.DELETED and before is not None and before.document is not None:
                raise NotFound("only objects of the deleted TrainJob are left")  # what was read before has more
        except TrainJobError as error:
            return _Read(before.document if before else None, error, time.monotonic() + self._seconds)
        took = time.monotonic() - began
        ended = document["kind"] == "training" and Phase(document["phase"]).terminal
        seconds = max(_ENDED_SECONDS if ended else _SHARED_SECONDS, 2 * took)
        return _Read(document, None, time.monotonic() + seconds)


async def compared(
    title: str,
    jobs: Sequence[TrainJob],
    read: Callable[[TrainJob], Coroutine[Any, Any, dict[str, Any]]],
    href: Callable[[str], str] = lambda _: "",
) -> dict[str, Any]:
    """The document that compares jobs: the latest attempt of each key.

    Args:
        title: Name of the workflow.
        jobs: The jobs, with all attempts.
        read: Reads the document of a job.
        href: Address of the page of a job, by its name.

    Raises:
        TrainJobError: No job can be read.
    """
    chosen = latest_attempts(jobs)
    notes = []
    if len(chosen) > MAX_TRAININGS:
        notes.append(f"Only the latest {MAX_TRAININGS} of {len(chosen)} trainings are shown.")
        chosen = chosen[-MAX_TRAININGS:]
    found: dict[int, dict[str, Any]] = {}
    failed: list[TrainJobError] = []
    limit = asyncio.Semaphore(_AT_ONCE)

    async def add(number: int, job: TrainJob) -> None:
        async with limit:
            try:
                found[number] = await read(job) | {"href": href(job["metadata"]["name"])}
            except TrainJobError as error:
                failed.append(error)
                notes.append(f"{job['metadata']['name']} cannot be read: {one_line(str(error), _MESSAGE)}")

    async with asyncio.TaskGroup() as tasks:
        for number, job in enumerate(chosen):
            tasks.create_task(add(number, job))
    if failed and not found:
        raise failed[0]
    return workflow_document(title, [found[number] for number in sorted(found)], notes)


def _note(error: BaseException | None) -> str:
    return f"The jobs cannot be read now: {one_line(str(error), _MESSAGE)}"


def _id_of(study: Study) -> str:
    return hashlib.sha256(study.identity.encode()).hexdigest()[:16]


# ---------------------------------------------------------------- HTTP


class Server(ThreadingHTTPServer):
    """Serves the pages of a client's namespace. A context manager; stops at its end and frees the port.

    Args:
        client: Client of the backend; stays open.
        port: Port on 127.0.0.1; a free one if 0.
        seconds: Age in seconds at which a job is read again.
        champion: Adds the champion of a model to the trainings.

    Raises:
        ConfigurationError: The port is in use or not permitted.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(
        self, client: TrainJobClient, port: int = 0, seconds: float = SECONDS, champion: Champion | None = None
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.client = client
        self.documents = Documents(client, seconds, champion)
        self._free = threading.BoundedSemaphore(_THREADS)
        self._thread: threading.Thread | None = None
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigurationError(
                f"port {port} on {HOST} cannot be used: {why}; choose another one with --port, or leave it out"
            ) from error
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        if self.server_port == 80:
            self.hosts |= {HOST, "localhost"}

    @property
    def url(self) -> str:
        """The address of the list of jobs, with the token."""
        return f"http://{HOST}:{self.server_port}/{self.token}/"

    def __enter__(self) -> Self:
        self._collecting = self.client.start(self.documents.collect)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._collecting.cancel()
        self.shutdown()
        if self._thread is not None:
            self._thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a request in a thread; drop it if too many are in progress."""
        if not self._free.acquire(timeout=1.0):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle a request."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if the client has closed the connection, or was too slow."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _IDLE_SECONDS

    def log_message(self, *_: object) -> None:
        """Log nothing: a path has the token."""

    def do_GET(self) -> None:
        status, kind, body, more = self._answer()
        self._send(status, kind, body, more)

    do_HEAD = do_GET  # noqa: N815 - the name that http.server looks for

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is malformed or has another method."""
        del message, explain
        self.close_connection = True
        self._send(405 if code == 501 else code, "text/plain", b"", {"Allow": "GET, HEAD"} if code == 501 else {})

    def _send(self, status: int, kind: str, body: bytes, more: Mapping[str, str]) -> None:
        self.send_response_only(status)  # without the name of the server
        for name, value in {**_HEADERS, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _answer(self) -> tuple[int, str, bytes, Mapping[str, str]]:
        """Status, media type, body and more headers."""
        parts = self._parts()
        if parts is None:
            return 404, "text/plain", b"", {}
        if not parts:
            return 308, "text/plain", b"", {"Location": f"/{self.server.token}/"}
        try:
            found = self._document(parts)
        except NotFound as error:
            return _message(404, str(error))
        except (TrainJobError, CancelledError, RuntimeError) as error:  # the last two: the server ends
            return _message(503, _note(error), {"Refresh": "5"})
        return _message(404, "there is no such page") if found is None else _response(parts, found)

    def _parts(self) -> list[str] | None:
        """The path below the token, split at slashes; none for the token alone; None if the request is refused."""
        hosts = self.headers.get_all("Host") or []
        token, slash, rest = self.path.removeprefix("/").partition("?")[0].partition("/")
        right = secrets.compare_digest(token.encode(errors="replace"), self.server.token.encode())
        if len(hosts) != 1 or hosts[0].lower() not in self.server.hosts or not self.path.startswith("/") or not right:
            return None
        return rest.split("/") if slash else []

    def _document(self, parts: Sequence[str]) -> dict[str, Any] | None:
        documents, call = self.server.documents, self.server.client.call
        match [unquote(part) for part in parts]:
            case ["" | "document.json"]:
                return call(documents.listed)
            case ["jobs", name, "" | "document.json"] if names.JOB.fullmatch(name):
                rank = parse_qs(urlsplit(self.path).query).get("rank", [""])[0]
                if not rank or _RANK.fullmatch(rank):
                    return call(lambda: documents.training(name, rank))
            case ["runs", study, "" | "document.json"] if re.fullmatch(r"[0-9a-f]{16}", study):
                return call(lambda: documents.workflow(study))
        return None


def _response(parts: Sequence[str], document: Mapping[str, Any]) -> tuple[int, str, bytes, Mapping[str, str]]:
    if parts[-1] == "document.json":
        return 200, "application/json", page_json(document).encode(), {}
    live: dict[str, Any] = {"document": "document.json", "seconds": POLL_SECONDS}
    if len(parts) > 1:
        live["list"] = "../../"
    return 200, "text/html", page_html(document, live).encode(), {}


def _message(
    status: int, text: str, more: Mapping[str, str] | None = None
) -> tuple[int, str, bytes, Mapping[str, str]]:
    body = f"<!doctype html><meta charset=utf-8><title>trainjob</title><p>{escape(one_line(text, _MESSAGE))}</p>"
    return status, "text/html", body.encode(), more or {}
