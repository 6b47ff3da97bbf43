"""Search hyperparameters of a digits model, evaluate the best model and export it: the pipeline ``tune_digits``.

::

    tune ── evaluate_model ── export_model

On this machine, with kfp.local and the local backend (no cluster, no Docker)::

    python dags_examples/kfp/tune_digits.py --local

For a cluster, as a file to upload to Kubeflow Pipelines::

    python dags_examples/kfp/tune_digits.py --compile tune_digits.yaml

Each trial is a TrainJob with its own directory for the model. On a cluster, environment variables set the locations of
data, scripts and models, as for ``retrain_digits.py``, and ``TRAINJOB_WORKSPACE`` that of the study's journal.
"""

import argparse
import os
import warnings
from pathlib import Path

from kfp import compiler, dsl, local

from trainjob_kfp import evaluate_model, export_model, tune

EXAMPLES = Path(__file__).resolve().parents[1]
# The path on the nodes: on a cluster, the path of this directory in their image.
ON_NODES = Path(os.environ.get("TRAINJOB_EXAMPLES", EXAMPLES))
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "jax-distributed")


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="tune-digits", description="Search the learning rate of a digits model; the best model is exported."
)
def tune_digits(
    models: str,
    registry: str,
    workspace: str = "",
    dataset: str = (ON_NODES / "data" / "digits.csv.gz").as_uri(),
    runtime: str = RUNTIME,
    trials: int = 6,
    parallel: int = 2,
    epochs: int = 8,
) -> None:
    tuned = tune(
        study={
            "space": {"learning_rate": {"type": "float", "low": 0.001, "high": 0.3, "log": True}},
            "metric": "accuracy",
            "direction": "maximize",
            "max_trials": trials,
            "parallel": parallel,
            "pruner": {"name": "successive_halving"},
        },
        workspace=workspace,
        runtime=runtime,
        command=["trainjob", "exec", "--", "python", str(ON_NODES / "training" / "digits_jax.py")],
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            "--learning-rate=$(KUBEFLOW_TRAINER_OPT_LEARNING_RATE)",
            f"--epochs={epochs}",
        ],
        inputs={"dataset": dataset},
    )
    evaluated = evaluate_model(
        candidate=tuned.outputs["model_uri"],
        champion="models:/digits@champion",
        dataset=dataset,
        command=["python", str(ON_NODES / "training" / "evaluate_digits.py"), "{model}", "{dataset}", "{scores}"],
        gate={"metrics": {"accuracy": {"min_improvement": 0}}},
        # The script needs NumPy.
        runtime=runtime,
        spec={"num_nodes": 1},
        registry=registry,
    )
    export_model(
        source=tuned.outputs["model_uri"],
        target=models,
        name="digits",
        metrics=tuned.outputs["result"],
        evaluation=evaluated.outputs["evaluation"],
        alias="champion",
        registry=registry,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Search hyperparameters with Kubeflow Pipelines.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--local", action="store_true", help="run it on this machine")
    how.add_argument("--compile", metavar="FILE", help="compile it for a Kubeflow Pipelines backend")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    home = Path(os.environ.get("TRAINJOB_HOME", "~/.trainjob")).expanduser().absolute()
    parser.add_argument("--workspace", default=os.environ.get("TRAINJOB_WORKSPACE", ""))
    parser.add_argument("--models", default=os.environ.get("TRAINJOB_MODELS", (home / "models").as_uri()))
    parser.add_argument(
        "--registry", default=os.environ.get("TRAINJOB_REGISTRY", f"mlflow+sqlite:///{home / 'registry.db'}")
    )
    given = parser.parse_args()
    names = ("workspace", "models", "registry", "trials", "parallel", "epochs")
    parameters = {name: getattr(given, name) for name in names}
    if given.compile:
        compiler.Compiler().compile(tune_digits, given.compile, pipeline_parameters=parameters)
        return
    os.environ.setdefault("TRAINJOB_BACKEND", "local")
    # kfp.local warns that the steps run in this environment and not in their image.
    warnings.filterwarnings("ignore", message=".*non-Python base image", category=RuntimeWarning)
    local.init(local.SubprocessRunner(use_venv=False))
    tune_digits(**parameters)


if __name__ == "__main__":
    main()
