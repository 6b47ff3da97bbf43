"""Numbers and JSON: it has neither NaN nor infinity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard


def count_of(text: object) -> int | None:
    """The whole number in a text that somebody else wrote: at most 18 ASCII digits; None for anything else.

    ``isdigit`` and ``isdecimal`` accept characters and lengths that `int` refuses, or other programs.
    """
    return int(text) if isinstance(text, str) and len(text) <= 18 and text.isascii() and text.isdigit() else None


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
