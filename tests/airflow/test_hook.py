"""`TrainJobHook`: connections become credentials, backends and clients."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob import TrainJobClient
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.local.backend import LocalBackend
from trainjob.errors import ConfigurationError
from trainjob_airflow.hooks.trainjob import Target, TrainJobHook

VERSION = "client.authentication.k8s.io/v1"
TOKEN = json.dumps({"apiVersion": VERSION, "kind": "ExecCredential", "status": {"token": "by-plugin"}})
PLUGIN = {"exec": {"apiVersion": VERSION, "command": "echo", "args": [TOKEN], "interactiveMode": "Never"}}
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "a",
    "contexts": [
        {"name": "a", "context": {"cluster": "a", "user": "plugin", "namespace": "from-kubeconfig"}},
        {"name": "b", "context": {"cluster": "b", "user": "plugin"}},
    ],
    "clusters": [{"name": each, "cluster": {"server": f"https://{each}.test:6443"}} for each in ("a", "b")],
    "users": [{"name": "plugin", "user": PLUGIN}],
}


def hook(monkeypatch: pytest.MonkeyPatch, kind: str = "trainjob", **fields: Any) -> TrainJobHook:
    monkeypatch.setenv("AIRFLOW_CONN_C", json.dumps({"conn_type": kind, **fields}))
    return TrainJobHook("c")


def credentials(hook: TrainJobHook) -> Credentials:
    with hook.client() as client:
        assert isinstance(client.backend, KubernetesBackend)
        return client.backend.credentials


def test_a_connection_of_type_trainjob(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_NAMESPACE", "from-environment")
    with hook(monkeypatch, extra={"backend": "local"}).client() as client:
        assert isinstance(client.backend, LocalBackend)
        assert client.namespace == "from-environment"
    with hook(monkeypatch, extra={"backend": "local", "namespace": "research"}).client() as client:
        assert client.namespace == "research"
    with hook(monkeypatch, extra={"backend": "local", "namespace": "research"}).client("mine") as client:
        assert client.namespace == "mine"


def test_an_api_server_and_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    found = credentials(
        hook(monkeypatch, host="https://a.test", password="hunter2", extra={"backend": "kubernetes", "ca_file": ""})
    )
    assert (found.host, found.token, found.verify) == ("https://a.test", "hunter2", True)
    assert "hunter2" not in repr(found)
    access = found.load()
    assert (access.host, access.authorization) == ("https://a.test", "Bearer hunter2")


SERVERS: list[tuple[dict[str, Any], str]] = [
    ({"host": "https://a.test"}, "https://a.test"),
    ({"host": "https://a.test", "port": 6443}, "https://a.test:6443"),
    ({"host": "https://a.test:6443/k8s/1", "port": 6443}, "https://a.test:6443/k8s/1"),
    ({"host": "https://a.test/k8s/1", "port": 6443}, "https://a.test:6443/k8s/1"),
    ({"host": "a.test", "port": 80, "schema": "http"}, "http://a.test:80"),
    ({"host": "[::1]", "port": 6443}, "https://[::1]:6443"),
    ({"host": "::1", "port": 6443}, "https://[::1]:6443"),
    ({"host": "fe80::1", "port": 6443}, "https://[fe80::1]:6443"),
    ({"host": "fe80::1"}, "https://[fe80::1]"),
]


@pytest.mark.parametrize(("fields", "url"), SERVERS)
def test_the_api_server_has_the_port_and_the_scheme_of_the_connection(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], url: str
) -> None:
    assert credentials(hook(monkeypatch, **fields, extra={"backend": "kubernetes"})).host == url


def test_a_connection_as_a_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_C", "trainjob://:t@cluster.test:6443/?backend=kubernetes")
    assert credentials(TrainJobHook("c")).host == "https://cluster.test:6443"


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("kubernetes", "kube_config"),
        ("kubernetes", "extra__kubernetes__kube_config"),
        ("trainjob", "kube_config"),
        ("trainjob", "secret_kube_config"),
    ],
)
def test_a_kubeconfig_in_a_connection(monkeypatch: pytest.MonkeyPatch, kind: str, field: str) -> None:
    prefix = field.partition("kube_config")[0].removeprefix("secret_")
    extra = {field: json.dumps(KUBECONFIG), f"{prefix}namespace": "team", f"{prefix}in_cluster": False}
    with hook(monkeypatch, kind, extra={"backend": "kubernetes", **extra}).client() as client:
        assert isinstance(client.backend, KubernetesBackend)
        assert client.namespace == "team"
        access = client.backend.credentials.load()
    assert (access.host, access.authorization) == ("https://a.test:6443", "Bearer by-plugin")


def test_context_and_namespace_of_a_kubeconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINJOB_NAMESPACE", raising=False)
    with hook(monkeypatch, "kubernetes", extra={"kube_config": KUBECONFIG}).client() as client:
        assert client.namespace == "from-kubeconfig"
    found = credentials(hook(monkeypatch, "kubernetes", extra={"kube_config": KUBECONFIG, "cluster_context": "b"}))
    assert found.load().host == "https://b.test:6443"


TWO = {"in_cluster": True, "kube_config_path": "/etc/kubeconfig"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"extra": TWO}, "set only one of in_cluster, kube_config_path"),
    ({"host": "https://a.test", "extra": {"secret_kube_config": "{}"}}, "set only one of secret_kube_config, host"),
    ({"extra": {"kube_config_path": "/a", "kube_config": "{}"}}, "set only one of kube_config_path, kube_config"),
    ({"password": "hunter2"}, "password (bearer token) needs host (API server)"),
    ({"host": "https://a.test:1", "port": 2}, "port is 2, but host has 1; remove one of them"),
    ({"host": "https://a.test", "schema": "http"}, "schema is 'http'; remove it, or set it to the scheme of host"),
    ({"port": 6443}, "port and schema need host"),
    ({"host": "h:abc", "port": 1}, "host is not the host or URL of an API server"),
    ({"host": "https://[::1"}, "host is not the host or URL of an API server"),
    ({"host": "https://h:99999"}, "host is not the host or URL of an API server"),
    ({"host": " h"}, "host is not the host or URL of an API server"),
    ({"extra": {"backend": "local", "name_space": "team"}}, "no field 'name_space': did you mean namespace?"),
    ({"extra": {"backend": "cloud"}}, "backend is 'cloud'; set it to kubernetes or local"),
    ({"extra": {"backend": "local", "namespace": "My Team"}}, "namespace: 'My Team' is not a namespace"),
    ({"kind": "http"}, "use a connection of type 'trainjob' or 'kubernetes'"),
    ({"kind": ""}, "use a connection of type 'trainjob' or 'kubernetes'"),
]


@pytest.mark.parametrize(("fields", "why"), REFUSED)
def test_a_wrong_connection_is_refused(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        hook(monkeypatch, **fields).client()
    assert str(refused.value).startswith("connection c")
    assert why in str(refused.value)


def test_in_cluster_outside_a_pod_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = credentials(hook(monkeypatch, "kubernetes", extra={"in_cluster": "true"}))
    with pytest.raises(ConfigurationError, match="no cluster is configured"):
        found.load()


def test_a_connection_that_does_not_exist() -> None:
    with pytest.raises(AirflowNotFoundException, match="connection 'nosuch' does not exist"):
        TrainJobHook("nosuch").client()


def test_secrets_of_a_connection_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hook(monkeypatch, extra={"kube_config": json.dumps(KUBECONFIG)})
    assert "by-plugin" not in repr(found._resolve())
    assert found.get_connection("c").conn_id == "c"


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"backend": "local", "namespace": "team"},
        {"backend": "kubernetes", "in_cluster": True},
        {"backend": "kubernetes", "kube_config_path": "/a", "cluster_context": "b", "disable_verify_ssl": True},
    ],
)
def test_a_connection_without_secrets_is_passed_to_triggers(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    found = hook(monkeypatch, extra=extra)
    target = json.loads(json.dumps(found.target()))
    monkeypatch.delenv("AIRFLOW_CONN_C")
    again = TrainJobHook("c", target)
    assert again._resolve() == found._resolve()
    assert again.target() == target


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "https://a.test", "password": "hunter2", "extra": {"backend": "kubernetes"}},
        {"host": "https://user:hunter2@a.test", "extra": {"backend": "kubernetes"}},
        {"extra": {"backend": "kubernetes", "secret_kube_config": json.dumps(KUBECONFIG)}},
        {"kind": "kubernetes", "extra": {"kube_config": KUBECONFIG}},
    ],
)
def test_a_connection_with_secrets_is_not_passed_to_triggers(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    assert hook(monkeypatch, **fields).target() is None


def test_settings_of_the_environment_are_not_passed_to_triggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the default connection, the triggerer's own environment decides."""
    monkeypatch.setenv("TRAINJOB_BACKEND", "kubernetes")
    target = TrainJobHook().target()
    assert target == {"backend": None, "namespace": None, "credentials": None}


def test_a_hook_tests_its_connection(home: Path) -> None:
    with TrainJobClient("local") as client:
        client.wait(client.launch({"runtime": "trainjob-step", "command": ["true"]}, "k"))
    hook = TrainJobHook()
    hook._known = Target()
    assert hook.test_connection() == (True, "1 TrainJob(s) of Airflow in namespace default")
    hook._known = Target("nowhere")
    assert hook.test_connection()[0] is False
