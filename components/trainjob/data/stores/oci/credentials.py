"""Credentials for registries, where Docker, Podman and Kubernetes keep them."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainjob.errors import ConfigurationError

_HELPER = re.compile(r"[A-Za-z0-9._-]+")
_HELPER_SECONDS = 60
# Docker keeps its own registry under the address of its first version.
_SERVERS = {"docker.io": "https://index.docker.io/v1/"}


@dataclass(frozen=True)
class Credential:
    """What a registry, or its token server, is to be shown. Its text never holds a secret.

    Attributes:
        username: Empty with an identity token.
        password: Empty with an identity token.
        identity_token: An OAuth2 refresh token, which ``docker login`` keeps for some registries.
    """

    username: str
    password: str = field(repr=False)
    identity_token: str = field(default="", repr=False)


def find(host: str, repository: str = "") -> Credential | None:
    """The credential for ``repository`` on ``host``; None where there is none.

    Looked up in ``$REGISTRY_AUTH_FILE``, else in ``config.json`` or ``.dockerconfigjson`` (as a Kubernetes secret is
    mounted) in ``$DOCKER_CONFIG``, else in ``~/.docker``, else in Podman's ``auth.json``: the first file that is there.
    In it ``credHelpers`` come first, then ``auths`` (the longest key that fits: a host, or a host with the beginning of
    the repository), then ``credsStore``.

    Raises:
        ConfigurationError: A file cannot be read, or a credential helper is missing or fails.
    """
    for path in _places():
        try:
            text = path.read_text()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
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
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        # What is in it is not repeated: it may be half a credential.
        raise ConfigurationError(f"{path} is not the JSON that `docker login` writes")
    return value


def _find(host: str, repository: str, config: Mapping[str, Any], path: Path) -> Credential | None:
    helpers = config.get("credHelpers")
    if isinstance(helpers, dict) and isinstance(helper := helpers.get(host), str):
        return _ask(helper, _SERVERS.get(host, host))
    auths = config.get("auths")
    entries = {_key(key): value for key, value in auths.items()} if isinstance(auths, dict) else {}
    for name in (*_prefixes(f"{host}/{repository}"), _key(_SERVERS.get(host, host))):
        if isinstance(entry := entries.get(name), dict) and (credential := _entry(entry, host, path)):
            return credential
    if isinstance(store := config.get("credsStore"), str) and store:
        return _ask(store, _SERVERS.get(host, host))
    return None


def _prefixes(name: str) -> Iterator[str]:
    """``host/a/b``, ``host/a``, ``host``."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def _key(key: str) -> str:
    """Keys are hosts, in older files URLs such as ``https://host/v1/``."""
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
            raise ConfigurationError(f"the entry of {host} in {path} is not base64 of user:password")
        return Credential(pair.partition(":")[0], pair.partition(":")[2].rstrip("\0"))
    username, password = entry.get("username"), entry.get("password")
    if isinstance(username, str) and isinstance(password, str) and username:
        return Credential(username, password)
    return None  # an empty entry: the credential is in `credsStore`


def _ask(helper: str, host: str) -> Credential | None:
    """What ``docker-credential-<helper>`` has (docker/docker-credential-helpers)."""
    name = f"docker-credential-{helper}"
    program = shutil.which(name) if _HELPER.fullmatch(helper) else None
    if program is None:
        raise ConfigurationError(f"the credential helper of {host}, {name}, is not on the PATH")
    try:
        done = subprocess.run(
            [program, "get"], input=host, capture_output=True, text=True, timeout=_HELPER_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{name} did not answer for {host}: {type(error).__name__}") from None
    if done.returncode != 0:
        if "not found" in done.stdout.lower():
            return None
        raise ConfigurationError(f"{name} failed for {host} with exit code {done.returncode}; try `{name} get` by hand")
    try:
        answer = json.loads(done.stdout)
        username, secret = answer["Username"], answer["Secret"]
    except (ValueError, KeyError, TypeError):
        username = secret = None
    if not isinstance(username, str) or not isinstance(secret, str):
        raise ConfigurationError(f"{name} gave no Username and Secret for {host}")
    return Credential("", "", secret) if username == "<token>" else Credential(username, secret)
