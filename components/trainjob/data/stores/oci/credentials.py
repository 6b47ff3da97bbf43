"""Find credentials for registries where Docker, Podman and Kubernetes store them."""

from __future__ import annotations

import base64
import binascii
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainjob._support.foreign import Unreadable, mapping_of
from trainjob.errors import ConfigurationError

_HELPER = re.compile(r"[A-Za-z0-9._-]+")
_HELPER_SECONDS = 60
# Docker stores the credential of Docker Hub under the URL of its first API version.
_SERVERS = {"docker.io": "https://index.docker.io/v1/"}


@dataclass(frozen=True)
class Credential:
    """A credential for a registry or its token server. Its ``repr`` contains no secret.

    Attributes:
        username: Empty with an identity token.
        password: Empty with an identity token.
        identity_token: OAuth2 refresh token, which ``docker login`` stores for some registries.
    """

    username: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


def find(host: str, repository: str = "") -> Credential | None:
    """Find the credential for ``repository`` on ``host``; None if there is no such credential.

    The first existing file is used, of: ``$REGISTRY_AUTH_FILE``; ``config.json`` or ``.dockerconfigjson`` (a mounted
    Kubernetes secret) in ``$DOCKER_CONFIG``, by default ``~/.docker``; Podman's ``auth.json``. In the file
    ``credHelpers`` come first, then ``auths`` (the longest matching key: a host, or a host with the beginning of the
    repository), then ``credsStore``.

    Raises:
        ConfigurationError: A file cannot be read, or a credential helper is missing or fails.
    """
    for path in _places():
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigurationError(f"credentials for {host} cannot be read from {path}: {reason}") from None
        return _find(host, repository, _config(text, path), path)
    return None


def _places() -> Iterator[Path]:
    if named := os.environ.get("REGISTRY_AUTH_FILE"):
        yield Path(named)
        return
    folder = os.environ.get("DOCKER_CONFIG")
    docker = Path(folder) if folder else Path.home() / ".docker"
    yield docker / "config.json"
    yield docker / ".dockerconfigjson"
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "containers" / "auth.json"


def _config(text: str, path: Path) -> Mapping[str, Any]:
    try:
        return mapping_of(text, str(path))
    except Unreadable:
        # The message does not quote the file, which may contain part of a credential.
        raise ConfigurationError(f"{path} is not a JSON object; write it with `docker login`") from None


def _find(host: str, repository: str, config: Mapping[str, Any], path: Path) -> Credential | None:
    helpers = config.get("credHelpers")
    if isinstance(helpers, dict) and isinstance(helper := helpers.get(host), str):
        return _run_helper(helper, _SERVERS.get(host, host))
    auths = config.get("auths")
    entries = {_key(key): value for key, value in auths.items()} if isinstance(auths, dict) else {}
    for name in (*_prefixes(f"{host}/{repository}"), _key(_SERVERS.get(host, host))):
        if isinstance(entry := entries.get(name), dict) and (credential := _entry(entry, host, path)):
            return credential
    if isinstance(store := config.get("credsStore"), str) and store:
        return _run_helper(store, _SERVERS.get(host, host))
    return None


def _prefixes(name: str) -> Iterator[str]:
    """``host/a/b``, ``host/a``, ``host``."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _key(key: str) -> str:
    """The host of a key. Older files have URLs such as ``https://host/v1/`` as keys."""
    bare = key.removeprefix("https://").removeprefix("http://").rstrip("/")
    return re.sub(r"/v[12]$", "", bare)


def _entry(entry: Mapping[str, Any], host: str, path: Path) -> Credential | None:
    if isinstance(token := entry.get("identitytoken"), str) and token:
        return Credential("", "", token)
    if isinstance(auth := entry.get("auth"), str) and auth:
        try:
            pair = base64.b64decode(auth, validate=True).decode()
        except (binascii.Error, ValueError):
            pair = ""
        if ":" not in pair:
            raise ConfigurationError(
                f"the entry of {host} in {path} is not base64 of user:password; run `docker login {host}`"
            )
        return Credential(pair.partition(":")[0], pair.partition(":")[2].rstrip("\0"))
    username, password = entry.get("username"), entry.get("password")
    if isinstance(username, str) and isinstance(password, str) and username:
        return Credential(username, password)
    return None  # an empty entry: the credential is in `credsStore`


def _run_helper(helper: str, host: str) -> Credential | None:
    """Request a credential of ``docker-credential-<helper>`` (docker/docker-credential-helpers)."""
    name = f"docker-credential-{helper}"
    program = shutil.which(name) if _HELPER.fullmatch(helper) else None
    if program is None:
        raise ConfigurationError(
            f"the credential helper of {host}, {name}, is not on the PATH; install it, or remove it from the Docker"
            " configuration"
        )
    try:
        done = subprocess.run(
            [program, "get"], input=host, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{name} did not return a credential for {host}: {type(error).__name__}") from None
    if done.returncode != 0:
        if "not found" in done.stdout.lower():
            return None
        raise ConfigurationError(
            f"{name} failed for {host} with exit code {done.returncode}; to see why, run: echo {host} | {name} get"
        )
    try:
        answer = mapping_of(done.stdout, name)
    except Unreadable:
        answer = {}
    username, secret = answer.get("Username"), answer.get("Secret")
    if not isinstance(username, str) or not isinstance(secret, str):
        raise ConfigurationError(f"{name} returned no Username and Secret for {host}")
    return Credential("", "", secret) if username == "<token>" else Credential(username, secret)
