"""An interrupted training resumes from its checkpoint: when its job is resumed, and in the next attempt."""

from __future__ import annotations

import os
import re
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import JobRef, TrainJobFailed
from trainjob._jobs.records import mark_delivered
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
    """The log of one process of rank 0: the epoch after which it resumed, and its latest epoch."""

    pid: int
    resumed: int = 0
    epoch: int = 0
    weights: str = ""


def processes(jobs: Jobs, ref: JobRef) -> list[Process]:
    """The processes of rank 0, in the order of their starts."""
    found: list[Process] = []
    for line in jobs.lines(ref):
        if started := re.search(r"starts, process (\d+)", line):
            found.append(Process(int(started[1])))
        elif match := re.match(r"rank 0 resumes after epoch (\d+)", line):
            found[-1].resumed = int(match[1])
        elif match := re.match(r"epoch (\d+)/", line):
            found[-1].epoch = int(match[1])
        elif match := re.search(r"ends with weights (\w+)", line):
            found[-1].weights = match[1]
    return found


def kill(jobs: Jobs, ref: JobRef) -> None:
    os.kill(processes(jobs, ref)[-1].pid, signal.SIGKILL)
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert caught.value.diagnosis.retry is RetryVerdict.INFRASTRUCTURE


def check_resumed(earlier: Process, later: Process) -> None:
    """Check that it resumed within one epoch of the last logged one: checkpoint and log line have no fixed order."""
    assert earlier.epoch - 1 <= later.resumed <= earlier.epoch + 1
    assert later.resumed > 0


@pytest.mark.full
def test_an_interrupted_training_ends_with_the_weights_of_an_undisturbed_one(jobs: Jobs, tmp_path: Path) -> None:
    backend = jobs.client.backend
    undisturbed = train(jobs, "undisturbed", tmp_path / "undisturbed")
    place = (tmp_path / "checkpoints").as_uri()
    first = train(jobs, "work", tmp_path / "model", checkpoints=place)

    eventually(lambda: jobs.lines(first) and processes(jobs, first)[0].epoch >= 10)
    jobs.client.call(lambda: backend.patch(first, {"spec": {"suspend": True}}))
    eventually(lambda: jobs.client.call(lambda: backend.stopped(first)))
    jobs.client.call(lambda: backend.patch(first, {"spec": {"suspend": False}}))
    eventually(lambda: len(found := processes(jobs, first)) == 2 and found[1].epoch >= found[1].resumed + 10)
    check_resumed(*processes(jobs, first))

    kill(jobs, first)
    second = train(jobs, "work", tmp_path / "model", checkpoints=place)
    assert second.attempt == 2
    result = jobs.client.wait(second)
    (last,) = processes(jobs, second)
    check_resumed(processes(jobs, first)[-1], last)
    assert result.metrics["resumed_after_epoch"] == last.resumed
    jobs.client.wait(undisturbed)
    assert last.weights == processes(jobs, undisturbed)[0].weights != ""
    assert [path for path in (tmp_path / "checkpoints").rglob("*") if path.is_file()] == [], (
        "the checkpoint is deleted after the end"
    )


def test_a_checkpoint_of_other_arguments_is_not_used(jobs: Jobs, tmp_path: Path) -> None:
    place = (tmp_path / "checkpoints").as_uri()
    first = train(jobs, "work", tmp_path / "model", checkpoints=place)
    # Two epochs: a checkpoint can be written after the log line of its epoch.
    eventually(lambda: jobs.lines(first) and processes(jobs, first)[0].epoch >= 2)
    kill(jobs, first)
    others = ("--seed=3", "--epochs=3")
    second = train(jobs, "work", tmp_path / "model", *others, checkpoints=place)
    assert second.attempt == 2
    jobs.client.wait(second)
    assert processes(jobs, second)[0].resumed == 0
    assert not any("from a training with other arguments or data" in line for line in jobs.lines(second)), (
        "its directory is another one"
    )
    (kept,) = (tmp_path / "checkpoints").rglob("checkpoint.safetensors")
    chosen = {"TRAINJOB_CHECKPOINT": str(kept.parent)}
    third = train(jobs, "other work", tmp_path / "model", *others, checkpoints=place, env=chosen)
    jobs.client.wait(third)
    assert any("from a training with other arguments or data" in line for line in jobs.lines(third))
    assert processes(jobs, third)[0].resumed == 0


WRITES = """
mkdir -p "$TRAINJOB_CHECKPOINT" && cd "$TRAINJOB_CHECKPOINT"
echo "$ITEM begins with $(cat weights 2>/dev/null || echo nothing)"
echo "weights of $ITEM" > weights
[ "$ITEM" != a ]
"""


def test_an_attempt_for_another_item_begins_anew(jobs: Jobs, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"checkpoints": (tmp_path / "checkpoints").as_uri(), "key": "nightly/0/train"}
    diagnosis = jobs.fails(WRITES, env={"ITEM": "a"}, **fields)
    assert diagnosis.failed
    jobs.fails(WRITES, env={"ITEM": "a", "OMP_NUM_THREADS": "1"}, num_nodes=1, **fields)
    jobs.run(WRITES, env={"ITEM": "z"}, **fields)
    attempts = sorted(map(JobRef.of, jobs.client.list()), key=lambda ref: ref.attempt)
    assert [jobs.lines(ref) for ref in attempts] == [
        ["a begins with nothing"],
        ["a begins with weights of a"],
        ["z begins with nothing"],
    ]


def test_a_training_that_completed_trains_again(jobs: Jobs, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"checkpoints": (tmp_path / "checkpoints").as_uri(), "env": {"ITEM": "b"}}
    for attempt in (1, 2, 3):
        ref = jobs.launch(WRITES, **fields)
        assert ref.attempt == attempt
        jobs.client.wait(ref)
        assert jobs.lines(ref) == ["b begins with nothing"]
        jobs.client.call(partial(mark_delivered, jobs.client.backend, ref))


def test_pvc_locations_are_refused_on_this_machine(jobs: Jobs) -> None:
    with pytest.raises(Rejected, match=r"checkpoints are in a PersistentVolumeClaim.*use file:///path"):
        jobs.launch("true", checkpoints="pvc://claim/path")
    with pytest.raises(Rejected, match=r"its locations are in a PersistentVolumeClaim.*use file:///path"):
        jobs.launch("true", inputs={"dataset": "pvc://claim/path"})


def test_a_rank_ends_on_sigterm(jobs: Jobs, tmp_path: Path) -> None:
    """Also with several ranks: JAX only records the signal, and the ranks would keep training until they are killed."""
    ref = train(jobs, "work", tmp_path / "model", num_nodes=2)
    eventually(lambda: any(line.startswith("epoch 1/") for line in jobs.lines(ref)))
    os.kill(processes(jobs, ref)[-1].pid, signal.SIGTERM)
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert 143 in [rank.exit_code for rank in jobs.client.diagnose(ref.name).ranks], caught.value.diagnosis
