"""Search for hyperparameters: one TrainJob for each combination; the best model is exported.

::

    trials ── train[0..n] ── best ── export_model

The number of trials is known only when the run starts; ``max_active_tis_per_dagrun`` limits how many train at once. A
failed trial does not affect the others. To try it on this machine::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    airflow dags test tune_digits --conf '{"learning_rates": [0.05, 0.2]}'
"""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Any

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
    "tune_digits",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={
        "learning_rates": Param([0.03, 0.1, 0.3], type="array", items={"type": "number"}),
        "batch_sizes": Param([64, 128], type="array", items={"type": "integer"}),
        "epochs": Param(10, type="integer", minimum=1),
    },
):

    @task
    def trials(**context: Any) -> list[dict[str, str]]:
        """Return the environment variables of each trial."""
        grid = product(context["params"]["learning_rates"], context["params"]["batch_sizes"])
        return [{"LEARNING_RATE": str(rate), "BATCH_SIZE": str(size)} for rate, size in grid]

    train = TrainJobOperator.partial(
        task_id="train",
        map_index_template="learning rate {{ task.env.LEARNING_RATE }}, batch size {{ task.env.BATCH_SIZE }}",
        max_active_tis_per_dagrun=4,
        runtime=RUNTIME,
        command=["trainjob", "exec", "--", "python", f"{EXAMPLES}/training/digits_jax.py"],
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            "--learning-rate=$(LEARNING_RATE)",
            "--batch-size=$(BATCH_SIZE)",
            "--epochs={{ params.epochs }}",
        ],
        inputs={"dataset": (EXAMPLES / "data" / "digits.csv.gz").as_uri()},
        outputs={"model": f"{WORKSPACE}/{{{{ run_id }}}}/{{{{ ti.map_index }}}}"},
        deferrable=True,
    ).expand(env=trials())

    @task(trigger_rule="all_done")
    def best(results: Any) -> Any:
        """Return the result of the trial with the highest accuracy."""
        return max(results, key=lambda result: float(result["metrics"]["accuracy"]))

    winner = best(train.output)

    ModelExportOperator(
        task_id="export_model",
        source="{{ ti.xcom_pull(task_ids='best')['outputs']['model'] }}",
        target=MODELS,
        name="digits",
        metrics=winner,
        alias="champion",
        metric="accuracy",
    )
