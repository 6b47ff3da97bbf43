"""Commands for jobs that end: crashed ranks, diagnoses, cancels; messages, exit codes, final state of the job."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program, launched

from trainjob import JobRef, Phase
from trainjob._diagnosis.evidence import Evidence
from trainjob._manifest.attempts import given_up
from trainjob.errors import BackendUnavailable
from trainjob.status import observe

pytestmark = pytest.mark.usefixtures("prompt")


class EndingBackend(DirectBackend):
    """Completes a job whose crash was reported."""

    ends = False

    async def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        async with aclosing(super().crashes(ref)) as found:
            async for evidence in found:
                yield evidence
                if self.ends:
                    self.end(ref)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> EndingBackend:
    backend = EndingBackend()
    monkeypatch.setattr("trainjob.cli.session.connect", lambda *_, **__: backend)
    return backend


@pytest.fixture
def job(backend: EndingBackend) -> JobRef:
    """A running job."""
    return launched(backend)


@pytest.fixture
def crashing(backend: EndingBackend, job: JobRef) -> JobRef:
    """A running job whose second rank has crashed once."""
    backend.crash(job, 1, 3, "loading", "ValueError: no")
    return job


@pytest.mark.parametrize(
    ("words", "phase", "text"),
    [
        (["wait", "key"], Phase.RUNNING, "keeps running"),
        (["wait", "key", "--on-crash-action", "cancel"], None, "was deleted"),
        (["run", "--runtime", "torch-distributed", "--key", "key"], Phase.SUSPENDED, "was suspended"),
    ],
    ids=["wait", "wait and cancel", "run"],
)
def test_a_crash_fails_the_command(
    program: Program, backend: EndingBackend, crashing: JobRef, words: list[str], phase: Phase | None, text: str
) -> None:
    code, _, err = program(*words, "--fail-on-first-crash", *(["--", "train"] if words[0] == "run" else []))
    assert code == 1
    for expected in (f"{crashing} {text}", "node-1 exited with code 3", "  | ValueError: no"):
        assert expected in err
    left = [job for (_, name), job in backend.jobs.items() if name == crashing.name]
    assert [observe(job).phase for job in left] == ([phase] if phase else [])
    if phase is Phase.SUSPENDED:
        assert given_up(left[0]) is not None
        assert "ValueError: no" in program("diagnose", "key")[1]


def test_json_output_has_a_crash_event(program: Program, backend: EndingBackend, crashing: JobRef) -> None:
    backend.ends = True
    _, out, _ = program("wait", crashing.name, "--json", "--no-logs")
    (crash,) = [each for each in map(json.loads, out.splitlines()) if each["event"] == "crash"]
    assert (crash["rank"], crash["exit_code"], crash["log"]) == ("node-1", 3, ["loading", "ValueError: no"])


def failed(backend: DirectBackend, job: JobRef) -> None:
    backend.write(job, 1, "loading", "ValueError: no")
    backend.pod(job, 1, 3)
    backend.condition(job, "Failed", "FailedJobs")


def broken_image(backend: DirectBackend, job: JobRef) -> None:
    backend.status(job, jobsStatus=[objects.counts(active=1)])
    backend.pod(job, 1, state=objects.waiting("InvalidImageName", "couldn't parse image"), phase="Pending")


def fine(backend: DirectBackend, job: JobRef) -> None:
    backend.pod(job)


def gone(backend: DirectBackend, job: JobRef) -> None:
    unknown(backend, job)
    backend.event(job, "Odd", "was")


def unknown(backend: DirectBackend, job: JobRef) -> None:
    backend.store.delete("trainjobs", job.name, {}, "Background", job.namespace)


@pytest.mark.parametrize(
    "case",
    [
        (failed, 1, "node-1 exited with code 3"),
        (broken_image, 2, "InvalidImageName"),
        (fine, 0, "is Running: nothing blocks the job"),
        (DirectBackend.end, 0, "Complete"),
        (gone, 5, "Odd"),
        (unknown, 5, ""),
    ],
    ids=lambda case: case[0].__name__,
)
def test_diagnose_exit_code_depends_on_the_job(
    program: Program,
    backend: EndingBackend,
    job: JobRef,
    case: tuple[Callable[[DirectBackend, JobRef], None], int, str],
) -> None:
    make, exit_code, text = case
    make(backend, job)
    code, out, _ = program("diagnose", job.name)
    assert (code, text in out) == (exit_code, True), out
    code, out, _ = program("diagnose", job.name, "--json")
    answer: dict[str, Any] = json.loads(out)
    assert code == exit_code
    if make is not unknown:
        status = json.loads(program("status", job.name, "--json")[1])
        seconds = [each.pop("seconds") for each in (answer, status)]
        assert status == {name: answer[name] for name in status}, "status and diagnose agree"
        assert seconds[0].keys() == seconds[1].keys()


# ---------------------------------------------------------------- cancel


def log_of(*lines: str) -> bytes:
    return "".join(f"2026-01-01T00:00:00Z {line}\n" for line in lines).encode()


@pytest.fixture
def begun(backend: DirectBackend) -> JobRef:
    """A running job that has reported a metric."""
    ref = launched(backend)
    backend.status(ref, trainerStatus={"progressPercentage": 40, "metrics": [{"name": "loss", "value": "0.5"}]})
    backend.store.logs = log_of(*(f"line {number}" for number in range(1, 31)))
    return ref


def test_cancel_prints_the_last_lines_of_rank_0(backend: DirectBackend, begun: JobRef, program: Program) -> None:
    backend.pod(begun, 1)
    backend.pod(begun, 0)
    code, out, _ = program("cancel", begun.name)
    assert code == 0
    first, *lines = out.splitlines()
    assert first == f"cancelled {begun}"
    assert lines[:4] == ["  phase     Running", "  progress  40%", "  metrics   loss 0.5", "last lines of node-0:"]
    assert lines[4:] == [f"  | line {number}" for number in range(11, 31)]
    assert backend.jobs == {}


def test_cancel_prints_the_last_lines_of_failed_ranks(backend: DirectBackend, begun: JobRef, program: Program) -> None:
    for rank, exited in enumerate((None, 3, 1)):
        backend.pod(begun, rank, exited)
    answer = json.loads(program("cancel", begun.name, "--json")[1])
    assert answer["message"] == f"cancelled {begun}"
    last = answer["last"]
    assert (last["phase"], last["progress"], last["metrics"]) == ("Running", 40, {"loss": 0.5})
    assert last["logs"].keys() == {"node-1", "node-2"}


@pytest.mark.parametrize("fails", [False, True])
def test_cancel_does_not_wait_for_missing_evidence(
    backend: DirectBackend,
    begun: JobRef,
    program: Program,
    monkeypatch: pytest.MonkeyPatch,
    fails: bool,
) -> None:
    left: list[tuple[str, str]] = []

    async def evidence(_: JobRef) -> Evidence:
        if fails:
            raise BackendUnavailable("no answer")
        try:
            await anyio.sleep_forever()
        finally:
            left.extend(backend.jobs)
        raise AssertionError

    monkeypatch.setattr(backend, "evidence", evidence)
    monkeypatch.setattr("trainjob.cli.stop.LAST_STATE_SECONDS", 0.5)
    code, out, _ = program("cancel", begun.name, "--json")
    assert code == 0
    assert "last" not in json.loads(out)
    assert backend.jobs == {}
    assert left == [], "the job was deleted during the read"


def test_an_interrupt_prints_the_last_lines(
    backend: DirectBackend, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.store.logs = log_of("epoch 7")
    watch, watches = backend.watch, itertools.count()

    def watched(ref: JobRef) -> Any:
        if next(watches) == 0:  # the cancel watches the job, too
            backend.running(ref)
            backend.pod(ref)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return watch(ref)

    monkeypatch.setattr(backend, "watch", watched)
    code, _, err = program("run", "--runtime", "torch-distributed", "--", "train")
    assert code == 130
    assert "  phase     Running\nlast lines of node-0:\n  | epoch 7\n" in err
    assert backend.jobs == {}


def test_suspend_prints_no_last_lines(backend: DirectBackend, begun: JobRef, program: Program) -> None:
    assert program("cancel", "--suspend", begun.name)[1] == f"suspended {begun}\n"
