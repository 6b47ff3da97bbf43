"""What replaces the network below `ApiClient._connect`: each request waits until the schedule answers it.

Retries, errors, paging, decoding and watches above it are the product's own code.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
from tests.fakes.kube.replies import Reply
from tests.fakes.kube.server import parsed

if TYPE_CHECKING:
    from tests.fakes.kube.server import Server
    from tests.simulation.processes import Process


@dataclass(eq=False, slots=True)
class Sent:
    """A request that is on its way.

    Attributes:
        process: The process that has sent it.
        method: GET, POST, PATCH or DELETE.
        path: Path below the server's URL.
        params: Query parameters.
        body: The decoded body; None without one.
        kind: Method and plural, as schedules name it: ``POST trainjobs``; ``WATCH pods`` for a watch.
        logged: Length of the server's log when it was sent.
        answer: Gets the reply, or an error of the connection.
    """

    process: Process
    method: str
    path: str
    params: Mapping[str, str]
    body: dict[str, Any] | None
    kind: str = ""
    logged: int = 0
    answer: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def changes(self) -> bool:
        """Whether it may change an object."""
        return self.method != "GET"

    @property
    def watches(self) -> bool:
        """Whether it opens a watch."""
        return self.kind.startswith("WATCH ")


class Watch:
    """An open watch. Its events arrive when the schedule says so.

    Attributes:
        process: The process that has opened it.
        plural: The watched collection.
    """

    def __init__(self, sent: Sent, server: Server, closed: Callable[[Watch], None]) -> None:
        self.process = sent.process
        self.plural = sent.kind.partition(" ")[2]
        self._labels = sent.params.get("labelSelector", "")
        self._fields = sent.params.get("fieldSelector", "")
        self._server = server
        self._closed = closed
        self._seen = self._upto = int(sent.params.get("resourceVersion") or 0)
        self._wake = asyncio.Event()
        self._broken = False

    @property
    def is_behind(self) -> bool:
        """Whether an event waits for its delivery."""
        if self._upto < self._server.compacted:
            return True
        events = self._server.events(self.plural, self._upto, self._server.version, self._labels, self._fields)
        return next(events, None) is not None

    def deliver(self) -> None:
        """Deliver every event up to now."""
        self._upto = self._server.version
        self._wake.set()

    def cut(self) -> None:
        """Break the connection."""
        self._broken = True
        self._wake.set()

    def close(self) -> None:
        """Forget the watch: its client has closed it."""
        self._closed(self)

    async def lines(self) -> AsyncIterator[bytes]:
        """The events as lines."""
        while True:
            if self._broken:
                raise httpx.ReadError("the connection broke")
            if self._seen < self._server.compacted:
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                yield json.dumps({"type": "ERROR", "object": status}).encode() + b"\n"
                return
            upto = self._upto
            for line in self._server.events(self.plural, self._seen, upto, self._labels, self._fields):
                yield line
            self._seen = max(self._seen, upto)
            self._wake.clear()
            await self._wake.wait()


class Connection:
    """The connections of one process, as `ApiClient` uses `httpx.AsyncClient`."""

    def __init__(self, process: Process, take: Callable[[Sent], None]) -> None:
        self._process = process
        self._take = take

    def build_request(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, str],
        headers: Mapping[str, str],
        content: bytes | None,
        extensions: Mapping[str, Any],
    ) -> Sent:
        """The request, decoded."""
        del headers, extensions
        path = urlsplit(url).path
        body = json.loads(content) if content else None
        sent = Sent(self._process, method, path, params, body)
        plural, _, _, sub = parsed(path)
        sent.kind = f"{'WATCH' if 'watch' in params else method} {sub or plural}"
        return sent

    async def send(self, request: Sent, *, stream: bool) -> Reply:
        """Wait until the schedule answers the request. A process that was killed sends nothing."""
        del stream
        if self._process.dead:
            raise asyncio.CancelledError
        plural, _, name, _ = parsed(request.path)
        self._process.sent.append((request.method, plural, name))
        self._take(request)
        self._process.unanswered[plural] += 1
        try:
            return await request.answer
        finally:
            self._process.unanswered[plural] -= 1

    async def aclose(self) -> None:
        """Do nothing: there are no sockets."""
