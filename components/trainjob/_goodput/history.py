"""The metrics and phases of a job over time, as a waiter collects them. Pure: no clock, no I/O.

A point is ``[step, time, value]``: the step of the training or None, Unix time in seconds, a finite number. Series are
thinned by min-max decimation: consecutive points form buckets of equal size, and each bucket keeps its lowest and its
highest value; the first and the last point stay. So thinning a thinned series loses no extreme.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from trainjob._support.numbers import is_finite
from trainjob.progress.message import MAX_METRICS, MAX_NAME, RESERVED
from trainjob.status import Phase

if TYPE_CHECKING:
    from trainjob.status import Observation

Point = tuple[float | None, float, float]
Points = Mapping[str, Sequence[Sequence[float | None]]]
"""Metric -> its points, oldest first; a step is None if it is unknown."""

METHOD = "min-max decimation"
MAX_POINTS = 2048
"""Points of one job in a waiter, of all metrics together: at most 100 KB of memory, 70 KB as JSON."""
CHECKPOINT = RESERVED + "checkpoint"
"""Series of the steps at which a checkpoint was complete."""

_PHASES = 64  # of one job in a waiter: at most 6 KB of memory, 2 KB as JSON
_SAME_SECONDS = 10.0  # a waiter sees a report later than the training made it
_LATE_SECONDS = 3.0  # the same for reports of different steps
_PHASE_NAMES = frozenset(map(str, Phase))


class MetricHistory:
    """The history of the numeric metrics and of the phases of one job, in bounded memory. Empty, it costs 0.2 KB.

    Args:
        limit: Points to keep, of all metrics together; up to twice as many are in memory.
    """

    __slots__ = ("_count", "_limit", "_phases", "_series")

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._series: dict[str, array[float]] = {}  # step (NaN if unknown), time, value of each point
        self._phases: tuple[tuple[float, Phase], ...] = ()
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._series)

    def add(self, time: float, metrics: Mapping[str, Any], step: float | None = None) -> bool:
        """Add the metrics that were reported at `time`; returns whether one has changed.

        A value that equals the latest one of its metric is not added: a waiter gets all metrics with each report, also
        those that the report has not changed. Values that are no finite numbers are left out.

        Args:
            time: Unix time in seconds.
            metrics: Name -> value.
            step: Step of the training, if known.
        """
        changed = False
        for name, value in metrics.items():
            if not is_finite(value):
                continue
            series = self._series.get(name)
            if series is None:
                if len(self._series) >= MAX_METRICS:
                    continue
                series = self._series[name] = array("d")
            elif series[-1] == value:
                continue
            series.extend((math.nan if step is None else step, time, float(value)))
            self._count += 1
            changed = True
        if self._count > 2 * self._limit:
            self._thin()
        return changed

    def observe(self, observation: Observation, time: float) -> bool:
        """Add what a waiter observed at `time`; returns whether a metric has changed."""
        if not self._phases or self._phases[-1][1] is not observation.phase:
            self._phases = (*self._phases, (time, observation.phase))[-_PHASES:]
        metrics, checkpoint = observation.metrics, observation.details.get("checkpoint")
        if checkpoint is not None:
            metrics = {**metrics, CHECKPOINT: checkpoint}
        return self.add(time, metrics, observation.step) if metrics else False

    def merge(self, points: Points) -> None:
        """Add points of the same job, in any order: of another waiter, of an earlier one, or of the training itself."""
        for name, more in points.items():
            if name in self._series or len(self._series) < MAX_METRICS:
                joined = _joined([*_unpacked(self._series.get(name, ())), *_points(more)])
                if joined:
                    self._series[name] = _packed(joined)
        self._count = sum(len(series) // 3 for series in self._series.values())
        if self._count > self._limit:
            self._thin()

    def points(self, limit: int | None = None) -> dict[str, list[list[Any]]]:
        """Metric -> points, as JSON values; at most `limit` points, by default those of this history."""
        unpacked = {name: _unpacked(series) for name, series in self._series.items()}
        return thinned(unpacked, self._limit if limit is None else limit)

    @classmethod
    def of(cls, points: object, limit: int = MAX_POINTS) -> Self:
        """The history with those points, as `points` returns them; what is no point is left out."""
        history = cls(limit)
        if isinstance(points, Mapping):
            named = (
                (name, each) for name, each in points.items() if isinstance(name, str) and 0 < len(name) <= MAX_NAME
            )
            history.merge({name: each for name, each in named if isinstance(each, list | tuple)})
        return history

    @property
    def phases(self) -> Sequence[tuple[float, Phase]]:
        """Unix time and phase of each observed change of the phase, oldest first; the latest 64."""
        return self._phases

    def merge_phases(self, phases: object) -> None:
        """Add phases of the same job that another waiter has observed, also as JSON values; others are left out."""
        known = set(self._phases)
        for each in phases if isinstance(phases, list | tuple) else ():
            if isinstance(each, list | tuple) and len(each) == 2 and is_finite(each[0]):
                time, phase = each
                if isinstance(phase, str) and phase in _PHASE_NAMES:
                    known.add((float(time), Phase(phase)))
        self._phases = tuple(sorted(known))[-_PHASES:]

    def _thin(self) -> None:
        each = max(4, self._limit // len(self._series))
        for name, series in self._series.items():
            self._series[name] = _packed(_decimated(_unpacked(series), each))
        self._count = sum(len(series) // 3 for series in self._series.values())


def thinned(series: Points, limit: int) -> dict[str, list[list[Any]]]:
    """`series` with at most `limit` points (at least 4 for each metric), as JSON values: times in 0.1 s.

    Short series stay as they are; the others share the remaining points equally.
    """
    found = {name: _points(points) for name, points in series.items()}
    room, kept = limit, dict[str, list[Point]]()
    for name in sorted(found, key=lambda name: len(found[name])):
        kept[name] = _decimated(found[name], max(4, room // (len(found) - len(kept))))
        room -= len(kept[name])
    return {
        name: [[step if step is None else _short(step), round(time, 1), value] for step, time, value in kept[name]]
        for name in series
        if kept[name]
    }


def thinned_values(values: Iterable[tuple[float, float]], limit: int) -> list[tuple[Any, float]]:
    """At most `limit` pairs of a step and a value, as `thinned`."""
    series = [[step, step, value] for step, value in values]
    return [(step, value) for step, _, value in thinned({"": series}, limit).get("", [])]


def _decimated(points: Sequence[Point], limit: int) -> list[Point]:
    """At most `limit` points: the first, the last, and the lowest and highest of buckets of equal size."""
    if len(points) <= limit:
        return list(points)
    inner = points[1:-1]
    size = -(-len(inner) // ((limit - 2) // 2))
    kept = [points[0]]
    for start in range(0, len(inner), size):
        bucket = range(start, min(start + size, len(inner)))
        low = min(bucket, key=lambda i: inner[i][2])
        high = max(bucket, key=lambda i: inner[i][2])
        kept += [inner[i] for i in sorted({low, high})]
    return [*kept, points[-1]]


def _joined(points: Iterable[Point]) -> list[Point]:
    """The points in the order of their times, each once.

    The same report reaches a waiter later than the training has recorded it, with more digits, and perhaps without its
    step. Without a step, a value equal to its predecessor is that of an earlier report, as in `MetricHistory.add`.
    """
    ordered = sorted(dict.fromkeys(points), key=lambda point: point[1])  # stable: times are kept in 0.1 s
    times: dict[float, list[float]] = {}
    for step, time, value in ordered:
        if step is not None:
            times.setdefault(_rounded(value), []).append(time)
    kept: list[Point] = []
    seen = set[tuple[float, float]]()
    for step, time, value in ordered:
        if step is None:
            known = bool(kept) and _rounded(kept[-1][2]) == _rounded(value)
            known = known or any(abs(time - other) <= _SAME_SECONDS for other in times.get(_rounded(value), ()))
        else:
            known = (step, _rounded(value)) in seen
            seen.add((step, _rounded(value)))
        if not known:
            kept.append((step, time, value))
            _place(kept)
    return kept


def _place(points: list[Point]) -> None:
    """Move the last point before those of later steps that a waiter has seen a moment earlier.

    The steps of a training that was restarted go back, too, but not within seconds.
    """
    i = len(points) - 1
    while i > 0:
        (before, earlier, _), (step, time, value) = points[i - 1], points[i]
        if step is None or before is None or before <= step or time - earlier > _LATE_SECONDS:
            return
        points[i - 1 : i + 1] = [(step, earlier, value), points[i - 1]]
        i -= 1


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")  # `trainjob.progress` keeps six digits


def _points(points: Iterable[object]) -> list[Point]:
    """The valid points, without steps and times that no training has."""
    found = []
    for point in points:
        if not isinstance(point, list | tuple) or len(point) != 3:
            continue
        step, time, value = point
        if is_finite(time) and is_finite(value):
            found.append((float(step) if is_finite(step) else None, float(time), float(value)))
    return found


def _short(step: float) -> float:
    return int(step) if step.is_integer() else step


def _packed(points: Iterable[Point]) -> array[float]:
    return array("d", (x for step, time, value in points for x in (math.nan if step is None else step, time, value)))


def _unpacked(series: Sequence[float]) -> list[Point]:
    return [
        (None if math.isnan(series[i]) else series[i], series[i + 1], series[i + 2]) for i in range(0, len(series), 3)
    ]
