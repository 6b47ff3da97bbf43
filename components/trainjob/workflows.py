"""The labels by which an orchestrator's jobs are found: those of a run, and those of a task over its runs. Pure.

Airflow's jobs have the labels that its ``KubernetesPodOperator`` puts on pods; KFP's have the run label of KFP's pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob.kube_objects import mapping

KFP_RUN = "pipeline/runid"
KFP_PIPELINE, KFP_TASK = "trainjob.dev/kfp-pipeline", "trainjob.dev/kfp-task"

_RUNS = (("dag_id", "run_id"), (KFP_RUN,))
_TASKS = (("dag_id", "task_id"), (KFP_PIPELINE, KFP_TASK))
_MAP_INDEX = "map_index"


def run_labels(trainjob: Mapping[str, Any]) -> dict[str, str]:
    """Labels of all jobs of the run that launched this job; empty if no orchestrator did."""
    return _first(trainjob, _RUNS)


def task_labels(trainjob: Mapping[str, Any]) -> dict[str, str]:
    """Labels of the jobs of the same task in all runs; empty if no orchestrator launched the job."""
    found = _first(trainjob, _TASKS)
    index = mapping(trainjob, "metadata", "labels").get(_MAP_INDEX)
    return found | ({_MAP_INDEX: str(index)} if found and index is not None else {})


def task_of(trainjob: Mapping[str, Any]) -> str:
    """Name of the task that launched the job; empty if no orchestrator did."""
    labels = mapping(trainjob, "metadata", "labels")
    index = labels.get(_MAP_INDEX)
    task = str(labels.get("task_id") or labels.get(KFP_TASK) or "")
    return f"{task} [{index}]" if task and index is not None else task


def title_of(trainjob: Mapping[str, Any]) -> str:
    """The run in words; empty if no orchestrator launched the job."""
    labels = mapping(trainjob, "metadata", "labels")
    if "dag_id" in labels and "run_id" in labels:
        return f"DAG {labels['dag_id']}, run {labels['run_id']}"
    if KFP_RUN in labels:
        pipeline = labels.get(KFP_PIPELINE)
        return f"pipeline {pipeline}, run {labels[KFP_RUN]}" if pipeline else f"run {labels[KFP_RUN]}"
    return ""


def selectors(run: str) -> list[dict[str, str]]:
    """Labels of the jobs of a run that a person names: the ID of a KFP run, or of an Airflow run."""
    return [{KFP_RUN: run}, {"run_id": run}]


def _first(trainjob: Mapping[str, Any], choices: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    labels = mapping(trainjob, "metadata", "labels")
    for names in choices:
        if all(labels.get(name) for name in names):
            return {name: str(labels[name]) for name in names}
    return {}
