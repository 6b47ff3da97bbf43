"""An interrupted training goes on where it was: the same job resumed, and the next attempt at the same work."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import JobRef, TrainJobFailed
from trainjob.errors import Rejected
from trainjob.verdicts import RetryVerdict

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
EPOCHS = 1000  # of some milliseconds each

pytestmark = pytest.mark.timeout(600)


def train(jobs: Jobs, key: str, output: Path, *more: str, **fields: Any) -> JobRef:
    script = str(EXAMPLES / "training" / "digits_jax.py")
    command = [sys.executable, script, f"--dataset={EXAMPLES / 'data'}", f"--output={output}", f"--epochs={EPOCHS}"]
    command += more
    return jobs.launch(key=key, runtime="jax-resilient", command=command, **fields)


@dataclass
class Process:
    """What one process of rank 0 said: epochs done before it began, and the latest one."""

    pid: int
    resumed: int = 0
    epoch: int = 0
    weights: str = ""


def processes(jobs: Jobs, ref: JobRef) -> list[Process]:
    """In the order of their starts."""
    found: list[Process] = []
    for line in jobs.lines(ref):
        if started := re.search(r"starts, process (\d+)", line):
            found.append(Process(int(started[1])))
        elif said := re.match(r"rank 0 resumes after epoch (\d+)", line):
            found[-1].resumed = int(said[1])
        elif said := re.match(r"epoch (\d+)/", line):
            found[-1].epoch = int(said[1])
        elif said := re.search(r"ends with weights (\w+)", line):
            found[-1].weights = said[1]
    return found


def kill(jobs: Jobs, ref: JobRef) -> None:
    os.kill(processes(jobs, ref)[-1].pid, signal.SIGKILL)
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert caught.value.diagnosis.retry is RetryVerdict.INFRASTRUCTURE


def goes_on(earlier: Process, later: Process) -> None:
    """From the last epoch that was said, or one more: it is kept before it is said, or the other way round."""
    assert earlier.epoch - 1 <= later.resumed <= earlier.epoch + 1
    assert later.resumed > 0


def test_an_interrupted_training_ends_where_an_undisturbed_one_does(jobs: Jobs, tmp_path: Path) -> None:
    backend = jobs.client.backend
    undisturbed = train(jobs, "undisturbed", tmp_path / "undisturbed")
    place = (tmp_path / "checkpoints").as_uri()
    first = train(jobs, "work", tmp_path / "model", checkpoints=place)

    eventually(lambda: jobs.lines(first) and processes(jobs, first)[0].epoch >= 10)
    jobs.client.call(lambda: backend.patch(first, {"spec": {"suspend": True}}))
    eventually(lambda: jobs.client.call(lambda: backend.stopped(first)))
    jobs.client.call(lambda: backend.patch(first, {"spec": {"suspend": False}}))
    eventually(lambda: len(found := processes(jobs, first)) == 2 and found[1].epoch >= found[1].resumed + 10)
    goes_on(*processes(jobs, first))

    kill(jobs, first)
    second = train(jobs, "work", tmp_path / "model", checkpoints=place)
    assert second.attempt == 2
    result = jobs.client.wait(second)
    (last,) = processes(jobs, second)
    goes_on(processes(jobs, first)[-1], last)
    assert result.metrics["resumed_after_epoch"] == last.resumed
    jobs.client.wait(undisturbed)
    assert last.weights == processes(jobs, undisturbed)[0].weights != ""
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == [], "it is done"


def test_a_checkpoint_of_other_arguments_is_left_alone(jobs: Jobs, tmp_path: Path) -> None:
    place = (tmp_path / "checkpoints").as_uri()
    first = train(jobs, "work", tmp_path / "model", checkpoints=place)
    # The second: a checkpoint is kept after its epoch is said.
    eventually(lambda: jobs.lines(first) and processes(jobs, first)[0].epoch >= 2)
    kill(jobs, first)
    second = train(jobs, "work", tmp_path / "model", "--seed=3", "--epochs=3", checkpoints=place)
    assert second.attempt == 2
    jobs.client.wait(second)
    assert any("of a training with other arguments or data" in line for line in jobs.lines(second))
    assert processes(jobs, second)[0].resumed == 0


def test_a_claim_is_nothing_for_this_machine(jobs: Jobs) -> None:
    with pytest.raises(Rejected, match=r"checkpoints are in a PersistentVolumeClaim.*give file:///path"):
        jobs.launch("true", checkpoints="pvc://claim/path")
    with pytest.raises(Rejected, match=r"its locations are in a PersistentVolumeClaim.*give file:///path"):
        jobs.launch("true", inputs={"dataset": "pvc://claim/path"})


def test_a_rank_ends_when_it_is_told_to(jobs: Jobs, tmp_path: Path) -> None:
    """Among several ranks, too, of which JAX would only take note: they would train on until they are killed."""
    ref = train(jobs, "work", tmp_path / "model", num_nodes=2)
    eventually(lambda: any(line.startswith("epoch 1/") for line in jobs.lines(ref)))
    os.kill(processes(jobs, ref)[-1].pid, signal.SIGTERM)
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert 143 in [rank.exit_code for rank in jobs.client.diagnose(ref.name).ranks], caught.value.diagnosis
