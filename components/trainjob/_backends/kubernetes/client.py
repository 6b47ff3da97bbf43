"""HTTP: requests as data, one small asynchronous client, one place that turns replies into objects or errors."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import anyio.to_thread
import httpx

from trainjob._backends.credentials import Access, Credentials
from trainjob._backends.kubernetes.errors import (
    ApiError,
    NoConnection,
    ServerError,
    Unauthorized,
    Unreachable,
    error_of,
)
from trainjob._support import retrying
from trainjob._support.foreign import Unreadable, json_of
from trainjob._support.retrying import Preset
from trainjob.errors import ConfigurationError
from trainjob.version import __version__

_log = logging.getLogger(__name__)

PAGE = 250
"""Objects per page, half of client-go's: decoding a page blocks the event loop for 10 ms at 2 KB per object."""

_READS = 8
"""Objects and pages that are read at once: 1,000 jobs that end in one second would else open 1,000 connections, each
with a TLS handshake. Log streams and watches, each of which holds a connection, do not count."""

TAILS = 16
"""Ends of logs that are read at once: a request to the kubelet of a lost node waits for half a minute."""

_ABSENT_SECONDS = 60.0  # until an API that the server did not have is requested again

_CONNECTION_ERRORS = (httpx.HTTPError, OSError)  # ssl's errors are OSErrors, and httpx does not wrap all of them

MERGE_PATCH = "application/merge-patch+json"

# An API server that has just started has loaded no roles yet and answers 403 for up to 0.3 s (observed with 1.36). So
# soon after an outage, a 403 is confirmed by a second request.
_AFTER_OUTAGE_SECONDS = 10.0
_CONFIRM_403_SECONDS = 2.0

# The kernel detects within 8 s that the other end of a silent watch is gone, without a request to the server.
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
    """Timeouts and intervals, in seconds.

    Attributes:
        connect: Timeout of a connection attempt, and again of its TLS handshake.
        read: Longest silence of the server during a request.
        watch_read: The same during a watch: a bookmark is due every 60 s (apiserver ``cacher.go``), so a connection
            that is silent for longer is dead.
        healthy_after: A watch open at least this long counts as healthy, even without events: load balancers close
            idle connections after a minute or less.
        relist: Interval at which a watched collection is listed again, plus or minus 20 % (kopf #585: silent streams).
        poll: Shortest and longest pause between two lists where watches are forbidden.
        settle: Time for which a suspended or deleted job without pods may still get some: a controller that has not
            seen the change yet may be creating them.
        renew: Interval at which a process records that it still waits for its jobs; a third of it after a failure.
        watch_backoff: Retries of a watch.
        request_backoff: Retries of a single request.
    """

    connect: float = 8.0
    read: float = 30.0
    watch_read: float = 75.0
    healthy_after: float = 5.0
    relist: float = 600.0
    poll: tuple[float, float] = (10.0, 30.0)
    settle: float = 3.0
    renew: float = 30.0
    watch_backoff: Preset = retrying.PATIENT
    request_backoff: Preset = retrying.REQUEST


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        method: GET, POST, PATCH or DELETE.
        path: Path below the server's URL.
        params: Query parameters.
        body: JSON to send.
        content_type: Media type of `body`.
        read_seconds: Longest silence of the server; `Timings.read` if None.
        accept: Media type of the reply.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    content_type: str = "application/json"
    read_seconds: float | None = None
    accept: str = "application/json"


class ApiClient:
    """Sends requests with current credentials. Belongs to one event loop.

    Args:
        credentials: Source of the credentials.
        timings: Timeouts and intervals.

    Attributes:
        timings: Timeouts and intervals.
        tails: Limits how many ends of logs are read at once.
    """

    def __init__(self, credentials: Credentials, timings: Timings | None = None) -> None:
        self.timings = timings or Timings()
        self._credentials = credentials
        self._access: Access | None = None
        self._http: httpx.AsyncClient | None = None
        self._failed_at = -_AFTER_OUTAGE_SECONDS
        self._lock = anyio.Lock()
        self._reads = anyio.Semaphore(_READS)
        self.tails = anyio.Semaphore(TAILS)
        self._absent: dict[str, float] = {}  # path -> monotonic time
        self._ahead: float | None = None  # of the monotonic clock, what the API server's is at least

    def now(self) -> datetime:
        """The current time by the API server's clock, less up to a second; by the local clock before the first reply.

        It goes back only if the server's clock was set back.
        """
        if self._ahead is None:
            return datetime.now(UTC)
        return datetime.fromtimestamp(time.monotonic() + self._ahead, UTC)

    def _hear(self, date: str, sent: float) -> None:
        """Take the server's time from the header ``Date``, which has whole seconds: the latest time proven counts."""
        try:
            seconds = parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError):
            return
        ahead = seconds - time.monotonic()
        if self._ahead is None or ahead > self._ahead or self._ahead > seconds + 1 - sent:
            self._ahead = ahead

    async def send(self, request: Request) -> dict[str, Any]:
        """The JSON object of the reply.

        Raises:
            ApiError: The request failed.
        """
        async with self._reads if request.method == "GET" else nullcontext(), self.stream(request) as response:
            try:
                # Not `aread`: httpx's response is in a reference cycle and would keep a page until a full collection.
                loaded = json.loads(b"".join([data async for data in response.aiter_bytes()]))
            except _CONNECTION_ERRORS as error:
                raise _unreachable(request, error) from error
            except (ValueError, RecursionError) as error:  # truncated, or written by a proxy
                raise ServerError(0, "", f"{request.method} {request.path}: the reply is not JSON ({error})") from error
            if not isinstance(loaded, dict):
                raise ServerError(0, "", f"{request.method} {request.path}: the reply is not a JSON object")
            return loaded

    async def items(self, path: str, params: Mapping[str, str]) -> list[dict[str, Any]]:
        """All objects of a collection, requested `PAGE` at a time.

        Raises:
            ApiError: A request failed.
        """
        found: list[dict[str, Any]] = []
        token = ""
        while True:
            more = {"continue": token} if token else {}
            request = Request("GET", path, {**params, "limit": str(PAGE), **more})
            page_items, metadata = parts_of(request, await self.send(request))
            found += page_items
            if not (token := metadata.get("continue") or ""):
                return found

    def lacks(self, path: str) -> bool:
        """Whether `absent` was called for a path within the last minute."""
        return time.monotonic() - self._absent.get(path, -_ABSENT_SECONDS) < _ABSENT_SECONDS

    def absent(self, path: str) -> None:
        """Note that the server does not have an API, or does not answer for it."""
        self._absent[path] = time.monotonic()

    @asynccontextmanager
    async def stream(self, request: Request) -> AsyncIterator[httpx.Response]:
        """The open reply of a successful request; after a 401 it is sent once more, with reloaded credentials."""
        response, access = await self._open(request)
        if response.status_code == 401:
            await response.aclose()
            response, _ = await self._open(request, refused=access)
        if response.status_code == 403 and time.monotonic() - self._failed_at < _AFTER_OUTAGE_SECONDS:
            await response.aclose()
            await anyio.sleep(_CONFIRM_403_SECONDS)
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
        """The reply line by line, as it arrives. With `unended`, a last line without its line end is included.

        Raises:
            ApiError: The request failed, or the connection broke.
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
            except _CONNECTION_ERRORS as error:
                raise _unreachable(request, error) from error

    async def pieces(self, request: Request) -> AsyncGenerator[tuple[bytes, bool]]:
        """The reply's lines as they arrive, each with whether it is complete; a progress bar's line comes in parts.

        Raises:
            ApiError: The request failed, or the connection broke.
        """
        async with self.stream(request) as response:
            rest = b""
            try:
                async for data in response.aiter_bytes():
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        yield line, True
                    if b"\r" in rest:  # up to the last state that is certainly complete
                        state, _, rest = rest.rpartition(b"\r")
                        yield state + b"\r", False
                if rest:
                    yield rest, True
            except _CONNECTION_ERRORS as error:
                raise _unreachable(request, error) from error

    async def access(self) -> Access:
        """The server's address and the current credentials."""
        _, access = await self._connect(None)
        return access

    async def _open(self, request: Request, refused: Access | None = None) -> tuple[httpx.Response, Access]:
        http, access = await self._connect(refused)
        headers = [("Accept", request.accept), ("User-Agent", f"trainjob/{__version__}"), *access.headers]
        if access.authorization:
            headers.append(("Authorization", access.authorization))
        content = None
        if request.body is not None:
            content = json.dumps(request.body).encode()
            headers.append(("Content-Type", request.content_type))
        timeout = httpx.Timeout(self.timings.connect, read=request.read_seconds or self.timings.read)
        connecting, sent = _Connecting(), time.monotonic()
        extensions: dict[str, Any] = {"timeout": timeout.as_dict(), "trace": connecting.trace}
        built = http.build_request(
            request.method,
            access.host + request.path,
            params=request.params,
            headers=[(name.encode(), value.encode()) for name, value in headers],
            content=content,
            extensions=extensions,
        )
        try:
            response = await connecting.send(http, built)
        except httpx.LocalProtocolError as error:  # h11 quotes the header that it refuses
            raise _unreachable(request, error) from None
        except _CONNECTION_ERRORS as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ConfigurationError(
                    f"the certificate of {access.host} is not trusted: {error}; check the certificate authority"
                ) from error
            self._failed_at = time.monotonic()
            raise _unreachable(request, error) from error
        if date := response.headers.get("date"):
            self._hear(date, sent)
        if response.status_code >= 500:
            self._failed_at = time.monotonic()
        return response, access

    async def _connect(self, refused: Access | None) -> tuple[httpx.AsyncClient, Access]:
        """The connection; the credentials are reloaded if they are those `refused`, have expired or were replaced.

        If many requests are refused at once, the first one reloads them for all: an exec plugin can take seconds.
        """
        async with self._lock:
            if self._http is None or self._access in (None, refused) or not self._access.is_current():
                access = await anyio.to_thread.run_sync(self._credentials.load, refused)
                if self._http is None or self._access is None or access.identity != self._access.identity:
                    old, self._http = self._http, _http(access)
                    if old is not None:
                        await old.aclose()
                self._access = access
            return self._http, self._access

    async def aclose(self) -> None:
        """Close all connections."""
        if self._http is not None:
            await self._http.aclose()
            self._http = None


def _http(access: Access) -> httpx.AsyncClient:
    # No limit on connections: each log stream and each watch holds one, and a full pool would block the next one for
    # ever. Idle connections are kept: TLS handshakes cost more than idle sockets.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=60)
    transport = httpx.AsyncHTTPTransport(
        verify=access.verify, proxy=access.proxy, trust_env=False, limits=limits, socket_options=_KEEP_ALIVE
    )
    return httpx.AsyncClient(transport=transport, trust_env=False)


class _Connecting:
    """The connections that a request opens. httpcore 1.0 leaves one open whose TLS handshake is cancelled."""

    def __init__(self) -> None:
        self._opened: list[Any] = []

    async def trace(self, event: str, about: Mapping[str, Any]) -> None:
        """The extension ``trace`` of httpcore."""
        if event == "connection.connect_tcp.complete":
            self._opened.append(about["return_value"])

    async def send(self, http: httpx.AsyncClient, request: httpx.Request) -> httpx.Response:
        """Send the request; if this is cancelled, close what it has opened."""
        try:
            return await http.send(request, stream=True)
        except asyncio.CancelledError:
            with anyio.CancelScope(shield=True):
                for stream in self._opened:
                    await stream.aclose()
            raise


def parts_of(request: Request, page: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    """The items and the metadata of a page of a collection.

    Raises:
        ServerError: The reply is no page.
    """
    items, metadata = page.get("items") or [], page.get("metadata") or {}
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in (metadata, *items)):
        raise ServerError(0, "", f"{request.method} {request.path}: the reply is not a list of objects")
    return items, metadata


async def _error(response: httpx.Response) -> ApiError:
    try:
        text = (await response.aread()).decode("utf-8", "replace")
    except _CONNECTION_ERRORS:
        text = ""
    try:
        body: object = json_of(text, "an error of the API server")
    except Unreadable:
        body = text
    error = error_of(response.status_code, body, response.headers.get("retry-after"))
    if isinstance(error, Unauthorized):
        advice = "the credentials are refused, also after they were reloaded: log in again or renew the token"
        return Unauthorized(error.status, error.reason, f"{advice} ({error.message})")
    return error


def _unreachable(request: Request, error: Exception) -> Unreachable:
    quoted = "" if isinstance(error, httpx.LocalProtocolError) else str(error)
    what = quoted or type(error).__name__
    kind = (
        NoConnection if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout) or _is_dead(error) else Unreachable
    )
    return kind(0, "", f"{request.method} {request.path}: no reply from the API server ({what})")


def _is_dead(error: BaseException | None) -> bool:
    """Whether TCP has detected that the other end is gone (ETIMEDOUT of a keep-alive probe)."""
    while error is not None:
        if isinstance(error, TimeoutError) and error.errno:
            return True
        error = error.__cause__ or error.__context__
    return False


def _warning_text(header: str) -> str:
    """The text of a ``299 - "…"`` header (RFC 7234, 5.5)."""
    return header.partition('"')[2].rpartition('"')[0] or header
