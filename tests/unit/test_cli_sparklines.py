from __future__ import annotations

import math
import sys

import pytest
from hypothesis import example, given, strategies as st

from trainjob.cli.sparklines import ASCII, BLOCKS, levels_of, sparkline

NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
POINTS = st.lists(st.tuples(st.none() | NUMBERS, NUMBERS, NUMBERS), max_size=60)


def points(*values: float) -> list[tuple[None, float, float]]:
    return [(None, float(i), value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ((), 10, ""),
        ((1.0,), 10, ""),
        ((0.0, 1.0), 2, "▁█"),
        ((1.0, 0.0), 0, ""),
        ((0, 1, 2, 3, 4, 5, 6, 7), 8, "▁▂▃▄▅▆▇█"),
        ((7, 6, 5, 4, 3, 2, 1, 0), 8, "█▇▆▅▄▃▂▁"),
        ((5.0, 5.0, 5.0), 3, "▄▄▄"),
        ((math.nan, 0.0, math.inf, 1.0), 2, "▁█"),
        ((0.0, 0.0, 1.0, 1.0), 2, "▁█"),
        ((-sys.float_info.max, sys.float_info.max), 2, "▁█"),
    ],
)
def test_a_sparkline(values: tuple[float, ...], width: int, expected: str) -> None:
    assert sparkline(points(*values), width) == expected


def test_a_character_without_a_report_shows_the_latest_value() -> None:
    assert sparkline([(None, 0.0, 1.0), (None, 1.0, 0.0), (None, 9.0, 1.0)], 10) == "█▁▁▁▁▁▁▁▁█"


def test_reports_of_one_moment_are_shown_in_their_order() -> None:
    assert sparkline([(None, 5.0, 0.0), (None, 5.0, 1.0)], 10) == "▁█"


@given(POINTS, st.integers(-1, 50), st.sampled_from([BLOCKS, ASCII]))
@example([(None, -5e-185, 0.0), (None, 0.0, 0.0), (None, -8e123, 0.0)], 1, BLOCKS)  # a time before the first
@example([(None, -1.7e308, 0.0), (None, 1.7e308, 1.0)], 2, BLOCKS)
@example([(None, 0.0, 0.0), (None, 5e-324, 1.0)], 2, BLOCKS)
@example([(None, 0.0, 1.7e308), (None, 1.0, 1.7e308), (None, 1.0, 1.7e308)], 1, BLOCKS)
def test_any_points(given_points: list[tuple[float | None, float, float]], width: int, levels: str) -> None:
    shown = sparkline(given_points, width, levels)
    assert len(shown) <= max(0, width)
    assert set(shown) <= set(levels)


@pytest.mark.parametrize(
    ("encoding", "levels"),
    [("utf-8", BLOCKS), ("cp437", ASCII), ("ascii", ASCII), ("iso8859-1", ASCII), (None, ASCII), ("nosuch", ASCII)],
)
def test_the_characters_follow_from_the_encoding(encoding: str | None, levels: str) -> None:
    assert levels_of(encoding) == levels
    levels.encode(encoding if encoding not in (None, "nosuch") else "ascii")
