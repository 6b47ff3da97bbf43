"""What a shell completes, and that it waits for nothing and prints nothing where there is no cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import yaml
from click.shell_completion import ShellComplete
from tests.contract.memory import MemoryBackend
from tests.processes import eventually
from tests.serving import serving

from trainjob.backends.kubernetes.backend import KubernetesBackend
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.backends.local.runtimes import FRAMEWORKS
from trainjob.cli import completion
from trainjob.cli.program import program
from trainjob.lifecycle import launch
from trainjob.spec import TrainJobSpec

SPEC = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(completion, "SECONDS", 30.0)  # the machine may be busy
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path / "home"))


def completed(*words: str) -> list[str]:
    """What the last of the words can become."""
    *before, incomplete = words
    shell = ShellComplete(program, {}, "trainjob", completion.VARIABLE)
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_commands_options_and_choices() -> None:
    assert completed("st") == ["status"]
    assert "--runtime" in completed("run", "--r")
    assert completed("list", "--phase", "run") == ["running"]
    assert completed("run", "--on-crash", "s") == ["suspend"]


def test_runtimes_of_this_machine() -> None:
    for words in (("run",), ("render",), ("doctor",)):
        assert completed(*words, "--runtime", "") == [*FRAMEWORKS]
        assert completed(*words, "--runtime", "torch-") == ["torch-distributed", "torch-resilient"]


def test_jobs_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend()
    monkeypatch.setattr("trainjob.cli.commands.connect", lambda *_, **__: backend)
    assert completed("status", "") == []

    async def make() -> list[str]:
        made = [await launch(backend, SPEC, key, namespace="default") for key in ("nightly/a", "weekly/b")]
        other = await launch(backend, SPEC, "nightly/c", namespace="ml")
        return [*(ref.name for ref in made), other.name]

    one, two, other = anyio.run(make)
    for command in ("status", "wait", "logs", "cancel", "resume", "delete", "diagnose"):
        assert sorted(completed(command, "")) == sorted([one, two])
    assert completed("status", one[:3]) == [one]
    assert completed("status", "ml/") == [f"ml/{other}"]
    assert completed("status", "../default/") == completed("status", "/") == []
    assert completed("-n", "ml", "status", "") == [other]
    assert completed("status", "-n", "ml", "") == [other]
    assert sorted(completed("list", "--key", "")) == ["nightly/a", "weekly/b"]
    assert completed("run", "--key", "week") == ["weekly/b"]


def ask(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """As bash asks for the word behind `words`."""
    given = {"COMP_WORDS": " ".join(["trainjob", *words, ""]), "COMP_CWORD": str(len(words) + 1)}
    return subprocess.run(
        [sys.executable, "-c", "from trainjob.cli import main; main()"],
        env={**os.environ, **environment, **given, completion.VARIABLE: "bash_complete"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def kubeconfig(path: Path, server: str, **user: Any) -> Path:
    config = {
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "here",
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_without_an_answer_there_is_nothing_and_no_message(tmp_path: Path) -> None:
    """No cluster, one that never answers, credentials that ask for a password and never end, wrong settings."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"https://127.0.0.1:{silent.getsockname()[1]}"
        asking = {"command": "sh", "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "IfAvailable"}
        plugin = {**asking, "args": ["-c", f"echo password: >&2; read password; echo $$ > {tmp_path}/pid; sleep 300"]}
        for environment in (
            {"KUBECONFIG": str(tmp_path / "nosuch"), "TRAINJOB_BACKEND": "kubernetes"},
            {"KUBECONFIG": str(kubeconfig(tmp_path / "silent", server)), "TRAINJOB_BACKEND": "kubernetes"},
            {"KUBECONFIG": str(kubeconfig(tmp_path / "asks", server, exec=plugin)), "TRAINJOB_BACKEND": "kubernetes"},
            {"TRAINJOB_BACKEND": "nosuch"},
        ):
            answer = ask(environment, "status")
            assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, "", "")
    if (tmp_path / "pid").exists():  # else the second was over before the plugin began
        plugin_pid = int((tmp_path / "pid").read_text())
        eventually(lambda: not psutil.pid_exists(plugin_pid))


class _Runtimes(BaseHTTPRequestHandler):
    """An API server that knows two runtimes."""

    def do_GET(self) -> None:
        assert self.path.startswith("/apis/trainer.kubeflow.org/v1alpha1/clustertrainingruntimes?")
        body = json.dumps({"items": [{"metadata": {"name": name}} for name in ("jax-own", "torch-own")]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as it is called there
        pass


def test_runtimes_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), _Runtimes)) as server:
        credentials = Credentials(host=f"http://127.0.0.1:{server.server_port}", token="t")
        monkeypatch.setattr("trainjob.cli.commands.connect", lambda *_, **__: KubernetesBackend(credentials))
        assert completed("run", "--runtime", "") == ["jax-own", "torch-own"]
        assert completed("doctor", "--runtime", "torch") == ["torch-own"]


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_gets_its_script(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from trainjob.cli import main; main()"],
        env={**os.environ, completion.VARIABLE: f"{shell}_source"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f"{completion.VARIABLE}={shell}_complete" in done.stdout
    assert done.stderr == ""


def test_bash_completes() -> None:
    """By the line of docs/how-to/command-line.md."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "command-line.md"
    line = 'eval "$(_TRAINJOB_COMPLETE=bash_source trainjob)"'
    assert line in page.read_text()
    script = f"{line}; COMP_WORDS=(trainjob stat); COMP_CWORD=1; _trainjob_completion trainjob; echo ${{COMPREPLY[@]}}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("status\n", "")
