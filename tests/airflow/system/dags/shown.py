"""Trainings of all states, and the export of a model. They print, report and raise a secret of the cluster."""

from __future__ import annotations

from typing import Any

from airflow.providers.openlineage.utils.selective_enable import enable_lineage
from airflow.sdk import DAG, Asset

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

SECRET = {"valueFrom": {"secretKeyRef": {"name": "shown", "key": "token"}}}
BEGIN = """
import json, math, os, pathlib, struct, sys, time
from trainjob.progress import report
secret = sys.argv[1]
assert secret == os.environ["TOKEN"]
print("up", flush=True)
print("token=" + secret, flush=True)
print("connected to https://user:" + secret + "@data.test/digits", flush=True)
step = 0
def train():
    global step
    step += 1
    metrics = {"loss": 1 / math.sqrt(step), "accuracy": 1 - 1 / (step + 1), "learning rate": 0.1 / step}
    report(metrics=metrics, step=step, total_steps=2000, checkpoint=step % 50 == 0)
"""
ENDS = """
for _ in range(40):
    train()
    time.sleep(0.02)
report(outputs={"model": "https://user:" + secret + "@models.test/digits"})
"""
WAITS = """
while not os.path.exists(os.environ["FLAG"]):
    train()
    time.sleep(0.1)
folder = pathlib.Path(os.environ["TRAINJOB_OUTPUT_MODEL"].removeprefix("file://"))
folder.mkdir(parents=True, exist_ok=True)
header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
(folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
report(progress=100, metrics={"accuracy": 0.75})
"""
FAILS = """
for _ in range(10):
    train()
    time.sleep(0.02)
if os.environ["JAX_PROCESS_ID"] == "1":
    time.sleep(1)
    raise ValueError("step 10 has no labels: https://user:" + secret + "@data.test/digits")
time.sleep(60)
"""
COMMON: dict[str, Any] = {"namespace": "shown", "trainjob_conn_id": "shown"}
TRAINED = "file://{{ params.workspace }}/trained"


def train(task_id: str, code: str, **more: Any) -> TrainJobOperator:
    fields: dict[str, Any] = {
        "runtime": "trainjob-step",
        "command": ["python", "-c", BEGIN + code, "$(TOKEN)"],
        "env": {"TOKEN": SECRET, "FLAG": "{{ params.flag }}"},
        "inputs": {"dataset": "s3://bucket/digits"},
    }
    return TrainJobOperator(task_id=task_id, **fields | COMMON | more)


with DAG("shown", params={"flag": "/nowhere", "workspace": "/nowhere"}) as dag:
    train("finished", ENDS)
    train("failed", FAILS, runtime="jax-distributed", num_nodes=2)
    train("running", WAITS, outputs={"model": f"{TRAINED}-running"})
    train("adopted", WAITS, outputs={"model": f"{TRAINED}-adopted"}, on_kill_action="keep")
    export = ModelExportOperator(
        task_id="export",
        source=TRAINED,
        target="file://{{ params.workspace }}/models",
        name="shown",
        registry="mlflow+sqlite:///{{ params.workspace }}/registry.db",
        metrics=train("train", WAITS, deferrable=True, labels={"team": "vision"}, outputs={"model": TRAINED}).output,
        alias="champion",
        metric="accuracy",
        outlets=[Asset("shown_model", uri="file:///models/shown")],
        **COMMON,
    )

enable_lineage(dag)
