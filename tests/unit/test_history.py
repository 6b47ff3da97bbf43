"""The history of metrics: bounded, mergeable, and without a lost extreme."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from trainjob._goodput.history import CHECKPOINT, MAX_POINTS, MetricHistory, Points, thinned
from trainjob.status import Observation, Phase


def collected(count: int, limit: int = MAX_POINTS, names: int = 1) -> tuple[MetricHistory, dict[str, list[float]]]:
    random.seed(count)
    history, values = MetricHistory(limit), dict[str, list[float]]()
    for step in range(count):
        metrics = {f"m{each}": random.random() for each in range(names)}
        history.add(1_000_000_000 + step, metrics, step)
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return history, values


@pytest.mark.parametrize(("count", "names"), [(1, 1), (2, 3), (300, 1), (10_000, 1), (3000, 7), (50, 250)])
def test_bounded_without_losing_extremes_and_ends(count: int, names: int) -> None:
    history, values = collected(count, 100, names)
    found = history.points()
    assert sum(map(len, found.values())) <= max(100, 4 * names)
    for name, points in found.items():
        assert [point[1] for point in points] == sorted(point[1] for point in points)
        assert (points[0][2], points[-1][2]) == (values[name][0], values[name][-1])
        if names == 1 or count <= 4:
            assert {min(values[name]), max(values[name])} <= {point[2] for point in points}


def test_memory_is_bounded_between_two_reads() -> None:
    history, _ = collected(20_000, 100, 2)
    assert sum(len(series) for series in history._series.values()) <= 3 * 2 * (100 + 2)


def test_the_observation_brings_step_and_checkpoint() -> None:
    history = MetricHistory()
    assert not history.observe(Observation(Phase.RUNNING), 1.0)
    assert (bool(history), history.points()) == (False, {})
    history.observe(Observation(Phase.RUNNING, metrics={"loss": 1.5}, details={"step": 7, "checkpoint": 5}), 10.0)
    assert history.points() == {"loss": [[7, 10.0, 1.5]], CHECKPOINT: [[7, 10.0, 5.0]]}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "0.5", None, 10**400])
def test_what_is_no_finite_number_is_left_out(value: object) -> None:
    history = MetricHistory()
    assert not history.add(1.0, {"x": value})
    assert history.points() == {}


def test_an_unchanged_metric_is_not_added_again() -> None:
    history = MetricHistory()
    assert history.add(1.0, {"loss": 0.5, "accuracy": 0.9}, 1)
    assert history.add(2.0, {"loss": 0.4, "accuracy": 0.9}, 2)
    assert not history.add(3.0, {"loss": 0.4, "accuracy": 0.9}, 3)
    assert history.points() == {"loss": [[1, 1.0, 0.5], [2, 2.0, 0.4]], "accuracy": [[1, 1.0, 0.9]]}


def test_two_waiters_and_the_training_merge_in_any_order() -> None:
    """The same reports, seen by two waiters at different times, one without steps, and kept by the training itself."""
    training = {"loss": [[step, 100.0 + step, float(f"{1 / (step + 1):.6g}")] for step in range(20)]}
    first = {"loss": [[step, 100.4 + step, 1 / (step + 1)] for step in range(12)]}
    second = {"loss": [[None, 101.3 + step, 1 / (step + 1)] for step in range(8, 20)]}
    parts: list[Points] = [training, first, second]
    merged = []
    for seed in range(6):
        random.Random(seed).shuffle(parts)
        history = MetricHistory()
        for part in parts:
            history.merge(part)
        merged.append(history.points())
    for each in merged:
        assert [point[0] for point in each["loss"]] == list(range(20))
        assert [point[2] for point in each["loss"]] == pytest.approx([1 / (step + 1) for step in range(20)], rel=1e-5)


def test_a_waiter_that_starts_late_adds_no_point_for_an_old_report() -> None:
    history = MetricHistory()
    history.add(900.0, {"loss": 0.500001, "accuracy": 0.9})
    history.merge({"loss": [[1, 100.0, 0.7], [2, 200.0, 0.5000012]]})
    assert history.points() == {"loss": [[1, 100.0, 0.7], [2, 200.0, 0.5000012]], "accuracy": [[None, 900.0, 0.9]]}
    history.add(910.0, {"loss": 0.7})
    history.merge({})
    assert history.points()["loss"][-1] == [None, 910.0, 0.7], "a new value, also if it has been seen before"


def test_a_report_that_a_waiter_sees_late_keeps_its_place() -> None:
    """The training has thinned its own points; the waiter has seen those between them a moment later."""
    training = {"loss": [[step, 100.0 + step / 4, 1 / step] for step in range(1, 40, 2)]}
    waiter = {"loss": [[step, 100.9 + step / 4, 1 / step] for step in range(2, 40, 2)]}
    history = MetricHistory.of(training)
    history.merge(waiter)
    points = history.points()["loss"]
    assert [point[0] for point in points] == list(range(1, 40))
    assert [point[1] for point in points] == sorted(point[1] for point in points)


def test_a_restart_is_no_late_report() -> None:
    restarted = {"loss": [[10, 100.0, 0.5], [11, 101.0, 0.4], [6, 106.0, 0.6], [7, 107.0, 0.55]]}
    assert [point[0] for point in MetricHistory.of(restarted).points()["loss"]] == [10, 11, 6, 7]


def test_merging_twice_is_merging_once() -> None:
    history, _ = collected(5000, 200, 3)
    points = json.loads(json.dumps(history.points()))
    history.merge(points)
    history.merge(points)
    assert history.points() == MetricHistory.of(points).points() == points


@pytest.mark.parametrize(
    "given",
    [
        None,
        "text",
        [],
        {"loss": None},
        {"loss": [None, [], [1, 2], [1, 2, 3, 4], ["a", "b", "c"], [1, True, 2.0], [1, 2.0, math.nan]]},
        {"": [[1, 1.0, 1.0]]},
        {"x" * 65: [[1, 1.0, 1.0]]},
        {1: [[1, 1.0, 1.0]]},
    ],
)
def test_a_malformed_history_is_empty(given: Any) -> None:
    assert MetricHistory.of(given).points() == {}


def test_phases_are_kept_when_they_change_and_bounded() -> None:
    history = MetricHistory()
    for time, phase in ((1, Phase.QUEUED), (2, Phase.QUEUED), (3, Phase.RUNNING), (4, Phase.RUNNING)):
        history.observe(Observation(phase), float(time))
    assert history.phases == ((1.0, Phase.QUEUED), (3.0, Phase.RUNNING))
    assert not history, "phases are no metrics"
    for time in range(5, 10_000):
        history.observe(Observation(Phase.RUNNING if time % 2 else Phase.RESTARTING), float(time))
    assert [time for time, _ in history.phases] == list(range(9936, 10_000))


def test_phases_of_two_waiters_are_merged() -> None:
    first, second = MetricHistory(), MetricHistory()
    first.observe(Observation(Phase.QUEUED), 1.0)
    first.observe(Observation(Phase.COMPLETE), 9.0)
    second.observe(Observation(Phase.RUNNING), 5.0)
    sent = json.loads(json.dumps([[time, str(phase)] for time, phase in second.phases]))
    first.merge_phases(sent)
    first.merge_phases(sent)
    assert first.phases == ((1.0, Phase.QUEUED), (5.0, Phase.RUNNING), (9.0, Phase.COMPLETE))


@pytest.mark.parametrize(
    "given", [None, "text", {}, [None], [[1.0]], [["1", "Queued"]], [[math.nan, "Queued"]], [[1, "New"], [1, []]]]
)
def test_malformed_phases_are_left_out(given: Any) -> None:
    history = MetricHistory()
    history.merge_phases(given)
    assert history.phases == ()


def test_short_series_leave_their_room_to_long_ones() -> None:
    series = {"short": [[1, 1.0, 1.0]], "long": [[i, float(i), math.sin(i)] for i in range(1000)]}
    found = thinned(series, 101)
    assert len(found["short"]) == 1
    assert 90 <= len(found["long"]) <= 100
    assert list(found) == ["short", "long"]


def test_more_metrics_than_trainer_accepts_are_left_out() -> None:
    history = MetricHistory()
    history.add(1.0, {f"m{number}": number for number in range(300)})
    assert len(history.points(10_000)) == 256
