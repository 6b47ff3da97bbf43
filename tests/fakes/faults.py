"""Proxies between a client and a server that record requests and inject planned faults.

`FaultProxy` stands in front of an API server: it terminates TLS with a separate certificate, and knows watches.
`Proxy` stands in front of a store or a registry: it forwards bytes as they come, and counts them. Both parse HTTP/1.1
just enough to separate requests and replies, and ask a plan which fault each request gets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import httpx
from tests.certificates import Pair

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


class _Recorder:
    """What both proxies record."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.requests: list[Seen] = []

    @property
    def injected(self) -> list[Seen]:
        """The requests with an injected fault."""
        return [each for each in self.requests if each.fault is not None]


class FaultProxy(_Recorder):
    """Listens on a port of 127.0.0.1 while it is open as a context.

    Args:
        server: URL of the API server.
        authority: Its CA certificate, PEM.
        pair: Certificate and key of the proxy, for 127.0.0.1.
        plan: Called for every request; returns the fault, or None to forward the request unchanged.
    """

    def __init__(self, server: str, authority: bytes, pair: Pair, plan: Plan = lambda _: None) -> None:
        super().__init__(plan)
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._tls.load_cert_chain(pair.certificate, pair.key)
        verify = ssl.create_default_context(cadata=authority.decode())
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._upstream = httpx.AsyncClient(
            base_url=server, verify=verify, trust_env=False, timeout=httpx.Timeout(60, read=None), limits=limits
        )
        self._connections: set[asyncio.Task[None]] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
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

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        try:
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

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; False if the connection ends with it."""
        request = await _read(reader)
        await self._flowing.wait()
        request.at = time.monotonic()
        self.requests.append(request)
        request.fault = fault = self.plan(request)
        if fault is not None and fault.kind is not Kind.DELAY:
            return await self._break(request, fault, reader, writer)
        if fault is not None and await _disconnects(reader, fault.seconds):
            return False
        if request.method != "WATCH":
            return await self._forward(request, writer)
        # If the client disconnects, end the watch at the API server, too; otherwise it ends only at the next event.
        forward = asyncio.create_task(self._forward(request, writer))
        closed = asyncio.create_task(_until_closed(reader))
        try:
            await asyncio.wait((forward, closed), return_when=asyncio.FIRST_COMPLETED)
            if forward.done():
                await forward
            return False
        finally:
            for task in (forward, closed):
                task.cancel()
            await asyncio.gather(forward, closed, return_exceptions=True)

    async def _break(
        self, request: Seen, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        kind, alive = fault.kind, False
        if kind is Kind.EVENT:
            line = json.dumps({"type": "ERROR", "object": _status(fault)}).encode() + b"\n"
            alive = await _write(writer, 200, {}, _chunks(line))
        elif kind in (Kind.DROP, Kind.STALL_REPLY, Kind.ANSWER_AFTER):
            async with self._sent(request) as answer:
                if request.method != "WATCH":
                    await answer.aread()
        elif kind in (Kind.BREAK, Kind.SHORTEN, Kind.STALL_BODY):
            alive = await self._forward(request, writer, fault)
        if kind in (Kind.ANSWER, Kind.ANSWER_AFTER):
            alive = await _answer(writer, fault)
        elif kind in (Kind.STALL, Kind.STALL_REPLY, Kind.STALL_BODY):
            await _until_closed(reader)
        elif kind is Kind.BREAK:
            writer.close()  # `abort` could discard the last bytes
            with suppress(TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), 1)
        return alive

    def _sent(self, request: Seen) -> AbstractAsyncContextManager[httpx.Response]:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        method = "GET" if request.method == "WATCH" else request.method
        return self._upstream.stream(method, request.target, headers=headers, content=request.body or None)

    async def _forward(self, request: Seen, writer: asyncio.StreamWriter, fault: Fault | None = None) -> bool:
        async with self._sent(request) as answer:
            headers = {name: value for name, value in answer.headers.items() if name not in _HOP}
            if request.method == "WATCH":
                headers["connection"] = (
                    "close"  # `_until_closed` reads from the connection until the client disconnects
                )
            body = self._passing(answer.aiter_raw(), request)
            if fault is None:
                return await _write(writer, answer.status_code, headers, body)
            headers.pop("content-length", None)
            part = _part(body, fault)
            return await _write(writer, answer.status_code, headers, part, end=fault.kind is Kind.SHORTEN)

    async def _passing(self, body: AsyncIterator[bytes], seen: Seen) -> AsyncIterator[bytes]:
        async for data in body:
            if not self._flowing.is_set():
                await self._flowing.wait()
                raise ConnectionResetError("held data is lost")
            seen.reply += data[: 4096 - len(seen.reply)]
            yield data


class Proxy(_Recorder):
    """Listens in a thread while `running`.

    Args:
        upstream: ``host:port`` of the server.
        plan: Returns the fault of a request, or None.
    """

    def __init__(self, upstream: str, plan: Plan = lambda _: None) -> None:
        super().__init__(plan)
        self.upstream = upstream
        self.host = ""
        self._connections: set[asyncio.Task[None]] = set()

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
        tasks = self._connections

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
            tasks.discard(task)
            writer.transport.abort()

        server = await asyncio.start_server(connected, "127.0.0.1", 0, limit=2**20)
        self.host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        await self._stop.wait()
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readexactly(1)
        if head == _TLS:
            return False  # as an HTTP server does at once: the client probes whether this is TLS
        head += await reader.readuntil(b"\r\n\r\n")
        seen = Seen(*_parse(head))
        self.requests.append(seen)
        seen.fault = fault = self.plan(seen)
        kind, length = fault.kind if fault else None, int(seen.headers.get("content-length", 0))
        assert "transfer-encoding" not in seen.headers, "the client sends the length of each body"
        if kind is Kind.STALL:
            await _until_closed(reader)
        if kind in (Kind.CUT, Kind.STALL):
            return False
        if fault is not None and kind is Kind.ANSWER:
            await _pass(reader, None, length)
            return await _write(writer, fault.status, {**fault.headers, "content-length": "0"}, _chunks())
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
            return await self._reply(seen, fault or Fault(Kind.DELAY), there, (reader, writer))
        finally:
            back.transport.abort()

    async def _reply(
        self,
        seen: Seen,
        fault: Fault,
        there: asyncio.StreamReader,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        reader, writer = client
        answer = await there.readuntil(b"\r\n\r\n")
        _, status, headers = _parse(answer)
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
            await _until_closed(reader)
        elif fault.kind is Kind.BREAK:
            writer.close()
            await writer.wait_closed()
        return fault.kind not in (Kind.BREAK, Kind.STALL_BODY)


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | None,
    length: int,
    seen: Seen | None = None,
    count: str = "",
    pause: float = 0.0,
) -> None:
    """Forward ``length`` bytes, and add them to an attribute of ``seen``."""
    while length > 0:
        data = await reader.read(min(length, 2**16 if pause else 2**18))
        if not data:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(data)
        if writer is not None:
            writer.write(data)
            await writer.drain()
        if seen is not None:
            setattr(seen, count, getattr(seen, count) + len(data))
        if pause:
            await asyncio.sleep(pause)


async def _read(reader: asyncio.StreamReader) -> Seen:
    method, target, headers = _parse(await reader.readuntil(b"\r\n\r\n"))
    seen = Seen(method, target, headers, body=await reader.readexactly(int(headers.get("content-length", 0))))
    seen.method = "WATCH" if seen.query.get("watch") == "true" else method
    return seen


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    """The first two words of a request or reply, and its headers in lower case."""
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    one, two = first.split(" ")[:2]
    return one, two, {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def _disconnects(reader: asyncio.StreamReader, seconds: float) -> bool:
    """Whether the client disconnects within `seconds`.

    Such a request is not forwarded, as in real proxies: otherwise the late request of a dead launcher could create a
    job after others have launched and cancelled the same work.
    """
    with suppress(TimeoutError):
        return not await asyncio.wait_for(_until_closed(reader), seconds)
    return False


async def _until_closed(reader: asyncio.StreamReader) -> bool:
    with suppress(OSError):
        while await reader.read(65536):
            pass
    return False


async def _chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


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


async def _write(
    writer: asyncio.StreamWriter,
    status: int,
    headers: Mapping[str, str],
    body: AsyncIterator[bytes],
    *,
    end: bool = True,
) -> bool:
    """Send a reply; without `end` the body stays incomplete, and the caller cuts or keeps the connection."""
    chunked = "content-length" not in headers
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", *(f"{name}: {value}" for name, value in headers.items())]
    lines += ["transfer-encoding: chunked"] if chunked else []
    writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
    await writer.drain()
    async for data in body:
        if data:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
            await writer.drain()
    if chunked and end:
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    return end


def _status(fault: Fault) -> dict[str, Any]:
    reason = {410: "Expired", 429: "TooManyRequests", 401: "Unauthorized", 403: "Forbidden"}.get(
        fault.status, "InternalError"
    )
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": f"injected {fault.status}",
        "code": fault.status,
    }


async def _answer(writer: asyncio.StreamWriter, fault: Fault) -> bool:
    headers = {"content-type": "application/json", **fault.headers}
    return await _write(writer, fault.status, headers, _chunks(json.dumps(_status(fault)).encode()))
