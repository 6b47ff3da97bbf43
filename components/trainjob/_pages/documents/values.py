"""Numbers of documents: no chart shows more than seven digits."""

from __future__ import annotations

from trainjob._support.numbers import is_finite


def finite(value: object) -> float | None:
    """The value if it is a finite number."""
    return value if is_finite(value) else None


def shortened(value: object) -> float | None:
    """The value with seven digits, which no chart can show; None if it is no finite number."""
    number = finite(value)
    if number is None or isinstance(number, int):
        return number
    short = float(f"{number:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
