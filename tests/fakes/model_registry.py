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
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

from tests.certificates import Pair
from tests.fakes.model_registry_store import Json, Refused, Store
from tests.fakes.scripted import Answer, AnsweringServer, Asked, as_json
from tests.serving import serving


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
        pair: Certificate for the host, and its key; None: without TLS.
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
        pair: Pair | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.host = host
        self.versions = versions
        self.token = token
        self.pair = pair
        self.store = store or Store()
        self.requests: list[Request] = []
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._running = serving(AnsweringServer(self._reply, self.pair, host=self.host))
        self._server = self._running.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)

    @property
    def url(self) -> str:
        return self._server.url

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

    def _reply(self, asked: Asked) -> Answer:
        parts, raw = urlsplit(asked.path), asked.body.decode()
        version, _, path = parts.path.removeprefix("/api/model_registry/").partition("/")
        query, body = dict(parse_qsl(parts.query, keep_blank_values=True)), json.loads(raw) if raw else None
        request = Request(asked.method, path, query, body, asked.headers.get("Authorization", ""), version)
        self.requests.append(request)
        fault = self.fault(request)
        if fault is None or fault.done:
            status, value = self.answer(request)
            if "\0" in raw or "\\u0000" in raw:
                status, value = 400, {"code": "Bad Request", "message": "Request body contains null bytes"}
        if fault is None:
            return as_json(value, status)
        headers = {"Content-Type": "application/json", **fault.headers}
        return Answer(0 if fault.cut else fault.status, fault.body.encode(), headers)
