"""Airflow's metrics of jobs, with the names ``trainjob.*``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any


def stats() -> Any:
    """Airflow's `Stats`, which DAG files need not import."""
    from airflow.providers.common.compat.sdk import Stats

    return Stats


def tags_of(ti: Any) -> dict[str, str]:
    """Tags of the metrics of a task instance."""
    return {"dag_id": ti.dag_id, "task_id": ti.task_id}


def send_stragglers(ti: Any, found: Sequence[Mapping[str, Any]]) -> None:
    """Count the ranks of a job that were slower than the others, with their nodes as the tag ``node``.

    Args:
        ti: The task instance.
        found: ``stragglers`` of a result.
    """
    for each in found:
        stats().incr("trainjob.stragglers", tags=tags_of(ti) | {"node": each["node"]})


def send_goodput(ti: Any, spent: Mapping[str, Any]) -> None:
    """Send how the time of a job was spent; nothing if it is unknown.

    Args:
        ti: The task instance.
        spent: ``goodput`` of a result or an error.
    """
    if spent:
        stats().gauge("trainjob.goodput", spent["ratio"], tags=tags_of(ti))
        for activity, seconds in spent["seconds"].items():
            if seconds:
                stats().timing(f"trainjob.activity.{activity}", timedelta(seconds=seconds), tags=tags_of(ti))
