"""`TrainJobSensor` in real task runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowSensorTimeout
from tests.airflow.conftest import Run, python

from trainjob import TrainJobClient
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.sensors.trainjob import TrainJobSensor


def job(code: str) -> str:
    with TrainJobClient("local") as client:
        return client.launch({"runtime": "trainjob-step", "command": python(code)}, "somebody-elses").name


@pytest.mark.parametrize(
    "how", [{}, {"mode": "reschedule"}, {"deferrable": True}], ids=["poke", "reschedule", "deferrable"]
)
def test_waits_for_the_end(run: Run, how: dict[str, Any]) -> None:
    with DAG("waits") as dag:
        TrainJobSensor(task_id="wait", name=job("import time; time.sleep(2)"), poke_interval=0.3, **how)
    ran = run(dag)
    assert ran.state == "success"
    assert "is Complete" in ran.log


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_job_that_ends_otherwise_fails_it_at_once(run: Run, deferrable: bool) -> None:
    with DAG("otherwise") as dag:
        TrainJobSensor(
            task_id="wait", name=job("import time; time.sleep(1); raise SystemExit(1)"), poke_interval=0.3,
            deferrable=deferrable, retries=2,
        )  # fmt: skip
    assert isinstance(run(dag).errors["wait"], TrainJobFatal)


def test_patience_ends(run: Run) -> None:
    with DAG("patience") as dag:
        TrainJobSensor(task_id="wait", name="never-launched", poke_interval=0.1, timeout=0.3)
    assert isinstance(run(dag).errors["wait"], AirflowSensorTimeout)


def test_running_counts_for_a_job_that_is_over(run: Run, home: Path) -> None:
    name = job("")
    with TrainJobClient("local") as client:
        client.wait(client.find(name))
    with DAG("over") as dag:
        TrainJobSensor(task_id="wait", name=name, phases=["Running"], poke_interval=0.1)
    assert run(dag).state == "success"


def test_a_phase_that_does_not_exist(run: Run) -> None:
    with DAG("phase") as dag:
        TrainJobSensor(task_id="wait", name="x", phases="Completed")
    assert "there is no phase 'Completed'" in str(run(dag).errors["wait"])
