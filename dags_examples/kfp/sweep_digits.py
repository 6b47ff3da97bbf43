"""Train once for each learning rate and export the best model: the pipeline ``sweep_digits``.

::

    train (for each learning rate) ── best ── export_model

On this machine, with kfp.local and the local backend (no cluster, no Docker)::

    python dags_examples/kfp/sweep_digits.py --local

For a cluster, as a file to upload to Kubeflow Pipelines::

    python dags_examples/kfp/sweep_digits.py --compile sweep_digits.yaml

The number of learning rates is known only when the run starts. Each training has its own directory below ``trials`` and
the run's ID, because kfp.local gives the artifacts of all iterations the same path. On a cluster, environment variables
set the locations of data, scripts and models, as for ``retrain_digits.py``.
"""

import argparse
import os
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from kfp import compiler, dsl, local

from trainjob_kfp import STEP_IMAGE, export_model, train

EXAMPLES = Path(__file__).resolve().parents[1]
# The path on the nodes: on a cluster, the path of this directory in their image.
ON_NODES = Path(os.environ.get("TRAINJOB_EXAMPLES", EXAMPLES))
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "jax-distributed")


# Any image with Python works; this one is on the nodes already.
@dsl.component(base_image=STEP_IMAGE, install_kfp_package=False)  # type: ignore[untyped-decorator]
def best(results: list[Any]) -> NamedTuple("Best", [("model", str), ("result", dict)]):  # type: ignore[valid-type]
    """Return the result of the training with the highest accuracy."""
    winner = max(results, key=lambda result: float(result["metrics"]["accuracy"]))
    print(f"{winner['name']} is the best of {len(results)}: accuracy {float(winner['metrics']['accuracy']):.4f}")
    return winner["outputs"]["model"], winner


@dsl.pipeline(  # type: ignore[untyped-decorator]
    name="sweep-digits", description="Train once for each learning rate; the best model is exported."
)
def sweep_digits(  # noqa: PLR0917 - KFP calls it by position
    trials: str,
    models: str,
    registry: str,
    learning_rates: list[float] = [0.03, 0.1, 0.3],  # noqa: B006 - KFP's way to give a default
    dataset: str = (ON_NODES / "data" / "digits.csv.gz").as_uri(),
    runtime: str = RUNTIME,
    epochs: int = 10,
) -> None:
    # One at a time, because the iterations of kfp.local share the artifacts' paths; a cluster needs no `parallelism`.
    with dsl.ParallelFor(learning_rates, parallelism=1) as learning_rate:
        trained = train(
            runtime=runtime,
            command=["trainjob", "exec", "--", "python", str(ON_NODES / "training" / "digits_jax.py")],
            args=[
                "--dataset=$(TRAINJOB_INPUT_DATASET)",
                "--output=$(TRAINJOB_OUTPUT_MODEL)",
                f"--learning-rate={learning_rate}",
                f"--epochs={epochs}",
            ],
            inputs={"dataset": dataset},
            outputs={"model": f"{trials}/{dsl.PIPELINE_JOB_ID_PLACEHOLDER}/{learning_rate}"},
        )
    winner = best(results=dsl.Collected(trained.outputs["result"]))
    export_model(
        source=winner.outputs["model"],
        target=models,
        name="digits",
        metrics=winner.outputs["result"],
        alias="champion",
        metric="accuracy",
        registry=registry,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Search for a learning rate with Kubeflow Pipelines.")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--local", action="store_true", help="run it on this machine")
    how.add_argument("--compile", metavar="FILE", help="compile it for a Kubeflow Pipelines backend")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[0.03, 0.1, 0.3])
    parser.add_argument("--epochs", type=int, default=10)
    home = Path(os.environ.get("TRAINJOB_HOME", "~/.trainjob")).expanduser().absolute()
    workspace = os.environ.get("TRAINJOB_WORKSPACE", (home / "workspace").as_uri())
    parser.add_argument("--trials", default=f"{workspace}/sweep-digits")
    parser.add_argument("--models", default=os.environ.get("TRAINJOB_MODELS", (home / "models").as_uri()))
    parser.add_argument(
        "--registry", default=os.environ.get("TRAINJOB_REGISTRY", f"mlflow+sqlite:///{home / 'registry.db'}")
    )
    given = parser.parse_args()
    names = ("trials", "models", "registry", "learning_rates", "epochs")
    parameters = {name: getattr(given, name) for name in names}
    if given.compile:
        compiler.Compiler().compile(sweep_digits, given.compile, pipeline_parameters=parameters)
        return
    os.environ.setdefault("TRAINJOB_BACKEND", "local")
    # kfp.local warns that the steps run in this environment and not in their image.
    warnings.filterwarnings("ignore", message=".*non-Python base image", category=RuntimeWarning)
    local.init(local.SubprocessRunner(use_venv=False))
    sweep_digits(**parameters)


if __name__ == "__main__":
    main()
