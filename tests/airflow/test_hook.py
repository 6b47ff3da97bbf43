"""What connections say about the cluster."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from airflow.providers.common.compat.sdk import AirflowNotFoundException

from trainjob.backends.kubernetes.backend import KubernetesBackend
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.backends.local.backend import LocalBackend
from trainjob.errors import ConfigurationError
from trainjob_airflow.hooks.trainjob import TrainJobHook

KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "a",
    "contexts": [
        {"name": "a", "context": {"cluster": "a", "user": "plugin", "namespace": "from-kubeconfig"}},
        {"name": "b", "context": {"cluster": "b", "user": "plugin"}},
    ],
    "clusters": [{"name": each, "cluster": {"server": f"https://{each}.test:6443"}} for each in ("a", "b")],
    "users": [
        {
            "name": "plugin",
            "user": {
                "exec": {
                    "apiVersion": "client.authentication.k8s.io/v1",
                    "command": "python",
                    "args": [
                        "-c",
                        'print(\'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
                        '"status": {"token": "by-plugin"}}\')',
                    ],
                    "interactiveMode": "Never",
                }
            },
        }
    ],
}


def hook(monkeypatch: pytest.MonkeyPatch, kind: str = "trainjob", **fields: Any) -> TrainJobHook:
    monkeypatch.setenv("AIRFLOW_CONN_C", json.dumps({"conn_type": kind, **fields}))
    return TrainJobHook("c")


def credentials(hook: TrainJobHook) -> Credentials:
    with hook.client() as client:
        assert isinstance(client.backend, KubernetesBackend)
        return client.backend.credentials


def test_its_own_type(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("prefix", ["", "extra__kubernetes__"])
def test_a_kubernetes_connection_as_it_is(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    extra = {f"{prefix}kube_config": json.dumps(KUBECONFIG), f"{prefix}namespace": "team", f"{prefix}in_cluster": False}
    with hook(monkeypatch, "kubernetes", extra=extra).client() as client:
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


def test_a_kubeconfig_under_a_name_that_airflow_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    text = yaml.safe_dump(KUBECONFIG)
    for name in ("secret_kube_config", "kube_config"):
        found = credentials(hook(monkeypatch, extra={"backend": "kubernetes", name: text}))
        assert found.load().host == "https://a.test:6443"


def test_fields_that_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    both = {"in_cluster": True, "kube_config_path": "/etc/kubeconfig"}
    with pytest.raises(ConfigurationError, match="connection c: only one of in_cluster, kubeconfig can say where"):
        hook(monkeypatch, "kubernetes", extra=both).client()
    with pytest.raises(ConfigurationError, match="a token needs the URL of its API server"):
        hook(monkeypatch, password="hunter2").client()


def test_a_connection_of_another_type_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("http", "aws", ""):
        with pytest.raises(ConfigurationError, match="TrainJobs need one of type 'trainjob' or 'kubernetes'"):
            hook(monkeypatch, kind).client()


def test_in_cluster_without_a_pod_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found = credentials(hook(monkeypatch, "kubernetes", extra={"in_cluster": "true"}))
    with pytest.raises(ConfigurationError, match="no cluster is configured"):
        found.load()


def test_a_connection_that_is_not_there() -> None:
    with pytest.raises(AirflowNotFoundException, match="there is no connection 'nosuch'"):
        TrainJobHook("nosuch").client()


def test_secrets_of_a_connection_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = hook(monkeypatch, extra={"kube_config": json.dumps(KUBECONFIG)})
    assert "by-plugin" not in repr(found._target())
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
def test_a_connection_without_secrets_is_told_to_triggers(
    monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any]
) -> None:
    found = hook(monkeypatch, extra=extra)
    told = json.loads(json.dumps(found.public()))
    monkeypatch.delenv("AIRFLOW_CONN_C")
    again = TrainJobHook("c", told)
    assert again._target() == found._target()
    assert again.public() == told


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "https://a.test", "password": "hunter2", "extra": {"backend": "kubernetes"}},
        {"host": "https://user:hunter2@a.test", "extra": {"backend": "kubernetes"}},
        {"extra": {"backend": "kubernetes", "secret_kube_config": json.dumps(KUBECONFIG)}},
        {"kind": "kubernetes", "extra": {"kube_config": KUBECONFIG}},
    ],
)
def test_a_connection_with_secrets_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]) -> None:
    assert hook(monkeypatch, **fields).public() is None


def test_nothing_is_told_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the default connection does not exist the triggerer's own environment decides."""
    monkeypatch.setenv("TRAINJOB_BACKEND", "kubernetes")
    told = TrainJobHook().public()
    assert told == {"backend": None, "namespace": None, "credentials": None}
