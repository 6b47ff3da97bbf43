"""The labels of the jobs of an orchestrator."""

from __future__ import annotations

from typing import Any

import pytest

from trainjob._manifest.workflow_labels import run_labels, selectors, task_labels, task_of, title_of

AIRFLOW = {"dag_id": "retrain", "run_id": "manual", "task_id": "train", "try_number": "1"}
KFP = {"pipeline/runid": "run-1", "trainjob.dev/kfp-pipeline": "digits", "trainjob.dev/kfp-task": "train"}


@pytest.mark.parametrize(
    ("labels", "run", "task", "name", "title"),
    [
        (AIRFLOW, {"dag_id": "retrain", "run_id": "manual"}, {"dag_id": "retrain", "task_id": "train"}, "train",
         "DAG retrain, run manual"),
        (AIRFLOW | {"map_index": "3"}, {"dag_id": "retrain", "run_id": "manual"},
         {"dag_id": "retrain", "task_id": "train", "map_index": "3"}, "train [3]", "DAG retrain, run manual"),
        (KFP, {"pipeline/runid": "run-1"}, {"trainjob.dev/kfp-pipeline": "digits", "trainjob.dev/kfp-task": "train"},
         "train", "pipeline digits, run run-1"),
        ({"pipeline/runid": "run-1"}, {"pipeline/runid": "run-1"}, {}, "", "run run-1"),
        ({"team": "a", "map_index": "1"}, {}, {}, "", ""),
        ({"dag_id": "", "run_id": "x"}, {}, {}, "", "DAG , run x"),
    ],
)  # fmt: skip
def test_labels(labels: dict[str, str], run: dict[str, str], task: dict[str, str], name: str, title: str) -> None:
    found: dict[str, Any] = {"metadata": {"name": "x", "labels": labels}}
    assert (run_labels(found), task_labels(found), task_of(found), title_of(found)) == (run, task, name, title)


def test_a_job_may_have_no_labels_and_a_run_is_one_of_each_orchestrator() -> None:
    assert run_labels({"metadata": {"name": "x"}}) == {}
    assert selectors("r") == [{"pipeline/runid": "r"}, {"run_id": "r"}]
