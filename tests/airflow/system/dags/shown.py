"""Trainings that end once a file exists, and the export of a model, for tests of the user interface."""

from __future__ import annotations

from typing import Any

from airflow.providers.openlineage.utils.selective_enable import enable_lineage
from airflow.sdk import DAG, Asset

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

TRAIN = """
import json, os, pathlib, struct, time
from trainjob.progress import report
print("up", flush=True)
while not os.path.exists(os.environ["FLAG"]):
    time.sleep(0.1)
folder = pathlib.Path(os.environ["TRAINJOB_OUTPUT_MODEL"].removeprefix("file://"))
folder.mkdir(parents=True)
header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
(folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
report(metrics={"accuracy": 0.75})
"""

with DAG("shown", params={"flag": "/nowhere", "workspace": "/nowhere"}) as dag:
    common: dict[str, Any] = {"namespace": "shown", "trainjob_conn_id": "shown"}
    trained = "file://{{ params.workspace }}/trained"
    training: dict[str, Any] = {
        "runtime": "trainjob-step",
        "command": ["python", "-c", TRAIN],
        "env": {"FLAG": "{{ params.flag }}"},
    }
    train = TrainJobOperator(
        task_id="train",
        deferrable=True,
        labels={"team": "vision"},
        inputs={"dataset": "s3://bucket/digits"},
        outputs={"model": trained},
        **training,
        **common,
    )
    export = ModelExportOperator(
        task_id="export",
        source=trained,
        target="file://{{ params.workspace }}/models",
        name="shown",
        registry="mlflow+sqlite:///{{ params.workspace }}/registry.db",
        metrics=train.output,
        alias="champion",
        metric="accuracy",
        outlets=[Asset("shown_model", uri="file:///models/shown")],
        **common,
    )
    train >> export
    TrainJobOperator(
        task_id="adopted",
        on_kill_action="keep",
        outputs={"model": "file://{{ params.workspace }}/adopted"},
        **training,
        **common,
    )

enable_lineage(dag)
