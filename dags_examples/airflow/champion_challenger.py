"""Train a challenger, which becomes the champion only if a person approves it.

::

    train ── evaluate_model ── gate ── approve ── export_model

``evaluate_model`` evaluates challenger and champion on the same held-out images. If the challenger does not pass the
gate, the remaining tasks are skipped, and no person is asked. ``approve`` waits without a worker until a person
responds in Airflow's UI (*Required actions*) or by its API. No response within three days counts as a rejection. After
a rejection nothing is exported and the champion stays. To try
it on this machine (a response needs Airflow's API server: `airflow standalone`, not `airflow dags test`)::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    airflow standalone

Needs Airflow 3.1.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import DAG, Param

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.evaluation import ModelEvaluationOperator, ModelGateOperator
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

    evaluate = ModelEvaluationOperator(
        task_id="evaluate_model",
        candidate=f"{WORKSPACE}/{{{{ run_id }}}}",
        champion="models:/digits@champion",
        dataset=(EXAMPLES / "data" / "digits.csv.gz").as_uri(),
        target=f"{WORKSPACE}/{{{{ run_id }}}}-evaluation",
        command=["python", f"{EXAMPLES}/training/evaluate_digits.py", "{model}", "{dataset}", "{scores}"],
        gate={"metrics": {"accuracy": {"min_improvement": 0}}},
        runtime=RUNTIME,
        num_nodes=1,
        deferrable=True,
    )

    gate = ModelGateOperator(task_id="gate", evaluation=evaluate.output, skip=True)

    approve = ApprovalOperator(
        task_id="approve",
        subject="Should the model of {{ run_id }} become the champion?",
        body=(
            "| model | accuracy |\n|---|---|\n"
            "| challenger | {{ '%.3f' % ti.xcom_pull(task_ids='evaluate_model')['metrics']['accuracy'] }} |\n\n"
            "{{ ti.xcom_pull(task_ids='gate')['rule'] }}: {{ ti.xcom_pull(task_ids='gate')['reason'] }}"
        ),
        defaults=ApprovalOperator.REJECT,
        response_timeout=timedelta(days=3),
    )

    export = ModelExportOperator(
        task_id="export_model",
        source=f"{WORKSPACE}/{{{{ run_id }}}}",
        target=MODELS,
        name="digits",
        metrics=challenger.output,
        evaluation=evaluate.output,
        alias="champion",  # stays if another model has become the champion while the approval was pending
        provenance={"approved_by": "{{ ti.xcom_pull(task_ids='approve')['responded_by_user']['name'] }}"},
    )

    challenger >> evaluate >> gate >> approve >> export
