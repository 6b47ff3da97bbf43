"""Exec plugins: real programs, and a server that accepts some of their tokens."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.certificates import Authority
from tests.endpoints import Endpoint, ask, kubeconfig, write

from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.errors import Unauthorized
from trainjob.errors import ConfigurationError

V1 = "client.authentication.k8s.io/v1"
LATER, EARLIER = ((datetime.now(UTC) + timedelta(hours=hours)).isoformat() for hours in (1, -1))


@pytest.fixture
def server() -> Iterator[Endpoint]:
    """A server without TLS."""
    with Endpoint() as running:
        yield running


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither standard input nor standard error is a terminal, regardless of who runs the tests."""
    monkeypatch.setattr("os.isatty", lambda _: False)


def plugin(directory: Path, script: str, server: str, **settings: Any) -> Credentials:
    """Credentials by the shell script `script`, which appends to the file ``runs``."""
    program = directory / "plugin"
    program.write_text(f'#!/bin/sh\necho run >> "{directory}/runs"\n{script}\n')
    program.chmod(0o755)
    settings = {"apiVersion": V1, "interactiveMode": "Never", "command": "./plugin", **settings}
    config = kubeconfig({"exec": settings}, {"server": server, "certificate-authority-data": "YXV0aG9yaXR5"})
    return Credentials(kubeconfig=write(directory / "kubeconfig", config))


def printing(version: str = V1, **status: str) -> str:
    """A script that prints credentials; ``$token`` in a status is expanded."""
    text = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
    return "cat <<END\n" + text + "\nEND"


def runs(directory: Path) -> int:
    """How often the plugin ran."""
    return len((directory / "runs").read_text().splitlines())


@pytest.mark.parametrize("version", [V1, f"{V1}beta1"])
def test_a_plugin_runs_once_for_many_requests_and_clients(tmp_path: Path, server: Endpoint, version: str) -> None:
    credentials = plugin(tmp_path, printing(version, token="t"), server.url, apiVersion=version)
    asyncio.run(ask(credentials, times=3))
    asyncio.run(ask(credentials))
    assert server.sent("Authorization") == [["Bearer t"]] * 4
    assert runs(tmp_path) == 1


@pytest.mark.parametrize(("expires", "times"), [(LATER, 1), (EARLIER, 3)], ids=["later", "earlier"])
def test_a_plugin_runs_again_after_the_expiration(tmp_path: Path, server: Endpoint, expires: str, times: int) -> None:
    script = printing(token="t", expirationTimestamp=expires)
    asyncio.run(ask(plugin(tmp_path, script, server.url), times=3))
    assert runs(tmp_path) == times


def test_a_plugin_runs_again_once_after_a_401(tmp_path: Path, server: Endpoint) -> None:
    script = f'token=$(wc -l < "{tmp_path}/runs")\n' + printing(token="t$token")
    credentials = plugin(tmp_path, script, server.url)
    server.tokens = {"t2"}
    asyncio.run(ask(credentials, times=2))
    assert server.sent("Authorization") == [["Bearer t1"], ["Bearer t2"], ["Bearer t2"]]
    server.tokens = {"another"}
    with pytest.raises(Unauthorized):
        asyncio.run(ask(credentials))
    assert runs(tmp_path) == 3


def test_credentials_that_cannot_be_used_are_not_kept(tmp_path: Path, server: Endpoint) -> None:
    credentials = plugin(tmp_path, printing(token="a\nb"), server.url)
    for times in (1, 2):
        with pytest.raises(ConfigurationError, match="characters that no token can have"):
            credentials.load()
        assert runs(tmp_path) == times


FAILURES = {
    "fails": (
        'echo "login: password=hunter2 refused" >&2; exit 3',
        r"failed with exit code 3: login: password=\S+ ref",
    ),
    "killed": ("kill -9 $$", "was killed by signal 9"),
    "text": ("echo hunter2", "printed no ExecCredential, but 8 bytes that are not JSON"),
    "nothing": ("true", "but 0 bytes that are not JSON"),
    "deep": ("yes [ | head -100000", "that are not JSON"),
    "large": ("yes hunter2", "prints more than 1 MiB"),
    "list": ("echo [1]", "printed JSON that is not an ExecCredential"),
    "kind": ("""echo '{"kind": "Pod"}'""", "printed JSON that is not an ExecCredential"),
    "version": (printing(f"{V1}beta1", token="hunter2"), f"apiVersion is not {V1}, as configured"),
    "no status": (f"""echo '{{"kind": "ExecCredential", "apiVersion": "{V1}"}}'""", "without a token or certificate"),
    "no token": (printing(token=""), "without a token or certificate"),
    "number": (printing(token="hunter2").replace('"hunter2"', "5"), "a status that is not text"),
    "time": (printing(token="hunter2", expirationTimestamp="tomorrow"), "expirationTimestamp is not RFC 3339"),
    "control characters": (printing(token="hunter2\nX: y"), "the token of the kubeconfig contains characters"),
    "half a pair": (printing(clientKeyData="hunter2"), "only one of clientCertificateData and clientKeyData"),
}


@pytest.mark.parametrize(("script", "message"), FAILURES.values(), ids=FAILURES)
def test_a_plugin_without_credentials_is_an_error_before_any_request(
    tmp_path: Path, server: Endpoint, script: str, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        asyncio.run(ask(plugin(tmp_path, script, server.url)))
    assert "hunter2" not in str(caught.value)
    assert server.headers == []
    assert runs(tmp_path) == 1


IN_THREAD = 'import subprocess, threading; threading.Thread(target=subprocess.run, args=(["sleep", "1000"],)).start()'


@pytest.mark.parametrize(
    "child",
    ["sleep 1000", "sh -c 'sleep 1000; true'", "setsid sh -c 'sleep 1000; true'", f"{sys.executable} -c '{IN_THREAD}'"],
    ids=["a child", "a grandchild", "of another session", "of a thread"],
)
def test_a_plugin_that_hangs_is_killed_with_its_children(
    tmp_path: Path, server: Endpoint, monkeypatch: pytest.MonkeyPatch, child: str
) -> None:
    monkeypatch.setattr("trainjob._backends.exec_plugin._SECONDS", 0.5)
    os.mkfifo(tmp_path / "alive")
    reader = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    script = f"echo waiting for a browser >&2\n{child} > {tmp_path}/alive &\nwait"
    with pytest.raises(ConfigurationError, match=r"has not finished after 0\.5 s: waiting for a browser"):
        asyncio.run(ask(plugin(tmp_path, script, server.url)))
    assert server.headers == []
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "the end of the file, after the child has ended"
    os.close(reader)


def test_a_plugin_that_prints_errors_without_end_is_killed(
    tmp_path: Path, server: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob._backends.exec_plugin._SECONDS", 0.5)
    with pytest.raises(ConfigurationError, match=r"(?s)has not finished after 0\.5 s: .*retrying$") as caught:
        asyncio.run(ask(plugin(tmp_path, "yes retrying >&2", server.url)))
    assert len(str(caught.value)) < 3000


WRONG = {
    "missing": (
        {"command": "nosuch-program"},
        "nosuch-program is not installed. Its installHint: install the sso tool",
    ),
    "missing path": ({"command": "./nosuch"}, "nosuch is not installed. Its installHint: install the sso tool"),
    "no program": ({"command": "./kubeconfig"}, "cannot be started: .*Permission denied.*install the sso tool"),
    "old": ({"apiVersion": f"{V1}alpha1"}, "v1alpha1'; supported: .*v1, .*v1beta1"),
    "no version": ({"apiVersion": None}, "has apiVersion ''"),
    "mode": ({"interactiveMode": "Sometimes"}, "'Sometimes'; set Never, IfAvailable or Always"),
    "no terminal": ({"interactiveMode": "Always"}, "standard input is not a terminal: log in on a terminal"),
    "no command": ({"command": ""}, "has no command, or a variable"),
    "variable": ({"env": [5]}, "user 'c', field exec.env.0 is not a mapping"),
    "args": ({"args": "text"}, "user 'c', field exec.args is not a list"),
    "no name": ({"env": [{"value": "hunter2"}]}, r"has no command, or a variable without a name in env"),
}


@pytest.mark.parametrize(("settings", "message"), WRONG.values(), ids=WRONG)
def test_a_plugin_that_cannot_run_is_an_error_before_any_request(
    tmp_path: Path, server: Endpoint, settings: dict[str, Any], message: str
) -> None:
    settings = {"installHint": "install the sso tool", **settings}
    with pytest.raises(ConfigurationError, match=message) as caught:
        asyncio.run(ask(plugin(tmp_path, "exit 1", server.url, **settings)))
    assert "hunter2" not in str(caught.value)
    assert server.headers == []
    assert not (tmp_path / "runs").exists()


def test_a_program_of_the_working_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    credentials = plugin(tmp_path, printing(token="t"), "http://127.0.0.1:1", command="plugin")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f".:{os.environ['PATH']}")
    with pytest.raises(ConfigurationError, match="plugin is not installed"):
        credentials.load()


@pytest.mark.parametrize(
    ("mode", "terminal", "interactive"),
    [("Never", True, False), ("IfAvailable", True, True), (None, False, False), ("Always", True, True)],
)
def test_a_plugin_is_told_whether_there_is_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, terminal: bool, interactive: bool
) -> None:
    script = f'printf %s "$KUBERNETES_EXEC_INFO" > "{tmp_path}/info"\n' + printing(token="t")
    monkeypatch.setattr("os.isatty", lambda number: terminal and number == 0)
    plugin(tmp_path, script, "http://127.0.0.1:1", interactiveMode=mode).load()
    spec = {"interactive": interactive}
    assert json.loads((tmp_path / "info").read_text()) == {"apiVersion": V1, "kind": "ExecCredential", "spec": spec}


def test_a_plugin_gets_its_arguments_environment_and_cluster(tmp_path: Path) -> None:
    script = f'printf %s "$KUBERNETES_EXEC_INFO" > "{tmp_path}/info"\n' + printing(token="$1-$NAME")
    settings = {"args": ["a b"], "env": [{"name": "NAME", "value": "v"}], "provideClusterInfo": True}
    credentials = plugin(tmp_path, script, "http://127.0.0.1:1", **settings)
    config = json.loads((tmp_path / "kubeconfig").read_text())
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "a", 1: [{True: None}]}}
    config["clusters"][0]["cluster"]["extensions"] = [{"name": "other", "extension": 1}, extension]
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    assert credentials.load().authorization == "Bearer a b-v"
    assert json.loads((tmp_path / "info").read_text())["spec"]["cluster"] == {
        "server": "http://127.0.0.1:1",
        "certificate-authority-data": "YXV0aG9yaXR5",
        "config": {"audience": "a", "1": [{"true": None}]},
    }


@pytest.mark.parametrize("other", [{"token": "s"}, {"tokenFile": "token"}])
def test_a_token_of_the_kubeconfig_takes_precedence(tmp_path: Path, other: dict[str, str]) -> None:
    credentials = plugin(tmp_path, "exit 1", "http://127.0.0.1:1")
    (tmp_path / "token").write_text("s")
    config = json.loads((tmp_path / "kubeconfig").read_text())
    config["users"][0]["user"].update(other)
    write(tmp_path / "kubeconfig", config)
    assert credentials.load().authorization == "Bearer s"


def test_a_plugin_issues_a_client_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    client = authority.issue("jane")
    status = {"clientCertificateData": client.certificate.read_text(), "clientKeyData": client.key.read_text()}
    with Endpoint(authority.issue("server", addresses=["127.0.0.1"]), authority) as server:
        credentials = plugin(tmp_path, printing(**status), server.url)
        config = json.loads((tmp_path / "kubeconfig").read_text())
        config["clusters"][0]["cluster"]["certificate-authority-data"] = authority.bundle
        write(tmp_path / "kubeconfig", config)
        asyncio.run(ask(credentials))
        assert server.clients == ["jane"]
        assert server.sent("Authorization") == [[]]
