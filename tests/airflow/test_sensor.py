"""`TrainJobSensor` in real task runs."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.common.compat.sdk import AirflowSensorTimeout
from airflow.sdk import DAG
from tests.airflow.conftest import Run, python
from tests.airflow.versions import since

from trainjob import TrainJobClient, TrainJobFailed
from trainjob_airflow.exceptions import TrainJobFatal
from trainjob_airflow.sensors.trainjob import TrainJobSensor


def job(code: str) -> str:
    with TrainJobClient("local") as client:
        return client.launch({"runtime": "trainjob-step", "command": python(code)}, "launched-elsewhere").name


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param(
            {"mode": "reschedule"},
            marks=since(
                "3.1", "the time of the first reschedule as a time; 3.0.4 can give the sensor a text, and fails"
            ),
        ),
        {"deferrable": True},
    ],
    ids=["poke", "reschedule", "deferrable"],
)
def test_waits_for_the_end(run: Run, how: dict[str, Any]) -> None:
    with DAG("waits") as dag:
        code = "import time; from trainjob.progress import report; time.sleep(2); report(metrics={'loss': 0.5})"
        TrainJobSensor(task_id="wait", name=(name := job(code)), poke_interval=0.3, **how)
    ran = run(dag)
    assert ran.state == "success", (ran.states, ran.errors, ran.log[:3000])
    assert "is Complete" in ran.log
    assert (ran.xcoms["wait"]["name"], ran.xcoms["wait"]["metrics"]) == (name, {"loss": 0.5})


@pytest.mark.parametrize("deferrable", [False, True])
def test_a_job_that_ends_in_another_phase_fails_the_sensor_at_once(run: Run, deferrable: bool) -> None:
    with DAG("otherwise") as dag:
        TrainJobSensor(
            task_id="wait", name=job("import time; time.sleep(1); raise SystemExit(1)"), poke_interval=0.3,
            deferrable=deferrable, retries=2,
        )  # fmt: skip
    assert isinstance(run(dag).errors["wait"], TrainJobFatal)


def test_a_soft_failure_is_a_skip(run: Run) -> None:
    name = job("raise SystemExit(1)")
    with DAG("soft") as dag:
        for deferrable in (False, True):
            TrainJobSensor(
                task_id=f"wait_{deferrable}", name=name, poke_interval=0.3, soft_fail=True, deferrable=deferrable
            )
    assert set(run(dag).states.values()) == {"skipped"}


@pytest.mark.parametrize("deferrable", [False, True])
def test_the_newest_job_with_the_labels(run: Run, deferrable: bool) -> None:
    with TrainJobClient("local") as client:
        for key, code in (("old", "raise SystemExit(1)"), ("young", "")):
            spec = {"runtime": "trainjob-step", "command": python(code), "labels": {"team": "a"}}
            ref = client.launch(spec, key)
            with contextlib.suppress(TrainJobFailed):
                client.wait(ref)
            time.sleep(1.1)  # creation timestamps are whole seconds, as on a cluster
    with DAG("labelled") as dag:
        TrainJobSensor(task_id="wait", labels={"team": "a"}, poke_interval=0.1, deferrable=deferrable)
        TrainJobSensor(task_id="by_condition", labels={"team": "a"}, condition="Complete", poke_interval=0.1)
    assert run(dag).state == "success"


def test_exactly_one_of_name_and_labels(run: Run) -> None:
    with DAG("which") as dag:
        TrainJobSensor(task_id="none", name="{{ '' }}")
        TrainJobSensor(task_id="both", name="{{ 'x' }}", labels={"team": "a"})
    errors = run(dag).errors
    assert {str(error) for error in errors.values()} == {"set exactly one of name and labels"}


def test_timeout(run: Run) -> None:
    with DAG("timeout") as dag:
        TrainJobSensor(task_id="wait", name="never-launched", poke_interval=0.1, timeout=0.3)
    assert isinstance(run(dag).errors["wait"], AirflowSensorTimeout)


def test_running_counts_as_reached_after_the_end(run: Run, home: Path) -> None:
    name = job("")
    with TrainJobClient("local") as client:
        client.wait(client.find(name))
    with DAG("over") as dag:
        TrainJobSensor(task_id="wait", name=name, phases=["Running"], poke_interval=0.1)
    assert run(dag).state == "success"


def test_a_phase_that_does_not_exist(run: Run) -> None:
    with DAG("phase") as dag:
        TrainJobSensor(task_id="wait", name="x", phases="{{ 'Completed' }}")
    assert "phases: 'Completed' is not a phase" in str(run(dag).errors["wait"])
