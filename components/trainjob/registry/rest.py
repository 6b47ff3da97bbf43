"""The REST API of a Kubeflow Model Registry: one request at a time, tried again as long as that is of use.

Two versions of the API are about, ``v1`` and ``v1alpha3``, with the same objects for all that is needed here; which one
a server has is asked once. The official client (``model-registry``) is not used: it retries nothing, replaces asyncio's
functions for the whole process and sets up the root logger (facts of 0.3.18), neither of which a triggerer survives.
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

from trainjob import retrying
from trainjob.errors import ConfigurationError, RegistryError, RegistryUnavailable
from trainjob.version import __version__

Json = dict[str, Any]

VERSIONS = ("v1", "v1alpha3")
PAGE = 100
_TIMEOUT = 30.0  # seconds; KEP-12020
_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The server answers 500 for a database that is away or in a deadlock, 503 before it has connected to one.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_HOW = (
    "set KUBEFLOW_REGISTRY_TOKEN, or KUBEFLOW_REGISTRY_TOKEN_FILE; in a pod, its service account's token is sent by"
    " https without them"
)


class NotThere(RegistryError):
    """The server answered 404."""


class Taken(RegistryError):
    """The server answered 409: a name or an external id is in use. Its text names the wrong one of them at times."""


class Endpoint:
    """Where a registry is and how to reach it; remembers the version of its API.

    Args:
        url: ``http(s)://host[:port][/prefix]``. Without a port 8080 and 443, as with the official client.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ConfigurationError(f"the registry's URL holds more than an address (credentials?); {_HOW}")
        try:
            port = parts.port or (8080 if parts.scheme == "http" else 443)
        except ValueError:
            port = 0
        if not parts.hostname or not port:
            raise ConfigurationError(f"no host, or no valid port, in the registry's address {url!a}")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        self.url = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
        self.secure = parts.scheme == "https"
        self.version = ""

    def token(self) -> str:
        """The bearer token, read afresh: Kubernetes replaces it every hour. Empty if there is none."""
        token = self._found_token()
        if not re.fullmatch(r"[!-~]*", token):  # httpx would repeat it in its error
            raise ConfigurationError("the token for the model registry has characters that no token has")
        return token

    def _found_token(self) -> str:
        """The pod's own token, which nobody gave to this registry on purpose, is not sent in clear."""
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
        """Trusted certificates: the system's, in a pod its cluster's, and those of ``KUBEFLOW_REGISTRY_CA_FILE``."""
        if not self.secure:
            return False  # nothing to verify, and the system's certificates take 20 ms to read
        context = ssl.create_default_context()
        with suppress(OSError):
            context.load_verify_locations(_POD / "ca.crt")
        if path := os.environ.get("KUBEFLOW_REGISTRY_CA_FILE"):
            try:
                context.load_verify_locations(path)
            except OSError as error:
                raise ConfigurationError(f"KUBEFLOW_REGISTRY_CA_FILE={path} holds no certificates: {error}") from None
        return context


class Session:
    """A connection for one operation. Nothing is shared between threads or kept open behind it.

    Paths are relative to ``/api/model_registry/<version>/``. Every method raises NotThere, Taken, RegistryUnavailable
    and ConfigurationError.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> Self:
        self._http = httpx.Client(
            timeout=httpx.Timeout(_TIMEOUT, connect=5.0),
            verify=self._endpoint.trust(),
            headers={"Accept": "application/json", "User-Agent": f"trainjob/{__version__}"},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._http.close()

    def get(self, path: str, **query: str) -> Json:
        """One object."""
        return self._call("GET", path, query)

    def post(self, path: str, body: Json) -> Json:
        """Create an object. May be sent twice, so a first one that arrived is answered by Taken."""
        return self._call("POST", path, {}, body)

    def patch(self, path: str, body: Json) -> Json:
        """Change an object; ``customProperties`` are replaced as a whole."""
        return self._call("PATCH", path, {}, body)

    def pages(self, path: str, **query: str) -> Iterator[Json]:
        """All objects of a list, page by page: without a page size the server sends everything in one answer."""
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
        """The newest version of the API that the server has."""
        if not self._endpoint.version:
            for version in VERSIONS:
                with suppress(NotThere, _NoJson):
                    self._send("GET", f"{version}/registered_models", {"pageSize": "1"})
                    self._endpoint.version = version
                    break
            else:
                raise ConfigurationError(
                    f"there is no Kubeflow Model Registry at {self._endpoint.url}: neither"
                    f" {' nor '.join(f'/api/model_registry/{version}/' for version in VERSIONS)} is served"
                )
        return self._endpoint.version

    def _send(self, method: str, path: str, query: Mapping[str, str], body: Json | None = None) -> Json:
        backoff, problem = retrying.MODEL_REGISTRY(), ""
        while True:
            token, asked = self._endpoint.token(), 0.0
            try:
                answer = self._http.request(
                    method,
                    f"{self._endpoint.url}/api/model_registry/{path}",
                    params=query,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"} if token else {},
                )
            except httpx.RequestError as error:
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise ConfigurationError(
                        f"the certificate of {self._endpoint.url} is not trusted; name its CA in"
                        " KUBEFLOW_REGISTRY_CA_FILE"
                    ) from None
                problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            else:
                if answer.status_code == 401 and self._endpoint.token() != token:  # it was replaced just now
                    problem = _said(answer, token)
                    if backoff.failure():
                        break
                    continue
                if answer.status_code not in _PASSING:
                    return self._read(answer, method, path, token)
                problem = _said(answer, token)
                asked = retrying.seconds(answer.headers.get("Retry-After")) or 0.0
                if asked > backoff.longest_retry_after:
                    problem += f" (it asks to come back in {asked:.0f} s)"
                    break
            if backoff.failure():
                break
            sleep(backoff.pause(asked))
        raise RegistryUnavailable(f"the model registry {self._endpoint.url} cannot be used: {problem}")

    def _read(self, answer: httpx.Response, method: str, path: str, token: str) -> Json:
        """The object of a good answer, the error of any other."""
        status, where = answer.status_code, self._endpoint.url
        if status == 404:
            raise NotThere(_said(answer, token))
        if status == 409:
            raise Taken(_said(answer, token))
        if status in (401, 403):
            raise ConfigurationError(f"the model registry {where} refused {method} {path} ({status}); {_HOW}")
        if answer.is_redirect:
            target = urlsplit(answer.headers.get("Location", "")).hostname or "another page"
            raise ConfigurationError(f"{where} redirects to {target}, to log in there perhaps; {_HOW}")
        if status >= 400:
            raise ConfigurationError(f"the model registry {where} did not take {method} {path}: {_said(answer, token)}")
        try:
            value = answer.json()
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise _NoJson(f"{where} answers, but not as a model registry: {method} {path} gave no JSON object")
        return value


class _NoJson(ConfigurationError):
    """A page for people, say, instead of an API."""


def _said(answer: httpx.Response, token: str) -> str:
    """What an answer says, in one line, without the token that some proxies repeat."""
    try:
        value = answer.json()
        text = str(value.get("message") or value) if isinstance(value, dict) else str(value)
    except ValueError:
        text = answer.text if "html" not in answer.headers.get("Content-Type", "") else answer.reason_phrase
    text = " ".join((text.replace(token, "***") if token else text).split())
    return f"{answer.status_code} {text[:400]}"
