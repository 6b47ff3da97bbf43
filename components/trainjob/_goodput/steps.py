"""What the reported steps tell: they divide the time in which attempts trained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from trainjob import progress
from trainjob._goodput.attempts import Attempt, Run, unix_time
from trainjob._goodput.history import CHECKPOINT, Points
from trainjob._goodput.spans import IDLE, RAN, Span, clipped, of_training, over, stretches_of
from trainjob._support.kube_objects import mapping
from trainjob._support.numbers import is_finite
from trainjob.goodput import Activity, Source
from trainjob.status import Phase, observe

STALL_SECONDS = 600.0
"""A pause of the steps of this length is a stall: the default timeout of PyTorch's NCCL watchdog. A shorter one may be
an evaluation or a checkpoint that the script does not report, unless the job has a shorter ``stall_timeout``."""
_NOISE = 0.05  # of the usual time of the steps: a longer interval is no pause
_SEVERAL = 3  # pauses whose median is the usual one
_LATE_SECONDS = 10.0  # a waiter sees a report later than the training made it
_EVALUATIONS = ("eval_", "val_", "test_")  # prefixes of Hugging Face's Trainer and of Lightning's examples


class _Step(NamedTuple):
    time: float
    step: float
    activity: Activity | None = None  # which this report ends


class Steps:
    """Divides the time in which attempts ran, by the steps that they reported. Call `divide` in their order.

    Attributes:
        highest: The highest step of all runs so far; None before the first one.
        checkpoint: The step of the latest checkpoint.
        usual: The usual time of a step, and the usual number of steps between two reports, of the latest attempt.
        pauses: Activity -> its usual duration, of evaluations and checkpoints of the latest attempt that had several.
    """

    def __init__(self) -> None:
        self.highest: float | None = None
        self.checkpoint: float | None = None
        self.usual: tuple[float, float] | None = None
        self.pauses: dict[Activity, float] = {}
        self._stall_seconds = STALL_SECONDS

    def divide(self, attempt: Attempt, spans: list[Span], runs: Sequence[Run]) -> list[Span]:
        """`spans` of an attempt with their training divided; `runs` are those of rank 0."""
        stall_timeout = observe(attempt.evidence.trainjob).stall_timeout
        self._stall_seconds = min(STALL_SECONDS, stall_timeout or STALL_SECONDS)
        reports = _reports_of(attempt, runs, stretches_of(of_training(spans)), spans[-1].end)
        collected = _collected(attempt, reports, spans)
        spans = over(spans, _unknown_training(collected, spans))
        stretches = stretches_of(of_training(spans))
        collected = _of_next_runs(collected, stretches)
        begins = [*(begin for begin, _ in stretches[1:]), math.inf]
        series = [_series(reports, collected, *each, next_) for each, next_ in zip(stretches, begins, strict=False)]
        self._learn([points for parts in series for points in parts])
        complete = observe(attempt.evidence.trainjob).phase is Phase.COMPLETE
        latest = _last_report(attempt)
        heard = math.inf if latest is None else latest - _LATE_SECONDS
        heard = min([heard, *(points[-1].time for points in reports if points)])
        found: list[Span] = []
        for (begin, end), parts in zip(stretches, series, strict=True):
            restarted = any(span.activity in RAN and span.end <= begin for span in spans)
            start, at = Activity.RESTARTING if restarted else Activity.STARTING, begin
            for number, points in enumerate(parts, 1):
                last = number == len(parts)
                until = end if last else points[-1].time
                # A history that was cut tells nothing of the time after it.
                alive = bool(attempt.phases) and attempt.phases[-1][0] >= end
                stalls = last and (points[-1].time >= heard or alive) and not (complete and end == spans[-1].end)
                found += self._run(points, at, until, start, stalls=stalls)
                start, at = Activity.RESTARTING, until
        return over(spans, clipped(found, spans[0].start, spans[-1].end))

    def _learn(self, series: Sequence[Sequence[_Step]]) -> None:
        clean = [
            ((after.time - before.time) / (after.step - before.step), after.step - before.step)
            for points in series
            for before, after in pairwise(points)
            if after.activity is None and after.step > before.step and after.time > before.time
        ]
        if clean:
            self.usual = median(each[0] for each in clean), median(each[1] for each in clean)
        pace = self.usual[0] if self.usual is not None else 0.0
        for activity in (Activity.EVALUATING, Activity.CHECKPOINTING):
            pauses = [
                after.time - before.time - (after.step - before.step) * pace
                for points in series
                for before, after in pairwise(points)
                if after.activity is activity
            ]
            if len(pauses) >= _SEVERAL:
                self.pauses[activity] = max(0.0, median(pauses))

    def _run(
        self, points: Sequence[_Step], begin: float, end: float, start: Activity, *, stalls: bool
    ) -> Iterator[Span]:
        """What one process did from `begin` to `end`: its start, its steps, and what followed the last report."""
        first = points[0]
        if self.usual is not None:
            at = _Step(max(begin, first.time - (first.step - self._begins(first)) * self.usual[0]), self._begins(first))
            yield Span(begin, at.time, start, Source.STEPS)
        else:
            yield Span(begin, first.time, Activity.TRAINING, Source.ASSUMED)
            at = first
        for point in points:
            yield from self._interval(at, point, latest=point is points[-1])
            at = point
        tail = end
        pace = self.usual[0] if self.usual is not None else None
        if stalls and self.usual is not None:
            expected = self.usual[0] * self.usual[1]
            if self._is_stall(end - at.time - expected, expected):
                tail = at.time + expected
        if self.highest is not None and pace is not None and at.step < self.highest:
            again = min(tail, at.time + (self.highest - at.step) * pace)
            yield Span(at.time, again, Activity.REPEATED, Source.STEPS)
            at = at._replace(time=again)
        yield Span(at.time, tail, Activity.TRAINING, Source.ASSUMED)
        yield Span(tail, end, Activity.STALLED, Source.STEPS)
        self.highest = max(self.highest or 0.0, *(point.step for point in points))
        saved = [point.step for point in points if point.activity is Activity.CHECKPOINTING]
        self.checkpoint = saved[-1] if saved else self.checkpoint

    def _is_stall(self, excess: float, expected: float) -> bool:
        """Whether a time that was expected to last `expected` seconds was a stall if it took `excess` longer."""
        return excess > max(self._stall_seconds, expected)

    def _begins(self, first: _Step) -> float:
        """The step with which a run begins whose first report is `first`: it does not report that."""
        if self.highest is None:
            return 0.0
        if self.checkpoint is not None and self.checkpoint <= first.step:
            return self.checkpoint
        return max(0.0, first.step - (self.usual[1] if self.usual is not None else 0.0))

    def _interval(self, before: _Step, after: _Step, *, latest: bool) -> Iterator[Span]:
        """What a process did from one report to the next.

        Its `latest` report may be sent when it is terminated, long after the step: the time between them is unknown.
        """
        took, steps = after.time - before.time, after.step - before.step
        expected = steps * self.usual[0] if self.usual is not None else took if steps else 0.0
        excess = max(0.0, took - expected)
        pause = 0.0
        if after.activity is not None and excess > _NOISE * expected:
            usual = self.pauses.get(after.activity)
            pause = usual if usual is not None and self._is_stall(excess - usual, expected + usual) else excess
        stalled = excess - pause if self._is_stall(excess - pause, expected + pause) else 0.0
        until = after.time - pause - stalled
        again, known = before.time, until
        if self.highest is not None and before.step < self.highest:
            if latest:
                known = max(min(until, before.time + expected), until - _LATE_SECONDS)
            share = (self.highest - before.step) / steps if steps else 1.0
            again = min(known, before.time + share * (known - before.time))
        yield Span(before.time, again, Activity.REPEATED, Source.STEPS)
        yield Span(again, known, Activity.TRAINING, Source.STEPS)
        yield Span(known, until, Activity.TRAINING, Source.ASSUMED)
        yield Span(until, until + stalled, Activity.STALLED, Source.STEPS)
        if after.activity is not None:
            yield Span(after.time - pause, after.time, after.activity, Source.STEPS)


def _reports_of(
    attempt: Attempt, runs: Sequence[Run], stretches: Sequence[tuple[float, float]], end: float
) -> list[list[_Step]]:
    """The reports that each run of rank 0 left in its termination message, fitted into the time in which it trained."""
    found: list[list[_Step]] = []
    messages = [(run, run.message) for run in runs]
    if runs and not any(run.message for run in runs) and attempt.evidence.reported:
        messages = [(runs[-1], attempt.evidence.reported)]
    for run, message in messages:
        report = progress.read(message) if message else None
        parts = [(max(run.start, a), min(run.end, b, end)) for a, b in stretches]
        longest = max(parts, key=lambda part: part[1] - part[0], default=(0.0, 0.0))
        if report is None or longest[1] <= longest[0]:
            found.append([])
            continue
        found.append(_fitted(_counted_on(_steps_in(report.history)), *longest))
    return found


def _collected(attempt: Attempt, reports: Sequence[Sequence[_Step]], spans: Sequence[Span]) -> list[_Step]:
    """The reports that a waiter has collected, and the latest one of the object, without those that a message has."""
    points = _steps_in(attempt.history)
    said, observation = _last_report(attempt), observe(attempt.evidence.trainjob)
    if said is not None and observation.step is not None and (not points or said > points[-1].time):
        points.append(_Step(said, float(observation.step)))
    points = _fitted(points, spans[0].start, spans[-1].end)
    covered: list[tuple[float, float]] = []
    for report in filter(None, reports):
        first, last = report[0].time, report[-1].time
        # What a waiter saw before it saw a restart is of an earlier run.
        restarts = (time for time, phase in attempt.phases if phase is not Phase.RUNNING and time <= first)
        covered.append((max([first - _LATE_SECONDS, *restarts]), last + _LATE_SECONDS))
    return [point for point in points if not any(a < point.time <= b for a, b in covered)]


def _last_report(attempt: Attempt) -> float | None:
    """The time of the latest report in the object."""
    return unix_time(mapping(attempt.evidence.trainjob, "status", "trainerStatus").get("lastUpdatedTime"))


def _unknown_training(points: Sequence[_Step], spans: Sequence[Span]) -> list[Span]:
    """Training while the job was suspended according to its condition, which tells the latest change only."""
    found = []
    for span in spans:
        if span.activity in IDLE and span.source is Source.CONDITIONS:
            own = [point.time for point in points if span.start < point.time < span.end - _LATE_SECONDS]
            if len(own) > 1:
                found.append(Span(own[0], own[-1], Activity.TRAINING, Source.STEPS))
    return found


def _of_next_runs(points: Iterable[_Step], stretches: Sequence[tuple[float, float]]) -> list[_Step]:
    """`points`, where reports that a waiter saw before the start of their run are moved to that start.

    Between two runs, a waiter also sees the latest report of the earlier one, which does not go backwards.
    """
    gaps = [(end, begin) for (_, end), (begin, _) in pairwise(stretches)]
    found: list[_Step] = []
    latest, restarted = -math.inf, -math.inf
    for point in points:
        time = next((begin for end, begin in gaps if end < point.time < begin), None)
        if time is not None and (time == restarted or point.step < latest):
            restarted = time
            found.append(point._replace(time=time))
        else:
            found.append(point)
        latest = point.step
    return found


def _series(
    reports: Iterable[Sequence[_Step]], collected: Iterable[_Step], start: float, end: float, following: float
) -> list[list[_Step]]:
    """The reports from `start` to `end`, those of each process apart; the job trains again from `following` on.

    A report that a waiter saw a moment after the end belongs to the end. A counter of a waiter's reports that goes
    backwards shows a restart.
    """
    until = min(end + _LATE_SECONDS, following)
    found = [list(points) for points in reports if points and start <= points[0].time <= end]
    own = [
        point._replace(time=min(point.time, end))
        for point in collected
        if start <= point.time <= end or end < point.time < until
    ]
    found += _between_restarts(own)
    return sorted(found, key=lambda points: points[0].time)


def _between_restarts(points: Sequence[_Step]) -> list[list[_Step]]:
    """The points in parts: a counter that goes backwards was restarted."""
    found: list[list[_Step]] = []
    for point in points:
        if found and point.step >= found[-1][-1].step:
            found[-1].append(point)
        else:
            found.append([point])
    return found


def _steps_in(history: Points) -> list[_Step]:
    """The reports that have a step, in the order of their times."""
    found: dict[tuple[float, float], Activity | None] = {}
    for name, points in history.items():
        activity = None
        if name == CHECKPOINT:
            activity = Activity.CHECKPOINTING
        elif name.startswith(_EVALUATIONS):
            activity = Activity.EVALUATING
        for step, time, _ in points:
            if is_finite(step) and is_finite(time):
                known = found.get((time, step))
                found[time, step] = known if known is Activity.EVALUATING else activity or known
    return [_Step(time, step, activity) for (time, step), activity in sorted(found.items(), key=lambda each: each[0])]


def _fitted(points: Sequence[_Step], start: float, end: float) -> list[_Step]:
    """`points` within `start` and `end`: shifted by the smallest offset, and clamped if they last longer."""
    if not points:
        return []
    first, last = points[0].time, points[-1].time
    offset = start - first if first < start else min(0.0, max(start - first, end - last))
    return [point._replace(time=min(end, max(start, point.time + offset))) for point in points]


def _counted_on(points: Iterable[_Step]) -> list[_Step]:
    """The reports of one process, whose counter continues where it went backwards."""
    found: list[_Step] = []
    offset = latest = 0.0
    for point in points:
        if point.step < latest:
            offset += latest
        latest = point.step
        found.append(point._replace(step=point.step + offset))
    return found
