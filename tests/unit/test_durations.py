"""Durations: the same texts in the command line, in a spec and in the options of a waiter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import click
import pytest
from hypothesis import example, given, strategies as st

from trainjob._spec import TrainJobSpec
from trainjob._spec.trainjob import LONGEST_STALL, SHORTEST_STALL
from trainjob._support.durations import iso_duration, parse_duration
from trainjob.cli.cluster import keep_for
from trainjob.cli.options import duration
from trainjob.errors import InvalidSpec
from trainjob.job import LONGEST_UNATTENDED, SHORTEST_UNATTENDED
from trainjob.wait_options import WaitOptions

NUMBERS = st.one_of(st.just(""), st.integers(0, 99).map(str), st.decimals(0, 9, places=2).map(str))
TEXTS = st.one_of(
    st.tuples(NUMBERS, NUMBERS, NUMBERS).map("{0[0]}h{0[1]}m{0[2]}s".format),
    st.tuples(NUMBERS, NUMBERS, NUMBERS).map("P{0[0]}DT{0[1]}H{0[2]}M".format),
    st.floats(0, 1e6).map("{:.3f}".format),
    st.text("0123456789.PTDHMSWYdhms-+:, ", max_size=12),
)
READERS: list[tuple[Callable[[str], object], timedelta, timedelta]] = [
    (duration, timedelta(0), timedelta.max),
    (keep_for, timedelta(hours=1), timedelta.max),
    (lambda text: WaitOptions.parse({"run_timeout": text}).run_timeout, timedelta(0), timedelta.max),
    (lambda text: spec(stall_timeout=text).stall_timeout, SHORTEST_STALL, LONGEST_STALL),
    (lambda text: spec(unattended_after=text).unattended_after, SHORTEST_UNATTENDED, LONGEST_UNATTENDED),
]


def spec(**fields: object) -> TrainJobSpec:
    return TrainJobSpec.parse({"runtime": "r", **fields})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("90", 90), ("90s", 90), ("15m", 900), ("1h30m", 5400), ("2d", 172800), ("0.5s", 0.5), ("1d1h1m1s", 90061)],
        *[("P30D", 2592000), ("PT2H", 7200), ("P1DT12H", 129600), ("PT1.5S", 1.5), (" PT1H1M1S ", 3661)],
    ],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


INVALID = ["", "0", "0s", "-5", "5 minutes", "m", "1m1h", "inf", "9999999999d", "9" * 400, "٣s", "1e3", "0.0000001s"]
INVALID += ["P", "PT", "P1DT", "P1M", "P1Y", "P1W", "PT1H1D", "-P1D", "PT0S", "1D", "pt2h", "00:10:00", "1 day"]


@pytest.mark.parametrize("text", INVALID)
def test_invalid_durations_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration such as 90s, 15m, 1h30m, 2d or PT2H$"):
        parse_duration(text)
    with pytest.raises(InvalidSpec, match=r"must be a number of seconds, or a duration such as .*, not text"):
        spec(unattended_after=text)


@given(st.integers(1, timedelta.max.days * 86400))
def test_a_written_duration_is_read_back(seconds: int) -> None:
    assert parse_duration(iso_duration(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@given(st.timedeltas(SHORTEST_UNATTENDED, LONGEST_UNATTENDED))
@example(LONGEST_UNATTENDED)
def test_a_spec_that_was_written_as_json_is_read_back(after: timedelta) -> None:
    written = spec(unattended_after=after)
    assert TrainJobSpec.parse(written.model_dump(mode="json", exclude_defaults=True)) == written


@given(TEXTS)
def test_all_readers_accept_the_same_texts(text: str) -> None:
    expected = timedelta(-1)
    with suppress(ValueError):
        expected = parse_duration(text)
    for read, shortest, longest in READERS:
        found = None
        with suppress(ValueError, InvalidSpec, click.BadParameter):
            found = read(text)
        assert found == (expected if shortest <= expected <= longest else None)
