"""Questions about the JSON objects of the fake API server. Independent of the product, which answers its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

Object = dict[str, Any]
Place = tuple[str, str]
"""Namespace and name of an object."""

NAMESPACE = "default"
QUEUE = "kueue.x-k8s.io/queue-name"
JOBSET = "jobset.sigs.k8s.io/jobset-name"
OWNER = "simulation/trainjob-uid"
"""Annotation of a pod: UID of its TrainJob. No part of the product reads it."""


def place_of(item: Mapping[str, Any]) -> Place:
    return item["metadata"]["namespace"], item["metadata"]["name"]


def conditions(job: Mapping[str, Any]) -> dict[str, Object]:
    return {each["type"]: each for each in job.get("status", {}).get("conditions", [])}


def has_condition(job: Mapping[str, Any], kind: str) -> bool:
    return any(
        each["type"] == kind and each["status"] == "True" for each in job.get("status", {}).get("conditions", ())
    )


def with_condition(job: Object, kind: str, value: str, reason: str, now: str) -> Object:
    """The job with that condition; the same object if it has it already."""
    present = conditions(job).get(kind)
    if present is not None and present["status"] == value:
        return job
    kept = [each for each in job.get("status", {}).get("conditions", []) if each["type"] != kind]
    made = {"type": kind, "status": value, "reason": reason, "message": reason, "lastTransitionTime": now}
    return {**job, "status": {**job.get("status", {}), "conditions": [*kept, made]}}


def without_condition(job: Object, kind: str) -> Object:
    kept = [each for each in job.get("status", {}).get("conditions", []) if each["type"] != kind]
    return {**job, "status": {**job.get("status", {}), "conditions": kept}}


def is_ended(job: Mapping[str, Any]) -> bool:
    return has_condition(job, "Complete") or has_condition(job, "Failed")


def is_deleting(job: Mapping[str, Any]) -> bool:
    return "deletionTimestamp" in job["metadata"]


def is_suspended(job: Mapping[str, Any]) -> bool:
    return bool(job["spec"].get("suspend"))


def is_active(job: Mapping[str, Any]) -> bool:
    """Whether the job runs or is about to run: what a person calls a running job."""
    return not is_suspended(job) and not is_deleting(job) and not is_ended(job)


def is_queued(job: Mapping[str, Any]) -> bool:
    """Whether the job waits in Kueue's queue, and will run once it is admitted."""
    return in_queue(job) and is_suspended(job) and not is_deleting(job) and not is_ended(job)


def in_queue(job: Mapping[str, Any]) -> bool:
    return QUEUE in (job["metadata"].get("labels") or {})


def annotation(item: Mapping[str, Any], name: str) -> str:
    return str((item["metadata"].get("annotations") or {}).get(f"trainjob.dev/{name}") or "")


def key_of(job: Mapping[str, Any]) -> str:
    """The key of an attempt; empty for the record of a failure and for jobs of other tools."""
    return annotation(job, "key")


def is_lost(pod: Mapping[str, Any]) -> bool:
    """Whether the node of a pod does not answer."""
    return any(each["type"] == "Ready" and each["status"] == "Unknown" for each in pod["status"].get("conditions", ()))


def merged(value: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    base = value if isinstance(value, dict) else {}
    changed = {name: merged(base.get(name), each) for name, each in patch.items()}
    return {name: each for name, each in {**base, **changed}.items() if each is not None}


Matches = Callable[[Mapping[str, Any]], bool]


@lru_cache(maxsize=10_000)
def selector(labels: str, fields: str) -> Matches:
    """A ``labelSelector`` with ``=``, ``in (…)`` and existence, and a ``fieldSelector`` with ``=`` and ``!=``."""
    sets = [
        (name, frozenset(re.split(r",\s*", text))) for name, text in re.findall(r"([^,\s]+) in \(([^)]*)\)", labels)
    ]
    terms = [term for term in re.sub(r"[^,\s]+ in \([^)]*\)", "", labels).split(",") if term]
    equal = [term.split("=", 1) for term in terms if "=" in term]
    present = [term for term in terms if "=" not in term]
    parts = [re.fullmatch(r"([^!=]+)(!?=)(.*)", term) for term in fields.split(",") if term]
    asked = [(found[1].split("."), found[2] == "=", found[3]) for found in parts if found is not None]

    def matches(item: Mapping[str, Any]) -> bool:
        given = item["metadata"].get("labels") or {}
        return (
            all(given.get(name) in values for name, values in sets)
            and all(given.get(name) == value for name, value in equal)
            and all(name in given for name in present)
            and all((_field(item, path) == value) is wanted for path, wanted, value in asked)
        )

    return matches


def _field(item: Any, path: list[str]) -> str:
    for name in path:
        item = (item or {}).get(name)
    return str(item or "")


def encode(value: object) -> bytes:
    """A value as JSON, as a server sends it."""
    return json.dumps(value, separators=(",", ":")).encode()
