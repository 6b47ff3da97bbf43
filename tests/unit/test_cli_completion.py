"""Shell completion. Without a cluster it returns at once and prints nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from click.shell_completion import ShellComplete
from tests.fakes.kube.direct import DirectBackend

from trainjob._jobs.launching import launch
from trainjob._spec import TrainJobSpec
from trainjob.cli import completion
from trainjob.cli.program import program

SPEC = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture(autouse=True)
def local_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(completion, "SECONDS", 30.0)  # the machine may be busy
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path / "home"))


def completed(*words: str) -> list[str]:
    """Completions of the last word."""
    *before, incomplete = words
    shell = ShellComplete(program, {}, "trainjob", completion.VARIABLE)
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_commands_options_and_choices_are_completed() -> None:
    assert completed("st") == ["status"]
    assert "--runtime" in completed("run", "--r")
    assert completed("list", "--phase", "run") == ["running"]
    assert completed("run", "--on-crash-action", "s") == ["suspend"]


def test_jobs_and_keys_are_completed(backend: DirectBackend) -> None:
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


def called(**environment: str) -> subprocess.CompletedProcess[str]:
    """Call the program as a shell does, without arguments."""
    return subprocess.run(
        [sys.executable, "-c", "from trainjob.cli import main; main()"],
        env={**os.environ, **environment},
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


def test_completion_without_a_cluster_is_empty_and_silent(tmp_path: Path) -> None:
    """No cluster, one that never responds, a credential plugin that asks for a password, invalid settings."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"https://127.0.0.1:{silent.getsockname()[1]}"
        asking = {"command": "sh", "apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "IfAvailable"}
        plugin = {**asking, "args": ["-c", "echo password: >&2; read password; sleep 5"]}
        for environment in (
            {"KUBECONFIG": str(tmp_path / "nosuch"), "TRAINJOB_BACKEND": "kubernetes"},
            {"KUBECONFIG": str(kubeconfig(tmp_path / "silent", server)), "TRAINJOB_BACKEND": "kubernetes"},
            {"KUBECONFIG": str(kubeconfig(tmp_path / "asks", server, exec=plugin)), "TRAINJOB_BACKEND": "kubernetes"},
            {"TRAINJOB_BACKEND": "nosuch"},
        ):
            asked = {"COMP_WORDS": "trainjob status ", "COMP_CWORD": "2", completion.VARIABLE: "bash_complete"}
            answer = called(**environment, **asked)
            assert (answer.returncode, answer.stdout.strip(), answer.stderr) == (0, "", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str) -> None:
    done = called(**{completion.VARIABLE: f"{shell}_source"})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{completion.VARIABLE}={shell}_complete" in done.stdout


def test_bash_completes() -> None:
    """With the line of docs/how-to/command-line.md."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "command-line.md"
    line = 'eval "$(_TRAINJOB_COMPLETE=bash_source trainjob)"'
    assert line in page.read_text()
    script = f"{line}; COMP_WORDS=(trainjob stat); COMP_CWORD=1; _trainjob_completion trainjob; echo ${{COMPREPLY[@]}}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("status\n", "")
