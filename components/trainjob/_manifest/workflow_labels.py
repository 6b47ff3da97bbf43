"""The labels by which an orchestrator's jobs are found: those of a run, and those of a task over its runs. Pure.

Airflow's jobs have the labels that its ``KubernetesPodOperator`` puts on pods; KFP's have the run label of KFP's pods.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainjob._support.kube_objects import mapping
from trainjob._support.numbers import count_of
from trainjob.job import ATTEMPT, KEY, key_hash

STUDY = "trainjob.dev/study"
"""Label of the trials of a hyperparameter search: the hash of its key."""
KFP_RUN = "pipeline/runid"
KFP_PIPELINE, KFP_TASK = "trainjob.dev/kfp-pipeline", "trainjob.dev/kfp-task"

_RUNS = (("dag_id", "run_id"), (KFP_RUN,))
_TASKS = (("dag_id", "task_id"), (KFP_PIPELINE, KFP_TASK))
_MAP_INDEX = "map_index"
_LABEL = 63  # characters of a label value
_LABEL_VALUE = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


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
    """Labels of the jobs of a run that a person names: the ID of a KFP or an Airflow run, or ``DAG/RUN``."""
    found = [{KFP_RUN: kfp_label(run)}, {"run_id": airflow_label(run)}]
    dag, slash, run_id = run.partition("/")
    return [*found, {"dag_id": airflow_label(dag), "run_id": airflow_label(run_id)}] if slash else found


def kfp_label(text: str) -> str:
    """`text` as a label's value; its hash if it is too long or has characters that are not allowed."""
    return text if _LABEL_VALUE.fullmatch(text) else key_hash(text)


def airflow_label(text: str) -> str:
    """`text` as a label's value, shortened as by `KubernetesPodOperator`: one selector finds its pods and the jobs."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "", text).strip("_.-")
    if safe == text and len(safe) <= _LABEL:
        return safe
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:9]
    return f"{safe[: _LABEL - len(digest) - 1]}-{digest}" if safe else digest


@dataclass(frozen=True)
class Study:
    """Jobs that belong together.

    Attributes:
        identity: What they have in common, as text; two studies of one namespace have different ones.
        title: The same for people.
        names: Names of the jobs.
    """

    identity: str
    title: str
    names: frozenset[str]


def studies(jobs: Iterable[Mapping[str, Any]]) -> list[Study]:
    """The workflows of the jobs, by their labels; for other jobs, several keys with one prefix, such as ``study/``.

    The trials of a hyperparameter search are one workflow, also if an orchestrator launched it.
    """
    found: dict[str, tuple[str, list[Mapping[str, Any]]]] = {}
    for each in jobs:
        prefix = _key(each).rpartition("/")[0]
        if study := mapping(each, "metadata", "labels").get(STUDY):
            identity, title = f"study {study}", prefix or str(study)
        elif labels := run_labels(each):
            identity, title = f"labels {json.dumps(labels, sort_keys=True)}", title_of(each)
        elif prefix:
            identity, title = f"key {prefix}", f"{prefix}/"
        else:
            continue
        found.setdefault(identity, (title, []))[1].append(each)
    return [
        Study(identity, title, frozenset(each["metadata"]["name"] for each in members))
        for identity, (title, members) in found.items()
        if identity.startswith(("labels", "study")) or len({_key(each) for each in members}) > 1
    ]


def latest_attempts(jobs: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Of each key the latest attempt, and all jobs without a key, in the order in which they were created."""
    chosen: dict[str, Mapping[str, Any]] = {}
    for each in sorted(jobs, key=lambda job: count_of(mapping(job, "metadata", "labels").get(ATTEMPT)) or 1):
        chosen[_key(each) or str(each["metadata"].get("uid"))] = each
    return sorted(chosen.values(), key=lambda job: str(job["metadata"].get("creationTimestamp")))


def _key(trainjob: Mapping[str, Any]) -> str:
    return str(mapping(trainjob, "metadata", "annotations").get(KEY) or "")


def _first(trainjob: Mapping[str, Any], choices: tuple[tuple[str, ...], ...]) -> dict[str, str]:
    labels = mapping(trainjob, "metadata", "labels")
    for names in choices:
        if all(labels.get(name) for name in names):
            return {name: str(labels[name]) for name in names}
    return {}
