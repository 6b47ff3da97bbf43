"""A complete Airflow on SQLite, as `airflow standalone` runs one: a deferred training, and one that fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.airflow.system.airflow import Airflow

DAG = """
from airflow.sdk import DAG

from trainjob_airflow.operators.trainjob import TrainJobOperator

for dag_id, code, deferrable in (("succeeds", 0, True), ("fails", 7, False)):
    with DAG(dag_id) as dag:
        TrainJobOperator(
            task_id="train",
            runtime="trainjob-step",
            command=["sh", "-c", f"echo trained; exit {code}"],
            deferrable=deferrable,
        )
    globals()[dag_id] = dag
"""


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    directory = tmp_path_factory.mktemp("airflow")
    (directory / "dags").mkdir()
    (directory / "dags" / "trainings.py").write_text(DAG)
    environment = {"TRAINJOB_BACKEND": "local", "TRAINJOB_HOME": str(directory / "trainings")}
    with Airflow(directory, directory / "dags", environment) as airflow:
        yield airflow


def test_a_deferred_training_succeeds(airflow: Airflow) -> None:
    run = airflow.run("succeeds")
    assert airflow.over("succeeds", run) == "success"
    assert airflow.xcom("succeeds", run)["name"].endswith("-1")
    assert "[node-0] trained" in airflow.log("succeeds", run)


def test_a_failing_rank_fails_the_task_with_its_diagnosis(airflow: Airflow) -> None:
    run = airflow.run("fails")
    assert airflow.over("fails", run) == "failed"
    assert "node-0 exited with code 7" in airflow.log("fails", run)
