"""`Backoff` and its presets, with a fake clock; the header Retry-After; reads that are resumed."""

from __future__ import annotations

import ast
import math
import re
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from trainjob._support import retrying
from trainjob._support.retrying import Backoff, Preset
from trainjob.data import ranges
from trainjob.data.stores.oci import repository
from trainjob.data.stores.oci.client import Interrupted
from trainjob.errors import StoreUnavailable

PRESETS: dict[str, Preset] = {
    name: value for name, value in vars(retrying).items() if isinstance(value, partial) and name[0] != "_"
}


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(retrying, "time", made)
    return made


def outage(backoff: Backoff, clock: Clock, *, attempt: float = 0.0, retry_after: float | None = None) -> list[float]:
    """The pauses during an endless outage; each attempt takes `attempt` seconds."""
    pauses: list[float] = []
    clock.now += attempt
    while not backoff.failure():
        pauses.append(backoff.pause(retry_after))
        clock.now += pauses[-1] + attempt
        assert len(pauses) < 100_000
    return pauses


# --- limits


def test_either_limit_ends_the_retries(clock: Clock) -> None:
    assert len(outage(Backoff(failures=4, seconds=1e6), clock)) == 3
    began = clock.now
    outage(Backoff(failures=1e6, seconds=60), clock, attempt=1)
    assert 60 <= clock.now - began <= 60 + 20 + 1


def test_both_requires_both_limits(clock: Clock) -> None:
    began = clock.now
    assert len(outage(Backoff(failures=3, seconds=600, both=True), clock, attempt=1)) > 3
    assert 600 <= clock.now - began <= 600 + 20 + 2
    assert len(outage(Backoff(failures=50, seconds=1, both=True), clock, attempt=1)) == 49


@pytest.mark.parametrize("both", [True, False])
def test_success_resets_failures_and_time_but_not_the_total(clock: Clock, both: bool) -> None:
    backoff = Backoff(failures=2, seconds=10, both=both, total=101)
    for _ in range(100):
        assert not backoff.failure()
        clock.now += 9
        backoff.success()
    assert (backoff.count, backoff.count_total) == (0, 100)
    assert backoff.failure()


def test_idle_time_counts_for_a_transfer_but_not_for_a_watch(clock: Clock) -> None:
    transfer, watch = Backoff(failures=9, seconds=60), Backoff(failures=1, seconds=60, both=True)
    clock.now += 3600
    assert transfer.failure()
    assert not watch.failure()


def test_retry_after_does_not_count_towards_the_time_limit(clock: Clock) -> None:
    assert len(outage(Backoff(failures=5, seconds=60, longest_retry_after=3600), clock, retry_after=3600)) == 4


def test_an_answer_resets_the_time_but_not_the_failures(clock: Clock) -> None:
    backoff = Backoff(failures=1, seconds=10, both=True)
    assert not backoff.failure()
    clock.now += 100
    backoff.answered()
    assert not backoff.failure()
    assert backoff.count == 2
    clock.now += 10
    assert backoff.failure()


# --- pauses


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(0, 2000),
    first=st.floats(0.001, 10),
    longest=st.floats(0.001, 100),
    asked=st.none() | st.floats(-10, 1e9),
    cap=st.floats(0, 4000),
)
def test_pauses_are_within_their_limits(
    clock: Clock, count: int, first: float, longest: float, asked: float | None, cap: float
) -> None:
    backoff = Backoff(failures=math.inf, first_pause=first, longest_pause=longest, longest_retry_after=cap)
    backoff.count = count
    requested = min(cap, max(0.0, asked or 0.0))
    bound = min(longest, first * 2 ** min(max(count - 1, 0), 40))
    assert requested < backoff.pause(asked) <= (requested + bound) * 1.000001


def test_pauses_are_spread_evenly() -> None:
    backoff = Backoff(failures=math.inf, first_pause=8)
    backoff.failure()
    pauses = [backoff.pause() for _ in range(2000)]
    for eighth in range(8):
        assert sum(eighth <= pause < eighth + 1 for pause in pauses) > 100, eighth
    assert min(pauses) >= 0.4


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(attempt=st.floats(0, 40), asked=st.none() | st.floats(0, 1e6))
def test_every_preset_has_a_limit(clock: Clock, name: str, attempt: float, asked: float | None) -> None:
    backoff = PRESETS[name]()
    began = clock.now
    pauses = outage(backoff, clock, attempt=attempt, retry_after=asked)
    longest = backoff.longest_pause + min(asked or 0.0, backoff.longest_retry_after)
    assert all(pause <= longest for pause in pauses)
    if backoff.both:
        most = max(backoff.failures * (attempt + longest), backoff.seconds + longest + 2 * attempt)
    else:
        most = min(backoff.failures, 1e6) * (attempt + longest)
        most = min(most, backoff.seconds + (len(pauses) + 1) * (asked or 0.0) + longest + attempt)
    assert clock.now - began <= most + 1e-6


def test_documented_table_matches_the_presets() -> None:
    rows = re.findall(r"^([A-Z_]+) +(.+?)  +(.+?)  +(.+?)  +.+$", retrying.__doc__ or "", re.MULTILINE)
    assert {row[0] for row in rows} == PRESETS.keys()
    for name, limits, pauses, header in rows:
        made = PRESETS[name]()
        numbers = [float(number) for number in re.findall(r"[\d.]+", limits)]
        expected = [made.failures, *([made.total] if made.total < math.inf else []), made.seconds]
        assert numbers == [each for each in expected if 0 < each < math.inf], name
        first, longest = map(float, pauses.split(" to "))
        assert first == made.first_pause, name
        doublings = made.failures - 2 if not made.both else math.inf
        assert longest == min(made.longest_pause, made.first_pause * 2**doublings), name
        assert [float(each) for each in re.findall(r"\d+", header)] in ([made.longest_retry_after], []), name


# --- retry


class Busy(Exception):
    """An error with the server's Retry-After."""

    def __init__(self, retry_after: float | None) -> None:
        super().__init__("busy")
        self.retry_after = retry_after


def test_retry_repeats_until_success_or_its_limit(clock: Clock) -> None:
    answers: list[Busy | str] = [Busy(None), Busy(7), "done", Busy(1), Busy(2), last := Busy(3)]

    def action() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Busy):
            raise answer
        return answer

    began = clock.now
    assert retrying.retry(action, Busy, Backoff(failures=3)) == "done"
    assert 7 < clock.now - began <= 7 + 1 + 2
    with pytest.raises(Busy) as caught:
        retrying.retry(action, Busy, Backoff(failures=3))
    assert caught.value is last
    with pytest.raises(IndexError):  # another error is raised at once
        retrying.retry(action, Busy, Backoff(failures=3))


def test_module_imports_only_the_standard_library() -> None:
    assert retrying.__file__ is not None
    tree = ast.parse(Path(retrying.__file__).read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


# --- Retry-After


def date(days: float) -> str:
    return format_datetime(datetime.now(UTC) + timedelta(days=days), usegmt=True)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        *(("7", 7), (" 0 ", 0), ("Wed, 21 Oct 2015 07:28:00 -0000", 0)),
        pytest.param(date(-1), 0, id="yesterday"),
        pytest.param(date(1), pytest.approx(86400, abs=3600), id="tomorrow"),
    ],
)
def test_seconds_and_dates_are_parsed(header: str, seconds: float) -> None:
    assert retrying.seconds(header) == seconds


@pytest.mark.parametrize("header", [None, "", "soon", "-5", "\N{SUPERSCRIPT TWO}", "Wed, 99 Oct", "1 Jan 99999999999"])
def test_invalid_retry_after_is_ignored(header: str | None) -> None:
    assert retrying.seconds(header) is None


def cut(start: int, end: int, error: type[Exception]) -> Iterator[bytes]:
    """Half of the bytes, and a cut."""
    yield b"x" * max(1, (end - start) // 2)
    if end - start > 1:
        raise error("cut")


def of_a_file() -> Iterator[bytes]:
    store: Any = SimpleNamespace(read=lambda *_, start, **__: cut(start, 8, StoreUnavailable), location="s3://b/")
    no_waits: Any = SimpleNamespace(wait=lambda _: False)
    return ranges.resumed(store, "f", 0, 8, "etag", no_waits)


def of_a_blob() -> Iterator[bytes]:
    made: Any = object.__new__(repository.Repository)
    made._where = "oci://r/m"
    made._blob = lambda _, start, end: cut(start, end, Interrupted)
    return repository.Repository.blob(made, "sha256:" + "0" * 64, 8)


@pytest.mark.parametrize("read", [of_a_file, of_a_blob])
def test_a_slow_read_is_resumed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, read: Callable[[], Iterator[bytes]]
) -> None:
    def paused(backoff: Backoff, *_: object) -> None:
        if backoff.failure():
            raise StoreUnavailable("given up")

    monkeypatch.setattr("trainjob.data.stores.oci.repository.pause", paused)
    got = 0
    for chunk in read():
        got += len(chunk)
        clock.now += 130
    assert got == 8
