"""A training whose second rank fails: the screenshot of README.md shows its log."""

from __future__ import annotations

from airflow.sdk import DAG

from trainjob_airflow.operators.trainjob import TrainJobOperator

TRAIN = """
import os, time

rank, labels = int(os.environ["JAX_PROCESS_ID"]), {0: "zero", 1: "one"}
for epoch in range(1, 4):
    print(f"epoch {epoch}: loss {0.9 / epoch:.3f}", flush=True)
    time.sleep(0.1)
if rank == 1:
    raise ValueError("step 300 has no labels")
time.sleep(60)
"""

with DAG("train_digits"):
    TrainJobOperator(task_id="train", runtime="jax-distributed", num_nodes=2, command=["python", "-c", TRAIN])
