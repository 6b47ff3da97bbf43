"""Retrain a digits model and promote it to champion if it is better: the pipeline ``retrain_digits``.

On this machine, with kfp.local and the local backend (no cluster, no Docker)::

    python dags_examples/kfp/retrain_digits.py --local

For a cluster, as a file to upload to Kubeflow Pipelines::

    python dags_examples/kfp/retrain_digits.py --compile retrain_digits.yaml

It has the same five steps as ``dags_examples/airflow/retrain_digits.py``. The Airflow DAG has a workspace; here every
step writes below the URIs that KFP gives to its artifacts, which with ``--local`` are below ``TRAINJOB_WORKSPACE``.
``--local`` can also launch on a cluster: set ``TRAINJOB_BACKEND=kubernetes`` and a kubeconfig (docs/how-to/cluster.md).
"""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any

from kfp import compiler, dsl, local

from trainjob_kfp import evaluate_model, export_model, initialize_dataset, initialize_model, train

EXAMPLES = Path(__file__).resolve().parents[1]
DATASET_DIGEST = (EXAMPLES / "data" / "SHA256SUMS").read_text().split()[0]
# The path on the nodes: on a cluster, the path of this directory in their image.
ON_NODES = Path(os.environ.get("TRAINJOB_EXAMPLES", EXAMPLES))
DATASET = ON_NODES / "data" / "digits.csv.gz"
# The scripts use local paths; their inputs and outputs may be in remote storage.
EXEC = ["trainjob", "exec", "--"]
FRAMEWORKS: dict[str, dict[str, Any]] = {
    framework: {
        "runtime": os.environ.get("TRAINJOB_RUNTIME") or f"{framework}-distributed",
        "command": [*EXEC, program, str(ON_NODES / "training" / f"digits_{framework}.py")],
    }
    for framework, program in {"jax": "python", "torch": "torchrun"}.items()
}
GATE = {
    "metrics": {"accuracy": {"min_improvement": 0}},
    "slices": {"digit=*": {"accuracy": {"max_regression": 0.1}}},
}


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="retrain-digits", description="Retrain a digits model; it becomes the champion if it is better."
)
def retrain_digits(
    models: str,
    registry: str,
    dataset: str = DATASET.as_uri(),
    dataset_digest: str = DATASET_DIGEST,
    runtime: str = FRAMEWORKS["jax"]["runtime"],
    command: list[str] = FRAMEWORKS["jax"]["command"],
    image: str = "",
    epochs: int = 8,
    evaluation_runtime: str = FRAMEWORKS["jax"]["runtime"],
) -> None:
    data = initialize_dataset(source=dataset, digest=dataset_digest)
    champion = initialize_model(source="models:/digits@champion", if_missing="fresh", registry=registry)

    trained = train(
        runtime=runtime,
        image=image,
        command=command,
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--model=$(TRAINJOB_INPUT_MODEL)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            f"--epochs={epochs}",
        ],
        num_nodes=2,
        inputs={"dataset": data.outputs["uri"], "model": champion.outputs["uri"]},
    )

    evaluated = evaluate_model(
        candidate=trained.outputs["model_uri"],
        champion="models:/digits@champion",
        dataset=data.outputs["uri"],
        dataset_digest=data.outputs["digest"],
        command=["python", str(ON_NODES / "training" / "evaluate_digits.py"), "{model}", "{dataset}", "{scores}"],
        gate=GATE,
        # The script needs NumPy, which the image of the runtime trainjob-step does not have.
        runtime=evaluation_runtime,
        image=image,
        spec={"num_nodes": 1},
        registry=registry,
    )

    # Registers the model with the verdict, and moves the alias only if the gate has passed.
    export_model(
        source=trained.outputs["model_uri"],
        target=models,
        name="digits",
        metrics=trained.outputs["result"],
        evaluation=evaluated.outputs["evaluation"],
        alias="champion",
        registry=registry,
        datasets=[{"uri": dataset, "digest": data.outputs["digest"]}],
        base_model={"uri": "models:/digits@champion", "digest": champion.outputs["digest"]},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Retrain a digits model with Kubeflow Pipelines.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--local", action="store_true", help="run it on this machine")
    how.add_argument("--compile", metavar="FILE", help="compile it for a Kubeflow Pipelines backend")
    parser.add_argument("--framework", choices=FRAMEWORKS, default="jax")
    parser.add_argument("--epochs", type=int, default=8)
    home = Path(os.environ.get("TRAINJOB_HOME", "~/.trainjob")).expanduser().absolute()
    parser.add_argument("--models", default=os.environ.get("TRAINJOB_MODELS", (home / "models").as_uri()))
    parser.add_argument(
        "--registry", default=os.environ.get("TRAINJOB_REGISTRY", f"mlflow+sqlite:///{home / 'registry.db'}")
    )
    given = parser.parse_args()
    parameters = {
        "models": given.models,
        "registry": given.registry,
        "epochs": given.epochs,
        **FRAMEWORKS[given.framework],
    }
    if given.compile:
        compiler.Compiler().compile(retrain_digits, given.compile, pipeline_parameters=parameters)
        return
    os.environ.setdefault("TRAINJOB_BACKEND", "local")
    # kfp.local warns that the steps run in this environment and not in their image.
    warnings.filterwarnings("ignore", message=".*non-Python base image", category=RuntimeWarning)
    workspace = os.environ.get("TRAINJOB_WORKSPACE", "")
    # KFP writes its own files on this machine, also if the jobs write to remote storage.
    root = workspace.removeprefix("file://") if workspace.startswith("file://") else "local_outputs"
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=root)
    retrain_digits(**parameters)


if __name__ == "__main__":
    main()
