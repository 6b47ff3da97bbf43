"""Authentication at a registry: Basic, or tokens of its token server (distribution's token specification)."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Protocol

from trainjob.data.stores.oci import challenges, credentials
from trainjob.data.stores.oci.challenges import Challenge
from trainjob.data.stores.oci.credentials import Credential
from trainjob.errors import ConfigurationError

_DEFAULT_SECONDS, _MARGIN = 60.0, 15.0  # the specification's lifetime of a token without one; renewed this early


class Fetch(Protocol):
    """Request a token of a token server."""

    def __call__(
        self, url: str, *, query: Sequence[tuple[str, str]], form: dict[str, str] | None, authorization: str | None
    ) -> Any:
        """GET with query fields, or POST with a form; returns the JSON of the response, None if access is denied."""
        ...


@dataclass(frozen=True)
class _Token:
    header: str
    until: float


class Access:
    """Makes the ``Authorization`` header for one registry. Safe for several threads.

    Args:
        host: The registry.
        fetch: Requests a token.
        may_ask: Whether the credential may be sent to a token server at this URL.
    """

    def __init__(self, host: str, fetch: Fetch, may_ask: Callable[[str], bool]) -> None:
        self._host, self._fetch, self._may_ask = host, fetch, may_ask
        self._lock = RLock()
        self._challenge: Challenge | None = None
        self._found: dict[str, Credential | None] = {}
        self._tokens: dict[tuple[str, ...], _Token] = {}

    def header(self, scopes: tuple[str, ...]) -> str | None:
        """The header for a request that needs ``scopes``; None until the registry requires authentication.

        Raises:
            ConfigurationError: The credential was rejected, or the token server cannot be used.
        """
        with self._lock:
            if self._challenge is None:
                return None
            if self._challenge.scheme == "basic":
                return _basic(self._credential(scopes))
            token = self._tokens.get(scopes)
            if token is None or token.until < time.monotonic():
                token = self._tokens[scopes] = self._token(self._challenge, scopes)
            return token.header

    def challenged(self, header: str, scopes: tuple[str, ...], sent: str | None) -> None:
        """Record a 401 and its ``WWW-Authenticate``.

        Raises:
            ConfigurationError: The registry requires an unsupported scheme, or rejected the credential.
        """
        with self._lock:
            offered = {each.scheme: each for each in reversed(challenges.parse(header))}
            chosen = offered.get("bearer") or offered.get("basic")
            if chosen is None:
                raise ConfigurationError(
                    f"{self._host} requires an unsupported authentication scheme (supported: Basic, Bearer)"
                )
            if chosen.scheme == "basic" and (sent is not None or self._credential(scopes) is None):
                raise self.denied(scopes)
            self._challenge = chosen
            if (held := self._tokens.get(scopes)) is not None and held.header == sent:
                del self._tokens[scopes]

    def denied(self, scopes: tuple[str, ...]) -> ConfigurationError:
        """The error for a request that the registry denied."""
        what = ", ".join(scope.partition(":")[2] for scope in scopes)
        if self._credential(scopes) is None:
            hint = "no credential for it was found; run `docker login`, or set DOCKER_CONFIG"
        else:
            hint = "check the permissions of its credential in the Docker configuration"
        return ConfigurationError(f"{self._host} denied access ({what}): {hint}")

    def scrub(self, text: str) -> str:
        """``text`` without the secrets that were used."""
        with self._lock:
            secrets = [token.header.partition(" ")[2] for token in self._tokens.values()]
            for credential in self._found.values():
                if credential is not None:
                    secrets += [credential.password, credential.identity_token]
                    secrets.append((_basic(credential) or "").partition(" ")[2])
        for secret in filter(None, secrets):
            text = text.replace(secret, "***")
        return text

    def _credential(self, scopes: tuple[str, ...]) -> Credential | None:
        repository = scopes[0].split(":")[1] if scopes else ""
        if repository not in self._found:
            self._found[repository] = credentials.find(self._host, repository)
        return self._found[repository]

    def _token(self, challenge: Challenge, scopes: tuple[str, ...]) -> _Token:
        realm = challenge.parameters.get("realm", "")
        if not self._may_ask(realm):
            raise ConfigurationError(f"the token server of {self._host} has no https URL; no credential is sent to it")
        credential = self._credential(scopes)
        service = [("service", challenge.parameters["service"])] if "service" in challenge.parameters else []
        asked = time.monotonic()
        if credential is not None and credential.identity_token:
            form = {
                "grant_type": "refresh_token",
                "client_id": "trainjob",
                "refresh_token": credential.identity_token,
                "scope": " ".join(scopes),
                **dict(service),
            }
            answer = self._fetch(realm, query=(), form=form, authorization=None)
        else:
            query = [*service, *(("scope", scope) for scope in scopes)]
            answer = self._fetch(realm, query=query, form=None, authorization=_basic(credential))
        if answer is None:
            raise self.denied(scopes)
        token, seconds = _read(answer)
        if token is None:
            raise ConfigurationError(f"the token server of {self._host} returned no token")
        return _Token(f"Bearer {token}", asked + max(seconds - _MARGIN, seconds / 2))


def _basic(credential: Credential | None) -> str | None:
    if credential is None or credential.identity_token:
        return None
    pair = f"{credential.username}:{credential.password}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _read(answer: Any) -> tuple[str | None, float]:
    """The token and its lifetime in seconds."""
    if not isinstance(answer, dict):
        return None, 0.0
    token = answer.get("token") or answer.get("access_token")
    seconds = answer.get("expires_in")
    valid = isinstance(token, str) and token.isascii() and token.isprintable()
    return (token if valid else None), float(seconds) if isinstance(seconds, int) and seconds > 0 else _DEFAULT_SECONDS
