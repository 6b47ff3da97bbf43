"""`cancel` on a backend that deletes the job, such as a cluster: prints the last state, which would be lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
from typing import Any

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.program import Program

from trainjob import JobRef, TrainJobSpec
from trainjob._jobs import launching as flow
from trainjob.errors import BackendUnavailable
from trainjob.verdicts import Evidence


def log_of(*lines: str) -> bytes:
    return "".join(f"2026-01-01T00:00:00Z {line}\n" for line in lines).encode()


@pytest.fixture
def job(backend: DirectBackend) -> JobRef:
    """A running job that has reported a metric."""
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
    ref = asyncio.run(flow.launch(backend, spec, "key", namespace="default"))
    backend.running(ref)
    backend.status(ref, trainerStatus={"progressPercentage": 40, "metrics": [{"name": "loss", "value": "0.5"}]})
    backend.store.logs = log_of(*(f"line {number}" for number in range(1, 31)))
    return ref


def test_cancel_prints_the_last_lines_of_rank_0(backend: DirectBackend, job: JobRef, program: Program) -> None:
    backend.pod(job, 1)
    backend.pod(job, 0)
    code, out, _ = program("cancel", job.name)
    assert code == 0
    first, *lines = out.splitlines()
    assert first == f"cancelled {job}"
    assert lines[:4] == ["  phase     Running", "  progress  40%", "  metrics   loss 0.5", "last lines of node-0:"]
    assert lines[4:] == [f"  | line {number}" for number in range(11, 31)]
    assert backend.jobs == {}


def test_cancel_prints_the_last_lines_of_failed_ranks(backend: DirectBackend, job: JobRef, program: Program) -> None:
    for rank, exited in enumerate((None, 3, 1)):
        backend.pod(job, rank, exited)
    answer = json.loads(program("cancel", job.name, "--json")[1])
    assert answer["message"] == f"cancelled {job}"
    last = answer["last"]
    assert (last["phase"], last["progress"], last["metrics"]) == ("Running", 40, {"loss": 0.5})
    assert last["logs"].keys() == {"node-1", "node-2"}


@pytest.mark.parametrize("fails", [False, True])
def test_cancel_does_not_wait_for_missing_evidence(
    backend: DirectBackend,
    job: JobRef,
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
    code, out, _ = program("cancel", job.name, "--json")
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


def test_suspend_prints_no_last_lines(backend: DirectBackend, job: JobRef, program: Program) -> None:
    assert program("cancel", "--suspend", job.name)[1] == f"suspended {job}\n"
