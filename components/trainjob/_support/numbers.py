"""Numbers and JSON: it has neither NaN nor infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard


def is_finite(value: object) -> TypeGuard[float]:
    """Whether the value is a number that a float can hold; ``True`` and ``False`` are not numbers."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def json_values(value: Any) -> Any:
    """The value for JSON, with its parts: NaN and infinity become text, a tuple becomes a list."""
    if isinstance(value, Mapping):
        return {name: json_values(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
