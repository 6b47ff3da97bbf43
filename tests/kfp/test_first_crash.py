"""A rank crashes while its job keeps running; on a real cluster: tests/cluster/test_first_crash.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tests.contract.memory import MemoryBackend

from trainjob import InvalidSpec, JobRef, LogLine, Phase, TrainJobClient, TrainJobSpec
from trainjob._manifest.attempts import given_up
from trainjob.errors import JobHung, QueueTimeout, RankCrashed
from trainjob.status import QUEUE_LABEL, observe
from trainjob.verdicts import Evidence
from trainjob_kfp import jobs, steplog
from trainjob_kfp.execution import Execution

EXECUTION = Execution("kfp/run/uuid/train", "run", "train")
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
PARAMETERS: dict[str, Any] = {
    "backend": "",
    "namespace": "ns",
    "queue_timeout": 0,
    "start_timeout": 0,
    "run_timeout": 0,
    "cancel_on_timeout": True,
    "on_kill_action": "suspend",
    "fail_fast": False,
    "owned_by_run": False,
    "fail_on_first_crash": True,
    "on_crash_action": "suspend",
}
CRASHED = {
    "metadata": {"name": "p", "labels": {"batch.kubernetes.io/job-completion-index": "1"}},
    "status": {"containerStatuses": [{"name": "node", "lastState": {"terminated": {"exitCode": 3}}}]},
}


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    """Runs every job, and crashes its second rank."""
    backend = MemoryBackend()

    def crash(request: str) -> None:
        if request == "create":
            ref = JobRef.of(next(iter(backend.jobs.values())))
            backend.running(ref)
            backend.crashed[ref.uid] = [Evidence(None, [CRASHED], {"p": ["ValueError: no"]})]

    backend.after = crash
    monkeypatch.setattr(jobs, "TrainJobClient", lambda _, namespace: TrainJobClient(backend, namespace))
    return backend


@pytest.mark.parametrize(
    ("action", "phase", "outcome"),
    [
        ("suspend", Phase.SUSPENDED, "was suspended"),
        ("cancel", None, "was deleted"),
        ("keep", Phase.RUNNING, "keeps running"),
    ],
)
def test_the_first_crash_fails_the_step(
    backend: MemoryBackend,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
    phase: Phase | None,
    outcome: str,
) -> None:
    recorded: list[object] = []
    monkeypatch.setattr(jobs, "record_goodput", lambda _, spent: recorded.append(spent))
    with pytest.raises(RankCrashed, match="exited with code 3") as raised:
        jobs.run_job(EXECUTION, SPEC, {**PARAMETERS, "on_crash_action": action})
    assert bool(getattr(raised.value, "__notes__", ())) is bool(phase), "a deleted job has no page"
    log = capsys.readouterr().out
    assert outcome in log
    assert re.search(r"goodput \d+\.\d%: training ", log)
    assert recorded == ([] if action == "keep" else [raised.value.spent]), "a later wait records a job that runs"
    assert [observe(job).phase for job in backend.jobs.values()] == ([phase] if phase else [])
    assert all(given_up(job) for job in backend.jobs.values() if phase is Phase.SUSPENDED)


def test_a_crash_is_logged_with_the_last_lines_of_its_rank(
    backend: MemoryBackend, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_line = steplog.write_line

    def end_after_warning(what: object) -> None:
        write_line(what)
        if "ValueError" in str(what):
            backend.end(JobRef.of(next(iter(backend.jobs.values()))))

    monkeypatch.setattr(jobs, "write_line", end_after_warning)
    jobs.run_job(EXECUTION, SPEC, {**PARAMETERS, "fail_on_first_crash": False})
    out = capsys.readouterr().out
    assert "exited with code 3; the job keeps running if" in out
    assert "  | ValueError: no" in out


def test_a_job_that_hangs_fails_any_step_and_is_suspended(
    backend: MemoryBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.crashed, backend.after = {}, lambda request: runs() if request == "create" else None
    backend.lines = [
        LogLine("2026-11-26T12:00:00Z", "node-0", 'trainjob.rank {"rank": 0, "count": 1, "stalled_seconds": 9}')
    ]

    def runs() -> None:
        backend.running(JobRef.of(next(iter(backend.jobs.values()))))

    spec = TrainJobSpec.parse({**SPEC.model_dump(exclude_unset=True), "stall_timeout": 1})
    without = {name: value for name, value in PARAMETERS.items() if "crash" not in name}
    with pytest.raises(JobHung, match="no rank has made progress for 1s: node-0 makes no step"):
        jobs.run_job(EXECUTION, spec, without)
    assert [observe(job).phase for job in backend.jobs.values()] == [Phase.SUSPENDED]
    assert "was suspended" in capsys.readouterr().out


def test_a_cancelled_job_without_capacity_changes_the_next_try(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster deletes the job, and the step keeps the reason: it does not know whether KFP retries it."""
    monkeypatch.setattr(backend, "cluster", object())
    backend.after = lambda _: None
    fields = {"labels": {QUEUE_LABEL: "main"}, "suspend": True, "on_retry": {"quota": {"queue": "backfill"}}}
    spec = TrainJobSpec.parse({**SPEC.model_dump(exclude_unset=True), **fields})
    for queue, index in (("main", "0"), ("backfill", "1")):
        monkeypatch.setenv("KFP_RETRY_INDEX", index)
        with pytest.raises(QueueTimeout, match=f"in queue {queue}"):
            jobs.run_job(EXECUTION, spec, {**PARAMETERS, "queue_timeout": 0.2, "fail_on_first_crash": False})


def test_unknown_crash_actions_are_refused(backend: MemoryBackend) -> None:
    with pytest.raises(InvalidSpec, match=r"on_crash_action: must be 'suspend', 'cancel' or 'keep', not 'delete'"):
        jobs.run_job(EXECUTION, SPEC, {**PARAMETERS, "on_crash_action": "delete"})
    assert backend.jobs == {}


def test_steps_without_crash_parameters_wait_for_the_end(backend: MemoryBackend) -> None:
    """Initializers and exporters on a cluster."""
    parameters = {name: value for name, value in PARAMETERS.items() if "crash" not in name}
    backend.after = lambda _: backend.end(JobRef.of(next(iter(backend.jobs.values()))))
    assert jobs.run_job(EXECUTION, SPEC, parameters).attempt == 1


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
