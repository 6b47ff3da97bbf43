"""Proxies between a client and a server that record requests and inject planned faults.

`FaultProxy` stands in front of an API server: it terminates TLS with a separate certificate, and knows watches.
`Proxy` stands in front of a store or a registry: it forwards bytes as they come, and counts them. Both ask a plan
which fault each request gets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self
from urllib.parse import parse_qs, urlsplit

import httpx
from tests.certificates import Pair
from tests.fakes.http1 import chunks, parse, until_closed, write

_HOP = {"connection", "keep-alive", "transfer-encoding", "host"}
_TLS = b"\x16"
"""First byte of a TLS handshake."""


class Kind(StrEnum):
    """Kinds of faults of one request."""

    CUT = "cut"
    """The connection is cut before the request reaches the server."""
    CUT_BODY = "cut-body"
    """The connections are cut in the middle of the request's body. Only `Proxy`."""
    DROP = "drop"
    """The server acts, and the connection is cut instead of its reply."""
    BREAK = "break"
    """The connection is cut in the middle of the reply's body."""
    SHORTEN = "shorten"
    """The body ends in the middle without an error, as behind a buffering proxy."""
    DELAY = "delay"
    """The request is forwarded after a delay, unless the client disconnects meanwhile."""
    STALL = "stall"
    """The request is not forwarded, and the connection stays open."""
    STALL_REPLY = "stall-reply"
    """The server acts, no reply is sent, and the connection stays open."""
    STALL_BODY = "stall-body"
    """The reply's body stops in the middle, and the connection stays open."""
    SLOW = "slow"
    """The reply's body is sent with a pause after each piece. Only `Proxy`."""
    ANSWER = "answer"
    """The proxy answers instead of the server, after it received the body."""
    ANSWER_AFTER = "answer-after"
    """The server acts, and the proxy sends another answer, as a load balancer does with 502."""
    EVENT = "event"
    """A watch starts with status 200, and its first line is an ERROR event."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        kind: Kind of the fault.
        status: HTTP status of an answer, or code of an ERROR event.
        after: Bytes of the body that pass before a fault in its middle.
        seconds: Seconds of a delay or of each pause, or of a watch before a fault in its middle.
        retry_after: Value of the header ``Retry-After``; None leaves it out.
        challenge: Value of the header ``WWW-Authenticate``; empty leaves it out.
    """

    kind: Kind
    status: int = 503
    after: int = 0
    seconds: float = 0.0
    retry_after: int | None = None
    challenge: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an answer."""
        found = {"www-authenticate": self.challenge} if self.challenge else {}
        return found if self.retry_after is None else {**found, "retry-after": str(self.retry_after)}


@dataclass
class Seen:
    """A request that a proxy received.

    Attributes:
        method: GET, POST, PATCH or DELETE, or WATCH for a GET that watches.
        target: Path and query.
        headers: In lower case.
        at: Monotonic time of its arrival.
        body: Body of the request; empty if it is forwarded as it comes.
        fault: The injected fault.
        reply: The first bytes of an API server's answer, if the request was forwarded.
        sent: Bytes of the body that the server got.
        received: Bytes of the reply's body that the client got.
        status: Status of the server's answer; 0 if the proxy received none.
    """

    method: str
    target: str
    headers: dict[str, str]
    at: float = field(default_factory=time.monotonic)
    body: bytes = b""
    fault: Fault | None = None
    reply: bytes = b""
    sent: int = 0
    received: int = 0
    status: int = 0

    @property
    def path(self) -> str:
        """Path without the query."""
        return urlsplit(self.target).path

    @property
    def query(self) -> Mapping[str, str]:
        """The query; of repeated parameters the last value."""
        return {name: values[-1] for name, values in parse_qs(urlsplit(self.target).query).items()}


Plan = Callable[[Seen], Fault | None]


class _Listening(ABC):
    """What both proxies record, and their connections."""

    def __init__(self, plan: Plan, tls: ssl.SSLContext | None = None) -> None:
        self.plan = plan
        self.requests: list[Seen] = []
        self._tls = tls
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()

    @property
    def injected(self) -> list[Seen]:
        """The requests with an injected fault."""
        return [each for each in self.requests if each.fault is not None]

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[int]:
        """Serve connections; yield the port."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, limit=2**20)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: StreamReader, writer: StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            if self._tls is not None:
                await writer.start_tls(self._tls)
            while await self._one(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, httpx.HTTPError):
            pass  # the client or the server has closed its connection; the other one is closed below
        except asyncio.CancelledError:
            writer.transport.abort()
            return  # asyncio up to 3.11 logs a traceback for cancelled tasks of connections
        with suppress(asyncio.CancelledError):
            await self._flowing.wait()
        writer.transport.abort()

    @abstractmethod
    async def _one(self, reader: StreamReader, writer: StreamWriter) -> bool:
        """Serve one request; False if the connection ends with it."""


class FaultProxy(_Listening):
    """Listens on a port of 127.0.0.1 while it is open as a context.

    Args:
        server: URL of the API server.
        authority: Its CA certificate, PEM.
        pair: Certificate and key of the proxy, for 127.0.0.1.
        plan: Called for every request; returns the fault, or None to forward the request unchanged.
    """

    def __init__(self, server: str, authority: bytes, pair: Pair, plan: Plan = lambda _: None) -> None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pair.certificate, pair.key)
        super().__init__(plan, tls)
        verify = ssl.create_default_context(cadata=authority.decode())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._upstream = httpx.AsyncClient(
            base_url=server, verify=verify, trust_env=False, timeout=httpx.Timeout(60, read=None), limits=limits
        )
        self._running = self._listening()
        self.url = ""

    async def __aenter__(self) -> Self:
        self.url = f"https://127.0.0.1:{await self._running.__aenter__()}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.__aexit__(None, None, None)
        await self._upstream.aclose()

    def freeze(self) -> None:
        """Forward nothing until `thaw`, and keep all connections open, even those that the server closes."""
        self._flowing.clear()

    def thaw(self) -> None:
        """Forward new requests; held requests are lost, and their connections are cut."""
        self._flowing.set()

    def seen(self, method: str, ending: str = "") -> list[Seen]:
        """The requests of a method (WATCH is one) whose path ends with `ending`."""
        return [each for each in self.requests if each.method == method and each.path.endswith(ending)]

    async def _one(self, reader: StreamReader, writer: StreamWriter) -> bool:
        request = Seen(*parse(await reader.readuntil(b"\r\n\r\n")))
        request.body = await reader.readexactly(int(request.headers.get("content-length", 0)))
        request.method = "WATCH" if request.query.get("watch") == "true" else request.method
        await self._flowing.wait()
        request.at = time.monotonic()
        self.requests.append(request)
        request.fault = fault = self.plan(request)
        if fault is not None and fault.kind is not Kind.DELAY:
            return await self._break(request, fault, reader, writer)
        # As in real proxies: otherwise the late request of a dead launcher could create a job after others have
        # launched and cancelled the same work.
        if fault is not None and await until_closed(reader, fault.seconds):
            return False
        if request.method != "WATCH":
            return await self._forward(request, writer)
        # If the client disconnects, end the watch at the API server, too; otherwise it ends only at the next event.
        forward = asyncio.create_task(self._forward(request, writer))
        closed = asyncio.create_task(until_closed(reader))
        try:
            await asyncio.wait((forward, closed), return_when=asyncio.FIRST_COMPLETED)
            if forward.done():
                await forward
            return False
        finally:
            for task in (forward, closed):
                task.cancel()
            await asyncio.gather(forward, closed, return_exceptions=True)

    async def _break(self, request: Seen, fault: Fault, reader: StreamReader, writer: StreamWriter) -> bool:
        kind, alive = fault.kind, False
        if kind is Kind.EVENT:
            alive = await write(writer, 200, {}, chunks(b'{"type": "ERROR", "object": %b}\n' % _status(fault)))
        elif kind in (Kind.DROP, Kind.STALL_REPLY, Kind.ANSWER_AFTER):
            async with self._sent(request) as answer:
                if request.method != "WATCH":
                    await answer.aread()
        elif kind in (Kind.BREAK, Kind.SHORTEN, Kind.STALL_BODY):
            alive = await self._forward(request, writer, fault)
        if kind in (Kind.ANSWER, Kind.ANSWER_AFTER):
            headers = {"content-type": "application/json", **fault.headers}
            alive = await write(writer, fault.status, headers, chunks(_status(fault)))
        elif kind in (Kind.STALL, Kind.STALL_REPLY, Kind.STALL_BODY):
            await until_closed(reader)
        elif kind is Kind.BREAK:
            writer.close()  # `abort` could discard the last bytes
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1)
        return alive

    def _sent(self, request: Seen) -> AbstractAsyncContextManager[httpx.Response]:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        method = "GET" if request.method == "WATCH" else request.method
        return self._upstream.stream(method, request.target, headers=headers, content=request.body or None)

    async def _forward(self, request: Seen, writer: StreamWriter, fault: Fault | None = None) -> bool:
        async with self._sent(request) as answer:
            headers = {name: value for name, value in answer.headers.items() if name not in _HOP}
            if request.method == "WATCH":  # `_until_closed` reads from the connection until the client disconnects
                headers["connection"] = "close"
            body = self._passing(answer.aiter_raw(), request)
            if fault is None:
                return await write(writer, answer.status_code, headers, body)
            headers.pop("content-length", None)
            part = _part(body, fault)
            return await write(writer, answer.status_code, headers, part, end=fault.kind is Kind.SHORTEN)

    async def _passing(self, body: AsyncIterator[bytes], seen: Seen) -> AsyncIterator[bytes]:
        async for data in body:
            if not self._flowing.is_set():
                await self._flowing.wait()
                raise ConnectionResetError("held data is lost")
            seen.reply += data[: 4096 - len(seen.reply)]
            yield data


class Proxy(_Listening):
    """Listens in a thread while `running`.

    Args:
        upstream: ``host:port`` of the server.
        plan: Returns the fault of a request, or None.
    """

    def __init__(self, upstream: str, plan: Plan = lambda _: None) -> None:
        super().__init__(plan)
        self.upstream = upstream
        self.host = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        started = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="proxy")
        thread.start()
        try:
            assert started.wait(10)
            yield
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join(30)

    def settle(self) -> None:
        """Wait until no connection is open, including those of killed clients."""
        deadline = time.monotonic() + 10
        time.sleep(0.005)  # for a connection that is not accepted yet
        while self._connections:
            assert time.monotonic() < deadline, "a connection does not end"
            time.sleep(0.001)

    @property
    def sent(self) -> int:
        """Bytes of bodies that the server got."""
        return sum(each.sent for each in self.requests)

    @property
    def received(self) -> int:
        """Bytes of bodies that the client got."""
        return sum(each.received for each in self.requests)

    def seen(self, method: str, part: str = "") -> list[Seen]:
        """Requests of a method whose target contains ``part``."""
        return [each for each in self.requests if each.method == method and part in each.target]

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with self._listening() as port:
            self.host = f"127.0.0.1:{port}"
            started.set()
            await self._stop.wait()

    async def _one(self, reader: StreamReader, writer: StreamWriter) -> bool:
        head = await reader.readexactly(1)
        if head == _TLS:
            return False  # as an HTTP server does at once: the client probes whether this is TLS
        head += await reader.readuntil(b"\r\n\r\n")
        seen = Seen(*parse(head))
        self.requests.append(seen)
        seen.fault = fault = self.plan(seen)
        kind, length = fault.kind if fault else None, int(seen.headers.get("content-length", 0))
        assert "transfer-encoding" not in seen.headers, "the client sends the length of each body"
        if kind is Kind.STALL:
            await until_closed(reader)
        if kind in (Kind.CUT, Kind.STALL):
            return False
        if fault is not None and kind is Kind.ANSWER:
            await reader.readexactly(length)
            return await write(writer, fault.status, {**fault.headers, "content-length": "0"}, chunks())
        host, port = self.upstream.split(":")
        there, back = await asyncio.open_connection(host, int(port), limit=2**20)
        try:
            back.write(head)
            if fault is not None and kind is Kind.CUT_BODY:
                await _pass(reader, back, min(length, fault.after), seen, "sent")
                back.close()  # not `abort`, which could discard the last bytes
                await back.wait_closed()
                return False
            await _pass(reader, back, length, seen, "sent")
            return await self._reply(seen, fault or Fault(Kind.DELAY), there, reader, writer)
        finally:
            back.transport.abort()

    async def _reply(
        self, seen: Seen, fault: Fault, there: StreamReader, reader: StreamReader, writer: StreamWriter
    ) -> bool:
        answer = await there.readuntil(b"\r\n\r\n")
        _, status, headers = parse(answer)
        seen.status = int(status)
        if fault.kind is Kind.DROP:
            return False
        writer.write(answer)
        left = int(headers.get("content-length", 0)) if seen.method != "HEAD" and seen.status != 204 else 0
        if headers.get("transfer-encoding") == "chunked":
            while data := await there.read(2**16):  # to the end of the chunked body
                writer.write(data)
                await writer.drain()
                if data.endswith(b"0\r\n\r\n"):
                    break
        if fault.kind in (Kind.BREAK, Kind.STALL_BODY):
            left = min(left, fault.after)
        await _pass(there, writer, left, seen, "received", fault.seconds if fault.kind is Kind.SLOW else 0.0)
        if fault.kind is Kind.STALL_BODY:
            await until_closed(reader)
        elif fault.kind is Kind.BREAK:
            writer.close()
            await writer.wait_closed()
        return fault.kind not in (Kind.BREAK, Kind.STALL_BODY)


async def _pass(
    reader: StreamReader, writer: StreamWriter, length: int, seen: Seen, count: str, pause: float = 0
) -> None:
    """Forward ``length`` bytes, and add them to an attribute of ``seen``."""
    while length > 0:
        data = await reader.read(min(length, 2**16 if pause else 2**18))
        if not data:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(data)
        writer.write(data)
        await writer.drain()
        setattr(seen, count, getattr(seen, count) + len(data))
        if pause:
            await asyncio.sleep(pause)


async def _part(body: AsyncIterator[bytes], fault: Fault) -> AsyncIterator[bytes]:
    """The first `fault.after` bytes, or the data of the first `fault.seconds` if given."""
    end, left = time.monotonic() + fault.seconds, fault.after
    while fault.seconds or left > 0:
        try:
            data = await asyncio.wait_for(anext(body), end - time.monotonic() if fault.seconds else None)
        except (TimeoutError, StopAsyncIteration):
            return
        yield data if fault.seconds else data[:left]
        left -= len(data)


def _status(fault: Fault) -> bytes:
    """The answer of an API server."""
    reasons = {410: "Expired", 429: "TooManyRequests", 401: "Unauthorized", 403: "Forbidden"}
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": f"injected {fault.status}"}
    return json.dumps({**status, "reason": reasons.get(fault.status, "InternalError"), "code": fault.status}).encode()
