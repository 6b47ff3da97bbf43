"""A key stands for the job that counts, in each command that takes the name of a job."""

from __future__ import annotations

import json

import pytest
from tests.contract.memory import MemoryBackend
from tests.unit.test_cli import exit_of

from trainjob import JobRef, Phase, TrainJobClient, TrainJobSpec, observe

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    made = MemoryBackend()
    monkeypatch.setattr("trainjob.cli.commands.connect", lambda *_, **__: made)
    return made


def launched(backend: MemoryBackend, key: str, namespace: str = "default") -> JobRef:
    with TrainJobClient(backend, namespace) as client:
        return client.launch(SPEC, key)


@pytest.mark.parametrize("key", ["c1", "nightly/train", "a/b/c", "Not A Name"])
@pytest.mark.parametrize("command", ["status", "diagnose", "wait", "logs", "goodput"])
def test_a_job_is_found_by_its_key(
    backend: MemoryBackend, capsys: pytest.CaptureFixture[str], command: str, key: str
) -> None:
    ref = launched(backend, key)
    backend.end(ref)
    code, out, err = exit_of(capsys, command, key)
    assert code == 0, err
    if command not in ("logs", "wait"):
        assert ref.name in out


def test_a_job_is_stopped_resumed_and_deleted_by_its_key(
    backend: MemoryBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = launched(backend, "nightly/train")
    assert exit_of(capsys, "cancel", "--suspend", "nightly/train")[0] == 0
    assert observe(backend.job(ref)).phase is Phase.SUSPENDED
    assert exit_of(capsys, "resume", "nightly/train")[0] == 0
    assert observe(backend.job(ref)).phase is not Phase.SUSPENDED
    backend.end(ref)
    assert exit_of(capsys, "delete", "nightly/train")[0] == 0
    assert backend.jobs == {}


def test_a_name_in_another_namespace_is_found_before_a_key(
    backend: MemoryBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    ref = launched(backend, "work", "ml")
    assert json.loads(exit_of(capsys, "status", "--json", f"ml/{ref.name}")[1])["name"] == ref.name
    assert json.loads(exit_of(capsys, "status", "--json", "ml/work")[1])["name"] == ref.name


def test_a_text_that_means_two_jobs_is_refused(backend: MemoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = launched(backend, "train", "nightly"), launched(backend, "nightly/train")
    code, _, err = exit_of(capsys, "status", "nightly/train")
    assert code == 2
    assert f"'nightly/train' is the name of TrainJob {one} and the key of TrainJob {other}" in err
    assert "name the one that you mean by its namespace and name" in err


def test_a_report_as_json_on_stdout_is_json_only(backend: MemoryBackend, capsys: pytest.CaptureFixture[str]) -> None:
    ref = launched(backend, "c1")
    code, out, _ = exit_of(capsys, "report", "c1", "--json", "-o", "-")
    assert code == 0
    assert json.loads(out)["name"] == ref.name
