"""`TrainJobRetryPolicy`, alone and in real task runs."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.airflow.conftest import Run, python
from tests.airflow.versions import AIRFLOW, older_than

if older_than("3.3"):
    pytest.skip(f"Airflow 3.3 introduced retry policies; this is {AIRFLOW}", allow_module_level=True)

from airflow.sdk import DAG, RetryAction
from airflow.sdk.exceptions import AirflowException

from trainjob.errors import BackendUnavailable, QueueTimeout, RetryVerdict
from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, airflow_error
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.retries import TrainJobRetryPolicy

POLICY = TrainJobRetryPolicy(quota=timedelta(hours=1))


@pytest.mark.parametrize(
    ("error", "action", "delay"),
    [
        (TrainJobFailure("lost", RetryVerdict.PREEMPTED), RetryAction.RETRY, timedelta(seconds=30)),
        (airflow_error(BackendUnavailable("away")), RetryAction.RETRY, timedelta(minutes=2)),
        (TrainJobFailure("full", RetryVerdict.QUOTA), RetryAction.RETRY, timedelta(hours=1)),
        (airflow_error(QueueTimeout("late")), RetryAction.DEFAULT, None),
        (TrainJobFatal("wrong"), RetryAction.DEFAULT, None),
        (AirflowException("another's"), RetryAction.DEFAULT, None),
        (TrainJobFailure(""), RetryAction.DEFAULT, None),
    ],
)
def test_delays(error: BaseException, action: RetryAction, delay: timedelta | None) -> None:
    decision = POLICY.evaluate(error, 1, 3)
    assert (decision.action, decision.retry_delay) == (action, delay)


def test_the_reason_is_one_line() -> None:
    decision = POLICY.evaluate(TrainJobFailure("first\nsecond" + "x" * 1000, RetryVerdict.PREEMPTED), 1, 3)
    assert decision.reason == "preempted: first"


def test_airflow_applies_the_policy(run: Run) -> None:
    suicide = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    none = timedelta(0)
    with DAG("by-policy") as dag:
        TrainJobOperator(
            task_id="train",
            runtime="trainjob-step",
            command=python(suicide),
            retries=1,
            retry_delay=timedelta(hours=1),
            retry_policy=TrainJobRetryPolicy(infrastructure=none),
        )
    ran = run(dag)
    assert ran.states == {"train": "failed"}
    assert "infrastructure: TrainJob default/train-" in ran.log
