"""Kubeconfigs read without the ``kubernetes`` package, compared with the results of the package."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.certificates import Authority

from trainjob._backends import credentials
from trainjob._backends.credentials import Access, Credentials
from trainjob.errors import ConfigurationError

SERVER = "https://127.0.0.1:1"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``ca.crt``, ``client.crt`` and ``client.key``, and token files."""
    directory = tmp_path_factory.mktemp("kubeconfig") / "made"
    Authority(directory).issue("client")
    (directory / "token").write_text("from-a-file")
    (directory / "empty").write_text("\n")
    return directory


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def config(user: dict[str, Any], cluster: dict[str, Any], name: str = "c") -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": f"of-{name}"}}],
        "clusters": [{"name": name, "cluster": {"server": SERVER, **cluster}}],
        "users": [{"name": name, "user": user}],
    }


def write(path: Path, content: object) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


CLUSTERS: dict[str, dict[str, Any]] = {
    "authority in a file": {"certificate-authority": "ca.crt"},
    "authority as data": {"certificate-authority-data": "ca.crt"},
    "not verified": {"insecure-skip-tls-verify": True},
    "a path, no TLS": {"server": "http://127.0.0.1:1/behind/"},
}
USERS: dict[str, dict[str, Any]] = {
    "token": {"token": "t"},
    "token in a file": {"tokenFile": "token"},
    "token and file": {"token": "t", "tokenFile": "token"},
    "token and plugin": {"token": "t", "exec": {"command": "false"}},
    "certificate in files": {"client-certificate": "client.crt", "client-key": "client.key"},
    "certificate as data": {"client-certificate-data": "client.crt", "client-key-data": "client.key"},
    "data before files": {"client-certificate": "nosuch", "client-key": "nosuch"}
    | {"client-certificate-data": "client.crt", "client-key-data": "client.key"},
    "password": {"username": "u", "password": "p"},
    "nothing": {},
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_credentials_equal_those_of_the_package(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], user: dict[str, Any]
) -> None:
    def filled(entry: dict[str, Any]) -> dict[str, Any]:
        return {k: data(directory / v) if k.endswith("-data") else v for k, v in entry.items()}

    given = Credentials(kubeconfig=write(directory / "kubeconfig", config(filled(user), filled(cluster))))
    ours = given.load()
    monkeypatch.setattr(credentials, "_needs_package", lambda _: True)
    monkeypatch.setattr(Credentials, "_run_package", lambda self: self.by_package(str(tmp_path)))
    assert facts(ours) == facts(given.load())
    assert given.namespace() == "of-c"


def facts(access: Access) -> tuple[object, ...]:
    return access.host, access.authorization, access.verify.verify_mode, access.verify.get_ca_certs(), access.identity


def test_several_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    # The package sends the newline, which makes the header invalid; client-go does not.
    (tmp_path / "other" / "token").write_text("relative to its own file\n")
    first = config({"token": "first"}, {}, "first")
    del first["current-context"]
    second = config({"tokenFile": "token"}, {}, "second")
    second["users"].append({"name": "first", "user": {"token": "comes too late"}})
    files = [write(tmp_path / "a", first), str(tmp_path / "nosuch"), write(tmp_path / "other" / "b", second)]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(files))
    assert Credentials().load().authorization == "Bearer relative to its own file"
    assert Credentials().token_file() == tmp_path / "other" / "token"
    assert Credentials().source() == f"kubeconfig {os.pathsep.join(files)}, context second"
    assert Credentials(kubeconfig=files[2], context="there").source() == f"kubeconfig {files[2]}, context there"
    assert Credentials(host="https://x", token="s3cret").source() == "given for https://x"
    assert Credentials(context="first").load().authorization == "Bearer first"
    assert Credentials(context="first").namespace() == "of-first"
    monkeypatch.delenv("KUBECONFIG")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert Credentials().source() == "service account of this pod"


def test_paths_in_kubeconfig_text_are_relative_to_the_working_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    text = json.dumps(config({"tokenFile": "token"}, {"certificate-authority": "ca.crt"}))
    assert Credentials(kubeconfig_text=text).load().authorization == "Bearer from-a-file"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no context": ({"current-context": ""}, "sets no current-context"),
    "another context": ({"current-context": "d"}, r"there is no context 'd' \(there are: c\)"),
    "no such user": ({"users": []}, r"there is no user 'c' \(there are: none\)"),
    "no such cluster": ({"clusters": None}, "there is no cluster 'c'"),
    "no server": ({"clusters": [{"name": "c", "cluster": {}}]}, "cluster has no server"),
    "entries of another kind": ({"contexts": {"name": "c"}}, "there is no context 'c'"),
    "no base64": (
        {"users": [{"name": "c", "user": {"client-key-data": "s3cret!"}}]},
        "client-key-data in the kubeconfig is not base64",
    ),
    "no such file": ({"users": [{"name": "c", "user": {"tokenFile": "nosuch"}}]}, "nosuch"),
    "an empty file": ({"users": [{"name": "c", "user": {"tokenFile": "empty"}}]}, "tokenFile .*empty is empty"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_errors_in_a_kubeconfig_are_reported(directory: Path, change: dict[str, Any], message: str) -> None:
    given = Credentials(kubeconfig=write(directory / "wrong", config({"token": "s3cret"}, {}) | change))
    with pytest.raises(ConfigurationError, match=message) as caught:
        given.load()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("text", ["users: [token: s3cret", "- s3cret", "s3cret", "\0"])
def test_invalid_kubeconfigs_are_rejected_without_their_content(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    for given in (Credentials(kubeconfig=str(tmp_path / "file")), Credentials(kubeconfig_text=text)):
        with pytest.raises(ConfigurationError, match="neither YAML nor JSON") as caught:
            given.load()
        assert "s3cret" not in str(caught.value)
        assert given.namespace() is None


def test_a_missing_or_unreadable_kubeconfig_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no cluster is configured: there is no kubeconfig at .*nosuch\. Set"):
        Credentials(kubeconfig=str(tmp_path / "nosuch")).load()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="binary cannot be read"):
        Credentials(kubeconfig=str(tmp_path / "binary")).load()


def test_the_package_is_not_imported(directory: Path) -> None:
    path = write(directory / "light", config({"token": "t"}, {"certificate-authority": "ca.crt"}))
    program = (
        "import sys; from trainjob._backends.credentials import Credentials; "
        f"Credentials(kubeconfig={path!r}).load(); print('kubernetes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


# The token is empty while the file has lines; each call removes one.
PLUGIN = """
token=second; [ -s "$0" ] && token=
sed -i 1d "$0"
printf '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "%s"}}' "$token"
"""


def with_plugin(directory: Path, empty: int) -> Credentials:
    """Credentials by an exec plugin."""
    (directory / "times").write_text("empty\n" * empty)
    plugin: dict[str, Any] = {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}
    plugin |= {"command": "sh", "args": ["-c", PLUGIN, str(directory / "times")]}
    return Credentials(
        kubeconfig=write(directory / "kubeconfig", config({"exec": plugin}, {"insecure-skip-tls-verify": True}))
    )


@pytest.mark.parametrize("empty", [2, 100])
def test_an_empty_token_is_requested_again(tmp_path: Path, empty: int) -> None:
    plugin = with_plugin(tmp_path, empty)
    if empty == 2:
        assert plugin.load().authorization == "Bearer second"
        return
    with pytest.raises(ConfigurationError, match="token is empty: check the output of its exec plugin"):
        plugin.load()


def test_modules_of_the_working_directory_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /tmp, for example, any user can create modules."""
    (tmp_path / "there").mkdir()
    for module in ("trainjob", "json", "kubernetes"):
        (tmp_path / "there" / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path / "there")
    assert with_plugin(tmp_path, 0).load().authorization == "Bearer second"
    assert not (tmp_path / "ran").exists()
