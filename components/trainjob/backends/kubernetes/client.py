"""The wire: requests as data, one small asynchronous client, one place where replies become objects or errors."""

from __future__ import annotations

import gc
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, TypedDict

import anyio
import anyio.to_thread
import msgspec

from trainjob import retrying
from trainjob.backends.kubernetes.credentials import Access, Credentials
from trainjob.backends.kubernetes.errors import (
    ApiError,
    NoConnection,
    ServerError,
    Unauthorized,
    Unreachable,
    error_of,
)
from trainjob.backends.kubernetes.lean_httpx import httpx
from trainjob.errors import ConfigurationError
from trainjob.retrying import Preset
from trainjob.version import __version__

_log = logging.getLogger(__name__)

PAGE = 500
"""Objects a page, as client-go has it: decoding one holds up the event loop for 10 ms at 3 KB an object."""

_BROKEN = (httpx.HTTPError, OSError)  # ssl's errors are OSErrors, and httpx lets some of them through

MERGE_PATCH = "application/merge-patch+json"

# An API server that has just been started knows no roles yet and answers 403, for up to 0.3 s (seen with 1.36): so soon
# after an outage, a refusal is believed only when it is repeated.
_DOUBT = 10.0
_SECOND_THOUGHTS = 2.0

# The kernel finds out within 8 s that the other end of a silent watch is gone, and asks for nothing of the server.
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 2))
        if hasattr(socket, name)  # not on every system
    ),
]


@dataclass(frozen=True)
class Timings:
    """How long is waited for what, in seconds.

    Attributes:
        connect: For a connection, TLS included each time.
        read: How long the server may be silent over a request.
        watch_read: The same over a watch: a bookmark is due every 60 s (apiserver ``cacher.go``); a connection that is
            silent for longer is dead.
        sound: A watch that lasted for so long was none that failed, even if nothing came: load balancers cut what is
            idle after a minute or less.
        relist: How often a watched collection is listed all the same, 20 % more or less (kopf #585: silent streams).
        poll: Shortest and longest pause between two lists where no watch is allowed.
        probe: Within so long it is noticed that the server does not answer while a watch is silent, by small requests;
            not at all if 0. It costs a second connection: for those who look at a terminal.
        settle: How long a job that was told to end may still get pods, if none were there: a controller that saw it go
            on a moment before is about to make them.
        renew: How often a process writes down that it still waits for its jobs. While that fails it is tried three
            times as often.
        watch_backoff: Retries of a watch.
        request_backoff: Retries of a single request.
    """

    connect: float = 8.0
    read: float = 30.0
    watch_read: float = 75.0
    sound: float = 5.0
    relist: float = 600.0
    poll: tuple[float, float] = (10.0, 30.0)
    probe: float = 0.0
    settle: float = 3.0
    renew: float = 30.0
    watch_backoff: Preset = retrying.KUBERNETES_WATCH
    request_backoff: Preset = retrying.KUBERNETES_REQUEST


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        method: GET, POST, PATCH or DELETE.
        path: Below the server's URL.
        params: Query.
        body: JSON to send.
        content_type: Of `body`.
        read_seconds: How long the server may be silent; `Timings.read` if None.
        last: Nothing like it will be asked soon, so that the connection is not kept: a process that waits has one.
        accept: Media type of the reply.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = "application/json"
    read_seconds: float | None = None
    last: bool = False
    accept: str = "application/json"


class ApiClient:
    """Sends requests with credentials that are always fresh. Belongs to one event loop.

    Args:
        credentials: Where they come from.
        timings: How long is waited for what.
    """

    def __init__(self, credentials: Credentials, timings: Timings | None = None) -> None:
        self.timings = timings or Timings()
        self._credentials = credentials
        self._access: Access | None = None
        self._http: httpx.AsyncClient | None = None
        self._token_file: Path | None = None
        self._token_stamp = 0
        self._failed_at = -_DOUBT
        self._lock = anyio.Lock()
        self._heard: tuple[str, float] | None = None

    def now(self) -> datetime:
        """The present by the clock of the API server, to a second; by this machine's before the first reply."""
        present = datetime.now(UTC)
        if self._heard is None:
            return present
        date, at = self._heard
        try:
            return parsedate_to_datetime(date).astimezone(UTC) + timedelta(seconds=time.monotonic() - at)
        except ValueError:
            return present

    async def send(self, request: Request, decode: Callable[[bytes], Any] = msgspec.json.decode) -> dict[str, Any]:
        """The reply's JSON object; `decode` tells what of it.

        Raises:
            ApiError: anything but a success.
        """
        async with self.stream(request) as response:
            try:
                # Not `aread`: httpx's reply is part of a cycle, and would keep a page until the next full collection.
                loaded = decode(b"".join([data async for data in response.aiter_bytes()]))
            except _BROKEN as error:
                raise _unreachable(request, error) from error
            except ValueError as error:  # something in between has shortened it, or written a page of its own
                raise ServerError(0, "", f"{request.method} {request.path}: the reply is no JSON ({error})") from error
            if not isinstance(loaded, dict):
                raise ServerError(0, "", f"{request.method} {request.path}: the reply is no JSON object")
            return loaded

    async def items(
        self, path: str, params: Mapping[str, str], *, page: int = PAGE, last: bool = False
    ) -> list[dict[str, Any]]:
        """All objects of a collection, `page` at a time; `last` as in `Request`.

        Raises:
            ApiError: anything but a success.
        """
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            more = {"continue": token} if token else {}
            request = Request("GET", path, {**params, "limit": str(page), **more}, last=last)
            answer = await self.send(request, decode_list)
            found += answer["items"]
            token = answer["metadata"].get("continue") or ""
            if not token:
                return found

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[httpx.Response]:
        """The open reply, once it is known to be a success. 401 is answered by reading the credentials again, once."""
        response, access = await self._open(request)
        if response.status_code == 401:
            await response.aclose()
            response, _ = await self._open(request, refused=access)
        if response.status_code == 403 and time.monotonic() - self._failed_at < _DOUBT:
            await response.aclose()
            await anyio.sleep(_SECOND_THOUGHTS)
            response, _ = await self._open(request)
        try:
            if response.status_code >= 400:
                raise await _error(response)
            for warning in response.headers.get_list("warning"):
                _log.warning("API server: %s", _warning_text(warning))
            yield response
        finally:
            await response.aclose()

    async def lines(self, request: Request, *, unended: bool = False) -> AsyncGenerator[bytes]:
        """The reply line by line, as it comes. What stands behind the last line's end is given if it may be `unended`.

        Raises:
            ApiError: no success, or the connection broke.
        """
        async with self.stream(request) as response:
            rest = b""
            try:
                async for data in response.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line
                if unended and rest:
                    yield rest
            except _BROKEN as error:
                raise _unreachable(request, error) from error

    async def pieces(self, request: Request) -> AsyncGenerator[tuple[bytes, bool]]:
        """The reply's lines as they come, each with whether it has ended; of a progress bar, what has come of its line.

        Raises:
            ApiError: no success, or the connection broke.
        """
        async with self.stream(request) as response:
            rest = b""
            try:
                async for data in response.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line, True
                    if b"\r" in rest:  # up to the last state that is certain to be whole
                        state, _, rest = rest.rpartition(b"\r")
                        yield state + b"\r", False
                if rest:
                    yield rest, True
            except _BROKEN as error:
                raise _unreachable(request, error) from error

    async def access(self) -> Access:
        """Where the server is, and by which credentials it is asked now."""
        _, access = await self._connect(None)
        return access

    async def _open(self, request: Request, refused: Access | None = None) -> tuple[httpx.Response, Access]:
        http, access = await self._connect(refused)
        headers = {"Accept": request.accept, "User-Agent": f"trainjob/{__version__}"}
        if access.authorization:
            headers["Authorization"] = access.authorization
        if request.last:
            headers["Connection"] = "close"
        content = None
        if request.body is not None:
            content = json.dumps(request.body).encode()
            headers["Content-Type"] = request.content_type
        timeout = httpx.Timeout(self.timings.connect, read=request.read_seconds or self.timings.read)
        extensions: dict[str, Any] = {"timeout": timeout.as_dict()}
        if access.server_name:
            extensions["sni_hostname"] = access.server_name
        built = http.build_request(
            request.method,
            access.host + request.path,
            params=request.params,
            headers=headers,
            content=content,
            extensions=extensions,
        )
        try:
            response = await http.send(built, stream=True)
        except _BROKEN as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ConfigurationError(
                    f"{access.host} cannot be trusted: {error}; check its certificate authority"
                ) from error
            self._failed_at = time.monotonic()
            raise _unreachable(request, error) from error
        if date := response.headers.get("date"):
            self._heard = (date, time.monotonic())
        if response.status_code >= 500:
            self._failed_at = time.monotonic()
        return response, access

    async def _connect(self, refused: Access | None) -> tuple[httpx.AsyncClient, Access]:
        """The connection, after the credentials were read again if they were `refused` or their file has changed.

        Where many requests are refused at once, the first one has them read again for all: that can take an exec
        plugin seconds.
        """
        async with self._lock:
            if self._http is None or self._access in (None, refused) or self._stamp() != self._token_stamp:
                access = await anyio.to_thread.run_sync(self._credentials.load)
                self._token_file = await anyio.to_thread.run_sync(self._credentials.token_file)
                self._token_stamp = self._stamp()
                if self._http is None or self._access is None or access.identity != self._access.identity:
                    old, self._http = self._http, _http(access)
                    if old is not None:
                        await old.aclose()
                self._access = access
            return self._http, self._access

    def _stamp(self) -> int:
        try:
            return self._token_file.stat().st_mtime_ns if self._token_file else 0
        except OSError:
            return 0

    async def aclose(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def _http(access: Access) -> httpx.AsyncClient:
    # No limit on connections: each log stream and watch holds one, and a pool that is full makes the next one wait
    # for ever. No keep-alive limit either: TLS handshakes cost more than idle sockets.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=60)
    transport = httpx.AsyncHTTPTransport(
        verify=access.verify, proxy=access.proxy, trust_env=False, limits=limits, socket_options=_KEEP_ALIVE
    )
    return httpx.AsyncClient(transport=transport, trust_env=False)


class _List(TypedDict, total=False):
    """A page of a collection."""

    metadata: dict[str, Any] | None
    items: list[dict[str, msgspec.Raw]] | None


_LIST = msgspec.json.Decoder(_List)
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def decode_list(reply: bytes) -> dict[str, Any]:
    """What `ApiClient.send` takes for a LIST; without `managedFields`, half of a pod, which nobody here reads."""
    # Nothing of it is garbage before it is whole, and looking for some takes four times as long as all the rest.
    collecting = gc.isenabled()
    gc.disable()
    try:
        page = _LIST.decode(reply)
        items = [{name: _part(name, raw) for name, raw in item.items()} for item in page.get("items") or []]
        return {"metadata": page.get("metadata") or {}, "items": items}
    finally:
        if collecting:
            gc.enable()


def _part(name: str, raw: msgspec.Raw) -> object:
    if name != "metadata":
        return msgspec.json.decode(raw)
    found = _PARTS.decode(raw)
    return {name: msgspec.json.decode(part) for name, part in found.items() if name != "managedFields"}


async def _error(response: httpx.Response) -> ApiError:
    try:
        text = (await response.aread()).decode("utf-8", "replace")
    except _BROKEN:
        text = ""
    try:
        body: object = json.loads(text)
    except ValueError:
        body = text
    error = error_of(response.status_code, body, response.headers.get("retry-after"))
    if isinstance(error, Unauthorized):
        advice = "the credentials are refused, also after they were read again: log in again or renew the token"
        return Unauthorized(error.status, error.reason, f"{advice} ({error.message})")
    return error


def _unreachable(request: Request, error: Exception) -> Unreachable:
    what = str(error) or type(error).__name__
    kind = (
        NoConnection if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) or _is_dead(error) else Unreachable
    )
    return kind(0, "", f"{request.method} {request.path}: no reply from the API server ({what})")


def _is_dead(error: BaseException | None) -> bool:
    """Whether TCP has found out that the other end does not answer any more (ETIMEDOUT of a keep-alive probe)."""
    while error is not None:
        if isinstance(error, TimeoutError) and error.errno:
            return True
        error = error.__cause__ or error.__context__
    return False


def _warning_text(header: str) -> str:
    """The text of a ``299 - "…"`` header (RFC 7234, 5.5)."""
    return header.partition('"')[2].rpartition('"')[0] or header
