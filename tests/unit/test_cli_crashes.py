"""The command line with crashed ranks and for diagnoses: messages, exit codes, final state of the job."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.contract.memory import MemoryBackend
from tests.unit.program import exit_of

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._jobs import launching as flow
from trainjob._manifest.attempts import given_up
from trainjob.status import observe
from trainjob.verdicts import Evidence

CRASHED = {
    "metadata": {
        "name": "p-1",
        "labels": {"batch.kubernetes.io/job-completion-index": "1", "jobset.sigs.k8s.io/replicatedjob-name": "node"},
    },
    "spec": {"containers": [{"name": "node"}]},
    "status": {"containerStatuses": [{"name": "node", "lastState": {"terminated": {"exitCode": 3}}}]},
}
EVIDENCE = Evidence(None, [CRASHED], {"p-1": ["loading", "ValueError: no"]})


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    backend = MemoryBackend()
    monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: backend)
    return backend


@pytest.fixture
def job(backend: MemoryBackend) -> JobRef:
    """A running job."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
    ref = asyncio.run(flow.launch(backend, spec, "key", namespace="default"))
    backend.running(ref)
    return ref


@pytest.fixture
def crashing(backend: MemoryBackend, job: JobRef) -> JobRef:
    backend.crashed[job.uid] = [EVIDENCE]
    return job


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ([], (Phase.RUNNING, "keeps running")),
        (["--on-crash-action", "keep"], (Phase.RUNNING, "keeps running")),
        (["--on-crash-action", "suspend"], (Phase.SUSPENDED, "was suspended")),
        (["--on-crash-action", "cancel"], (None, "was deleted")),
    ],
)
def test_wait_fails_at_the_first_crash(
    capsys: pytest.CaptureFixture[str],
    backend: MemoryBackend,
    crashing: JobRef,
    options: list[str],
    outcome: tuple[Phase | None, str],
) -> None:
    phase, text = outcome
    code, _, err = exit_of(capsys, "wait", crashing.name, "--fail-on-first-crash", *options)
    assert code == 1
    assert f"{crashing} {text}" in err
    assert "node-1 exited with code 3" in err
    assert "  | ValueError: no" in err
    left = list(backend.jobs.values())
    assert [observe(job).phase for job in left] == ([phase] if phase else [])


def test_run_suspends_its_crashed_job(
    capsys: pytest.CaptureFixture[str], backend: MemoryBackend, crashing: JobRef
) -> None:
    words = ["--runtime", "torch-distributed", "--key", "key", "--fail-on-first-crash", "--", "train"]
    code, _, err = exit_of(capsys, "run", *words)
    assert (code, f"{crashing} was suspended" in err) == (1, True)
    assert given_up(backend.job(crashing)) is not None
    code, out, _ = exit_of(capsys, "diagnose", crashing.name)
    assert (code, "ValueError: no" in out) == (1, True)


def test_a_crash_is_printed_with_its_last_lines(
    capsys: pytest.CaptureFixture[str], backend: MemoryBackend, crashing: JobRef
) -> None:
    def end(request: str) -> None:  # after some watch events
        if request == "look" and backend.requests.count("watch") and next(looks) > 20:
            backend.end(crashing)

    looks = iter(range(10**6))
    backend.before = end
    code, out, err = exit_of(capsys, "wait", crashing.name)
    assert (code, "Complete" in out) == (0, True)
    assert "node-1 exited with code 3; the job keeps running if" in err
    assert "last lines of node-1:\n  | loading\n  | ValueError: no" in err


def test_json_output_has_a_crash_event(
    capsys: pytest.CaptureFixture[str], backend: MemoryBackend, crashing: JobRef
) -> None:
    looks = iter(range(10**6))
    backend.before = lambda request: backend.end(crashing) if request == "look" and next(looks) > 20 else None
    _, out, _ = exit_of(capsys, "wait", crashing.name, "--json", "--no-logs")
    (crash,) = [each for each in map(json.loads, out.splitlines()) if each["event"] == "crash"]
    assert (crash["rank"], crash["exit_code"], crash["log"]) == ("node-1", 3, ["loading", "ValueError: no"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["wait", "x", "y", "--on-crash-action", "cancel"], "give the NAME of one"),
        (["run", "--runtime", "r", "--on-crash-action", "keep", "--", "x"], "give one of them"),
        (["wait", "x", "y", "--fail-on-first-crash"], "give the NAME of one"),
        (["wait", "x", "y", "--no-logs"], "give the NAME of one"),
        (["wait", "x", "--fail-on-first-crash", "--on-crash-action", "delete"], "delete"),
    ],
)
def test_invalid_crash_options_are_rejected(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = exit_of(capsys, *words)
    assert (code, message in err) == (2, True), err


# ---------------------------------------------------------------- diagnose


def broken_image(backend: MemoryBackend, job: JobRef) -> Evidence:
    backend.status(job, jobsStatus=[{"name": "node", "active": 1}])
    waiting = {"waiting": {"reason": "InvalidImageName", "message": "couldn't parse image"}}
    status = {"phase": "Pending", "containerStatuses": [{"name": "node", "state": waiting}]}
    return Evidence(backend.job(job), [{**CRASHED, "status": status}])


def failed(backend: MemoryBackend, job: JobRef) -> Evidence:
    backend.condition(job, "Failed", "FailedJobs")
    return Evidence(backend.job(job), EVIDENCE.pods, EVIDENCE.logs)


def fine(backend: MemoryBackend, job: JobRef) -> Evidence:
    return Evidence(backend.job(job))


def complete(backend: MemoryBackend, job: JobRef) -> Evidence:
    backend.end(job)
    return Evidence(backend.job(job))


def gone(backend: MemoryBackend, job: JobRef) -> Evidence:
    backend.jobs.clear()
    subject = {"kind": "JobSet", "name": job.name}
    return Evidence(None, events=[{"type": "Warning", "reason": "Odd", "message": "was", "involvedObject": subject}])


def unknown(backend: MemoryBackend, job: JobRef) -> Evidence:
    backend.jobs.clear()
    return Evidence(None)


@pytest.mark.parametrize(
    "case",
    [
        (failed, 1, "node-1 exited with code 3"),
        (broken_image, 2, "InvalidImageName"),
        (fine, 0, "is Running: nothing blocks the job"),
        (complete, 0, "Complete"),
        (gone, 5, "Odd"),
        (unknown, 5, ""),
    ],
    ids=lambda case: case[0].__name__,
)
def test_diagnose_exit_code_depends_on_the_job(
    capsys: pytest.CaptureFixture[str],
    backend: MemoryBackend,
    job: JobRef,
    tmp_path: Path,
    case: tuple[Callable[[MemoryBackend, JobRef], Evidence], int, str],
) -> None:
    make, exit_code, text = case
    found = make(backend, job)

    async def evidence(_: JobRef) -> Evidence:
        return found

    backend.evidence = evidence  # type: ignore[assignment,method-assign]
    code, out, _ = exit_of(capsys, "diagnose", job.name)
    assert (code, text in out) == (exit_code, True), out
    code, out, _ = exit_of(capsys, "diagnose", job.name, "--json")
    answer: dict[str, Any] = json.loads(out)
    assert code == exit_code
    if make is not unknown:
        status = json.loads(exit_of(capsys, "status", job.name, "--json")[1])
        seconds = [each.pop("seconds") for each in (answer, status)]
        assert status == {name: answer[name] for name in status}, "status and diagnose agree"
        assert seconds[0].keys() == seconds[1].keys()
