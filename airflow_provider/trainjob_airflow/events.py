"""Observations in the events that triggers send to workers: JSON, since Airflow stores events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainjob import Observation


def pack(observation: Observation) -> dict[str, Any]:
    """Convert an observation to JSON values."""
    from trainjob.progress.message import text_of

    packed = {
        name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(observation).items()
    }
    # Metrics as text: NaN and infinity are not JSON, and PostgreSQL refuses them.
    return packed | {"metrics": {name: text_of(value) for name, value in observation.metrics.items()}}


def unpack(packed: Mapping[str, Any] | None) -> Observation | None:
    """Restore an observation from JSON values; None stays None."""
    from dataclasses import fields

    from trainjob import Observation, Phase
    from trainjob._support.kube_objects import parse_time
    from trainjob.progress.reading import value_of

    if packed is None:
        return None
    # Known fields only: the triggerer may run another version of this package.
    is_time = {field.name: "datetime" in str(field.type) for field in fields(Observation)}
    values: dict[str, Any] = {name: value for name, value in packed.items() if name in is_time}
    times = {name: parse_time(value) for name, value in values.items() if is_time[name]}
    metrics = {name: value_of(str(text)) for name, text in packed.get("metrics", {}).items()}
    return Observation(**values | times | {"metrics": metrics, "phase": Phase(packed["phase"])})
