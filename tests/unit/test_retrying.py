"""The header Retry-After."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from trainjob import retrying

PAST = format_datetime(datetime.now(UTC) - timedelta(days=1), usegmt=True)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("7", 7), (" 0 ", 0), pytest.param(PAST, 0, id="yesterday"), ("Wed, 21 Oct 2015 07:28:00 -0000", 0)],
)
def test_seconds_and_dates(header: str, seconds: float) -> None:
    assert retrying.seconds(header) == seconds


def test_a_date_to_come() -> None:
    found = retrying.seconds(format_datetime(datetime.now(UTC) + timedelta(seconds=60), usegmt=True))
    assert found is not None
    assert 50 < found <= 60


@pytest.mark.parametrize("header", [None, "", "soon", "-5", "\N{SUPERSCRIPT TWO}", "Wed, 99 Oct", "1 Jan 99999999999"])
def test_what_says_nothing(header: str | None) -> None:
    assert retrying.seconds(header) is None
