"""Runs with secrets in connections, variables and trainings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from trainjob_airflow.operators.trainjob import TrainJobOperator

REFERENCE = {"valueFrom": {"secretKeyRef": {"name": "planted", "key": "token"}}}
CODE = """
import os, sys, time
from trainjob.progress import report
assert len(os.environ["TOKEN"]) > 30 and sys.argv[1] == os.environ["TOKEN"]
report(metrics={"loss": 0.5})
print("the secret was there", flush=True)
"""
ENDS = {"succeeds": "", "fails": "sys.exit(3)", "late": "time.sleep(600)"}


def train(task_id: str, code: str = CODE, **more: Any) -> None:
    given = {"runtime": "trainjob-step", "env": {"TOKEN": REFERENCE}, "namespace": "planted", "retries": 0}
    TrainJobOperator(task_id=task_id, **{"command": ["python", "-c", code, "$(TOKEN)"], **given, **more})


with DAG("planted_here"):
    for mode in ("worker", "deferred"):
        for end, code in ENDS.items():
            connection = "planted_kubeconfig" if end == "fails" else "planted_token"
            # Deferred, long enough for a busy machine to defer the task and for the test to read its row.
            limit = timedelta(seconds=60 if mode == "deferred" else 15)
            late: dict[str, Any] = {"execution_timeout": limit} if end == "late" else {}
            # On a busy machine a worker may fail to start, which proves nothing: retry.
            late |= {"retries": 2, "retry_delay": timedelta(0)} if end == "succeeds" else {}
            train(f"{end}_{mode}", CODE + code, trainjob_conn_id=connection, deferrable=mode == "deferred", **late)
    train("literal", env={"API_TOKEN": "{{ conn.planted_token.password }}"})
    train("argument", command=["echo", "{{ conn.planted_token.password }}"])
    train("option", command=["echo", "--password={{ conn.planted_token.password }}"])
    train("url", env={"DATABASE": "{{ conn.planted_token.get_uri() }}"})
    train("variable", env={"SETTING": "{{ var.value.planted_api_key }}"})
    train("json", env={"SETTING": "key={{ var.json.planted_settings.password }}"})
    # The search must find a secret that the DAG author publishes.
    leak = (
        "import os; from trainjob.progress import report; v = os.environ['NOTE']; print(v); report(outputs={'note': v})"
    )
    train("public", command=["python", "-c", leak], env={"NOTE": "{{ var.value.planted_note }}"})

with DAG("planted_there"):
    # Long enough for a busy machine to defer the tasks and for the test to read their rows.
    there: dict[str, Any] = {"execution_timeout": timedelta(seconds=30), "namespace": "default"}
    for mode in ("worker", "deferred"):
        train(f"token_{mode}", trainjob_conn_id="planted_cluster_token", deferrable=mode == "deferred", **there)
    train("key_deferred", trainjob_conn_id="planted_cluster_key", deferrable=True, **there)
    for wrong in ("token", "plugin", "text"):
        train(f"wrong_{wrong}", trainjob_conn_id=f"planted_wrong_{wrong}", namespace="default")
