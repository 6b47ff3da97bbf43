"""Debian's docker-registry, and a token server as registries of companies use one."""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jwt
import pytest
import yaml
from tests import debian
from tests.certificates import Pair
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.processes import Component, free_port, listens, wait_until
from tests.serving import serving

PROGRAM = "docker-registry"
needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo (Debian: skopeo)")


@dataclass(frozen=True)
class Server:
    """A running registry.

    Attributes:
        host: ``127.0.0.1:port``.
        folder: Directory of its data.
    """

    host: str
    folder: Path

    def uri(self, name: str) -> str:
        return f"oci://{self.host}/{name}"


@contextmanager
def registry(folder: Path, *, tls: Pair | None = None, **auth: Any) -> Iterator[Server]:
    """Run a registry; ``auth`` is that section of its configuration."""
    program, port = debian.program(PROGRAM), free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "warn", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": f"127.0.0.1:{port}", "secret": "a secret of this test"},
    }
    if tls is not None:
        config["http"]["tls"] = {"certificate": str(tls.certificate), "key": str(tls.key)}
    if auth:
        config["auth"] = auth
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    server = Component("registry", [str(program), "serve", str(folder / "config.yml")], folder, {})
    server.start()
    try:
        wait_until("the registry listens", lambda: listens(port), 30, among=[server])
        yield Server(f"127.0.0.1:{port}", folder)
    finally:
        server.kill()


@contextmanager
def registry_with_password(folder: Path, user: str, password: str) -> Iterator[Server]:
    """Run a registry in which only one user can authenticate."""
    (folder / "htpasswd").write_text(f"{user}:{_hashed(password)}\n")
    with registry(folder, htpasswd={"realm": "tests", "path": str(folder / "htpasswd")}) as server:
        yield server


def _hashed(password: str) -> str:
    """Hash a password for an htpasswd file with bcrypt, by Perl's call of libcrypt."""
    script = "print crypt($ARGV[0], '$2y$05$' . 'trainjobtrainjobtrainj')"
    return subprocess.run(["perl", "-e", script, password], capture_output=True, text=True, check=True).stdout


@dataclass
class TokenServer:
    """Issues tokens to known users and records requests.

    Attributes:
        pair: What it signs with.
        users: Passwords by name.
        seconds: Lifetime of a token.
        granted: Actions that tokens can contain.
        failures: Statuses of the first answers.
        requests: User and scopes of each request.
    """

    pair: Pair
    users: dict[str, str]
    seconds: int = 60
    granted: frozenset[str] = frozenset({"pull", "push"})
    failures: list[int] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        with serving(ScriptedServer(self._answer)) as server:
            self.url = f"{server.url}/token"
            yield

    def _answer(self, asked: Asked) -> Answer:
        given = base64.b64decode(asked.headers.get("authorization", "").removeprefix("Basic ")).decode()
        user, _, password = given.partition(":")
        scopes = parse_qs(urlsplit(asked.path).query).get("scope", [])
        self.requests.append({"user": user, "scopes": scopes})
        known = self.users.get(user, "\0") == password
        status = self.failures.pop(0) if self.failures else 200 if known else 401
        if status != 200:
            return as_json({}, status)
        return as_json({"token": self.token(user, scopes), "expires_in": self.seconds})

    def token(self, user: str, scopes: list[str]) -> str:
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": sorted(set(actions.split(",")) & self.granted)})
        now = int(time.time())
        claims = {
            "iss": "tests",
            "aud": "registry",
            "sub": user,
            "nbf": now - 60,
            "iat": now,
            "exp": now + self.seconds,
        }
        chain = ssl.PEM_cert_to_DER_cert(self.pair.certificate.read_text())
        headers = {"x5c": [base64.b64encode(chain).decode()]}
        return jwt.encode({**claims, "access": access}, self.pair.key.read_bytes(), "ES256", headers=headers)
