"""Numbers of documents: JSON has neither NaN nor infinity, and no chart shows more than seven digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def finite_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with NaN and infinity as text: JSON has neither."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def finite(value: object) -> float | None:
    """The value if it is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can hold
        return None


def shortened(value: object) -> float | None:
    """The value with seven digits, which no chart can show; None if it is no finite number."""
    number = finite(value)
    if number is None or isinstance(number, int):
        return number
    short = float(f"{number:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
