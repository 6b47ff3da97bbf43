"""Train a challenger, which becomes the champion only if a person approves it.

::

    train ── compare ── approve ── export_model

``approve`` waits without a worker until a person responds in Airflow's UI (*Required actions*) or by its API. No
response within three days counts as a rejection. After a rejection nothing is exported and the champion stays. To try
it on this machine (a response needs Airflow's API server: `airflow standalone`, not `airflow dags test`)::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    airflow standalone

Needs Airflow 3.1.
"""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param, task

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

# As in retrain_digits.py; on a cluster, set the variables to locations that its nodes can reach.
EXAMPLES = Path(os.environ.get("TRAINJOB_EXAMPLES", Path(__file__).resolve().parents[1]))
HOME = Path(os.environ.get("TRAINJOB_HOME", Path.home() / ".trainjob")).absolute()
WORKSPACE = os.environ.get("TRAINJOB_WORKSPACE", (HOME / "workspace").as_uri())
MODELS = os.environ.get("TRAINJOB_MODELS", (HOME / "models").as_uri())
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "jax-distributed")

with DAG(
    "champion_challenger",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={"epochs": Param(20, type="integer", minimum=1)},
):
    challenger = TrainJobOperator(
        task_id="train",
        runtime=RUNTIME,
        num_nodes=2,
        command=["trainjob", "exec", "--", "python", f"{EXAMPLES}/training/digits_jax.py"],
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            "--epochs={{ params.epochs }}",
        ],
        inputs={"dataset": (EXAMPLES / "data" / "digits.csv.gz").as_uri()},
        outputs={"model": f"{WORKSPACE}/{{{{ run_id }}}}"},
        deferrable=True,
    )

    @task
    def compare(challenger: Any) -> str:
        """Compare challenger and champion in a Markdown table, for the person who decides."""
        from trainjob.errors import ModelNotFound
        from trainjob.registry import connect

        accuracies = {"challenger": challenger["metrics"]["accuracy"]}
        with suppress(ModelNotFound):  # there is no champion before the first approval
            champion = connect().resolve("digits", "champion")
            accuracies[f"champion (version {champion.version})"] = champion.metrics["accuracy"]
        rows = [f"| {name} | {accuracy:.3f} |" for name, accuracy in accuracies.items()]
        return "\n".join(["| model | accuracy |", "|---|---|", *rows])

    approve = ApprovalOperator(
        task_id="approve",
        subject="Should the model of {{ run_id }} become the champion?",
        body="{{ ti.xcom_pull(task_ids='compare') }}",
        defaults=ApprovalOperator.REJECT,
        response_timeout=timedelta(days=3),
    )

    export = ModelExportOperator(
        task_id="export_model",
        source=f"{WORKSPACE}/{{{{ run_id }}}}",
        target=MODELS,
        name="digits",
        metrics=challenger.output,
        alias="champion",  # without metric, which would require an improvement: a person has decided
        provenance={"approved_by": "{{ ti.xcom_pull(task_ids='approve')['responded_by_user']['name'] }}"},
    )

    compare(challenger.output) >> approve >> export
