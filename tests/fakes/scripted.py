"""A server on this machine that a test scripts: what it answers, what it holds back, and where it breaks off."""

from __future__ import annotations

import json
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.certificates import Pair
from tests.serving import EndsConnections


@dataclass(frozen=True)
class Asked:
    """A request; those of one connection have the same `client`. The path has its query."""

    client: tuple[str, int]
    method: str
    path: str
    headers: Message
    body: bytes


@dataclass
class Answer:
    """A reply.

    Attributes:
        status: HTTP status; 0: close the connection without a reply.
        chunks: In place of `body`: sent as they come, without a length.
        cut: Break the connection after so many bytes of the body, or after the chunks, in place of an end.
        closes: Close the connection after the reply, without a header that announces it.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    chunks: Iterable[bytes] | None = None
    cut: int | None = None
    closes: bool = False


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


def faulty(fault: Mapping[str, Any], answer: Callable[[], Answer], stalled: threading.Event) -> Answer:
    """An answer with the fault of its request.

    ``{"status": 503, "headers": {...}, "body": b""}`` is sent in its place, ``{"cut": 100}`` ends its body after that
    many bytes, ``{"stall": True}`` sends nothing and closes the connection later, ``{"lost": True}`` serves the request
    and closes the connection without a reply.
    """
    if "stall" in fault:
        stalled.wait(20)
        return Answer(0)
    if "status" in fault:
        made = Answer(fault["status"], fault.get("body", b""), fault.get("headers") or {})
    else:
        made = answer()
    if fault.get("lost"):
        return Answer(0)
    return replace(made, cut=fault["cut"]) if fault.get("cut", len(made.body)) < len(made.body) else made


def span(data: bytes, given: str) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of a reply with the range that a request asks for."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", given)
    if asked is None:
        return 200, data, {}
    start, end = int(asked[1]), min(int(asked[2] or len(data) - 1), len(data) - 1)
    if start >= len(data):
        return 416, b"", {"Content-Range": f"bytes */{len(data)}"}
    return 206, data[start : end + 1], {"Content-Range": f"bytes {start}-{end}/{len(data)}"}


class AnsweringServer(EndsConnections):
    """Answers each request by `answer`, which runs in the thread of the connection. Use it with `tests.serving`.

    Attributes:
        stalled: For an `answer` that holds a reply back; set when the server ends.
    """

    daemon_threads = False
    request_queue_size = 64

    def __init__(self, answer: Callable[[Asked], Answer], pair: Pair | None = None, *, host: str = "127.0.0.1") -> None:
        super().__init__((host, 0), _Handler)
        self.answer, self.host = answer, host
        self.stalled = threading.Event()
        self.scheme = "http"
        if pair is not None:
            self.secure(pair)

    def secure(self, pair: Pair) -> None:
        """Serve HTTPS with that certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pair.certificate, pair.key)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.scheme = "https"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host}:{self.server_port}"

    def add(self, asked: Asked) -> None:
        """Called with each request before it is answered."""

    def handle_error(self, *_: Any) -> None:
        """Report faults of a test's `answer`, but no client that has left."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(*_)


class ScriptedServer(AnsweringServer):
    """Also records the requests.

    Attributes:
        asked: The requests so far.
    """

    def __init__(self, answer: Callable[[Asked], Answer] = lambda _: Answer(), pair: Pair | None = None) -> None:
        self.asked: list[Asked] = []
        self._arrived = threading.Condition()
        super().__init__(answer, pair)

    def add(self, asked: Asked) -> None:
        """Record a request."""
        with self._arrived:
            self.asked.append(asked)
            self._arrived.notify_all()

    def arrived(self, count: int) -> bool:
        """Wait until so many requests have arrived; False if they do not arrive."""
        with self._arrived:
            return self._arrived.wait_for(lambda: len(self.asked) >= count, 30)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30  # of an idle connection, so that no test hangs
    disable_nagle_algorithm = True  # a reply is two packets; like real servers, do not wait between them
    server: AnsweringServer

    def log_message(self, *_: object) -> None: ...

    def _answer(self) -> None:
        asked = Asked(self.client_address, self.command, self.path, self.headers, self._body())
        self.server.add(asked)
        answer = self.server.answer(asked)
        # Set before the client has its reply.
        self.close_connection = answer.closes or answer.cut is not None or not answer.status
        if not answer.status:
            return
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.chunks is None:
            if answer.status != 204:
                self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else answer.body[: answer.cut])
            return
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in answer.chunks:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        if answer.cut is None:
            self.wfile.write(b"0\r\n\r\n")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _answer  # noqa: N815 - the names of http.server
