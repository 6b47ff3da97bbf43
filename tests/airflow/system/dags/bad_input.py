"""Tasks that cannot succeed, each for another reason; all have retries left."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from trainjob_airflow.operators.trainjob import TrainJobOperator
from trainjob_airflow.sensors.trainjob import TrainJobSensor

SLEEP = ["python", "-c", "import time; print('up', flush=True); time.sleep(600)"]
WRONG = ["python", "-c", "raise ValueError('no such column')"]


def arguments(**changed: Any) -> dict[str, Any]:
    given = {"runtime": "trainjob-step", "command": SLEEP, "namespace": "bad-input", "deferrable": False}
    return {**given, "retries": 2, "retry_delay": timedelta(0), **changed}


BROKEN: dict[str, dict[str, Any]] = {
    "wrong_connection": {"trainjob_conn_id": "nosuch"},
    "undefined_name": {"env": {"NAME": "{{ nosuch.thing }}"}},
    "wrong_syntax": {"env": {"NAME": "{{ run_id"}},
    "undefined_in_a_file": {"runtime": None, "command": None, "spec": "bad_input.yaml"},
    "invalid_spec": {"num_nodes": "{{ params.nodes }}"},
    "runtime_missing": {"runtime": "nosuch"},
    "deleted_worker": {},
    "deleted_deferred": {"deferrable": True},
    "wrong_code": {"command": WRONG, "retry_user_errors": False},
    "wrong_code_for_once": {"command": WRONG, "retries": 1},
    "module_missing": {"command": ["python", "-c", "import no_such_module"]},
    "killed": {"command": ["sh", "-c", "kill -9 $$$$"], "retries": 1},
}

with DAG("bad_input", params={"nodes": "many"}):
    for name, changed in BROKEN.items():
        TrainJobOperator(task_id=name, **arguments(**changed))
    TrainJobOperator.partial(task_id="undefined_in_mapped", **arguments()).expand(env=[{"NAME": "{{ nosuch.thing }}"}])
    TrainJobSensor(
        task_id="wrong_connection_of_a_sensor",
        job="some",
        trainjob_conn_id="nosuch",
        deferrable=True,
        retries=2,
        retry_delay=timedelta(0),
    )
