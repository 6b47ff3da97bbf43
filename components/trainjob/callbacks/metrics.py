"""Converts the metrics of a library to those of `trainjob.progress`."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from trainjob.progress.message import MAX_METRICS, MAX_NAME


def numbers(logged: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that `trainjob.progress.report` accepts; others are dropped, so that no training fails here."""
    found = {}
    for name, value in islice(logged.items(), MAX_METRICS):
        try:
            found[str(name)[:MAX_NAME] or "_"] = float(value)
        except (TypeError, ValueError):  # text, or a tensor of several numbers
            continue
    return found
