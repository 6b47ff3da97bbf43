"""Every kind of credentials on a real API server."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
import yaml
from tests.endpoints import proxy
from tests.testcluster.access import Access

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob.errors import ConfigurationError, TrainJobError

pytestmark = pytest.mark.timeout(400)

PLUGIN = """
import json, os, sys
assert json.loads(os.environ["KUBERNETES_EXEC_INFO"])["kind"] == "ExecCredential"
status = {"token": open(sys.argv[1]).read()}
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}))
"""


def user(kubeconfig: Path, target: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A copy of a kubeconfig whose user or cluster is changed; the current context is another one."""
    config = yaml.safe_load(kubeconfig.read_text())
    change(config["users"][0]["user"], config["clusters"][0]["cluster"])
    config["contexts"].append({"name": "other", "context": {"cluster": "nosuch", "user": "nosuch"}})
    config["current-context"] = "other"
    target.write_text(yaml.safe_dump(config))
    return target


@pytest.mark.anyio
async def test_every_kind_of_kubeconfig_user(
    cluster: Access, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        *(Credentials(kubeconfig=str(file), context="test") for file in files),
        Credentials(kubeconfig=str(cluster.kubeconfig)),  # a client certificate
        Credentials(kubeconfig_text=limited.read_text()),
    ]
    monkeypatch.setenv("KUBECONFIG", str(limited))
    found = [(each.namespace(), await finds(each, str(each.namespace()))) for each in [*every, Credentials()]]
    assert found == [(namespace, [])] * 4 + [("default", []), (namespace, []), (namespace, [])]


@pytest.mark.anyio
async def test_an_impersonated_user_has_no_more_permissions(cluster: Access, namespace: str, tmp_path: Path) -> None:
    path = tmp_path / "config"
    nobody = user(cluster.kubeconfig, path, lambda user, _: user.update({"as": "nobody", "as-groups": ["g"]}))
    with pytest.raises(TrainJobError, match='User "nobody" cannot list'):
        await finds(Credentials(kubeconfig=str(nobody), context="test"), namespace)


@pytest.mark.anyio
@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_requests_go_through_the_proxy_of_the_kubeconfig(cluster: Access, tmp_path: Path, scheme: str) -> None:
    with proxy(scheme) as (url, asked):
        proxied = user(cluster.kubeconfig, tmp_path / "config", lambda _, cluster: cluster.update({"proxy-url": url}))
        assert await finds(Credentials(kubeconfig=str(proxied), context="test")) == []
    assert asked == [urlsplit(cluster.api.server).netloc]


async def finds(credentials: Credentials, namespace: str = "default") -> list[Any]:
    backend = KubernetesBackend(credentials)
    try:
        return await backend.find(namespace, {})
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
