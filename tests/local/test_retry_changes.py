"""A training that really runs out of memory, and the next attempt with more."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.local.conftest import Jobs

from trainjob import Phase, QueueTimeout, RetryVerdict, WaitOptions
from trainjob.status import QUEUE_LABEL, observe

# This backend limits no memory, so the rank limits itself, to the memory of the spec.
TRAINING = """
import os, resource
megabytes = int(os.environ["MEMORY"].removesuffix("Mi"))
resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, megabytes * 2**20))
batch = bytearray(400 * 2**20)
print("trained with", os.environ["MEMORY"])
"""


def test_a_training_without_enough_memory_succeeds_at_the_next_attempt(jobs: Jobs) -> None:
    limit = {"valueFrom": {"resourceFieldRef": {"resource": "limits.memory"}}}
    fields: dict[str, Any] = {
        "command": ["python", "-c", TRAINING],
        "env": {"MEMORY": limit},
        "resources_per_node": {"memory": "300Mi"},
        "on_retry": {"out_of_memory": {"memory_factor": 3, "max_memory": "2000Mi"}},
    }
    diagnosis = jobs.fails(**fields)
    assert (diagnosis.category, diagnosis.retry) == ("out of memory", RetryVerdict.INFRASTRUCTURE)
    assert "the next attempt changes memory 300Mi -> 900Mi" in diagnosis.text()
    second = jobs.launch(**fields)
    notices: list[str] = []
    result = jobs.client.wait(second, on_change=lambda _, notice: notices.append(notice))
    assert (result.attempt, jobs.lines(second)) == (2, ["trained with 900Mi"])
    (notice,) = filter(None, notices)
    assert "memory 300Mi -> 900Mi; because of out of memory: node-0 exited with code 1: MemoryError" in notice


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_without_capacity_goes_to_another_queue(jobs: Jobs, cancelled: bool) -> None:
    fields: dict[str, Any] = {
        "suspend": True,
        "labels": {QUEUE_LABEL: "main"},
        "on_retry": {"quota": {"queue": "backfill"}},
    }
    first = jobs.launch("true", **fields)
    with pytest.raises(QueueTimeout):
        jobs.client.wait(first, WaitOptions(queue_timeout=timedelta(seconds=0.1)))
    if cancelled:
        jobs.client.cancel(first)
    second = jobs.launch("true", **fields)
    job = jobs.client.get(second)
    assert job is not None
    assert (second.attempt, job["metadata"]["labels"][QUEUE_LABEL]) == (2, "backfill")
    assert observe(jobs.client.get(first)).phase is Phase.CANCELLED
    assert jobs.launch("true", **fields) == second
