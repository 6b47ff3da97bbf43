"""A proxy in front of a registry that counts traffic and injects faults."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus

TLS = b"\x16"
"""First byte of a TLS handshake."""


class Kind(StrEnum):
    """Kinds of faults."""

    REFUSE = "refuse"
    """The connection is cut before anything reaches the registry."""
    CUT = "cut"
    """The connections are cut in the middle of the request's body."""
    DROP = "drop"
    """The registry acts, and its reply is lost."""
    BREAK = "break"
    """The connection is cut in the middle of the reply's body."""
    STALL = "stall"
    """Nothing is forwarded, and the connection stays open."""
    ANSWER = "answer"
    """The proxy answers instead of the registry, after it received the body."""


@dataclass(frozen=True)
class Fault:
    """A fault of one request.

    Attributes:
        kind: Its kind.
        after: Bytes of the body that still pass.
        status: Status of the proxy's answer.
        retry_after: The header ``Retry-After``; empty: omitted.
        challenge: The header ``WWW-Authenticate``; empty: omitted.
    """

    kind: Kind
    after: int = 0
    status: int = 503
    retry_after: str = ""
    challenge: str = ""


@dataclass
class Seen:
    """A request that the proxy received.

    Attributes:
        method: Such as PATCH.
        target: Path and query.
        headers: In lower case.
        sent: Bytes of the body that the registry got.
        received: Bytes of the reply's body that the client got.
        fault: The injected fault.
        status: Status of the registry's answer; 0 if the proxy received none.
    """

    method: str
    target: str
    headers: dict[str, str]
    sent: int = 0
    received: int = 0
    fault: Fault | None = None
    status: int = 0


Plan = Callable[[Seen], Fault | None]


@dataclass
class Proxy:
    """Listens while `running`.

    Attributes:
        upstream: ``host:port`` of the registry.
        plan: Returns the fault of a request, or None.
        requests: All received requests.
    """

    upstream: str
    plan: Plan = lambda _: None
    requests: list[Seen] = field(default_factory=list)
    host: str = ""
    _connections: set[asyncio.Task[None]] = field(default_factory=set)

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
        """Bytes of bodies that the registry got."""
        return sum(each.sent for each in self.requests)

    def seen(self, method: str, part: str = "") -> list[Seen]:
        """Requests of a method whose target contains ``part``."""
        return [each for each in self.requests if each.method == method and part in each.target]

    @property
    def injected(self) -> list[Seen]:
        return [each for each in self.requests if each.fault is not None]

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
        if head == TLS:
            return False  # as an HTTP server does at once: the client probes whether this is TLS
        head += await reader.readuntil(b"\r\n\r\n")
        first, headers = _parse(head)
        method, target, _ = first.split(" ")
        seen = Seen(method, target, headers)
        self.requests.append(seen)
        seen.fault = fault = self.plan(seen)
        length = int(headers.get("content-length", 0))
        assert "transfer-encoding" not in headers, "the client sends the length of each body"
        if fault is not None and fault.kind is Kind.REFUSE:
            return False
        if fault is not None and fault.kind is Kind.STALL:
            while await reader.read(2**16):
                pass
            return False
        if fault is not None and fault.kind is Kind.ANSWER:
            await _pass(reader, None, length)
            fields = {"retry-after": fault.retry_after, "www-authenticate": fault.challenge}
            extra = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
            reason = HTTPStatus(fault.status).phrase
            writer.write(f"HTTP/1.1 {fault.status} {reason}\r\ncontent-length: 0\r\n{extra}\r\n".encode())
            await writer.drain()
            return True
        host, port = self.upstream.split(":")
        there, back = await asyncio.open_connection(host, int(port), limit=2**20)
        try:
            return await self._forward(head, seen, length, (reader, writer), (there, back))
        finally:
            back.transport.abort()

    async def _forward(
        self,
        head: bytes,
        seen: Seen,
        length: int,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        registry: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    ) -> bool:
        (reader, writer), (there, back), fault = client, registry, seen.fault
        back.write(head)
        cut = fault is not None and fault.kind is Kind.CUT
        count = min(length, fault.after) if cut and fault is not None else length
        await _pass(reader, back, count, lambda size: setattr(seen, "sent", seen.sent + size))
        if cut:
            back.close()  # not `abort`, which could discard the last bytes
            await back.wait_closed()
            return False
        answer = await there.readuntil(b"\r\n\r\n")
        first, headers = _parse(answer)
        seen.status = int(first.split(" ")[1])
        if fault is not None and fault.kind is Kind.DROP:
            return False
        writer.write(answer)
        left = int(headers.get("content-length", 0)) if seen.method != "HEAD" and seen.status != 204 else 0
        chunked = headers.get("transfer-encoding") == "chunked"
        if fault is not None and fault.kind is Kind.BREAK:
            left = min(left, fault.after)
        if chunked:
            while data := await there.read(2**16):  # to the end of the chunked body
                writer.write(data)
                await writer.drain()
                if data.endswith(b"0\r\n\r\n"):
                    break
        await _pass(there, writer, left, lambda size: setattr(seen, "received", seen.received + size))
        if fault is not None and fault.kind is Kind.BREAK:
            writer.close()
            await writer.wait_closed()
            return False
        return True


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    return first, {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter | None,
    length: int,
    count: Callable[[int], None] = lambda _: None,
) -> None:
    while length > 0:
        data = await reader.read(min(length, 2**18))
        if not data:
            raise asyncio.IncompleteReadError(b"", length)
        length -= len(data)
        if writer is not None:
            writer.write(data)
            await writer.drain()
            count(len(data))
