"""Train on GPUs from a queue: all nodes of the job start together, or none does.

Kueue keeps the job suspended until its queue has room for every node, so no node runs while it waits for the others. A
job that is preempted by a job of higher priority returns to the queue by itself. The task waits in the triggerer, logs
what it waits for, and has a timeout for each kind of waiting.

The cluster needs Kueue, and the namespace a LocalQueue. Needs Airflow 3.3 for the retry policy.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG, Param

from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.retries import TrainJobRetryPolicy

with DAG(
    "train_gang",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={
        "queue": Param("research", type="string", description="LocalQueue in the namespace of the jobs."),
        "image": Param("registry.example/digits-torch:1", type="string"),
    },
):
    TrainJobOperator(
        task_id="train",
        runtime="torch-distributed",
        image="{{ params.image }}",
        command=["torchrun", "train.py"],
        labels={"kueue.x-k8s.io/queue-name": "{{ params.queue }}"},
        num_nodes=4,
        resources_per_node={"cpu": 8, "memory": "64Gi", "gpu": 2},
        deferrable=True,
        queue_timeout=timedelta(hours=12),  # until admission
        start_timeout=timedelta(minutes=20),  # from admission to the first running rank: nodes start, images are pulled
        execution_timeout=timedelta(days=2),  # for the task as a whole
        fail_fast=True,  # at once on a permanent blocker: a missing queue, more GPUs than the queue has
        retries=5,
        retry_policy=TrainJobRetryPolicy(),
    )
