"""Read Kubernetes objects as JSON: fields that may be missing, names, times and roles of pods."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from trainjob._support.foreign import LENIENT, Unreadable, json_of
from trainjob._support.numbers import count_of

INITIALIZERS = ("dataset-initializer-", "model-initializer-")
"""Prefixes of the ranks of Trainer's initializers."""

MAX_LINE = 16 * 1024
"""Bytes of a log line that stay together; container runtimes split longer lines (CRI log format)."""

_OBJECT = (dict, Mapping)  # dict first: isinstance with an abstract class takes half of the time in jobs of 1,000 pods


def parse_time(text: object) -> datetime | None:
    """An API timestamp (``2026-11-21T10:00:00Z``, with or without fractions of a second); None for anything else."""
    try:
        return datetime.fromisoformat(text).astimezone(UTC) if isinstance(text, str) else None
    except (ValueError, OverflowError):
        return None


def mapping(value: object, *path: str) -> Mapping[str, Any]:
    """The object at `path` of a JSON value; empty if there is none."""
    for name in path:
        value = value.get(name) if isinstance(value, _OBJECT) else None
    return value if isinstance(value, _OBJECT) else {}


def mappings(value: object, *path: str) -> list[Mapping[str, Any]]:
    """The objects in the list at `path` of a JSON value; empty if there is no list."""
    items = mapping(value, *path[:-1]).get(path[-1])
    return [item for item in items if isinstance(item, Mapping)] if isinstance(items, list | tuple) else []


def annotated(value: object, name: str) -> Any:
    """The JSON value of an annotation, which a person may have edited; None if it is missing or not readable."""
    text = mapping(value, "metadata", "annotations").get(name)
    try:
        return None if text is None else json_of(text, name, LENIENT)
    except Unreadable:
        return None


def rank_of(pod: Mapping[str, Any]) -> str:
    """``<replicated job>-<completion index>`` of a pod of a JobSet, as ``node-1``.

    For a replicated job of several Jobs, which Trainer's runtimes do not have: ``node-<job>-<completion index>``.
    """
    labels = mapping(pod, "metadata", "labels")
    name = labels.get("jobset.sigs.k8s.io/replicatedjob-name", "pod")
    job = str(labels.get("jobset.sigs.k8s.io/job-index", "0"))
    index = labels.get("batch.kubernetes.io/job-completion-index", "0")
    return f"{name}-{index}" if job == "0" else f"{name}-{job}-{index}"


def name_of(pod: Mapping[str, Any]) -> str:
    """Name of a pod."""
    return str(mapping(pod, "metadata").get("name", ""))


def job_restarts(pod: Mapping[str, Any]) -> int:
    """How often JobSet had restarted all ranks of the job before it created this pod."""
    return count_of(mapping(pod, "metadata", "labels").get("jobset.sigs.k8s.io/restart-attempt")) or 0


def training_container(pod: Mapping[str, Any]) -> str:
    """The container that trains: ``node`` in the runtimes that Trainer ships, else the first that is not a sidecar."""
    found = mappings(pod, "spec", "containers") or mappings(pod, "status", "containerStatuses")
    names = [str(container.get("name", "")) for container in found]
    step = mapping(pod, "metadata", "labels").get("jobset.sigs.k8s.io/replicatedjob-name", "")
    return next((name for name in ("node", str(step)) if name in names), names[0] if names else "")


def sidecars_of(pod: Mapping[str, Any]) -> set[str]:
    """Names of the sidecars: init containers that keep running."""
    found = mappings(pod, "spec", "initContainers")
    return {str(container.get("name", "")) for container in found if container.get("restartPolicy") == "Always"}


def has_trained(pod: Mapping[str, Any]) -> bool:
    """Whether the training container of a pod has ever been running."""
    name = training_container(pod)
    found = [each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == name]
    began = any(
        mapping(each, state, kind).get("startedAt")
        for each in found
        for state, kind in (("state", "running"), ("state", "terminated"), ("lastState", "terminated"))
    )
    return began and not rank_of(pod).startswith(INITIALIZERS)
