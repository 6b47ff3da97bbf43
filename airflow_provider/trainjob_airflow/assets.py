"""Airflow's assets: what events of a task's outlets say, and the partition that a run is for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator, Context

    from trainjob import TrainJobSpec

_LABEL, _VARIABLE = "airflow.apache.org/partition-key", "AIRFLOW_PARTITION_KEY"


def announce(context: Context, operator: BaseOperator, told: Mapping[str, Any]) -> None:
    """Let the event of each asset among the outlets say what came of the job.

    Its extra gets ``trainjob`` (``namespace/name``), ``uid``, ``metrics``, and each of the job's outputs by its name:
    of an export ``uri``, ``digest``, ``version``. What an author has put there already stays.

    Args:
        context: Of the task.
        operator: Whose outlets.
        told: What its task returns.
    """
    from airflow.providers.common.compat.sdk import Asset

    extra = {
        **{name: value for name, value in told["outputs"].items() if name != "name"},
        "trainjob": f"{told['namespace']}/{told['name']}",
        "uid": told["uid"],
        "metrics": dict(told["metrics"]),
    }
    for outlet in operator.outlets or []:
        if isinstance(outlet, Asset):
            event = context["outlet_events"][outlet]
            event.extra = extra | event.extra


def with_partition(spec: TrainJobSpec, context: Context | None) -> TrainJobSpec:
    """The spec with the partition key of the run (Airflow 3.2) as a label and for the nodes, where there is one."""
    key = context.get("partition_key") if context else None
    if not key:
        return spec
    label = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(key))[:63].strip("-_.")
    labels = {_LABEL: label} if label else {}
    return spec.model_copy(update={"labels": labels | spec.labels, "env": {_VARIABLE: str(key)} | spec.env})
