"""A Kubeflow Model Registry for tests: an HTTP server in this process, on a free port.

The real registry is written in Go, cannot be installed as a package, and needs MySQL or PostgreSQL.
`tests.registry.test_fake` checks that this one replies as the real one did (`tests.registry.recorder`), and that two
official clients see what they expect.

::

    with FakeRegistry() as fake:
        registry = connect(f"kubeflow+{fake.url}")
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.model_registry_store import Json, Refused, Store
from tests.serving import EndsConnections


@dataclass(frozen=True)
class Request:
    """A received request; ``path`` is relative to the API's version."""

    method: str
    path: str
    query: Mapping[str, str]
    body: Json | None
    authorization: str
    version: str


@dataclass(frozen=True)
class Fault:
    """What a request receives instead of its answer.

    Attributes:
        status: Of the answer.
        headers: Of the answer.
        body: Of the answer.
        done: Whether the request is carried out nevertheless.
        cut: Whether the connection is cut instead of answering.
    """

    status: int = 503
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = '{"message": "not now"}'
    done: bool = False
    cut: bool = False


LOST = Fault(done=True, cut=True)


class FakeRegistry:
    """A Kubeflow Model Registry, served while the context is open.

    Args:
        versions: Served versions of the API.
        token: Required bearer token; empty: none.
        store: Its database.
        tls: TLS context with a certificate for the host; None: without TLS.
        host: Address to listen on.

    Attributes:
        requests: All received requests, including those that received a fault.
        fault: Called before each request; returns its fault or None.
    """

    def __init__(
        self,
        versions: tuple[str, ...] = ("v1",),
        *,
        token: str = "",
        store: Store | None = None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.versions = versions
        self.token = token
        self.tls = tls
        self.store = store or Store()
        self.requests: list[Request] = []
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._server = _Server((self.host, 0), _Handler)
        self._server.registry = self
        if self.tls:
            # The thread of each connection performs the TLS handshake.
            self._server.socket = self.tls.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://{self.host}:{self._server.server_address[1]}"

    def settle(self) -> None:
        """Wait until no client is connected any more."""
        self._server.settle()

    def faults(self, *faults: Fault | None) -> None:
        """Apply these faults to the next requests, one each; None: no fault."""
        left = list(faults)
        self.fault = lambda _: left.pop(0) if left else None

    def sent(self, *methods: str) -> list[str]:
        """``METHOD path`` of the requests so far, of these methods or of all."""
        return [f"{each.method} {each.path}" for each in self.requests if not methods or each.method in methods]

    def call(self, method: str, path: str, body: Json | None = None, **query: str) -> Json:
        """Send a request to the store as another client would."""
        with self._lock:
            return self.store.handle(method, path, query, body)[1]

    def answer(self, request: Request) -> tuple[int, Json]:
        """Status and body, without faults."""
        if self.token and request.authorization != f"Bearer {self.token}":
            return 401, {"code": "Unauthorized", "message": f"not a token: {request.authorization}"}
        if request.version not in self.versions:
            return 404, {"code": "Not Found", "message": "page not found"}
        with self._lock:
            try:
                return self.store.handle(request.method, request.path, request.query, request.body)
            except Refused as error:
                return error.status, error.body()


class _Server(EndsConnections):
    registry: FakeRegistry
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnected."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = 60
    wbufsize = 1 << 16  # head and body in one segment: else a client's delayed acknowledgement costs 40 ms

    def _serve(self) -> None:
        fake = self.server.registry
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        parts = urlsplit(self.path)
        prefix, _, rest = parts.path.removeprefix("/api/model_registry/").partition("/")
        request = Request(
            self.command,
            rest,
            dict(parse_qsl(parts.query, keep_blank_values=True)),
            json.loads(raw) if raw else None,
            self.headers.get("Authorization", ""),
            prefix,
        )
        fake.requests.append(request)
        fault = fake.fault(request)
        if fault is None or fault.done:
            status, body = fake.answer(request)
            if "\0" in raw or "\\u0000" in raw:
                status, body = 400, {"code": "Bad Request", "message": "Request body contains null bytes"}
            text, headers = json.dumps(body), {"Content-Type": "application/json; charset=UTF-8"}
        if fault is not None:
            if fault.cut:
                self.close_connection = True
                return
            status, text, headers = fault.status, fault.body, {"Content-Type": "application/json", **fault.headers}
        data = text.encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PATCH = do_DELETE = _serve  # noqa: N815 - as BaseHTTPRequestHandler has it

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as BaseHTTPRequestHandler has it
        pass
