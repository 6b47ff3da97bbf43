"""Trainings of all states, for the tabs of the user interface. They print, report and raise a secret of the cluster."""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, task

from trainjob_airflow.operators.data import ModelExportOperator
from trainjob_airflow.operators.trainjob import TrainJobOperator

SECRET = {"valueFrom": {"secretKeyRef": {"name": "pages", "key": "token"}}}
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
FOREVER = """
while not os.path.exists(os.environ["FLAG"]):
    train()
    time.sleep(0.1)
folder = pathlib.Path(os.environ["TRAINJOB_OUTPUT_MODEL"].removeprefix("file://"))
folder.mkdir(parents=True, exist_ok=True)
header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
(folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
report(progress=100)
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


def train(task_id: str, code: str, env: dict[str, str] | None = None, **more: Any) -> TrainJobOperator:
    fields: dict[str, Any] = {
        "runtime": "trainjob-step",
        "command": ["python", "-c", BEGIN + code, "$(TOKEN)"],
        "env": {"TOKEN": SECRET, **(env or {})},
        "namespace": "pages",
        "inputs": {"dataset": "s3://bucket/digits"},
        "resources_per_node": {"cpu": 1, "memory": "1Gi"},
    }
    return TrainJobOperator(task_id=task_id, **fields | more)


with DAG("pages", params={"flag": "/nowhere", "workspace": "/nowhere"}):
    trained = "file://{{ params.workspace }}/trained"
    until = {"FLAG": "{{ params.flag }}"}
    train("finished", ENDS)
    train("finished_deferred", ENDS, deferrable=True)
    train("failed", FAILS, runtime="jax-distributed", num_nodes=2)
    TrainJobOperator.partial(task_id="mapped", runtime="trainjob-step", namespace="pages").expand(
        command=[["true"], ["true"]]
    )
    running = train("running", FOREVER, env=until, outputs={"model": trained})
    train("deferred", FOREVER, env=until, outputs={"model": trained + "-deferred"}, deferrable=True)
    export = ModelExportOperator(
        task_id="export",
        namespace="pages",
        source=trained,
        target="file://{{ params.workspace }}/models",
        name="pages",
        registry="mlflow+sqlite:///{{ params.workspace }}/registry.db",
        metrics=running.output,
        alias="champion",
        metric="accuracy",
    )
    running >> export

    @task
    def other() -> int:
        return 1

    other()
