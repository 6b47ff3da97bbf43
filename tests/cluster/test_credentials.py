"""Every kind of credentials on a real API server, with the oldest and newest supported ``kubernetes`` packages."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import yaml
from tests.testcluster.access import Access

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob.errors import ConfigurationError

pytestmark = pytest.mark.timeout(400)

VERSIONS = ("27.2.0", "31.0.0", "36.0.1", "37.0.2")
"""The oldest supported release, kfp's upper limit, that of Airflow's provider, and the first of the new generation."""

LOOK = """
import asyncio, json, sys
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.credentials import Credentials
import kubernetes
assert kubernetes.__version__ == sys.argv[1], (kubernetes.__version__, kubernetes.__file__)
for credentials in json.loads(sys.argv[2]):
    backend = KubernetesBackend(Credentials(**credentials))
    namespace = backend.default_namespace
    found = asyncio.run(backend.find(namespace, {}))
    print(namespace, [job["metadata"]["name"] for job in found])
"""

PLUGIN = """
import json, os, sys
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
status = {"token": open(sys.argv[1]).read()}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


@pytest.fixture(params=VERSIONS)
def package(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A release of the ``kubernetes`` package in a separate directory."""
    uv = Path(sys.executable).parent / "uv"
    install = [str(uv), "pip", "install", "--quiet", "--python", sys.executable, "--target", str(tmp_path / "package")]
    subprocess.run([*install, f"kubernetes=={request.param}"], check=True)
    return str(request.param), tmp_path / "package"


def look(command: list[str], *credentials: dict[str, Any], **environment: str) -> list[str]:
    """Output of a program that ends with code 0, for each of the credentials."""
    clean = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    done = subprocess.run(
        [*command, json.dumps(credentials)], env={**clean, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else [done.stderr]


def user(kubeconfig: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of a kubeconfig whose user or cluster is changed; the current context is another one."""
    config = yaml.safe_load(kubeconfig.read_text())
    change(config["users"][0]["user"], config["clusters"][0]["cluster"])
    config["contexts"].append({"name": "other", "context": {"cluster": "nosuch", "user": "nosuch"}})
    config["current-context"] = "other"
    target.write_text(yaml.safe_dump(config))
    return target


def test_every_kind_of_kubeconfig_user(
    package: tuple[str, Path], cluster: Access, namespace: str, tmp_path: Path
) -> None:
    limited = cluster.kubeconfig_for(namespace=namespace)
    token = yaml.safe_load(limited.read_text())["users"][0]["user"]["token"]
    (tmp_path / "token").write_text(token)
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "ca.crt").write_bytes(cluster.api.authority)

    def by_file(user: dict[str, Any], _: dict[str, Any]) -> None:
        del user["token"]
        user["tokenFile"] = str(tmp_path / "token")

    def by_plugin(user: dict[str, Any], _: dict[str, Any]) -> None:
        del user["token"]
        user["exec"] = {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": [str(tmp_path / "plugin.py"), str(tmp_path / "token")],
            "interactiveMode": "Never",
        }

    def unverified(_: dict[str, Any], cluster: dict[str, Any]) -> None:
        del cluster["certificate-authority-data"]
        cluster["insecure-skip-tls-verify"] = True

    changes = (lambda *_: None, by_file, by_plugin, unverified)
    files = [user(limited, tmp_path / f"{i}.kubeconfig", change) for i, change in enumerate(changes)]
    every = [
        *({"kubeconfig": str(file), "context": "test"} for file in files),
        {"kubeconfig": str(cluster.kubeconfig)},  # a client certificate
        {"kubeconfig_text": limited.read_text()},
    ]
    version, directory = package
    path = os.pathsep.join(filter(None, (str(directory), os.environ.get("PYTHONPATH"))))
    program = [sys.executable, "-c", LOOK, version]
    found = look(program, *every, PYTHONPATH=path)
    assert found == [f"{namespace} []"] * 4 + ["default []", f"{namespace} []"]
    assert look(program, {}, PYTHONPATH=path, KUBECONFIG=str(limited)) == [f"{namespace} []"]


@pytest.fixture
def proxy() -> Iterator[tuple[str, list[str]]]:
    """An HTTP proxy that tunnels (CONNECT): its URL, and the requested hosts."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            asked.append(self.path)
            host, _, port = self.path.rpartition(":")
            with socket.create_connection((host, int(port))) as upstream:
                self.send_response(200)
                self.end_headers()
                others = {self.connection: upstream, upstream: self.connection}
                while data := (ready := select.select([*others], [], [])[0][0]).recv(65536):
                    others[ready].sendall(data)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}", asked
        server.shutdown()


@pytest.mark.anyio
async def test_requests_go_through_a_proxy(
    cluster: Access, proxy: tuple[str, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = proxy
    host = urlsplit(cluster.api.server).netloc
    monkeypatch.setenv("no_proxy", "")
    proxied = user(cluster.kubeconfig, tmp_path / "config", lambda _, cluster: cluster.update({"proxy-url": url}))
    assert await finds(Credentials(kubeconfig=str(proxied), context="test")) == []
    assert asked == [host]
    monkeypatch.setenv("https_proxy", url)
    assert await finds(Credentials(kubeconfig=str(cluster.kubeconfig))) == []
    assert asked == [host] * 2
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert await finds(Credentials(kubeconfig=str(cluster.kubeconfig))) == []
    assert asked == [host] * 2, "no_proxy covers the host"


async def finds(credentials: Credentials) -> list[Any]:
    backend = KubernetesBackend(credentials)
    try:
        return await backend.find("default", {})
    finally:
        await backend.aclose()


@pytest.mark.anyio
async def test_the_certificate_is_verified_unless_verification_is_disabled(cluster: Access, tmp_path: Path) -> None:
    authority = tmp_path / "ca.crt"
    authority.write_bytes(cluster.api.authority)
    server = cluster.api.server
    rules = [{"apiGroups": ["trainer.kubeflow.org"], "resources": ["trainjobs"], "verbs": ["list"]}]
    token = yaml.safe_load(cluster.kubeconfig_for(rules).read_text())["users"][0]["user"]["token"]
    with anyio.fail_after(10), pytest.raises(ConfigurationError, match="certificate") as caught:
        await finds(Credentials(host=server, token=token))
    assert token not in str(caught.value)
    assert await finds(Credentials(host=server, token=token, ca_file=str(authority))) == []
    assert await finds(Credentials(host=server, token=token, verify=False)) == []


def test_no_key_is_left_on_disk(cluster: Access, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several threads load the same credentials."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    given = Credentials(kubeconfig_text=cluster.kubeconfig.read_text())
    with ThreadPoolExecutor(8) as threads:
        loaded = [*threads.map(lambda _: given.load(), range(100))]
    assert len({each.identity for each in loaded}) == 1
    assert [*tmp_path.iterdir()] == []
