"""Train on GPUs that a queue hands out: all nodes of the job at once, or none.

Kueue keeps the job suspended until its queue has room for every node; nothing runs and waits for the rest of the gang
meanwhile. A job that a more important one preempts goes back into the queue by itself. The task waits for all that in
the triggerer, says in its log what it waits for, and has a limit for each kind of waiting.

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
        queue_timeout=timedelta(hours=12),  # until it is admitted
        start_timeout=timedelta(minutes=20),  # from then until the first rank runs: nodes come up, images are pulled
        execution_timeout=timedelta(days=2),  # for all of it
        fail_fast=True,  # and none at all with what only a person can change: no such queue, more GPUs than it has
        retries=5,
        retry_policy=TrainJobRetryPolicy(),
    )
