"""Files of web servers, through httpx: ranges, going on after a cut, and answers that say when to come again."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

from trainjob import retrying
from trainjob.data.locations import Location, public
from trainjob.data.stores import redirects, trust
from trainjob.data.stores.base import CHUNK, Entry, ReadableStore, retry
from trainjob.errors import ConfigurationError, CorruptData, SourceNotFound, StoreUnavailable
from trainjob.version import __version__

_TIMEOUT = httpx.Timeout(60, connect=10)  # of a stall; a body may take as long as it takes
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)
"""As many connections as there are threads, all of them kept: httpx itself keeps 20, and opens the others anew for each
file."""
_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


@dataclass(frozen=True)
class Facts:
    """What a server says of a file.

    Attributes:
        size: Bytes; None where it does not say.
        tag: Its entity tag, else its date and size; empty where it says neither.
        ranges: Whether parts of it can be asked for.
    """

    size: int | None
    tag: str
    ranges: bool


class Web:
    """GET, with errors in the terms of stores. Safe to be used by several threads.

    Args:
        home: URL of the server that the author chose; see `redirects.Guard`.
        headers: Sent with every request; not to another host after a redirect if they authorize.
        tag: Reads the entity tag of an answer, for servers that have their own header for it; None where it has none.
    """

    def __init__(
        self,
        home: str,
        headers: Mapping[str, str] | None = None,
        tag: Callable[[httpx.Response], str | None] | None = None,
    ) -> None:
        own = {"User-Agent": f"trainjob/{__version__}", "Accept-Encoding": "identity"}
        # Certificates are those of the system, or of SSL_CERT_FILE; proxies are those of the environment.
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
        # For those who open a store and do not close it.
        weakref.finalize(self, self._client.close)

    def close(self) -> None:
        """End all connections."""
        self._client.close()

    def facts(self, url: str, where: str) -> Facts:
        """What the server says of a file. By GET of its first byte: many web applications answer no HEAD."""
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
            if tag.startswith('"'):  # a weak tag, or a date that we put together, is not for If-Range
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
                    raise StoreUnavailable(f"{where}: the server sent another part than was asked for")
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
        """The answer at the end of the redirects, whose body has not been read yet."""
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
        raise ConfigurationError(f"{where}: the server redirects more than {redirects.LIMIT} times, or in a circle")


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
            raise ConfigurationError(f"{public(at)}: the server does not say how long the file is; copy it elsewhere")
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
    """Bytes of the whole file; None where a server does not know, as it may say with a part of it (``bytes 0-0/*``)."""
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
        error = StoreUnavailable(f"{where}: the server answered HTTP {status}")
        error.retry_after = retrying.seconds(response.headers.get("Retry-After"))
        raise error
    raise ConfigurationError(f"{where}: the server answered HTTP {status}")


@contextmanager
def _errors(where: str) -> Iterator[None]:
    try:
        yield
    except httpx.TimeoutException as error:
        what = "cannot be reached" if isinstance(error, httpx.ConnectTimeout) else "sent nothing for too long"
        raise StoreUnavailable(f"{where}: the server {what}") from None
    except httpx.ConnectError as error:
        text = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            raise ConfigurationError(
                f"{where}: the certificate of the server is not trusted here; set SSL_CERT_FILE to a file with its CA"
            ) from None
        raise StoreUnavailable(f"{where}: the server cannot be reached: {text[:200]}") from None
    except httpx.RemoteProtocolError as error:
        if "location header" in str(error):  # httpx 0.28 has no separate error for it
            raise ConfigurationError(f"{where} redirects to something that is no URL") from None
        raise StoreUnavailable(f"{where}: the connection was cut") from None
    except (httpx.TransportError, httpx.StreamError):
        raise StoreUnavailable(f"{where}: the connection was cut") from None
    except redirects.Refused as refused:
        raise ConfigurationError(f"{where} {refused.reason}") from None
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"{where} is no valid address: {error}") from None
