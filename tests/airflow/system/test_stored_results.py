"""Whatever a training reports or returns, its task succeeds, and PostgreSQL holds its XComs."""

from __future__ import annotations

import pytest
from tests.airflow.system.airflow import Airflow
from tests.airflow.system.dags.unstorable import RETURNED
from tests.unstorable import CLEANED, unstorable

DAG = "unstorable"


@pytest.fixture(scope="module")
def run(airflow: Airflow) -> str:
    """A run that is over."""
    run = airflow.run(DAG)
    airflow.over(DAG, run, 500)
    return run


def test_every_task_succeeds(airflow: Airflow, run: str) -> None:
    tasks = airflow.get(f"dags/{DAG}/dagRuns/{run}/taskInstances")["task_instances"]
    assert len(tasks) == 2 * len(RETURNED) + 1
    assert {each["state"] for each in tasks} == {"success"}


@pytest.mark.parametrize("task", ["worker", "deferred"])
def test_what_is_json_is_cleaned_and_the_rest_is_lost(airflow: Airflow, run: str, task: str) -> None:
    found = [airflow.xcom(DAG, run, task, map_index=index) for index in range(len(RETURNED))]
    results = [airflow.xcom(DAG, run, task, "result", index) for index in range(len(RETURNED))]
    assert found == [{name: value for name, (_, value) in CLEANED.items()}, *results[1:]]
    for result in results:
        assert unstorable(result) == []
        assert result["outputs"]["model"] == "s3://m"
        assert result["metrics"]["loss"] == 0.5


def test_what_another_program_writes_into_the_message_is_cleaned(airflow: Airflow, run: str) -> None:
    assert airflow.xcom(DAG, run, "written") == {"__id___": "\ufffd"}
