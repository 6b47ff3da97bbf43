"""DAGs for a complete Airflow on the cluster, each for workers and for the triggerer."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from trainjob_airflow.operators.trainjob import TrainJobOperator

RUNTIME = {"worker": "torch-distributed", "deferred": "until-finished"}


def training(mode: str, **more: Any) -> dict[str, Any]:
    """Arguments of a task."""
    return {
        "task_id": "train",
        "runtime": "until-finished",
        "namespace": "{{ params.namespace }}",
        "num_nodes": 1,
        "deferrable": mode == "deferred",
        "retries": 3,
        "retry_delay": timedelta(0),
        **more,
    }


for mode in ("worker", "deferred"):
    with DAG(f"{mode}_waits", params={"namespace": "nowhere"}) as dag:
        TrainJobOperator(**training(mode))
    globals()[dag.dag_id] = dag

    # Two cores can run four tasks at once; deferred tasks do not count.
    with DAG(f"{mode}_mapped", params={"namespace": "nowhere"}, max_active_tasks=4) as dag:
        mapped = training(mode, runtime=RUNTIME[mode])
        del mapped["num_nodes"]
        TrainJobOperator.partial(**mapped).expand(num_nodes=[1] * int(os.environ["TRAINJOB_TEST_MAPPED"]))
    globals()[dag.dag_id] = dag
