"""Airflow's assets: the events of a task's outlets, and the partition key of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator, Context

    from trainjob import TrainJobSpec

_LABEL, _VARIABLE = "airflow.apache.org/partition-key", "AIRFLOW_PARTITION_KEY"


def set_extra(context: Context, operator: BaseOperator, result: Mapping[str, Any]) -> None:
    """Add the job's result to the event of each asset among the outlets.

    The event's extra gets ``trainjob`` (``namespace/name``), ``uid``, ``metrics`` and each output of the job under its
    name: for an export ``uri``, ``digest``, ``version``. Keys that the DAG author has set are kept.

    Args:
        context: Of the task.
        operator: The operator with the outlets.
        result: What `execute` returns.
    """
    from airflow.providers.common.compat.sdk import Asset

    extra = {
        **{name: value for name, value in result["outputs"].items() if name != "name"},
        "trainjob": f"{result['namespace']}/{result['name']}",
        "uid": result["uid"],
        "metrics": dict(result["metrics"]),
    }
    for outlet in operator.outlets or []:
        if isinstance(outlet, Asset):
            event = context["outlet_events"][outlet]
            event.extra = extra | event.extra


def with_partition(spec: TrainJobSpec, context: Context | None) -> TrainJobSpec:
    """Add the partition key of the run (Airflow 3.2), if it has one, as a label and in the environment of the nodes."""
    key = context.get("partition_key") if context else None
    if not key:
        return spec
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(key))[:63].strip("-_.")
    labels = {_LABEL: label} if label else {}
    return spec.model_copy(update={"labels": labels | spec.labels, "env": {_VARIABLE: str(key)} | spec.env})
