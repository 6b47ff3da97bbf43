"""Trainings that end once a file exists, one DAG for each way to wait and each fate."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from trainjob_airflow.operators.trainjob import TrainJobOperator

CODE = """
import os, time
from trainjob.progress import report
print("up", flush=True)
flag = os.environ["FLAG"]
while not os.path.exists(flag):
    time.sleep(0.1)
report(metrics={"done": 1})
"""


def train(dag_id: str, mode: str, **more: Any) -> None:
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
    with DAG(dag_id, params={"flag": "/nowhere", "namespace": "nowhere"}) as made:
        TrainJobOperator(**arguments)
    globals()[dag_id] = made


for mode in ("worker", "deferred"):
    for action in ("cancel", "suspend", "keep"):
        train(f"{mode}_{action}", mode, on_kill_action=action)
