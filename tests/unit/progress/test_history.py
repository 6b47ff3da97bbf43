"""Metrics over time, and the remaining time derived from the progress."""

from __future__ import annotations

import base64
import json
import math
import subprocess
import sys
import time
import zlib
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.unit.progress.reports import written

from trainjob import progress
from trainjob.progress import Report, calls, flush, read, report, reporter, reporting
from trainjob.progress.reading import history_of
from trainjob.progress.reporter import Reporter

pytestmark = pytest.mark.usefixtures("log")


def test_history_has_step_and_time_of_each_value(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = float(round(time.time()) + 1000)  # a whole second: what is rounded cannot fall on either side
    report(metrics={"early": 1})
    report(metrics={"early": 2})
    monkeypatch.setattr("trainjob.progress.reporter.time.time", lambda: now)
    report(step=10, metrics={"loss": 0.5, "phase": "warm-up", "ok": True, "bad": math.nan})
    report(metrics={"accuracy": 1})
    report(step=30, metrics={"loss": 0.25, "bad": 2.0})
    history = written(log).history
    early = history.pop("early")
    assert [(step, value) for step, _, value in early] == [(1, 1.0), (2, 2.0)], "the number of the call is the step"
    assert {name: [(step, value) for step, _, value in points] for name, points in history.items()} == {
        "loss": [(10, 0.5), (30, 0.25)],
        "accuracy": [(10, 1.0)],
        "bad": [(30, 2.0)],
    }
    assert {moment for points in history.values() for _, moment, _ in points} == {now}


def test_a_long_training_keeps_first_last_lowest_and_highest_within_the_message(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = count(1_800_000_000)  # steps of the same length: the points are chosen by time
    monkeypatch.setattr("trainjob.progress.reporter.time.time", lambda: float(next(moments)))
    values = [2 / (1 + i / 150) + 0.01 * math.sin(i * 7919) for i in range(6_000)]
    values[2_001], values[4_003] = 9.5, -1.5
    for step, value in enumerate(values):
        report(step=step, metrics={"loss": value, "rate": 1 - step / 6_000, "same": 1.0})
    report(outputs={"model": "s3://models/digits/7"})
    found = written(log)
    assert sum(map(len, found.history.values())) <= 256
    loss = found.history["loss"]
    assert len(loss) >= 60, "enough points for a curve"
    assert {0: pytest.approx(2.0), 2_001: 9.5, 4_003: -1.5}.items() <= {step: value for step, _, value in loss}.items()
    assert loss[-1][0] == 5_999
    assert loss[-1][2] == pytest.approx(values[-1], rel=1e-5)
    # Evenly spaced: no part of the training is without points.
    steps = [step for step, _, _ in loss]
    assert max(b - a for a, b in pairwise(steps)) < 6_000 / 15


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=600),
    metrics=st.integers(1, 80),
)
def test_limits_hold_for_any_values(log: Path, values: list[float], metrics: int) -> None:
    reporting._reporter = Reporter(calls.warn_once)
    for step, value in enumerate(values):
        report(step=step, metrics={"m": value})
    report(step=len(values), metrics={f"n{i}": i for i in range(metrics - 1)})
    history = written(log).history
    assert sum(map(len, history.values())) <= 256
    for points in history.values():
        assert [step for step, _, _ in points] == sorted({step for step, _, _ in points})
    if metrics <= 20:
        rounded = [float(f"{value:.6g}") for value in values]
        kept = [value for _, _, value in history["m"]]
        assert (kept[0], kept[-1], min(kept), max(kept)) == (rounded[0], rounded[-1], min(rounded), max(rounded))


def test_other_fields_have_priority_over_the_history(log: Path) -> None:
    report(metrics={f"m{i}": i for i in range(60)})
    first = written(log)
    history = len(json.loads(log.read_text())["history"])
    report(outputs={"text": "x" * (4096 - log.stat().st_size + history // 2)})
    assert written(log).metrics == first.metrics
    assert 0 < len(written(log).history) < 60
    progress.merge("returned", "y" * (history // 4))
    later = written(log)
    assert (later.metrics, later.returned) == (first.metrics, "y" * (history // 4))
    assert len(later.history) <= 1


def test_a_full_message_is_not_thinned_at_each_report(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thinning most points takes 20 ms, and a training may report 1,000 times per second."""
    calls: list[int] = []
    fitting = reporter.History._fitting

    def counted(self: reporter.History, room: int) -> str:
        calls.append(room)
        return fitting(self, room)

    monkeypatch.setattr(reporter, "_INTERVAL", math.inf)
    monkeypatch.setattr(reporter.History, "_fitting", counted)
    report(metrics={f"m{i}": i for i in range(90)})
    for i in range(200):
        report(metrics={"m0": 1 / (i + 1), "m1": 10 ** (i % 60)}, outputs={"note": "x" * (i * 9)})
    assert len(calls) == 1
    assert written(log).outputs == {"note": "x" * 199 * 9}
    assert len(calls) == 2


def test_memory_of_the_history_is_limited() -> None:
    for i in range(5_000):
        report(metrics={"loss": math.sin(i)})
    assert reporting._reporter is not None
    assert len(reporting._reporter._history._points["loss"]) <= 512
    speed = reporter.Speed()
    samples = []
    for i in range(50_000):
        speed.add(i * 0.01, i / 1000)
        samples.append(len(speed._samples))
    assert max(samples) <= 128
    assert speed.remaining(500.0) == pytest.approx(500, abs=2)


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "1/0", "progress.flush(); os._exit(0)"])
def test_the_last_values_are_written_at_the_end(log: Path, end: str) -> None:
    """The history is updated once per second; these 40 reports take less."""
    report(metrics={"loss": 1})
    before = log.read_bytes()
    subprocess.run([sys.executable, "-c", "from trainjob import progress"], check=True, timeout=60)
    assert log.read_bytes() == before, "a process without reports"
    code = f"""
import os
from trainjob import progress
for step in range(40):
    progress.report(step=step, metrics={{"loss": step}})
{end}
"""
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, stderr=subprocess.DEVNULL)
    found = read(log.read_text())
    assert found is not None
    assert found.history["loss"][-1][::2] == (39, 39.0)


# --- reading -------------------------------------------------------------------------------------------------------


def test_plain_json_history_is_read() -> None:
    text = '{"trainjob": 1, "history": {"loss": [[100, 1769860800.0, 0.9], [400, 1769860860, 1]]}}'
    found = read(text)
    assert found is not None
    assert found.history == {"loss": [(100, 1769860800.0, 0.9), (400, 1769860860.0, 1.0)]}
    assert history_of(json.loads(json.dumps(found.history))) == found.history


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


@pytest.mark.parametrize(
    "value",
    [
        *(5, True, None, [], "", "no base64", "eA==", {"a": 5}, {"a": [5]}, {"a": [[1, 2]]}, {"a": [[1, 2, 3, 4]]}),
        *({"a": [["1", 2, 3]]}, {"a": [[1, True, 3]]}, {"a": [[1.5, 2, 3]]}, {"a": [[1, 2, None]]}, {"a": {"b": 1}}),
        *({"": [[1, 2, 3]]}, {"x" * 65: [[1, 2, 3]]}, {"a": [[1, 2, 10**400]]}, {"a": [[0, 0, 0]] * 257}),
        *(packed(5), packed({"a": 5}), packed({"a": [[1], [2], []]}), packed({"a": [["x"], [2], [3]]})),
        *(packed({"a": [[1], [2], [None]]}), packed({"a": [[0] * 257] * 3})),
        base64.b64encode(zlib.compress(b"[" * 10**7)).decode(),
    ],
    ids=lambda value: str(value)[:20],
)
def test_an_invalid_history_counts_as_absent(value: Any) -> None:
    assert history_of(value) == {}
    found = read(json.dumps({"trainjob": 1, "progressPercentage": 5, "history": value}))
    assert found == Report(progress=5)


# --- the remaining time --------------------------------------------------------------------------------------------


def remaining(samples: list[tuple[float, float]], now: float | None = None) -> int | None:
    speed = reporter.Speed()
    for moment, done in samples:
        speed.add(moment, done)
    return speed.remaining(samples[-1][0] if now is None else now)


def test_remaining_time_depends_on_the_speed() -> None:
    assert remaining([(100, 10)]) is None, "one report gives no speed"
    assert remaining([(100, 10), (110, 10)]) is None
    assert remaining([(100, 0), (110, 10)]) == 90
    assert remaining([(100, 0), (110, 10)], now=130) == 70, "time without reports counts"
    assert remaining([(100, 0), (110, 10)], now=500) == 0
    assert remaining([(100, 60), (110, 61)]) == 390, "after a resume from a checkpoint"
    assert remaining([(100, 90), (200, 100)]) == 0
    assert remaining([(100, 0), (1100, 90), (1101, 0), (1111, 1)]) == 990, "another part of the work"
    assert remaining([(0, 0), (1, 1e-12)]) == 2**31 - 1


def test_recent_speed_has_more_weight() -> None:
    """100 s for the first 10 %, as with a cold cache, then 1 s for each percent."""
    samples = [(float(10 * i), float(i)) for i in range(10)] + [(100.0 + i, 10.0 + i) for i in range(61)]
    assert remaining(samples) == pytest.approx(30, rel=0.5)
    samples += [(160.0 + i, 70.0 + i / 10) for i in range(200)]
    assert remaining(samples) == pytest.approx(101, rel=0.1)


def test_remaining_time_is_derived_from_progress(log: Path) -> None:
    report(step=1, total_steps=10)
    assert written(log) == Report(progress=10, updated=written(log).updated, details={"step": 1})
    report(step=2)
    assert written(log).progress == 20
    assert written(log).remaining_seconds in range(60), "two reports in quick succession"
    assert written(log).details == {"step": 2, "estimate": "speed"}
    report(progress=55, step=3)
    assert written(log).progress == 55, "explicit progress has priority"
    report(remaining_seconds=4000)
    report(step=9)
    assert (written(log).progress, written(log).remaining_seconds) == (90, 4000)
    assert written(log).details == {"step": 9}, "the script's own estimate"
    report(step=11)
    assert written(log).progress == 100, "at most"


def test_checkpoints_have_a_history(log: Path) -> None:
    for step in range(1, 7):
        report(step=step, metrics={"loss": 1 / step}, checkpoint=step % 3 == 0)
    flush()
    found = written(log)
    assert found.details == {"step": 6, "checkpoint": 6}
    assert [(step, value) for step, _, value in found.history["trainjob.checkpoint"]] == [(3, 3.0), (6, 6.0)]
    assert found.metrics.keys() == {"loss"}


def test_details_are_left_out_where_the_outputs_need_the_space(log: Path) -> None:
    report(step=5, outputs={"model": "x" * 3950})
    assert written(log).outputs == {"model": "x" * 3950}
    report(outputs={"model": "x" * 10})
    assert written(log).details == {"step": 5}
