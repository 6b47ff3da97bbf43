"""Hyperparameter searches in DAGs: real trials on the local backend, a real journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from tests.airflow.conftest import Run, python

from trainjob_airflow.operators.tuning import TrainJobTuningOperator

TRAIN = """
import os
from trainjob import progress
x = float(os.environ["KUBEFLOW_TRAINER_OPT_X"])
for step in (1, 2):
    progress.report(step=step, total_steps=2, metrics={"loss": (x - 2) ** 2 + 1 / step})
"""
STUDY: dict[str, Any] = {
    "space": {"x": {"type": "float", "low": 0, "high": 4, "step": 1}},
    "metric": "loss",
    "direction": "minimize",
    "sampler": {"name": "grid"},
    "max_trials": 5,
    "parallel": 5,
}


def search(code: str = TRAIN, **fields: Any) -> TrainJobTuningOperator:
    given = {"study": STUDY, "runtime": "trainjob-step", "command": python(code), "outputs": {"model": "file:///m"}}
    return TrainJobTuningOperator(task_id="search", **{**given, **fields})


def dag_of(name: str, code: str = TRAIN, **fields: Any) -> DAG:
    with DAG(name) as dag:
        search(code, **fields)
    return dag


@pytest.mark.timeout(300)
@pytest.mark.parametrize("deferrable", [False, True])
def test_the_best_trial_is_found(run: Run, home: Path, deferrable: bool) -> None:
    done = run(dag_of(f"tuned_{deferrable}", deferrable=deferrable))
    assert done.state == "success", done.log[-6000:]
    print(json.dumps(done.xcoms, indent=1), done.log[-5000:])
    assert 0
