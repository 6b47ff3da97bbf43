"""The TrainJob of a step: crashes, hangs, tries of the step and attempts of its key."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.kfp.step_backend import StepBackend

from trainjob import JobRef, LogLine, Phase, TrainJobClient, TrainJobFailed, TrainJobSpec
from trainjob._jobs import telemetry
from trainjob._manifest.attempts import given_up
from trainjob.errors import RankCrashed
from trainjob.job import KEY, TRY
from trainjob.status import observe
from trainjob_kfp import jobs, steplog
from trainjob_kfp.execution import Execution

EXECUTION = Execution("kfp/run/uuid/train", "run", "train")
FIELDS = {"runtime": "torch-distributed", "command": ["train"]}
SPEC = TrainJobSpec.parse(FIELDS)
INITIALIZER: dict[str, Any] = {
    "backend": "",
    "namespace": "ns",
    "queue_timeout": 0,
    "start_timeout": 0,
    "run_timeout": 0,
    "cancel_on_timeout": True,
    "on_kill_action": "suspend",
    "fail_fast": False,
    "owned_by_run": False,
}
"""Parameters of a step that initializes or exports."""
TRAIN = {**INITIALIZER, "fail_on_first_crash": True, "on_crash_action": "suspend"}
WAIT = {**TRAIN, "fail_on_first_crash": False}


@pytest.fixture(autouse=True)
def connected(backend: StepBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is connected to the cluster of its test."""
    monkeypatch.setattr(jobs, "TrainJobClient", lambda _, namespace: TrainJobClient(backend, namespace))


def attempts(backend: StepBackend) -> list[JobRef]:
    """The attempts that exist; the record of a failed one is none."""
    return [JobRef.of(job) for job in backend.jobs.values() if KEY in job["metadata"]["labels"]]


def at_creation(backend: StepBackend, happens: Callable[[JobRef], object]) -> None:
    """Each new attempt runs, and something happens to it."""

    def after(request: str) -> None:
        if request == "POST trainjobs" and (found := attempts(backend)):
            backend.running(found[-1])
            happens(found[-1])

    backend.after = after


def replaced_at_the_first_watch(backend: StepBackend, happens: Callable[[JobRef], object]) -> None:
    """Another launcher has decided that its attempt counts, to which something happens."""

    def before(request: str) -> None:
        if request == "WATCH trainjobs" and (first := attempts(backend)[0]).attempt == 1:
            happens(backend.replaced(first, SPEC))

    backend.before = before


# ---------------------------------------------------------------- crashes and messages


@pytest.mark.parametrize(
    ("action", "left"), [("suspend", [Phase.SUSPENDED]), ("cancel", []), ("keep", [Phase.RUNNING])]
)
def test_the_first_crash_fails_the_step(
    backend: StepBackend,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    left: list[Phase],
) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(telemetry, "record_goodput", lambda _, spent: recorded.append(spent))
    replaced_at_the_first_watch(backend, lambda ref: backend.crash(ref, 1, 3, "ValueError: no"))
    with pytest.raises(RankCrashed, match="exited with code 3") as raised:
        jobs.run_job(EXECUTION, SPEC, {**TRAIN, "on_crash_action": action})
    assert ("report: " in "".join(raised.value.__notes__)) is bool(left), "a deleted job has no page"
    assert re.search(r"goodput \d+\.\d%: training ", capsys.readouterr().out)
    assert recorded == ([] if action == "keep" else [raised.value.spent]), "a later wait records a job that runs"
    found = [backend.job(ref) for ref in attempts(backend)]
    assert [observe(job).phase for job in found] == left
    assert all(given_up(job) for job in found if action == "suspend")


def test_the_log_of_a_step_has_no_control_sequences(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = tmp_path / "message"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(message))
    hostile = "\x1b]52;c;ZXZpbA==\x07a \x1b[31mred\x1b[0m \x9b2Jb"
    steplog.write_line(LogLine("t", "node-0", hostile))
    steplog.leave_message(hostile)
    assert capsys.readouterr().out == "[node-0] a red b\n"
    assert message.read_text() == "a red b"
    monkeypatch.delenv("TRAINJOB_TERMINATION_LOG")  # outside a pod
    steplog.leave_message("another")
    assert message.read_text() == "a red b"


def test_a_long_termination_message_keeps_its_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    message = tmp_path / "message"
    monkeypatch.setenv("TRAINJOB_TERMINATION_LOG", str(message))
    summary = "TrainJob default/train-1 failed: node-0 exited with code 3"
    steplog.leave_message("\n".join([summary, *["ä" * 300] * 30]))
    assert 4000 < message.stat().st_size <= 4096
    assert message.read_text().splitlines()[0] == summary


@pytest.mark.parametrize(
    ("deadline", "shown"), [("2026-11-21T10:32:34Z", True), ("0001-01-01T00:00:00Z", False), ("", False)]
)
def test_a_step_logs_when_kfp_terminates_it(
    backend: StepBackend,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    deadline: str,
    shown: bool,
) -> None:
    monkeypatch.setenv("ARGO_DEADLINE", deadline)
    at_creation(backend, backend.end)
    jobs.run_job(EXECUTION, SPEC, INITIALIZER)
    assert ("KFP terminates this step at 2026-11-21T10:32:34Z" in capsys.readouterr().out) is shown


# ---------------------------------------------------------------- tries of the step


def test_kfps_retries_and_retry_run_start_new_attempts(backend: StepBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(ref: JobRef) -> None:
        backend.write(ref, 0, "about to fail")
        backend.end(ref, 7)

    at_creation(backend, fails)
    found = []
    for index, user_errors in (("0", True), ("1", False), ("1", True), ("", False)):  # at last: "Retry run"
        monkeypatch.setenv("KFP_RETRY_INDEX", index)
        with pytest.raises(TrainJobFailed, match="node-0 exited with code 7"):
            jobs.run_job(EXECUTION, SPEC, {**WAIT, "retry_user_errors": user_errors})
        found.append([job["metadata"]["annotations"][TRY] for job in backend.jobs.values()])
    assert found == [["1"], ["1"], ["1", "2"], ["1", "2", "3"]], "the failure is not certain to repeat"


# ---------------------------------------------------------------- attempts of the key


def test_a_step_follows_the_attempt_that_replaces_its_job(
    backend: StepBackend, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    replaced_at_the_first_watch(backend, backend.end)
    result = jobs.run_job(EXECUTION, SPEC, WAIT, tmp_path / "report.html")
    (second,) = attempts(backend)
    assert (result.name, result.attempt) == (second.name, 2)
    out = capsys.readouterr().out
    assert f"TrainJob ns/{second.name[:-1]}1 was replaced by {second}, which is waited for from now on" in out
    assert f"TrainJob {second} is Complete" in out
    assert second.name in (tmp_path / "report.html").read_text()
