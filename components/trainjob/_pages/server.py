"""`trainjob ui`: the pages of the jobs of one namespace, served on this machine.

The address has a random token, and the server listens on 127.0.0.1 only: other users of the machine can connect, but do
not know the token. A request with another Host header is refused, since a website could have its name resolved to
127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import re
import secrets
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from trainjob import names
from trainjob._pages.live import SECONDS
from trainjob._pages.page import page_html, page_json
from trainjob._pages.shared_documents import MESSAGE, Documents, note_of
from trainjob._support.control_characters import one_line
from trainjob.client import TrainJobClient
from trainjob.errors import ConfigurationError, NotFound, TrainJobError

HOST = "127.0.0.1"
POLL_SECONDS = 1.0
"""Time between two requests of a page: with `SECONDS`, the age of a read, a page is at most three seconds old."""

_THREADS = 64  # requests at the same time
_IDLE_SECONDS = 10.0  # for the request of a connection
_RANK = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Server(ThreadingHTTPServer):
    """Serves the pages of a client's namespace. A context manager; stops at its end and frees the port.

    Args:
        client: Client of the backend; stays open.
        port: Port on 127.0.0.1; a free one if 0.
        seconds: Age in seconds at which a job is read again.

    Raises:
        ConfigurationError: The port is in use or not permitted.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, client: TrainJobClient, port: int = 0, seconds: float = SECONDS) -> None:
        self.token = secrets.token_urlsafe(32)
        self.client = client
        self.documents = Documents(client, seconds)
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

    def do_HEAD(self) -> None:
        self.do_GET()

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
            return _message(503, note_of(error), {"Refresh": "5"})
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
    body = f"<!doctype html><meta charset=utf-8><title>trainjob</title><p>{escape(one_line(text, MESSAGE))}</p>"
    return status, "text/html", body.encode(), more or {}
