"""HTTP requests to one registry, with credentials and without retries."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from ipaddress import ip_address
from typing import Any, TypeVar

import httpx

from trainjob._support import retrying
from trainjob._support.foreign import Limits, Unreadable, json_of
from trainjob._support.kube_objects import mappings
from trainjob._support.retrying import Backoff
from trainjob.data.stores import redirects, trust
from trainjob.data.stores.oci.access import Access
from trainjob.data.stores.web import LIMITS
from trainjob.errors import ConfigurationError, CorruptData, OutOfSpace, SourceNotFound, StoreUnavailable, TrainJobError
from trainjob.settings import Settings

CONNECT, READ, FINISH = 10.0, 60.0, 600.0
"""Seconds: to connect; between two bytes; for a registry to verify the digest of an upload, which takes at least a
second per GiB."""
_MANIFEST_LIMIT = 16 * 1024 * 1024  # distribution-spec requires registries to accept 4 MiB
DOCUMENT = Limits(_MANIFEST_LIMIT, values=1_000_000, of="a document of a registry")
"""Limits of manifests and lists."""
_ERROR_LIMIT = 64 * 1024
_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})
# The host in names of Docker Hub's images is not the host of its registry.
_HOSTS = {"docker.io": "registry-1.docker.io"}
Content = bytes | Iterator[bytes] | None
T = TypeVar("T")

# httpx logs every URL at level INFO, httpcore every reply's headers at DEBUG. URLs of uploads and of redirects to
# object stores are signed, which makes them credentials.
_ours: ContextVar[bool] = ContextVar("trainjob-oci", default=False)
for _name in ("httpx", *(f"httpcore.{part}" for part in ("connection", "http11", "proxy"))):
    logging.getLogger(_name).addFilter(lambda _: not _ours.get())


class Interrupted(Exception):
    """One request failed, and another attempt may succeed.

    Attributes:
        retry_after: Seconds that the server asked to wait; None if it did not.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


def pause(backoff: Backoff, where: str, error: Interrupted) -> None:
    """Record a failure, and sleep before the next attempt.

    Raises:
        StoreUnavailable: ``backoff`` is used up.
    """
    if backoff.failure():
        raise StoreUnavailable(f"{where}: {error} ({backoff.count_total} failures)") from None
    time.sleep(backoff.pause(error.retry_after))


def retry(where: str, attempt: Callable[[], T]) -> T:
    """The result of ``attempt``, retried while it is `Interrupted`.

    Raises:
        StoreUnavailable: The registry failed too often.
    """
    backoff = retrying.TRANSFER()
    while True:
        try:
            return attempt()
        except Interrupted as error:
            pause(backoff, where, error)


class Client:
    """Sends requests to one registry. Safe for several threads.

    Args:
        host: ``host[:port]``. Plain HTTP is used for this machine and for the hosts in ``TRAINJOB_OCI_PLAIN_HTTP``
            only.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        with self._errors():
            self._guard = redirects.Guard(httpx.URL(f"http://{_HOSTS.get(host, host)}/"))
        self._http = redirects.client(
            self._guard,
            verify=trust.by_system(),
            timeout=httpx.Timeout(READ, connect=CONNECT, pool=None),
            limits=LIMITS,
            headers={"user-agent": "trainjob", "accept-encoding": "identity"},
        )
        self._plain = host in {each.strip() for each in Settings().oci_plain_http.split(",")}
        self._base: httpx.URL | None = None
        self._access = Access(host, self._fetch, self._may_ask)

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    @property
    def base(self) -> httpx.URL:
        """Base URL of the registry."""
        if self._base is None:
            secure = not self._plain and not (_loopback(self.host) and not self._speaks_tls())
            address = _HOSTS.get(self.host, self.host)
            self._base = httpx.URL(f"{'https' if secure else 'http'}://{address}/v2/")
        return self._base

    def url(self, repository: str, rest: str) -> str:
        """URL of a resource of a repository."""
        return str(self.base.join(f"{repository}/{rest}"))

    def location(self, response: httpx.Response) -> str:
        """The ``Location`` of a reply; empty if it has none."""
        text = response.headers.get("location", "")
        if not text:
            return ""
        url = response.request.url.join(text)
        if url.host == self.base.host and url.scheme == "http" and self.base.scheme == "https":
            # A registry behind a proxy that terminates TLS often does not know about https.
            url = url.copy_with(scheme="https", port=self.base.port)
        self._guard.check(self.base, url)
        return str(url)

    @contextmanager
    def open(
        self,
        method: str,
        url: str,
        scopes: tuple[str, ...],
        *,
        headers: Mapping[str, str] | None = None,
        content: Content = None,
        read: float | None = None,
    ) -> Iterator[httpx.Response]:
        """Send one request; yields the reply, whose body has not been read yet. Redirects of GET and HEAD are followed.

        Raises:
            Interrupted: A retry may succeed.
            ConfigurationError: Access was denied.
        """
        once = content is not None and not isinstance(content, bytes)
        with self._errors():
            for final in (False, True):
                sent = self._access.header(scopes)
                response = self._send(method, url, {**(headers or {})}, content, read, sent)
                try:
                    if response.status_code == 401:
                        self._access.challenged(response.headers.get("www-authenticate", ""), scopes, sent)
                        if final:
                            raise self._access.denied(scopes)
                        if once:
                            raise Interrupted("the credential was rejected during an upload and is renewed")
                        continue
                    if response.status_code == 403:
                        raise self._access.denied(scopes)
                    if response.status_code in _AGAIN:
                        wait = retrying.seconds(response.headers.get("retry-after"))
                        raise Interrupted(f"the registry replied {self.reason(response)}", wait)
                    yield response
                    return
                finally:
                    response.close()

    def read(self, response: httpx.Response, limit: int = _MANIFEST_LIMIT) -> bytes:
        """Read the body.

        Raises:
            CorruptData: It has more than ``limit`` bytes.
        """
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > limit:
                raise CorruptData(f"{self.host} sent more than {limit} bytes for a small document")
        return bytes(data)

    def refused(self, response: httpx.Response, where: str) -> TrainJobError:
        """The error for a status that is neither a success nor worth a retry."""
        text = f"{where}: the registry replied {self.reason(response)}"
        if response.status_code == 404:
            return SourceNotFound(f"{where} does not exist")
        if response.status_code == 507:
            return OutOfSpace(text)
        if response.status_code in (405, 413, 415):
            return ConfigurationError(text)
        return StoreUnavailable(text)

    def reason(self, response: httpx.Response) -> str:
        """The status of a reply with the codes and messages of its body, on one line without secrets."""
        text = ""
        with suppress(Unreadable, httpx.HTTPError, CorruptData):
            errors = mappings(json_of(self.read(response, _ERROR_LIMIT), "the error of a registry"), "errors")
            text = "; ".join(f"{each.get('code')} {each.get('message', '')}".strip() for each in errors)
        text = re.sub(r"\?\S*", "?...", " ".join(self._access.scrub(text).split()))
        return f"{response.status_code}{f' ({text[:300]})' if text else ''}"

    def _send(
        self, method: str, url: str, headers: dict[str, str], content: Content, read: float | None, sent: str | None
    ) -> httpx.Response:
        timeout = httpx.Timeout(READ, connect=CONNECT, read=read or READ, pool=None)
        for _ in range(1 + redirects.LIMIT):
            target = httpx.URL(url)
            allowed = {"authorization": sent} if sent and _origin(target) == _origin(self.base) else {}
            request = self._http.build_request(
                method, target, headers={**headers, **allowed}, content=content, timeout=timeout
            )
            response = self._quietly(request)
            if method not in ("GET", "HEAD") or response.status_code not in (301, 302, 303, 307, 308):
                return response
            try:
                url = self.location(response)
            finally:
                response.close()
        raise StoreUnavailable(f"{self.host} redirects more than {redirects.LIMIT} times")

    def _quietly(self, request: httpx.Request) -> httpx.Response:
        token = _ours.set(True)
        try:
            return self._http.send(request, stream=True)
        finally:
            _ours.reset(token)

    def _fetch(
        self, url: str, *, query: Sequence[tuple[str, str]], form: dict[str, str] | None, authorization: str | None
    ) -> Any:
        headers = {"authorization": authorization} if authorization else {}
        target = httpx.URL(url).copy_merge_params(list(query)) if query else httpx.URL(url)
        self._guard.check(self.base, target)
        request = self._http.build_request("POST" if form else "GET", target, headers=headers, data=form)
        response = self._quietly(request)
        try:
            if response.status_code in _AGAIN:
                wait = retrying.seconds(response.headers.get("retry-after"))
                raise Interrupted(f"its token server replied {response.status_code}", wait)
            if response.status_code != 200:
                return None
            return json_of(self.read(response), "the reply of a token server")
        except Unreadable:
            raise ConfigurationError(f"the token server of {self.host} replied with invalid JSON") from None
        finally:
            response.close()

    def _may_ask(self, realm: str) -> bool:
        with suppress(httpx.InvalidURL):
            url = httpx.URL(realm)
            return bool(url.host) and (url.scheme == "https" or (url.scheme == "http" and self.base.scheme == "http"))
        return False

    def _speaks_tls(self) -> bool:
        try:
            self._quietly(self._http.build_request("GET", f"https://{self.host}/v2/")).close()
        except httpx.TransportError as error:
            # A server with an untrusted certificate speaks TLS too; the next request reports the certificate.
            return "CERTIFICATE_VERIFY_FAILED" in str(error)
        return True

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, OSError) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ConfigurationError(
                    f"the certificate of {self.host} is not trusted; set SSL_CERT_FILE to a file with the certificate"
                    " of its CA"
                ) from None
            text = "" if isinstance(error, httpx.LocalProtocolError) else str(error)  # h11 quotes a header, in escapes
            raise Interrupted(f"{type(error).__name__} {self._access.scrub(text)[:200]}".strip()) from None
        except redirects.Refused as refused:
            raise ConfigurationError(f"{self.host} {refused.reason}") from None
        except httpx.InvalidURL:
            raise ConfigurationError(f"{self.host} redirects to an invalid URL") from None


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _loopback(host: str) -> bool:
    name = httpx.URL(f"http://{host}/").host
    with suppress(ValueError):
        return ip_address(name).is_loopback
    return name == "localhost"
