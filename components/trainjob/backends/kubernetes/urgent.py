"""One request that is ready to go, over a connection of its own that is open: for a process with milliseconds left."""

from __future__ import annotations

import json
import socket
import ssl
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPResponse
from threading import Lock
from urllib.parse import urlencode, urlsplit

import anyio.to_thread

from trainjob import __version__
from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.backends.kubernetes.credentials import Access


class Urgent:
    """A request to one object.

    `ApiClient` takes some ten thousand instructions of Python to send one, in another thread, and on a busy machine a
    tenth of a second. Here its bytes are there, and whoever is interrupted by a signal sends them himself.

    Args:
        client: Where credentials come from.
        request: What to send.
    """

    def __init__(self, client: ApiClient, request: Request) -> None:
        self._client = client
        self._request = request
        self._connection: HTTPConnection | None = None
        self._bytes = b""
        self._lock = Lock()

    async def warm(self) -> None:
        """Open the connection, or keep it open by asking for the object; with the credentials as they are now.

        Raises:
            OSError, HTTPException: it cannot be done; `send` answers False then.
        """
        access = await self._client.access()
        await anyio.to_thread.run_sync(self._warm, access)

    def _warm(self, access: Access) -> None:
        url = urlsplit(access.host)
        headers = {"Host": url.netloc, "User-Agent": f"trainjob/{__version__}", "Accept": "application/json"}
        if access.authorization:
            headers["Authorization"] = access.authorization
        with self._lock:
            self._bytes = _bytes(self._request, url.path, headers)
            for again in (True, False):
                try:
                    self._connection = self._connection or _connect(access, self._client.timings.connect)
                    self._connection.request("GET", url.path + self._request.path, headers=headers)
                    self._connection.getresponse().read()
                    return
                except (OSError, HTTPException):  # the server has closed what was idle
                    self._close()
                    if not again:
                        raise

    def send(self) -> bool:
        """Send the request and wait for the answer, from any thread and from a signal's handler.

        Returns:
            False if it could not be sent, or was refused: to be asked again in the usual way.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            connection = self._connection
            if connection is None or connection.sock is None:
                return False
            connection.sock.sendall(self._bytes)
            with closing(HTTPResponse(connection.sock, method=self._request.method)) as response:
                response.begin()
                response.read()
            return response.status < 300 or response.status == 404  # it is gone
        except (OSError, HTTPException):
            return False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _bytes(request: Request, prefix: str, headers: dict[str, str]) -> bytes:
    body = json.dumps(request.body).encode()
    every = {**headers, "Content-Type": request.content_type, "Content-Length": str(len(body))}
    query = f"?{urlencode(request.params)}" if request.params else ""
    lines = [f"{request.method} {prefix}{request.path}{query} HTTP/1.1", *(f"{k}: {v}" for k, v in every.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _connect(access: Access, seconds: float) -> HTTPConnection:
    url = urlsplit(access.host)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    opened = socket.create_connection((host, port), timeout=seconds)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection = HTTPConnection(host, port, timeout=seconds)
    connection.sock = opened
    if url.scheme == "https":
        try:
            connection.sock = access.verify.wrap_socket(opened, server_hostname=access.server_name or host)
        except (OSError, ssl.SSLError):
            opened.close()
            raise
    return connection
