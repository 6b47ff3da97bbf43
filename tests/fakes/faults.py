"""A proxy between a client and the API server that injects planned faults.

It terminates TLS with a separate certificate, parses HTTP/1.1 just enough to separate requests and replies, counts
them, and asks a plan which fault each one gets.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import httpx
from tests.certificates import Pair

_HOP = {"connection", "keep-alive", "transfer-encoding", "host"}


class Kind(StrEnum):
    """Kinds of faults of one request."""

    CUT = "cut"
    """The connection is cut before the request reaches the server."""
    DROP = "drop"
    """The server acts, and the connection is cut instead of its reply."""
    BREAK = "break"
    """The connection is cut in the middle of the body."""
    SHORTEN = "shorten"
    """The body ends in the middle without an error, as behind a buffering proxy."""
    DELAY = "delay"
    """The request is forwarded after a delay, unless the client disconnects meanwhile."""
    STALL = "stall"
    """The request is not forwarded, and the connection stays open."""
    STALL_REPLY = "stall-reply"
    """The server acts, no reply is sent, and the connection stays open."""
    STALL_BODY = "stall-body"
    """The body stops in the middle, and the connection stays open."""
    ANSWER = "answer"
    """The proxy answers instead of the server."""
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
        seconds: Seconds of a delay, or of a watch before a fault in its middle.
        retry_after: Value of the header ``Retry-After``; None leaves it out.
    """

    kind: Kind
    status: int = 0
    after: int = 0
    seconds: float = 0.0
    retry_after: int | None = None


@dataclass
class Seen:
    """A request that the proxy received.

    Attributes:
        method: GET, POST, PATCH or DELETE, or WATCH for a GET that watches.
        path: Path without the query.
        query: The query; of repeated parameters the last value.
        at: Monotonic time of its arrival.
        body: Body of the request.
        fault: The injected fault.
        reply: The first bytes of the server's answer, if the request was forwarded.
    """

    method: str
    path: str
    query: Mapping[str, str]
    at: float
    body: bytes
    fault: Fault | None = None
    reply: bytes = b""


Plan = Callable[[Seen], Fault | None]


@dataclass
class _Request:
    seen: Seen
    target: str
    headers: dict[str, str]


class FaultProxy:
    """Listens on a port of 127.0.0.1 while it is open as a context.

    Args:
        server: URL of the API server.
        authority: Its CA certificate, PEM.
        pair: Certificate and key of the proxy, for 127.0.0.1.
        plan: Called for every request; returns the fault, or None to forward the request unchanged.
    """

    def __init__(self, server: str, authority: bytes, pair: Pair, plan: Plan = lambda _: None) -> None:
        self.plan = plan
        self.requests: list[Seen] = []
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

    @property
    def injected(self) -> list[Seen]:
        """The requests with an injected fault."""
        return [each for each in self.requests if each.fault is not None]

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
        self.requests.append(request.seen)
        request.seen.fault = fault = self.plan(request.seen)
        if fault is not None and fault.kind is not Kind.DELAY:
            return await self._break(request, fault, reader, writer)
        if fault is not None and await _disconnects(reader, fault.seconds):
            return False
        if request.seen.method != "WATCH":
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
        self, request: _Request, fault: Fault, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        kind, alive = fault.kind, False
        if kind is Kind.EVENT:
            line = json.dumps({"type": "ERROR", "object": _status(fault)}).encode() + b"\n"
            alive = await _write(writer, 200, {}, _chunks(line))
        elif kind in (Kind.DROP, Kind.STALL_REPLY, Kind.ANSWER_AFTER):
            async with self._sent(request) as answer:
                if request.seen.method != "WATCH":
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

    def _sent(self, request: _Request) -> AbstractAsyncContextManager[httpx.Response]:
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        method = "GET" if request.seen.method == "WATCH" else request.seen.method
        return self._upstream.stream(method, request.target, headers=headers, content=request.seen.body or None)

    async def _forward(self, request: _Request, writer: asyncio.StreamWriter, fault: Fault | None = None) -> bool:
        async with self._sent(request) as answer:
            headers = {name: value for name, value in answer.headers.items() if name not in _HOP}
            if request.seen.method == "WATCH":
                headers["connection"] = (
                    "close"  # `_until_closed` reads from the connection until the client disconnects
                )
            body = self._passing(answer.aiter_raw(), request.seen)
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


async def _read(reader: asyncio.StreamReader) -> _Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    parts = urlsplit(target)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    method = "WATCH" if query.get("watch") == "true" else method
    return _Request(Seen(method, parts.path, query, time.monotonic(), body), target, headers)


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
    headers = {"content-type": "application/json"}
    if fault.retry_after is not None:
        headers["retry-after"] = str(fault.retry_after)
    return await _write(writer, fault.status, headers, _chunks(json.dumps(_status(fault)).encode()))
