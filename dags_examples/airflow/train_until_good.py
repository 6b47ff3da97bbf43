"""Train further until the gate passes, at most five times; then export the model.

::

    improve: train ── evaluate ── good_enough ──┐ not yet: again
             ▲──────────────────────────────────┤
                                                └── export_model

Each iteration is a new TrainJob that continues the model of the one before. If no iteration passes the gate, the loop
fails, and no model is exported. Needs Airflow 3.4, whose task groups have loops; older versions report an import error
for this file. To try it on this machine::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    airflow dags test train_until_good
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Param, task_group

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.evaluation import ModelEvaluationOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

# As in retrain_digits.py; on a cluster, set the variables to locations that its nodes can reach.
EXAMPLES = Path(os.environ.get("TRAINJOB_EXAMPLES", Path(__file__).resolve().parents[1]))
HOME = Path(os.environ.get("TRAINJOB_HOME", Path.home() / ".trainjob")).absolute()
WORKSPACE = os.environ.get("TRAINJOB_WORKSPACE", (HOME / "workspace").as_uri())
MODELS = os.environ.get("TRAINJOB_MODELS", (HOME / "models").as_uri())
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "jax-distributed")
DATASET = (EXAMPLES / "data" / "digits.csv.gz").as_uri()

with DAG(
    "train_until_good",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={"epochs": Param(2, type="integer", minimum=1, description="Epochs of each iteration.")},
):
    directory = f"{WORKSPACE}/{{{{ run_id }}}}"

    @task_group
    def improve() -> None:
        """One iteration."""
        train = TrainJobOperator(
            task_id="train",
            runtime=RUNTIME,
            command=["trainjob", "exec", "--", "python", f"{EXAMPLES}/training/digits_jax.py"],
            args=[
                "--dataset=$(TRAINJOB_INPUT_DATASET)",
                "--model=$(TRAINJOB_INPUT_MODEL)",
                "--output=$(TRAINJOB_OUTPUT_MODEL)",
                "--epochs={{ params.epochs }}",
            ],
            inputs={
                "dataset": DATASET,
                "model": f"{{% if loop.index %}}{directory}/{{{{ loop.index - 1 }}}}/model{{% endif %}}",
            },
            outputs={"model": f"{directory}/{{{{ loop.index }}}}/model"},
        )
        evaluate = ModelEvaluationOperator(
            task_id="evaluate",
            candidate=f"{directory}/{{{{ loop.index }}}}/model",
            dataset=DATASET,
            target=f"{directory}/{{{{ loop.index }}}}/evaluation",
            command=["python", f"{EXAMPLES}/training/evaluate_digits.py", "{model}", "{dataset}", "{scores}"],
            gate={"metrics": {"accuracy": {"min": 0.95}}},
            runtime=RUNTIME,
        )
        train >> evaluate

    def good_enough(*, loop: Any) -> bool:
        """Whether the gate of this iteration has passed."""
        return loop.result["outputs"]["passed"] is True

    if not hasattr(improve, "loop"):
        raise ImportError(
            "the example train_until_good needs Airflow 3.4 or later: task groups of this one have no loops"
        )
    improved = improve.loop(max_iterations=5, until=good_enough)

    last = f"{directory}/{{{{ ti.xcom_pull(task_ids='improve.evaluate') | length - 1 }}}}"
    export = ModelExportOperator(
        task_id="export_model",
        source=f"{last}/model",
        evaluation=f"{last}/evaluation",
        target=MODELS,
        name="digits",
        alias="champion",
    )
    improved >> export
