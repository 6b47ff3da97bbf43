"""Trainings that end once a file exists, one DAG for each way to wait and each fate."""

from __future__ import annotations

import os
import signal
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import DAG, get_current_context

from trainjob_airflow.operators.trainjob import TrainJobOperator

MAPPED = 50 if "TRAINJOB_CAMPAIGN" in os.environ else 3

CODE = """
import os, time
from trainjob.progress import report
print("up", flush=True)
flag = os.environ["FLAG"]
while not os.path.exists(flag):
    time.sleep(0.1)
report(metrics={"done": 1})
"""


class Mortal(TrainJobOperator):
    """Its worker dies right before the first try defers, when the job already runs."""

    def defer(self, **how: Any) -> None:  # type: ignore[override]
        if get_current_context()["ti"].try_number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super().defer(**how)


def train(
    dag_id: str, mode: str, expand: dict[str, Any] | None = None, dag: dict[str, Any] | None = None, **more: Any
) -> None:
    arguments: dict[str, Any] = {
        "task_id": "train",
        "runtime": "trainjob-step",
        "command": ["python", "-c", CODE],
        "env": {"FLAG": "{{ params.flag }}"},
        "namespace": "{{ params.namespace }}",
        "deferrable": mode == "deferred",
        "retries": 5,
        "retry_delay": timedelta(0),
        **more,
    }
    operator = arguments.pop("operator", TrainJobOperator)
    with DAG(dag_id, params={"flag": "/nowhere", "namespace": "nowhere"}, **(dag or {})) as made:
        if expand:
            operator.partial(**arguments).expand(**expand)
        else:
            operator(**arguments)
    globals()[dag_id] = made


for mode in ("worker", "deferred"):
    for action in ("cancel", "suspend", "keep"):
        train(f"{mode}_{action}", mode, on_kill_action=action)
    # Two cores run this many tasks at once; deferred tasks do not count.
    train(f"{mode}_mapped", mode, expand={"num_nodes": [1] * MAPPED}, dag={"max_active_tasks": 4})
    days = {"schedule": "@daily", "start_date": datetime(2026, 1, 1, tzinfo=UTC), "catchup": False}
    # The schedule ends before today, so that it starts no run.
    train(f"{mode}_daily", mode, dag=days | {"end_date": datetime(2026, 1, 31, tzinfo=UTC)})
train("deferred_mortal", "deferred", operator=Mortal)
