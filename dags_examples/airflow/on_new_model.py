"""DAGs that start when there is a new model.

* ``release_digits`` trains and exports. Its last task has an asset as outlet; the asset's event has the model's URI.
* ``evaluate_digits`` starts on that event. It tests the model on noisy images, with one job for each noise level; the
  script of these jobs is a Python function.
* ``deploy_digits`` starts when any version of the model becomes the champion: an asset watcher polls the registry.

All three DAGs must be unpaused, and a scheduler and a triggerer must run: `airflow standalone`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, Asset, AssetWatcher, Param, task

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.triggers.assets import ModelVersionEventTrigger

# As in retrain_digits.py; on a cluster, set the variables to locations that its nodes can reach.
EXAMPLES = Path(os.environ.get("TRAINJOB_EXAMPLES", Path(__file__).resolve().parents[1]))
HOME = Path(os.environ.get("TRAINJOB_HOME", Path.home() / ".trainjob")).absolute()
WORKSPACE = os.environ.get("TRAINJOB_WORKSPACE", (HOME / "workspace").as_uri())
MODELS = os.environ.get("TRAINJOB_MODELS", (HOME / "models").as_uri())
RUNTIME = os.environ.get("TRAINJOB_RUNTIME", "jax-distributed")
DATASET = (EXAMPLES / "data" / "digits.csv.gz").as_uri()

released = Asset("digits_released")
champion = Asset(
    "digits_champion",
    watchers=[
        AssetWatcher(
            name="digits_champion",
            trigger=ModelVersionEventTrigger(name="digits", alias="champion", poll_interval=15),
        )
    ],
)

with DAG(
    "release_digits",
    schedule=None,
    tags=["trainjob"],
    doc_md=__doc__,
    params={"epochs": Param(20, type="integer", minimum=1)},
):
    train = TrainJobOperator(
        task_id="train",
        runtime=RUNTIME,
        command=["trainjob", "exec", "--", "python", f"{EXAMPLES}/training/digits_jax.py"],
        args=[
            "--dataset=$(TRAINJOB_INPUT_DATASET)",
            "--output=$(TRAINJOB_OUTPUT_MODEL)",
            "--epochs={{ params.epochs }}",
        ],
        inputs={"dataset": DATASET},
        outputs={"model": f"{WORKSPACE}/{{{{ run_id }}}}"},
    )

    ModelExportOperator(
        task_id="export_model",
        source=f"{WORKSPACE}/{{{{ run_id }}}}",
        target=MODELS,
        name="digits",
        metrics=train.output,
        outlets=[released],
    )


with DAG("evaluate_digits", schedule=[released], tags=["trainjob"], doc_md=__doc__):

    @task.trainjob(
        runtime=RUNTIME,
        # The event has the outputs of the export: uri, digest, version, metrics.
        inputs={"model": "{{ (triggering_asset_events.values() | first | last).extra.uri }}", "dataset": DATASET},
    )
    def evaluate(noise: float) -> None:
        """Report the accuracy on noisy images (noise: standard deviation, where white is 0 and black is 1)."""
        import os
        import tempfile

        import numpy as np
        from safetensors.numpy import load_file

        from trainjob.data import initialize
        from trainjob.progress import report

        with tempfile.TemporaryDirectory() as here:
            for name in ("model", "dataset"):
                initialize(os.environ[f"TRAINJOB_INPUT_{name.upper()}"], f"{here}/{name}")
            weights = load_file(f"{here}/model/model.safetensors")
            rows = np.loadtxt(f"{here}/dataset/digits.csv.gz", delimiter=",")
        images, labels = rows[:, :64] / 16, rows[:, 64]
        images += np.random.default_rng(0).normal(0, noise, images.shape)
        hidden = np.maximum(images @ weights["hidden.weight"].T + weights["hidden.bias"], 0)
        answers = (hidden @ weights["output.weight"].T + weights["output.bias"]).argmax(axis=1)
        report(metrics={"noise": noise, "accuracy": float((answers == labels).mean())})

    evaluate.expand(noise=[0.0, 0.3])


with DAG("deploy_digits", schedule=[champion], tags=["trainjob"], doc_md=__doc__):

    @task
    def deploy(**context: Any) -> dict[str, Any]:
        """Return the new champion; code that updates a serving system goes here."""
        version: dict[str, Any] = context["triggering_asset_events"][champion][-1].extra["payload"]
        print(f"version {version['version']} of {version['name']}, {version['digest']}, is at {version['uri']}")
        return version

    deploy()
