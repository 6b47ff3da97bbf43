"""Continue with a TrainJob that was launched elsewhere: by kubectl, the Kubeflow SDK, another team's workflow.

::

    wait ── result ── good_enough ── export_model

The sensor waits in the triggerer, also for a job that does not exist yet, and fails at once if the job fails. This DAG
never cancels the job. To try it on this machine::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    job=$(trainjob run --detach --runtime jax-distributed -- python $PWD/dags_examples/training/digits_jax.py \\
        --dataset=$PWD/dags_examples/data --output=$HOME/digits)
    airflow dags test adopt_training --conf '{"job": "'$job'"}'
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

# As in retrain_digits.py; on a cluster, set the variables to locations that its nodes can reach.
HOME = Path(os.environ.get("TRAINJOB_HOME", Path.home() / ".trainjob")).absolute()
MODELS = os.environ.get("TRAINJOB_MODELS", (HOME / "models").as_uri())

with DAG(
    "adopt_training",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={
        "job": Param(type="string", description="Name of the TrainJob."),
        "accuracy": Param(0.9, type="number", description="Minimum accuracy for the export of the model."),
    },
):
    wait = TrainJobSensor(
        task_id="wait", job="{{ params.job }}", deferrable=True, timeout=timedelta(days=2).total_seconds()
    )

    @task
    def result(job: str) -> dict[str, Any]:
        """Return what the job reported, as a TrainJobOperator does."""
        from trainjob_airflow.hooks.trainjob import TrainJobHook

        with TrainJobHook().client() as client:
            return client.wait(client.find(job)).as_dict()

    @task.short_circuit
    def good_enough(result: Any, **context: Any) -> bool:
        """Skip the export if the accuracy is too low."""
        return float(result["metrics"]["accuracy"]) >= float(context["params"]["accuracy"])

    adopted = result("{{ params.job }}")

    export = ModelExportOperator(
        task_id="export_model",
        source="{{ ti.xcom_pull(task_ids='result')['outputs']['model'] }}",
        target=MODELS,
        name="digits",
        metrics=adopted,
    )

    wait >> adopted
    good_enough(adopted) >> export
