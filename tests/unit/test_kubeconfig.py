"""Kubeconfigs: fields, files, and what is refused."""

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
from tests.endpoints import kubeconfig, write
from tests.fakes.kube.http import FakeKube
from tests.unit.program import Program

from trainjob._backends.credentials import Credentials
from trainjob.errors import ConfigurationError


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``ca.crt``, ``client.crt`` and ``client.key``, and token files."""
    directory = tmp_path_factory.mktemp("kubeconfig") / "made"
    Authority(directory).issue("client")
    (directory / "token").write_text("from-a-file\n")
    (directory / "empty").write_text("\n")
    return directory


def data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


TOKENS: dict[str, tuple[dict[str, Any], str]] = {
    "token": ({"token": "t"}, "Bearer t"),
    "token in a file": ({"tokenFile": "token"}, "Bearer from-a-file"),
    "token and file": ({"token": "t", "tokenFile": "token"}, "Bearer from-a-file"),
    "token and no file": ({"token": "t", "tokenFile": "nosuch"}, "Bearer t"),
    "token and certificate": (
        {"token": "t", "client-certificate": "client.crt", "client-key": "client.key"},
        "Bearer t",
    ),
    "certificate": ({"client-certificate": "client.crt", "client-key": "client.key"}, ""),
    "null": ({"token": None, "exec": None, "as": None, "auth-provider": None}, ""),
    "nothing": ({}, ""),
}


@pytest.mark.parametrize(("user", "authorization"), TOKENS.values(), ids=TOKENS)
def test_a_token_is_that_of_client_go(directory: Path, user: dict[str, Any], authorization: str) -> None:
    given = Credentials(kubeconfig=write(directory / "kubeconfig", kubeconfig(user, {})))
    assert given.load().authorization == authorization
    assert given.namespace() == "of-c"


@pytest.mark.parametrize("named", ["certificate-authority", "certificate-authority-data"])
def test_a_certificate_authority_is_a_file_or_data(directory: Path, named: str) -> None:
    value = data(directory / "ca.crt") if named.endswith("-data") else "ca.crt"
    given = Credentials(kubeconfig=write(directory / "kubeconfig", kubeconfig({}, {named: value})))
    assert "trainjob-test-cluster" in str(given.load().verify.get_ca_certs())


def test_data_take_precedence_over_files(directory: Path) -> None:
    user = {"client-certificate": "nosuch", "client-key": "nosuch"}
    user |= {f"{name}-data": data(directory / f"client.{end}") for name, end in zip(user, ("crt", "key"), strict=True)}
    given = Credentials(kubeconfig=write(directory / "kubeconfig", kubeconfig(user, {})))
    assert given.load().identity[-2:] == tuple((directory / f"client.{end}").read_bytes() for end in ("crt", "key"))


def test_several_files_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "token").write_text("relative to its own file\n")
    first = kubeconfig({"token": "first"}, {}, "first")
    del first["current-context"]
    second = kubeconfig({"tokenFile": "token"}, {}, "second")
    second["users"].append({"name": "first", "user": {"token": "comes too late"}})
    (tmp_path / "empty").write_text("")
    missing = [str(tmp_path / "nosuch"), str(tmp_path / "empty")]
    files = [write(tmp_path / "a", first), *missing, write(tmp_path / "other" / "b", second)]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(files))
    assert Credentials().load().authorization == "Bearer relative to its own file"
    assert Credentials().source() == f"kubeconfig {os.pathsep.join(files)}, context second"
    assert Credentials(kubeconfig=files[-1], context="there").source() == f"kubeconfig {files[-1]}, context there"
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
    text = json.dumps(kubeconfig({"tokenFile": "token"}, {"certificate-authority": "ca.crt"}))
    assert Credentials(kubeconfig_text=text).load().authorization == "Bearer from-a-file"


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no context": ({"current-context": ""}, "sets no current-context"),
    "another context": ({"current-context": "d"}, r"there is no context 'd' \(there are: c\)"),
    "no such user": ({"users": []}, r"there is no user 'c' \(there are: none\)"),
    "no such cluster": ({"clusters": None}, "there is no cluster 'c'"),
    "no server": ({"clusters": [{"name": "c", "cluster": {}}]}, "cluster 'c' has no server"),
    "no URL": ({"clusters": [{"name": "c", "cluster": {"server": "host:6443"}}]}, "such as https://host:6443"),
    "no user": ({"contexts": [{"name": "c", "context": {"cluster": "c"}}]}, "there is no user ''"),
    "two users": ({"users": [{"name": "c"}, {"name": "c"}]}, "wrong has two users named 'c': remove one"),
    "two clusters": ({"clusters": [{"name": "c"}, {"name": "c"}]}, "wrong has two clusters named 'c': remove one"),
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
    given = Credentials(kubeconfig=write(directory / "wrong", kubeconfig({"token": "s3cret"}, {}) | change))
    with pytest.raises(ConfigurationError, match=message) as caught:
        given.load()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("text", ["users: [token: s3cret", "- s3cret", "s3cret", "\0", "[" * 100_000])
def test_invalid_kubeconfigs_are_rejected_without_their_content(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    for given in (Credentials(kubeconfig=str(tmp_path / "file")), Credentials(kubeconfig_text=text)):
        with pytest.raises(ConfigurationError, match=r"neither YAML nor JSON|is nested 65 lists") as caught:
            given.load()
        assert "s3cret" not in str(caught.value)
        assert given.namespace() is None


def test_a_missing_or_unreadable_kubeconfig_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no cluster is configured: there is no kubeconfig at .*nosuch\. Set"):
        Credentials(kubeconfig=str(tmp_path / "nosuch")).load()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match="binary cannot be read"):
        Credentials(kubeconfig=str(tmp_path / "binary")).load()


def test_a_large_file_is_no_kubeconfig(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"#" * (1 << 20) + b"\na: b")
    with pytest.raises(ConfigurationError, match="file has 1,048,577 bytes; a kubeconfig has at most 1,048,576"):
        Credentials(kubeconfig=str(tmp_path / "file")).load()


OIDC = {"name": "oidc", "config": {"client-secret": "s3cret"}}
USERS: dict[str, tuple[dict[str, Any], str]] = {
    "auth provider": (
        {"auth-provider": OIDC, "token": "s3cret"},
        "has auth-provider, but auth providers are not supported: use the exec",
    ),
    "user name": ({"username": "u", "password": "s3cret"}, "has username, but Kubernetes has no basic authentication"),
    "password": ({"password": "s3cret", "token": "t"}, "has password, but Kubernetes has no basic authentication"),
    "groups": ({"token": "s3cret", "as-groups": ["g"]}, "without as: set as"),
    "uid": ({"token": "s3cret", "as-uid": "1"}, "without as: set as"),
    "extra": ({"token": "s3cret", "as-user-extra": {"a": ["b"]}}, "without as: set as"),
    "control characters": (
        {"token": "s3cret", "as": "s3cret\r\nImpersonate-Group: b"},
        "has a control character, or a space at the start or end, in 'User'",
    ),
    "a space after the user": ({"as": "s3cret "}, "a space at the start or end, in 'User'"),
    "a space before the group": ({"as": "a", "as-groups": ["b", " s3cret"]}, "a space at the start or end, in 'Group'"),
    "an extra that is a space": ({"as": "a", "as-user-extra": {"k": [" "]}}, "at the start or end, in 'Extra-k'"),
    "a number": ({"token": "s3cret", "as": 5}, "user 'c', field as is not text"),
    "text": (
        {"token": "s3cret", "as-groups": "g"},
        "user 'c', field as-groups is not a list",
    ),
    "a mapping as token": (
        {"token": {"s3cret": 1}},
        "user 'c', field token is not text",
    ),
}


@pytest.mark.parametrize(("user", "message"), USERS.values(), ids=USERS)
def test_what_would_change_who_one_is_is_refused(tmp_path: Path, user: dict[str, Any], message: str) -> None:
    given = Credentials(kubeconfig=write(tmp_path / "kubeconfig", kubeconfig(user, {})))
    with pytest.raises(ConfigurationError, match=message) as caught:
        given.load()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"insecure-skip-tls-verify": "false"},
            "cluster 'c', field insecure-skip-tls-verify is not true or false",
        ),
        (
            {"insecure-skip-tls-verify": True, "certificate-authority": "ca.crt"},
            "and insecure-skip-tls-verify: remove one",
        ),
        (
            {"proxy-url": "ftp://u:s3cret@proxy"},
            r"the proxy for https://127.0.0.1:1 \(proxy-url\) is not a URL with scheme http",
        ),
        ({"proxy-url": "proxy:3128"}, "is not a URL with scheme http"),
        ({"proxy-url": "http://[::1"}, "is not a URL with scheme http"),
        ({"proxy-url": "http://proxy:s3cret"}, "is not a URL with scheme http"),
        ({"server": "https://[::1"}, "has no server, the URL"),
        ({"server": "https://host:s3cret"}, "has no server, the URL"),
        ({"certificate-authority": "nosuch"}, "certificate-authority of the kubeconfig cannot be read"),
    ],
)
def test_settings_of_a_cluster_that_cannot_be_are_refused(
    tmp_path: Path, cluster: dict[str, Any], message: str
) -> None:
    given = Credentials(kubeconfig=write(tmp_path / "kubeconfig", kubeconfig({}, cluster)))
    with pytest.raises(ConfigurationError, match=message) as caught:
        given.load()
    assert "s3cret" not in str(caught.value)


def test_entries_of_other_contexts_are_not_checked(tmp_path: Path) -> None:
    config = kubeconfig({"token": "t"}, {})
    config["users"].append({"name": "other", "user": {"auth-provider": OIDC}})
    assert Credentials(kubeconfig=write(tmp_path / "kubeconfig", config)).load().authorization == "Bearer t"


def test_a_kubeconfig_is_parsed_once_until_it_changes(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    load = yaml.load

    def counted(text: str, Loader: Any) -> Any:  # noqa: N803 - the name of PyYAML
        parsed.append(text)
        return load(text, Loader)

    monkeypatch.setattr("yaml.load", counted)
    with FakeKube() as server:
        path = server.kubeconfig(tmp_path)
        monkeypatch.setenv("KUBECONFIG", str(path))
        monkeypatch.setenv("TRAINJOB_BACKEND", "kubernetes")
        for times in (1, 1, 2):
            if times == 2:
                path.write_text(path.read_text() + "\n# changed")
            assert program("list")[0] == 0
            assert len(parsed) == times


def test_the_package_kubernetes_is_not_imported(directory: Path) -> None:
    path = write(directory / "light", kubeconfig({"token": "t"}, {"certificate-authority": "ca.crt"}))
    program = (
        "import sys; from trainjob._backends.credentials import Credentials; "
        f"Credentials(kubeconfig={path!r}).load(); print('kubernetes' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
