"""Debian's docker-registry, and a token server as registries of companies use one."""

from __future__ import annotations

import base64
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
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
from tests.certificates import Authority, Pair
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.processes import free_port
from tests.serving import serving

PROGRAM = "docker-registry"
needs_skopeo = pytest.mark.skipif(shutil.which("skopeo") is None, reason="needs skopeo (Debian: skopeo)")


@dataclass(frozen=True)
class Server:
    """A running registry.

    Attributes:
        host: ``127.0.0.1:port``.
        folder: Directory of its data.
        pid: ID of its process.
    """

    host: str
    folder: Path
    pid: int

    def uri(self, name: str) -> str:
        return f"oci://{self.host}/{name}"


@contextmanager
def registry(
    folder: Path, *, tls: Pair | None = None, authority: Authority | None = None, **auth: Any
) -> Iterator[Server]:
    """Run a registry; ``auth`` is that section of its configuration."""
    program = debian.program(PROGRAM)
    port = free_port()
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
    context = ssl.create_default_context(cafile=str(authority.certificate)) if authority else None
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 30
        while not _answers(f"{'https' if tls else 'http'}://127.0.0.1:{port}/v2/", context):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)
        yield Server(f"127.0.0.1:{port}", folder, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _answers(url: str, context: ssl.SSLContext | None) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5, context=context).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code == 401
    except OSError:
        return False
    return True


def hashed(password: str) -> str:
    """Hash a password for an htpasswd file with bcrypt, by Perl's call of libcrypt."""
    script = "print crypt($ARGV[0], '$2y$05$' . 'trainjobtrainjobtrainj')"
    return subprocess.run(["perl", "-e", script, password], capture_output=True, text=True, check=True).stdout


@dataclass
class TokenServer:
    """Issues tokens to known users and records requests.

    Attributes:
        pair: What it signs with.
        users: Passwords by name; a password is also accepted as identity token.
        seconds: Lifetime of a token.
        granted: Actions that tokens can contain.
        failures: Statuses of the first answers.
        requests: Method, user and scopes of each request.
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
        if asked.method == "GET":
            given = base64.b64decode(asked.headers.get("authorization", "").removeprefix("Basic ")).decode()
            user, _, password = given.partition(":")
            known = self.users.get(user, "\0") == password
            scopes = parse_qs(urlsplit(asked.path).query).get("scope", [])
        else:
            form, user = parse_qs(asked.body.decode()), "identity"
            known = form["refresh_token"][0] in self.users.values() and form["grant_type"] == ["refresh_token"]
            scopes = form["scope"][0].split()
        self.requests.append({"method": asked.method, "user": user, "scopes": scopes})
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
