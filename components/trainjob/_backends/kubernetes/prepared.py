"""Ready-made requests, each with a separate open connection: for a process with milliseconds left."""

from __future__ import annotations

import json
import select
import socket
import ssl
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from threading import Lock
from urllib.parse import urlencode, urlsplit

import anyio.to_thread

from trainjob._backends.credentials import Access
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._support.numbers import count_of
from trainjob.version import __version__

_READ = 4096  # bytes
_DRY_RUNS = 3
_BUSY_SECONDS = 1.0  # longest wait for a request that keeps the connection open; these are small


class PreparedRequest:
    """A ready-made request to one object.

    `ApiClient` runs some ten thousand Python instructions to send a request, in another thread, and takes a tenth of a
    second on a busy machine. Here the bytes exist in advance, and a signal handler sends them itself.

    Args:
        client: Source of the credentials.
        request: The request to send.

    Attributes:
        took: Seconds that dry runs of a PATCH take, including webhooks: the shortest of the latest ones, since one slow
            run proves nothing. None before the first, if the server refuses them, and for other methods.
        forbidden: Whether the server answered 403 to the latest request that kept the connection open.
    """

    def __init__(self, client: ApiClient, request: Request) -> None:
        self.took: float | None = None
        self.forbidden = False
        self._dry_runs: deque[float] = deque(maxlen=_DRY_RUNS)
        self._client = client
        self._request = request
        self._connection: HTTPConnection | None = None
        self._bytes = b""
        self._lock = Lock()
        self._sent: HTTPConnection | None = None
        self._reply = b""

    async def warm(self) -> None:
        """Open the connection, or keep it open by a request, with the current credentials.

        A PATCH is sent as a dry run, which takes as long as the PATCH itself. A GET is sent unchanged. For a DELETE the
        object is read.

        Raises:
            OSError, HTTPException: The request failed; `send` returns False then.
        """
        access = await self._client.access()
        await anyio.to_thread.run_sync(self._warm, access)

    def _warm(self, access: Access) -> None:
        url = urlsplit(access.host)
        headers = {"Host": url.netloc, "User-Agent": f"trainjob/{__version__}", "Accept": "application/json"}
        if access.authorization:
            headers["Authorization"] = access.authorization
        harmless = Request("GET", self._request.path) if self._request.method == "DELETE" else self._request
        if self._request.method == "PATCH":
            harmless = replace(self._request, params={**self._request.params, "dryRun": "All"})
        with self._lock:
            self._bytes = _bytes(self._request, url.path, headers)
            for again in (True, False):
                try:
                    self._connection = self._connection or _connect(access, self._client.timings.connect)
                    self._keep_open(self._connection, harmless, url.path, headers)
                    return
                except (OSError, HTTPException):  # the server has closed the idle connection
                    self._close()
                    if not again:
                        raise

    def _keep_open(self, connection: HTTPConnection, request: Request, prefix: str, headers: dict[str, str]) -> None:
        body = None
        if request.method == "PATCH":
            body, headers = json.dumps(request.body), {**headers, "Content-Type": request.content_type}
        began = time.monotonic()
        connection.request(request.method, f"{prefix}{request.path}{_query(request)}", body, headers)
        response = connection.getresponse()
        response.read()
        self.forbidden = response.status == 403
        if request.method == "PATCH" and response.status < 300:
            self._dry_runs.append(time.monotonic() - began)
            self.took = min(self._dry_runs)

    def send(self) -> bool:
        """Send the request and wait for the reply, from any thread or a signal handler.

        Returns:
            False if the request could not be sent or was refused; the caller then sends it by `ApiClient`.
        """
        return self._write(_BUSY_SECONDS) and self._done(time.monotonic() + self._client.timings.connect)

    def read(self, seconds: float) -> bytes | None:
        """Send the request and return the body of the reply; for signal handlers.

        Args:
            seconds: Timeout of the reply.

        Returns:
            None if no reply arrives in time, or the request was refused.
        """
        until = time.monotonic() + seconds
        if not self._write(seconds):
            return None
        opened = self._sent.sock if self._sent is not None else None
        if opened is None:
            return None
        try:
            opened.settimeout(max(0.001, until - time.monotonic()))  # TimeoutError is an OSError
            with closing(HTTPResponse(opened, method="GET")) as response:
                response.begin()
                return response.read() if response.status == 200 else None
        except (OSError, HTTPException):
            return None

    def send_or(self, other: PreparedRequest, seconds: float) -> PreparedRequest | None:
        """Send the request, and `other` as well unless the reply arrives in time; for signal handlers.

        The API server cancels a request whose connection closes before the reply, so a process that may end at any
        moment cannot wait for a slow reply. If dry runs take longer than `seconds`, `other` is sent at once, and this
        request only if `other` is refused.

        Args:
            other: The alternative request.
            seconds: Timeout of the reply, after which `other` is sent.

        Returns:
            The request that was carried out, `other` if both may have been; None if neither was.
        """
        began = time.monotonic()
        slow = self.took is not None and self.took > seconds
        sent = not slow and self._write(seconds)
        if sent and self._done(began + seconds):
            return self
        if other.send():
            return other
        sent = sent or self._write(seconds)
        return self if sent and self._done(began + self._client.timings.connect) else None

    def _write(self, seconds: float) -> bool:
        """Send the request without waiting for the reply.

        Args:
            seconds: Longest wait for a running `warm`.

        Returns:
            False if there is no open connection.
        """
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            connection, self._connection = self._connection, None  # only the status of its reply is read
            if connection is None or connection.sock is None:
                return False
            self._forget()
            self._reply, self._sent = b"", connection
            connection.sock.sendall(self._bytes)
            connection.sock.setblocking(False)
        except OSError:
            return False
        else:
            return True
        finally:
            self._lock.release()

    def _done(self, until: float) -> bool:
        """Whether a reply before `until` confirms that the request sent by `_write` was carried out."""
        opened = self._sent.sock if self._sent is not None else None
        if opened is None:
            return False
        poll = select.poll()
        poll.register(opened, select.POLLIN)
        while (status := self._status(opened)) is None:
            left = until - time.monotonic()
            if left <= 0:
                return False
            poll.poll(1000 * left)
        return 0 < status < 300 or status == 404  # 404: the object is gone

    def _status(self, opened: socket.socket) -> int | None:
        """The status of the reply; None until it arrives, 0 if none will arrive."""
        try:
            while b"\r\n" not in self._reply:
                received = opened.recv(_READ)
                if not received:
                    return 0
                self._reply += received
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except OSError:
            return 0
        words = self._reply.split(maxsplit=2)
        return (count_of(words[1].decode("ascii", "replace")) or 0) if len(words) > 1 else 0

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._close()
            self._forget()

    def _forget(self) -> None:
        if self._sent is not None:
            self._sent.close()
            self._sent = None

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _bytes(request: Request, prefix: str, headers: dict[str, str]) -> bytes:
    body = json.dumps(request.body).encode()
    every = {**headers, "Content-Type": request.content_type, "Content-Length": str(len(body))}
    first = f"{request.method} {prefix}{request.path}{_query(request)} HTTP/1.1"
    return "\r\n".join([first, *(f"{k}: {v}" for k, v in every.items()), "", ""]).encode("latin-1") + body


def _query(request: Request) -> str:
    return f"?{urlencode(request.params)}" if request.params else ""


def _connect(access: Access, seconds: float) -> HTTPConnection:
    url = urlsplit(access.host)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    opened = socket.create_connection((host, port), timeout=seconds)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = HTTPConnection(host, port, timeout=seconds)
    connection.sock = opened
    if url.scheme == "https":
        try:
            connection.sock = access.verify.wrap_socket(opened, server_hostname=host)
        except (OSError, ssl.SSLError):
            opened.close()
            raise
    return connection
