"""Search for hyperparameters by one task, each trial of which is a TrainJob; the best model is exported.

::

    search (trials 0..n) ── export_model

The task is deferred, so the search needs no worker. If the triggerer dies, the next one continues the same search.
Clear the task with a larger number of trials to search further. It needs Optuna (``pip install 'trainjob[tune]'``). To
try it on this machine::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    airflow dags test tune_digits --conf '{"trials": 4}'
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import DAG, Param, XComArg

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.tuning import TrainJobTuningOperator

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
        "trials": Param(12, type="integer", minimum=1),
        "parallel": Param(4, type="integer", minimum=1, description="Trials that train at the same time."),
        "epochs": Param(10, type="integer", minimum=1),
    },
):
    search = TrainJobTuningOperator(
        task_id="search",
        study={
            "space": {
                "learning_rate": {"type": "float", "low": 0.01, "high": 0.5, "log": True},
                "batch_size": {"type": "categorical", "choices": [32, 64, 128]},
            },
            "metric": "accuracy",
            "direction": "maximize",
            "pruner": {"name": "successive_halving"},
            "max_trials": "{{ params.trials }}",
            "parallel": "{{ params.parallel }}",
        },
        workspace=WORKSPACE,
        runtime=RUNTIME,
        command=["trainjob", "exec", "--", "python", f"{EXAMPLES}/training/digits_jax.py"],
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            "--learning-rate=$(KUBEFLOW_TRAINER_OPT_LEARNING_RATE)",
            "--batch-size=$(KUBEFLOW_TRAINER_OPT_BATCH_SIZE)",
            "--epochs={{ params.epochs }}",
        ],
        inputs={"dataset": (EXAMPLES / "data" / "digits.csv.gz").as_uri()},
        outputs={"model": f"{WORKSPACE}/{{{{ run_id }}}}"},  # each trial has its own directory there
        deferrable=True,
    )

    ModelExportOperator(
        task_id="export_model",
        source="{{ ti.xcom_pull(task_ids='search', key='best')['outputs']['model'] }}",
        target=MODELS,
        name="digits",
        metrics=XComArg(search, key="best"),
        alias="champion",
        metric="accuracy",
    )
