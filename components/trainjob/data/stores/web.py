"""Read files of web servers, through httpx: ranges, resuming after a cut, and ``Retry-After``."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from trainjob._support import retrying
from trainjob.data.locations import Location, public
from trainjob.data.stores import redirects, trust
from trainjob.data.stores.base import CHUNK, Entry, ReadableStore, retry
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, StoreUnavailable
from trainjob.version import __version__

_TIMEOUT = httpx.Timeout(60, connect=10)  # without a byte; a body as a whole has no time limit
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
"""One connection per thread, all of them kept open: by default httpx keeps 20, and opens the others again for each
file."""
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


@dataclass(frozen=True)
class Facts:
    """What a server reports about a file.

    Attributes:
        size: Bytes; None if the server does not report it.
        tag: Entity tag, else date and size; empty if the server reports none of them.
        ranges: Whether the server supports range requests for it.
    """

    size: int | None
    tag: str
    ranges: bool


class Web:
    """GET requests, with the errors of stores. Safe for several threads.

    Args:
        home: URL of the server that the author chose; see `redirects.Guard`.
        headers: Sent with every request. Those with credentials are not sent to another host after a redirect.
        tag: Reads the entity tag of a response, for servers with a header of another name; None if it has none.
    """

    def __init__(
        self,
        home: str,
        headers: Mapping[str, str] | None = None,
        tag: Callable[[httpx.Response], str | None] | None = None,
    ) -> None:
        own = {"User-Agent": f"trainjob/{__version__}", "Accept-Encoding": "identity"}
        # Certificates come from the system or SSL_CERT_FILE, proxies from the environment.
        with _errors(home.partition("?")[0]):
            self._guard = redirects.Guard(httpx.URL(home))
        self._client = redirects.client(
            self._guard,
            headers={**own, **(headers or {})},
            verify=trust.by_httpx(),
            timeout=_TIMEOUT,
            limits=LIMITS,
        )
        self._tag = tag or _tag
        # For callers that do not close the store.
        weakref.finalize(self, self._client.close)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def facts(self, url: str, where: str) -> Facts:
        """Request facts of a file, by GET of its first byte: many web applications do not support HEAD."""
        with _errors(where), self._get(url, where, {"Range": "bytes=0-0"}) as response:
            if response.status_code == 416 and (match := _RANGE.fullmatch(response.headers.get("Content-Range", ""))):
                return Facts(int(match[3]), self._tag(response) or "", ranges=False)
            _check(response, where)
            return Facts(_size(response), self._tag(response) or "", ranges=response.status_code == 206)

    def read(self, url: str, where: str, start: int, length: int | None, tag: str) -> Iterator[bytes]:
        """Read from ``start`` on. A server without ranges sends the file from its beginning; that part is dropped."""
        if length == 0:
            return
        headers = {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-" + (str(start + length - 1) if length is not None else "")
            if tag.startswith('"'):  # If-Range takes neither weak tags nor our own combination of date and size
                headers["If-Range"] = tag
        with _errors(where), self._get(url, where, headers) as response:
            if response.status_code in (412, 416):
                raise CorruptData(f"{where} changed while it was read; run the step again")
            _check(response, where)
            if tag and self._tag(response) not in (tag, None):
                raise CorruptData(f"{where} changed while it was read; run the step again")
            skip, left = start, length
            if response.status_code == 206:
                match = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
                if match is None or match[1] is None or int(match[1]) != start:
                    raise StoreUnavailable(f"{where}: the server sent another range than requested")
                skip = 0
            for chunk in response.iter_raw(CHUNK):
                data = chunk[skip:] if skip else chunk
                skip -= len(chunk) - len(data)
                if left is not None:
                    data = data[:left]
                    left -= len(data)
                if data:
                    yield data
                if left == 0:
                    return

    @contextmanager
    def _get(self, url: str, where: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Follow redirects to the final response, whose body has not been read yet."""
        request = self._client.build_request("GET", url, headers=headers)
        history: list[httpx.Response] = []
        while len(history) <= redirects.LIMIT:
            response = self._client.send(request, stream=True)
            try:
                if response.next_request is None:
                    response.history = history
                    yield response
                    return
                self._guard.check(request.url, response.next_request.url)
                history.append(response)
                request = response.next_request
            finally:
                response.close()
        raise ConfigurationError(f"{where}: the server redirects more than {redirects.LIMIT} times, perhaps in a loop")


class WebStore(ReadableStore):
    """One file of a web server."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._web = Web(location.uri)
        self._ranges = False

    def close(self) -> None:
        """Close the store's connections."""
        self._web.close()

    def supports_ranges(self, path: str, entry: Entry) -> bool:
        """Whether ranges can be read, as the last `stat` reported."""
        del path
        return self._ranges and entry.etag.startswith('"')

    def list(self) -> Iterator[Entry]:
        """Raise ConfigurationError: a web server has no directories."""
        raise ConfigurationError(
            f"cannot list {public(self._location)}: a web server has no directories; name one file, or copy the"
            " files to an object store or a directory"
        )

    def stat(self, path: str) -> Entry:
        """Return the file; raise SourceNotFound if it does not exist."""
        at = self._at(path)
        facts = retry(lambda: self._web.facts(at.uri, public(at)))
        if facts.size is None:
            raise ConfigurationError(
                f"{public(at)}: the server does not report the size of the file; copy it to an object store or a"
                " directory"
            )
        self._ranges = facts.ranges
        return Entry(path, facts.size, facts.tag)

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> Iterator[bytes]:
        """Read the bytes from ``start`` on: ``length`` of them, or to the end."""
        return self._web.read(self._at(path).uri, public(self._at(path)), start, length, etag)

    def _at(self, path: str) -> Location:
        return self._location.child(path) if path else self._location


def _tag(response: httpx.Response) -> str:
    tag: str = response.headers.get("ETag", "")
    date, size = response.headers.get("Last-Modified", ""), _size(response)
    return tag or (f"{date}-{size}" if date else "")


def _size(response: httpx.Response) -> int | None:
    """Size of the complete file; None if the server does not report it (a range may have ``bytes 0-0/*``)."""
    if match := _RANGE.fullmatch(response.headers.get("Content-Range", "")):
        return int(match[3])
    if response.status_code == 206:
        return None
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdecimal() else None


def _check(response: httpx.Response, where: str) -> None:
    status = response.status_code
    if status in (200, 206):
        return
    if status in (404, 410):
        raise SourceNotFound(f"{where} does not exist")
    if status in (401, 403, 407):
        raise ConfigurationError(f"access to {where} was denied (HTTP {status})")
    if status in (408, 425, 429) or status >= 500:
        error = StoreUnavailable(f"{where}: the server replied HTTP {status}")
        error.retry_after = retrying.seconds(response.headers.get("Retry-After"))
        raise error
    raise ConfigurationError(f"{where}: the server replied HTTP {status}")


@contextmanager
def _errors(where: str) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        what = "cannot be reached" if isinstance(error, httpx.ConnectTimeout) else "stopped sending"
        raise StoreUnavailable(f"{where}: the server {what}") from None
    except httpx.ConnectError as error:
        text = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise ConfigurationError(
                f"{where}: the certificate of the server is not trusted; set SSL_CERT_FILE to a file with the"
                " certificate of its CA"
            ) from None
        raise StoreUnavailable(f"{where}: the server cannot be reached: {text[:200]}") from None
    except httpx.RemoteProtocolError as error:
        if "location header" in str(error):  # httpx 0.28 has no separate error for this
            raise ConfigurationError(f"{where} redirects to an invalid URL") from None
        raise StoreUnavailable(f"{where}: the connection was cut") from None
    except (httpx.TransportError, httpx.StreamError):
        raise StoreUnavailable(f"{where}: the connection was cut") from None
    except redirects.Refused as refused:
        raise ConfigurationError(f"{where} {refused.reason}") from None
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{where} is not a valid URL: {error}") from None
