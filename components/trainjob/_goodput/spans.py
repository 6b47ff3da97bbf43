"""Times with one activity of one attempt: cut, and laid over each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from trainjob.goodput import Activity, Source

IDLE = (Activity.QUEUED, Activity.STOPPED)  # without GPUs
RAN = (Activity.TRAINING, Activity.RESTARTING)


class Span(NamedTuple):
    """A time with one activity; times in Unix time."""

    start: float
    end: float
    activity: Activity
    source: Source


def clipped(spans: Iterable[Span], start: float, end: float) -> list[Span]:
    """The parts of spans within `start` and `end`, without overlap: a later one begins where the earlier one ends."""
    found: list[Span] = []
    at = start
    for span in spans:
        begin, until = max(at, span.start), min(end, span.end)
        if until > begin:
            found.append(span._replace(start=begin, end=until))
            at = until
    return found


def over(below: Sequence[Span], above: Sequence[Span]) -> list[Span]:
    """Both, each in order and without overlap; where they overlap, `above`."""
    cuts = sorted({time for span in (*below, *above) for time in (span.start, span.end)})
    found: list[Span] = []
    i = j = 0
    for start, end in pairwise(cuts):
        while i < len(below) and below[i].end <= start:
            i += 1
        while j < len(above) and above[j].end <= start:
            j += 1
        if j < len(above) and above[j].start <= start:
            span = above[j]
        elif i < len(below) and below[i].start <= start:
            span = below[i]
        else:
            continue
        if found and found[-1].end == start and found[-1][2:] == span[2:]:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(span._replace(start=start, end=end))
    return found


def of_training(spans: Iterable[Span]) -> Iterator[Span]:
    """The spans of training."""
    return (span for span in spans if span.activity is Activity.TRAINING)


def stretches_of(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The times that spans cover without a gap."""
    found: list[tuple[float, float]] = []
    for span in spans:
        if found and found[-1][1] == span.start:
            found[-1] = (found[-1][0], span.end)
        else:
            found.append((span.start, span.end))
    return found
