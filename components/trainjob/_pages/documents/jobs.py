"""The documents of several jobs: the list of a namespace, and the comparison of the trainings of a workflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from trainjob._backends.base import TrainJob
from trainjob._goodput.history import thinned
from trainjob._manifest.workflow_labels import title_of
from trainjob._pages.documents import MAX_POINTS, VERSION
from trainjob._pages.documents.attempts import with_segments
from trainjob._support.display import iso, short_text
from trainjob._support.kube_objects import mapping
from trainjob._support.numbers import json_values
from trainjob.job import KEY, JobRef
from trainjob.status import observe


def list_document(
    jobs: Iterable[TrainJob], namespace: str, taken: datetime, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """The document of the jobs of a namespace, the newest first, as they were at `taken`, by `Backend.now`."""
    shown = [listed(each) for each in jobs]
    return {
        "version": VERSION,
        "kind": "list",
        "taken": iso(taken),
        "notes": list(notes),
        "namespace": namespace,
        "jobs": sorted(shown, key=lambda job: job["created"] or "", reverse=True),
    }


def listed(trainjob: TrainJob) -> dict[str, Any]:
    """One job of a list, from its object alone."""
    ref, now = JobRef.of(trainjob), observe(trainjob)
    return {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "attempt": ref.attempt,
        "key": short_text(mapping(trainjob, "metadata", "annotations").get(KEY)),
        "phase": str(now.phase),
        "message": short_text(now.message),
        "created": iso(now.created),
        "finished": iso(now.finished),
        "progress": now.progress,
        "remaining_seconds": now.remaining_seconds,
        "metrics": json_values({name: each for name, each in now.metrics.items() if isinstance(each, int | float)}),
        "workflow": short_text(title_of(trainjob)),
        "workflow_href": "",
        "href": "",
    }


def workflow_document(title: str, trainings: Iterable[Mapping[str, Any]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The document that compares the trainings of one run of a workflow."""
    shown = [dict(each) | {"logs": [], "events": [], "compare": []} for each in trainings]
    for each in shown:
        each["history"] = thinned(each["history"], MAX_POINTS // len(shown))
        each["attempts"] = [
            attempt | {"goodput": attempt.get("goodput") and with_segments(attempt["goodput"], 0)}
            for attempt in each["attempts"]
        ]
    return {
        "version": VERSION,
        "kind": "workflow",
        "taken": iso(datetime.now(UTC)),
        "notes": list(notes),
        "title": short_text(title),
        "trainings": shown,
    }
