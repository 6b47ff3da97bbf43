"""A metric over time as one line of text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trainjob._support.numbers import is_finite

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#@"
"""For terminals whose encoding lacks the blocks."""


def levels_of(encoding: str | None) -> str:
    """The characters of a sparkline, lowest first, in an `encoding`."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return ASCII
    return BLOCKS


def sparkline(points: Sequence[Sequence[float | None]], width: int, levels: str = BLOCKS) -> str:
    """A line of at most `width` characters from the first to the last point; empty for fewer than two points.

    Each character stands for the same time and shows the mean of its points, or the latest value before them: a metric
    that does not change is not reported again. Points whose time or value is no finite number are left out.

    Args:
        points: ``[step, Unix time, value]``, oldest first.
        width: Characters.
        levels: Characters, lowest first.
    """
    kept = [(time, value) for _, time, value in points if is_finite(time) and is_finite(value)]
    if len(kept) < 2 or width < 1:
        return ""
    kept = [(time / 2, value / 2) for time, value in kept]  # the difference of two floats can be infinite
    start, end = kept[0][0], max(time for time, _ in kept)
    if end <= start:  # in one moment: one character for each point
        start, end, kept = 0.0, len(kept) - 1.0, [(float(i), value) for i, (_, value) in enumerate(kept)]
        width = min(width, len(kept))
    columns: list[list[float]] = [[] for _ in range(width)]
    for time, value in kept:
        part = min(1.0, max(0.0, (time - start) / (end - start)))
        columns[min(width - 1, int(part * width))].append(value)
    heights, last = [], kept[0][1]
    for column in columns:
        heights.append(math.fsum(value / len(column) for value in column) if column else last)
        last = column[-1] if column else last
    low, high = min(heights), max(heights)
    top = len(levels) - 1
    if high <= low:
        return levels[top // 2] * width
    return "".join(levels[round((height - low) / (high - low) * top)] for height in heights)
