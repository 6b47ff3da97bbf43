"""An interrupted training resumes from its checkpoint: when its job is resumed, and in the next attempt."""

from __future__ import annotations

import os
import re
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import JobRef, TrainJobFailed
from trainjob._jobs.records import mark_delivered
from trainjob.errors import Diagnosis, RetryVerdict

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
EPOCHS = 1000  # of some milliseconds each

pytestmark = pytest.mark.timeout(600)


def train(jobs: Jobs, key: str, output: Path, *more: str, **fields: Any) -> JobRef:
    script = str(EXAMPLES / "training" / "digits_jax.py")
    command = [sys.executable, script, f"--dataset={EXAMPLES / 'data'}", f"--output={output}", f"--epochs={EPOCHS}"]
    return jobs.launch(key=key, runtime="jax-resilient", command=[*command, *more], **fields)


def last(jobs: Jobs, ref: JobRef, pattern: str) -> str:
    """What the latest line of rank 0 with the pattern says; empty without one."""
    return next((found[1] for line in reversed(jobs.lines(ref)) if (found := re.search(pattern, line))), "")


def epoch(jobs: Jobs, ref: JobRef) -> int:
    return int(last(jobs, ref, r"^epoch (\d+)/") or 0)


def resumed(jobs: Jobs, ref: JobRef) -> int:
    return int(last(jobs, ref, r"^rank 0 resumes after epoch (\d+)") or 0)


def end(jobs: Jobs, ref: JobRef, number: signal.Signals) -> Diagnosis:
    """Send a signal to rank 0; return why the job failed."""
    os.kill(int(last(jobs, ref, r"starts, process (\d+)")), number)
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert caught.value.diagnosis.retry is RetryVerdict.INFRASTRUCTURE
    return caught.value.diagnosis


def test_a_checkpoint_of_other_arguments_is_not_used(jobs: Jobs, tmp_path: Path) -> None:
    place = (tmp_path / "checkpoints").as_uri()
    first = train(jobs, "work", tmp_path / "model", checkpoints=place)
    # Two epochs: a checkpoint can be written after the log line of its epoch.
    eventually(lambda: epoch(jobs, first) >= 2)
    end(jobs, first, signal.SIGKILL)
    others = ("--seed=3", "--epochs=3")
    second = train(jobs, "work", tmp_path / "model", *others, checkpoints=place)
    jobs.client.wait(second)
    (kept,) = (tmp_path / "checkpoints").rglob("checkpoint.safetensors")
    chosen = {"TRAINJOB_CHECKPOINT": str(kept.parent)}
    third = train(jobs, "other work", tmp_path / "model", *others, checkpoints=place, env=chosen)
    jobs.client.wait(third)
    assert (second.attempt, resumed(jobs, second), resumed(jobs, third)) == (2, 0, 0)
    refused = [last(jobs, ref, "(from a training with other arguments or data)") for ref in (second, third)]
    assert refused == ["", "from a training with other arguments or data"], "the second has another directory"


def test_a_rank_ends_on_sigterm(jobs: Jobs, tmp_path: Path) -> None:
    """Also with several ranks: JAX only records the signal, and the ranks would keep training until they are killed."""
    ref = train(jobs, "work", tmp_path / "model", num_nodes=2)
    eventually(lambda: epoch(jobs, ref) >= 1)
    diagnosis = end(jobs, ref, signal.SIGTERM)
    assert 143 in [rank.exit_code for rank in jobs.client.diagnose(ref.name).ranks], diagnosis


WRITES = """
mkdir -p "$TRAINJOB_CHECKPOINT" && cd "$TRAINJOB_CHECKPOINT"
echo "$ITEM begins with $(cat weights 2>/dev/null || echo nothing)"
echo "weights of $ITEM" > weights
[ "$ITEM" != a ]
"""


def test_a_training_that_completed_trains_again(jobs: Jobs, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"checkpoints": (tmp_path / "checkpoints").as_uri(), "env": {"ITEM": "b"}}
    for attempt in (1, 2, 3):
        ref = jobs.launch(WRITES, **fields)
        assert ref.attempt == attempt
        jobs.client.wait(ref)
        assert jobs.lines(ref) == ["b begins with nothing"]
        jobs.client.call(partial(mark_delivered, jobs.client.backend, ref))
