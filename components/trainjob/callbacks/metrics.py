"""Converts the metrics of a library to those of `trainjob.progress`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any


def numbers(logged: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers. Others are dropped without a line: libraries log text and tables among them."""
    found = {}
    for name, value in logged.items():
        with suppress(Exception):  # text, or a tensor of several numbers, for which PyTorch raises a RuntimeError
            found[str(name)] = float(value)
    return found
