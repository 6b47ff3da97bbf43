"""A key stands for the job that counts, in each command that takes the name of a job; shells complete both.

Without a cluster a completion returns at once and prints nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from click.shell_completion import ShellComplete
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program, kubeconfig

from trainjob import (
    BackendUnavailable,
    InvalidSpec,
    JobRef,
    Phase,
    Rejected,
    TrainJobClient,
    TrainJobSpec,
    launch,
    observe,
)
from trainjob._jobs.named import find_job, find_written
from trainjob.cli import completion
from trainjob.cli.program import program

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})


def launched(backend: DirectBackend, key: str, namespace: str = "default") -> JobRef:
    with TrainJobClient(backend, namespace) as client:
        return client.launch(SPEC, key)


@pytest.mark.parametrize("key", ["c1", "Not A Name/b/c"])
@pytest.mark.parametrize("command", ["status", "diagnose", "wait", "logs", "goodput"])
def test_a_job_is_found_by_its_key(backend: DirectBackend, program: Program, command: str, key: str) -> None:
    ref = launched(backend, key)
    backend.end(ref)
    code, out, err = program(command, key)
    assert code == 0, err
    if command not in ("logs", "wait"):
        assert ref.name in out


def test_a_job_is_stopped_resumed_and_deleted_by_its_key(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend, "nightly/train")
    assert program("cancel", "--suspend", "nightly/train")[0] == 0
    assert observe(backend.job(ref)).phase is Phase.SUSPENDED
    assert program("resume", "nightly/train")[0] == 0
    assert observe(backend.job(ref)).phase is not Phase.SUSPENDED
    backend.end(ref)
    assert program("delete", "nightly/train")[0] == 0
    assert backend.jobs == {}


def test_a_name_in_another_namespace_is_found_before_a_key(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend, "work", "ml")
    assert json.loads(program("status", "--json", f"ml/{ref.name}")[1])["name"] == ref.name
    assert json.loads(program("status", "--json", "ml/work")[1])["name"] == ref.name


def test_a_text_that_means_two_jobs_is_refused(backend: DirectBackend, program: Program) -> None:
    one, other = launched(backend, "train", "nightly"), launched(backend, "nightly/train")
    code, _, err = program("status", "nightly/train")
    assert code == 2
    assert f"'nightly/train' is the name of TrainJob {one} and the key of TrainJob {other}" in err
    assert "name the one that you mean as NAMESPACE/NAME" in err


def test_a_report_as_json_on_stdout_is_json_only(backend: DirectBackend, program: Program) -> None:
    ref = launched(backend, "c1")
    code, out, _ = program("report", "c1", "--json", "-o", "-")
    assert code == 0
    assert json.loads(out)["name"] == ref.name


# --- what an account may not read


class Guarded(DirectBackend):
    """Refuses lists in these namespaces, and reads of single jobs in those."""

    lists: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    down = False

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[Any]:
        if self.down:
            raise BackendUnavailable("the API server is unavailable")
        if namespace in self.lists:
            raise Rejected(f"TrainJobs in namespace {namespace} cannot be listed")
        return await super().find(namespace, labels)

    async def get(self, namespace: str, name: str) -> Any:
        if namespace in self.reads:
            raise Rejected(f"TrainJobs in namespace {namespace} cannot be read")
        return await super().get(namespace, name)


@pytest.mark.anyio
async def test_who_may_read_single_jobs_only_names_them() -> None:
    backend = Guarded()
    ref = await launch(backend, SPEC, "key", namespace="ml")
    backend.lists = ("ml", "default")
    assert JobRef.of(await find_job(backend, "ml", ref.name)) == ref
    assert JobRef.of(await find_written(backend, "default", "ml", ref.name)) == ref
    with pytest.raises(Rejected, match="cannot be listed"):
        await find_job(backend, "ml", "key")


@pytest.mark.anyio
async def test_the_first_part_of_a_key_need_not_be_a_namespace_that_may_be_read() -> None:
    backend = Guarded()
    ref = await launch(backend, SPEC, "nightly/train", namespace="default")
    backend.lists = backend.reads = ("nightly",)
    assert JobRef.of(await find_written(backend, "default", "nightly", "train")) == ref
    with pytest.raises(Rejected, match="cannot be read"):
        await find_written(backend, "default", "nightly", "other")


@pytest.mark.anyio
async def test_an_outage_is_not_taken_for_a_missing_job() -> None:
    backend = Guarded()
    ref = await launch(backend, SPEC, "key", namespace="default")
    backend.down = True
    with pytest.raises(BackendUnavailable):
        await find_job(backend, "default", ref.name)


@pytest.mark.anyio
async def test_a_name_with_its_namespace_means_one_job_although_it_is_a_key_there() -> None:
    backend = DirectBackend()
    one = await launch(backend, SPEC, "first", namespace="ml")
    await launch(backend, SPEC, one.name, namespace="ml")
    with pytest.raises(InvalidSpec, match="name the one that you mean as NAMESPACE/NAME"):
        await find_job(backend, "ml", one.name)
    assert JobRef.of(await find_written(backend, "default", "ml", one.name)) == one


# ---------------------------------------------------------------- completion


SHELLS = ("zsh", "fish")


@pytest.fixture
def local_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(completion, "SECONDS", 30.0)  # the machine may be busy
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_HOME", str(tmp_path / "home"))


def completed(*words: str) -> list[str]:
    """Completions of the last word."""
    *before, incomplete = words
    shell = ShellComplete(program, {}, "trainjob", completion.VARIABLE)
    return [item.value for item in shell.get_completions(before, incomplete)]


@pytest.mark.usefixtures("local_backend")
def test_commands_options_and_choices_are_completed() -> None:
    assert completed("st") == ["status"]
    assert "--runtime" in completed("run", "--r")
    assert completed("list", "--phase", "run") == ["running"]
    assert completed("run", "--on-crash-action", "s") == ["suspend"]


@pytest.mark.usefixtures("local_backend")
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


@pytest.mark.usefixtures("local_backend")
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


@pytest.mark.usefixtures("local_backend")
@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script(shell: str) -> None:
    done = called(**{completion.VARIABLE: f"{shell}_source"})
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{completion.VARIABLE}={shell}_complete" in done.stdout


@pytest.mark.usefixtures("local_backend")
def test_bash_completes() -> None:
    """With the line of docs/how-to/command-line.md."""
    page = Path(__file__).parents[2] / "docs" / "how-to" / "command-line.md"
    line = 'eval "$(_TRAINJOB_COMPLETE=bash_source trainjob)"'
    assert line in page.read_text()
    script = f"{line}; COMP_WORDS=(trainjob stat); COMP_CWORD=1; _trainjob_completion trainjob; echo ${{COMPREPLY[@]}}"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("status\n", "")
