"""A job that hangs fails its task, in a worker and deferred; the core's tests are in tests/unit/test_stalls.py."""

from __future__ import annotations

import pytest
from airflow.sdk import DAG
from tests.airflow.conftest import Run
from tests.airflow.test_operator import both, step

from trainjob import JobRef, Phase, TrainJobClient
from trainjob.lifecycle import given_up
from trainjob.status import observe
from trainjob_airflow.exceptions import TrainJobFailure

HANGS = """
import time
from trainjob import progress
progress.step()
def read_forever(): time.sleep(600)
read_forever()
"""


@both
def test_a_job_that_hangs_fails_the_task_with_its_stack(run: Run, deferrable: bool) -> None:
    with DAG("hangs") as dag:
        step(code=HANGS, stall_timeout="1s", deferrable=deferrable)
    ran = run(dag)
    assert ran.states == {"train": "failed"}
    error = ran.errors["train"]
    assert isinstance(error, TrainJobFailure), "another try may succeed"
    for text in ("no rank has made progress for 1s: node-0 makes no step in read_forever()", "category: hang"):
        assert text in str(error)
        assert text in ran.log
    assert "was suspended" in ran.log
    with TrainJobClient() as client:
        (job,) = client.list()
        assert observe(job).phase is Phase.SUSPENDED
        reason = given_up(job)
        assert reason is not None
        assert reason.category == "hang"
        client.cancel(JobRef.of(job))


@pytest.mark.parametrize("timeout", ["soon", 0])
def test_an_invalid_timeout_fails_when_the_dag_is_parsed(timeout: object) -> None:
    with pytest.raises(Exception, match="stall_timeout"):
        step(stall_timeout=timeout)
