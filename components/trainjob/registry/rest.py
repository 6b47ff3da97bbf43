"""The REST API of a Kubeflow Model Registry, with retries.

The API exists as ``v1`` and ``v1alpha3``, with the same objects as far as they are used here. The version of a server
is requested once. The official client (``model-registry``) is not used: it does not retry, and it replaces asyncio's
functions and configures the root logger of the process (facts of 0.3.18), which break Airflow's triggerer.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from time import sleep
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from trainjob._support import retrying
from trainjob._support.foreign import LARGE, Unreadable, json_of, mapping_of
from trainjob._support.proxies import proxy_for, why_unusable
from trainjob._support.urls import is_url
from trainjob.errors import ConfigurationError, RegistryError, RegistryUnavailable
from trainjob.version import __version__

Json = dict[str, Any]

VERSIONS = ("v1", "v1alpha3")
PAGE = 100
_TIMEOUT = 30.0  # seconds; KEP-12020
_LARGEST = 64 << 20  # bytes of a reply; a page has 100 objects
_OF_BODY = frozenset({"content-encoding", "content-length", "transfer-encoding"})  # headers
_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The server replies 500 if its database is unreachable or in a deadlock, and 503 before it has connected to one.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_ADVICE = (
    "set KUBEFLOW_REGISTRY_TOKEN or KUBEFLOW_REGISTRY_TOKEN_FILE; without them, a pod sends the token of its service"
    " account, over https only"
)


class NotThere(RegistryError):
    """The server replied 404."""


class Taken(RegistryError):
    """The server replied 409: a name or an external ID is in use. Its text sometimes names the wrong one."""


class Endpoint:
    """The address of a registry, its credentials and the version of its API.

    Args:
        url: ``http(s)://host[:port][/prefix]``. Default ports: 8080 for http and 443, as in the official client.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigurationError(f"the registry's URL must not contain credentials, query or fragment; {_ADVICE}")
        try:
            port = parts.port or (8080 if parts.scheme == "http" else 443)
        except ValueError:
            port = 0
        if not parts.hostname or not port:
            raise ConfigurationError(f"the registry's URL {url!a} has no host or an invalid port")
        if not is_url(url, "http", "https"):
            raise ConfigurationError(f"the registry's URL {url!a} is not a URL with scheme http or https")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.url = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
        self.secure = parts.scheme == "https"
        self.version = ""

    def token(self) -> str:
        """Read the bearer token, each time: Kubernetes replaces it every hour. Empty without a token."""
        token = self._found_token()
        if not re.fullmatch(r"[!-~]*", token):  # httpx would quote it in its error
            raise ConfigurationError(
                "the token for the model registry contains characters that are not allowed in a bearer token"
            )
        return token

    def _found_token(self) -> str:
        """Find the token. That of the pod's service account is sent over https only."""
        if given := os.environ.get("KUBEFLOW_REGISTRY_TOKEN", "").strip():
            return given
        for name in ("KUBEFLOW_REGISTRY_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH"):
            if path := os.environ.get(name):
                try:
                    return Path(path).read_text().strip()
                except (OSError, UnicodeDecodeError) as error:
                    raise ConfigurationError(f"the token file {path} of {name} cannot be read: {error}") from None
        with suppress(OSError, UnicodeDecodeError):
            return (_POD / "token").read_text().strip() if self.secure else ""
        return ""

    def trust(self) -> ssl.SSLContext | bool:
        """The trusted certificates: the system's, the cluster's in a pod, and ``KUBEFLOW_REGISTRY_CA_FILE``."""
        if not self.secure:
            return False  # nothing to verify, and reading the system's certificates takes 20 ms
        context = ssl.create_default_context()
        with suppress(OSError):
            context.load_verify_locations(_POD / "ca.crt")
        if path := os.environ.get("KUBEFLOW_REGISTRY_CA_FILE"):
            try:
                context.load_verify_locations(path)
            except OSError as error:
                raise ConfigurationError(
                    f"KUBEFLOW_REGISTRY_CA_FILE={path} contains no valid certificates: {error}"
                ) from None
        return context


class Session:
    """A connection for one operation. It is not shared between threads, and closed at the end.

    Paths are relative to ``/api/model_registry/<version>/``. Every method raises NotThere, Taken, RegistryUnavailable
    and ConfigurationError.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> Self:
        proxy = proxy_for(self._endpoint.url)
        if proxy is not None and (why := why_unusable(proxy)):
            raise ConfigurationError(f"the proxy for {self._endpoint.url} (HTTPS_PROXY or HTTP_PROXY) {why}")
        self._http = httpx.Client(
            timeout=httpx.Timeout(_TIMEOUT, connect=5.0),
            verify=self._endpoint.trust(),
            proxy=proxy,
            trust_env=False,  # httpx would let NO_PROXY except no networks, and send requests to loopback by a proxy
            headers={
                "Accept": "application/json",
                "Accept-Encoding": "identity",
                "User-Agent": f"trainjob/{__version__}",
            },
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: str) -> Json:
        """Read one object."""
        return self._call("GET", path, query)

    def post(self, path: str, body: Json) -> Json:
        """Create an object. A retry of a request that succeeded raises Taken."""
        return self._call("POST", path, {}, body)

    def patch(self, path: str, body: Json) -> Json:
        """Change an object; all ``customProperties`` are replaced."""
        return self._call("PATCH", path, {}, body)

    def pages(self, path: str, **query: str) -> Iterator[Json]:
        """Read all objects of a list, page by page: without a page size the server sends everything in one reply."""
        token = ""
        while True:
            page = self._call(
                "GET", path, {**query, "pageSize": str(PAGE), **({"nextPageToken": token} if token else {})}
            )
            yield from page.get("items") or ()
            following = page.get("nextPageToken") or ""
            if not following or following == token:
                return
            token = following

    def _call(self, method: str, path: str, query: Mapping[str, str], body: Json | None = None) -> Json:
        return self._send(method, f"{self._version()}/{path}", query, body)

    def _version(self) -> str:
        """The newest version of the API that the server supports."""
        if not self._endpoint.version:
            for version in VERSIONS:
                with suppress(NotThere, _NoJson):
                    self._send("GET", f"{version}/registered_models", {"pageSize": "1"})
                    self._endpoint.version = version
                    break
            else:
                raise ConfigurationError(
                    f"{self._endpoint.url} is not a Kubeflow Model Registry: it serves neither"
                    f" {' nor '.join(f'/api/model_registry/{version}/' for version in VERSIONS)}"
                )
        return self._endpoint.version

    def _send(self, method: str, path: str, query: Mapping[str, str], body: Json | None = None) -> Json:
        backoff, problem = retrying.TRANSFER(longest_retry_after=60.0), ""
        while True:
            token, asked = self._endpoint.token(), 0.0
            try:
                request = self._http.build_request(
                    method,
                    f"{self._endpoint.url}/api/model_registry/{path}",
                    params=query,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"} if token else {},
                )
                answer = _limited(self._http.send(request, stream=True))
            except httpx.RequestError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise ConfigurationError(
                        f"the certificate of {self._endpoint.url} is not trusted; set KUBEFLOW_REGISTRY_CA_FILE to a"
                        " file with the certificate of its CA"
                    ) from None
                text = "" if isinstance(error, httpx.LocalProtocolError) else str(error)  # h11 quotes a header
                problem = f"{type(error).__name__}: {text}" if text else type(error).__name__
            else:
                if answer.status_code == 401 and self._endpoint.token() != token:  # the token was just replaced
                    problem = _message(answer, token)
                    if backoff.failure():
                        break
                    continue
                if answer.status_code not in _PASSING:
                    return self._read(answer, method, path, token)
                problem = _message(answer, token)
                asked = retrying.seconds(answer.headers.get("Retry-After")) or 0.0
                if asked > backoff.longest_retry_after:
                    problem += f" (it asks for a retry after {asked:.0f} s)"
                    break
            if backoff.failure():
                break
            sleep(backoff.pause(asked))
        raise RegistryUnavailable(f"the model registry {self._endpoint.url} is unavailable: {problem}")

    def _read(self, answer: httpx.Response, method: str, path: str, token: str) -> Json:
        """The object of a successful reply; raises the error of any other."""
        status, where = answer.status_code, self._endpoint.url
        if status == 404:
            raise NotThere(_message(answer, token))
        if status == 409:
            raise Taken(_message(answer, token))
        if status in (401, 403):
            raise ConfigurationError(f"the model registry {where} denied {method} {path} (HTTP {status}); {_ADVICE}")
        if answer.is_redirect:
            target = urlsplit(answer.headers.get("Location", "")).hostname or "another page"
            raise ConfigurationError(f"{where} redirects to {target}, which may be a login page; {_ADVICE}")
        if status >= 400:
            raise ConfigurationError(f"the model registry {where} rejected {method} {path}: {_message(answer, token)}")
        try:
            return mapping_of(answer.content, f"the reply of {where}", LARGE)
        except Unreadable:
            raise _NoJson(f"{where} is not a model registry: {method} {path} returned no JSON object") from None


class _NoJson(ConfigurationError):
    """The server is not an API, but for example a web page."""


def _limited(answer: httpx.Response) -> httpx.Response:
    """The reply with its body, of which not more is read or decompressed than `_LARGEST`.

    Raises:
        ConfigurationError: It is longer.
    """
    body = bytearray()
    try:
        for chunk in answer.iter_bytes():
            body += chunk
            if len(body) > _LARGEST:
                raise ConfigurationError(
                    f"{answer.url.host} sent more than {_LARGEST:,} bytes: not a model registry; check its address"
                )
    finally:
        answer.close()
    headers = {name: text for name, text in answer.headers.items() if name not in _OF_BODY}
    return httpx.Response(answer.status_code, headers=headers, content=bytes(body), request=answer.request)


def _message(answer: httpx.Response, token: str) -> str:
    """The message of a reply, on one line, without the token, which some proxies repeat."""
    try:
        value = json_of(answer.content, "the reply")
        text = str(value.get("message") or value) if isinstance(value, dict) else str(value)
    except Unreadable:
        text = answer.text if "html" not in answer.headers.get("Content-Type", "") else answer.reason_phrase
    text = " ".join((text.replace(token, "***") if token else text).split())
    return f"{answer.status_code} {text[:400]}"
