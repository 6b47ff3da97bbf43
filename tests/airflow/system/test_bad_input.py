"""Invalid input fails a task at once with a clear error and leaves no process; on the local backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.airflow.system.airflow import Airflow
from tests.contract.processes import marked
from tests.processes import wait_until

from trainjob import TrainJobClient
from trainjob.status import observe

DAG, NAMESPACE = "bad_input", "bad-input"

# Task: exception, tries, text of the error.
BROKEN = {
    "wrong_connection": ("TrainJobFatal", 1, "connection 'nosuch' does not exist: create it with type trainjob"),
    "wrong_connection_of_a_sensor": (
        "TrainJobFatal",
        1,
        "connection 'nosuch' does not exist: create it with type trainjob",
    ),
    "undefined_name": ("TrainJobFatal", 1, "the template of 'env' cannot be rendered: 'nosuch' is undefined"),
    "undefined_in_mapped": ("TrainJobFatal", 1, "the template of 'env' cannot be rendered: 'nosuch' is undefined"),
    "undefined_in_a_file": (
        "TrainJobFatal",
        1,
        "the template bad_input.yaml cannot be rendered: 'nosuch' is undefined",
    ),
    "wrong_syntax": ("TrainJobFatal", 1, "the template of 'env' cannot be rendered: unexpected end of template"),
    "invalid_spec": ("TrainJobFatal", 1, "num_nodes: "),
    "runtime_missing": ("TrainJobFatal", 1, "nosuch"),
    "deleted_worker": ("TrainJobFatal", 1, "the TrainJob was deleted before it finished"),
    "deleted_deferred": ("TrainJobFatal", 1, "the TrainJob was deleted before it finished"),
    "wrong_code": ("TrainJobFatal", 1, "ValueError: no such column"),
    "wrong_code_for_once": ("TrainJobFailure", 2, "ValueError: no such column"),
    "module_missing": ("TrainJobFatal", 1, "not retried: the module is missing in the image"),
    "killed": ("TrainJobFailure", 2, "SIGKILL"),
}


@dataclass
class Run:
    """The finished run with all tasks."""

    airflow: Airflow
    run: str

    def task(self, task: str) -> dict[str, Any]:
        found = self.airflow.get(f"dags/{DAG}/dagRuns/{self.run}/taskInstances", task_id=task)["task_instances"]
        (one,) = [each for each in found if each["task_id"] == task]
        return dict(one)

    def log(self, task: str, attempt: int) -> list[dict[str, Any]]:
        """Lines of the log of a try, with all their fields."""
        index = self.task(task)["map_index"]
        path = f"dags/{DAG}/dagRuns/{self.run}/taskInstances/{task}/logs/{attempt}"
        lines = self.airflow.get(path, full_content="true", map_index=index)["content"]
        return [each for each in lines if isinstance(each, dict)]

    def error(self, task: str, attempt: int) -> tuple[str, str]:
        """Class and text of the exception that ended a try."""
        lines = self.log(task, attempt)
        details = [each["error_detail"] for each in lines if each["event"] == "Task failed with exception"]
        assert len(details) == 1, lines
        return details[0][0]["exc_type"], details[0][0]["exc_value"]


@pytest.fixture(scope="module")
def run(airflow: Airflow, trainings: Path) -> Iterator[Run]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINJOB_HOME", str(trainings))
        run = airflow.run(DAG)
        with TrainJobClient("local", NAMESPACE) as client:
            for task in ("deleted_worker", "deleted_deferred"):
                path = f"dags/{DAG}/dagRuns/{run}/taskInstances/{task}"
                up = lambda task=task: "[node-0] up" in airflow.log(DAG, run, task)  # noqa: E731
                wait_until(f"the job of {task} is waited for", up, 240, poll=0.5, ignore=httpx.HTTPError)
                if task == "deleted_deferred":
                    airflow.until_left(DAG, run, task)
                ref = client.find(airflow.get(f"{path}/state-store/trainjob")["value"]["name"])
                client.call(lambda ref=ref: client.backend.delete(ref))  # type: ignore[misc]
        airflow.over(DAG, run)
        yield Run(airflow, run)


@pytest.mark.parametrize("task", BROKEN)
def test_the_task_fails_with_a_clear_error(run: Run, task: str) -> None:
    error, tries, text = BROKEN[task]
    found = run.task(task)
    assert (found["state"], found["try_number"]) == ("failed", tries), f"{error} has {tries} tries"
    for attempt in range(1, tries + 1):
        kind, value = run.error(task, attempt)
        assert kind == error
        assert text in value


def test_no_process_is_left(run: Run, trainings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_HOME", str(trainings))
    with TrainJobClient("local", NAMESPACE) as client:
        jobs = client.list()
    assert {str(observe(job).phase) for job in jobs} == {"Failed"}
    assert len(jobs) == 6, "two tries of two tasks, one of two others; the other tasks launch no job"
    uids = [job["metadata"]["uid"] for job in jobs]
    wait_until("no process is left", lambda: not any(marked(uid) for uid in uids), 30)
    tasks = run.airflow.get(f"dags/{DAG}/dagRuns/{run.run}/taskInstances")["task_instances"]
    assert {each["task_id"] for each in tasks} == set(BROKEN), "all tasks are tested here"
