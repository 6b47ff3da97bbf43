"""Retrain a model that classifies handwritten digits, starting from the current champion.

Five tasks, each of which is a TrainJob::

    initialize_dataset ──┐
                         ├── train ── evaluate_model ── export_model
    initialize_model ────┘

The first run finds no model in the registry and trains a new one. Each later run trains the champion further and
evaluates both models on the same held-out images. The export registers each model with the verdict, and replaces the
champion only if the new model passes the gate: a higher accuracy, and no digit that is read much worse. On this
machine, without a cluster::

    export TRAINJOB_BACKEND=local TRAINJOB_REGISTRY=mlflow+sqlite:///$HOME/registry.db
    airflow dags test retrain_digits

On a cluster the same file runs unchanged: create a connection ``trainjob_default`` or unset TRAINJOB_BACKEND, and set
the variables below to locations that the cluster's nodes can reach (docs/how-to/cluster.md).
"""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import DAG, Param

from trainjob_airflow.operators.data import (
    DatasetInitializerOperator,
    ModelExportOperator,
    ModelInitializerOperator,
)
from trainjob_airflow.operators.evaluation import ModelEvaluationOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

# The path on the nodes: on a cluster, the path of this directory in their image.
EXAMPLES = Path(os.environ.get("TRAINJOB_EXAMPLES", Path(__file__).resolve().parents[1]))
HOME = Path(os.environ.get("TRAINJOB_HOME", Path.home() / ".trainjob")).absolute()
WORKSPACE = os.environ.get("TRAINJOB_WORKSPACE", (HOME / "workspace").as_uri())
MODELS = os.environ.get("TRAINJOB_MODELS", (HOME / "models").as_uri())
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "")
GATE = {
    "metrics": {"accuracy": {"min_improvement": 0}},
    "slices": {"digit=*": {"accuracy": {"max_regression": 0.1}}},
}

with DAG(
    "retrain_digits",
    schedule=None,
    catchup=False,
    tags=["trainjob"],
    doc_md=__doc__,
    params={
        "dataset": Param((EXAMPLES / "data").as_uri() + "/", type="string", description="Location of the dataset."),
        "dataset_file": Param("digits.csv.gz", type="string", description="File of the dataset."),
        "dataset_digest": Param(
            "e31b7ccbf8cc2b158de948b1bb7a67bf39a856fb064b3aa8ef489f12a2dc4b63",
            type="string",
            description="Expected SHA-256 of the file; another content is refused.",
        ),
        "workspace": Param(WORKSPACE, type="string", description="Directory that the tasks share."),
        "models": Param(MODELS, type="string", description="Directory of exported models."),
        "registry": Param("", type="string", description="Model registry; TRAINJOB_REGISTRY if empty."),
        "training": Param(str(EXAMPLES / "training"), type="string", description="Directory of the training scripts."),
        "framework": Param("jax", enum=["jax", "torch"]),
        "runtime": Param(RUNTIME, type="string", description="Training runtime; <framework>-distributed if empty."),
        "epochs": Param(20, type="integer", minimum=1),
        "num_nodes": Param(2, type="integer", minimum=1),
    },
) as dag:
    # Each run has its own directories; runs share only the registry.
    workspace = "{{ params.workspace }}/{{ run_id }}"

    dataset = DatasetInitializerOperator(
        task_id="initialize_dataset",
        source="{{ params.dataset }}",
        include=["{{ params.dataset_file }}"],
        digest="{{ params.dataset_digest }}",
        target=f"{workspace}/dataset",
    )

    model = ModelInitializerOperator(
        task_id="initialize_model",
        source="models:/digits@champion",
        if_missing="fresh",  # there is no champion before the first run
        target=f"{workspace}/model",
        registry="{{ params.registry }}",
    )

    train = TrainJobOperator(
        task_id="train",
        runtime="{{ params.runtime or params.framework ~ '-distributed' }}",
        num_nodes="{{ params.num_nodes }}",
        command=[
            *("trainjob", "exec", "--"),  # the scripts use local paths; the workspace may be in remote storage
            "{{ 'torchrun' if params.framework == 'torch' else 'python' }}",
            "{{ params.training }}/digits_{{ params.framework }}.py",
        ],
        # Each node gets these as TRAINJOB_INPUT_<NAME> and TRAINJOB_OUTPUT_<NAME>.
        inputs={
            "dataset": "{{ ti.xcom_pull(task_ids='initialize_dataset')['outputs']['uri'] }}",
            "model": "{{ ti.xcom_pull(task_ids='initialize_model')['outputs'].get('uri', '') }}",
        },
        outputs={"model": f"{workspace}/trained"},
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--model=$(TRAINJOB_INPUT_MODEL)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            "--epochs={{ params.epochs }}",
        ],
    )

    evaluate = ModelEvaluationOperator(
        task_id="evaluate_model",
        candidate=f"{workspace}/trained",
        champion="models:/digits@champion",
        dataset="{{ ti.xcom_pull(task_ids='initialize_dataset')['outputs']['uri'] }}",
        dataset_digest="{{ ti.xcom_pull(task_ids='initialize_dataset')['outputs']['digest'] }}",
        target=f"{workspace}/evaluation",
        command=["python", "{{ params.training }}/evaluate_digits.py", "{model}", "{dataset}", "{scores}"],
        gate=GATE,
        # The script needs NumPy, which the image of the runtime trainjob-step does not have.
        runtime="{{ params.runtime or 'jax-distributed' }}",
        num_nodes=1,
        registry="{{ params.registry }}",
    )

    export = ModelExportOperator(
        task_id="export_model",
        source=f"{workspace}/trained",
        target="{{ params.models }}",
        name="digits",
        registry="{{ params.registry }}",
        metrics=train.output,
        evaluation=evaluate.output,
        alias="champion",
        datasets=[dataset.output],
        base_model=model.output,
    )

    [dataset, model] >> train >> evaluate >> export
