"""Finds ranks that are slower than the others, for a waiter: a warning, never a failure.

In a synchronous training all ranks have the same step time: each waits for the slowest. So what is compared is the time
that a rank spends by itself, without its waits for other ranks, as the watchdogs of `trainjob.progress` count it; and
the step time, which differs if the ranks do not wait for each other. A wait for a device may be a wait for another rank
(NCCL), or for work that other ranks have not waited for yet: if a rank waits so, only the loading of data is compared.

Compares two readings of the ranks' markers, never clocks of different nodes.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainjob._diagnosis.markers import Marker
from trainjob._diagnosis.ranks import Process, Rank
from trainjob._support.control_characters import plain
from trainjob._support.kube_objects import annotated
from trainjob.progress.watchdog import DEVICE, LOADING, WAITING

STRAGGLERS = "trainjob.dev/stragglers"
"""Annotation of a TrainJob: the stragglers that waiters have found, a JSON list."""

FACTOR = 1.5
"""A straggler spends at least so many times the median of all ranks."""
SHARE = 0.2
"""What that costs is at least this part of each of its steps."""
WINDOWS = 3
"""In so many windows between readings, one after another: a single pause of one rank can lie in two."""
_STEPS = 10  # in a window, at least: ranks are read between two steps
_DEVICE_SHARE = 0.05  # of the time of a rank that waits for its device
_KEPT = 8  # stragglers in the annotation


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, in the steps in which it was found.

    Attributes:
        rank: Rank of its pod, as ``node-1``.
        number: Number of the process in the training.
        name: Both for people, as ``rank 5 (node-1)``.
        node: Name of its node; empty if unknown.
        seconds: Time per step that it spends by itself.
        median: The median of that time of all ranks.
        step_seconds: Time per step, with waits.
        loading: Seconds per step among `seconds` in which it loads data.
    """

    rank: str
    number: int
    name: str
    node: str
    seconds: float
    median: float
    step_seconds: float
    loading: float = 0.0

    def __str__(self) -> str:
        where = f" on {self.node}" if self.node else ""
        lost = (self.seconds - self.median) / self.step_seconds
        loads = " It loads data for most of that." if self.loading > self.seconds / 2 else ""
        return (
            f"{self.name}{where} is slower than the other ranks: {_seconds(self.seconds)} of work per step, the "
            f"median is {_seconds(self.median)}. Ranks that wait for it lose {lost:.0%} of each step.{loads}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The straggler as JSON, with a ``summary`` for people."""
        return {**asdict(self), "summary": str(self)}


class Stragglers:
    """Compares consecutive readings of the ranks of one job."""

    def __init__(self) -> None:
        self._before: Mapping[Process, Rank] = {}
        self._slow: dict[Process, int] = {}  # windows in a row in which a rank was slow
        self._named: set[Process] = set()

    def take(self, ranks: Mapping[Process, Rank], nodes: Mapping[str, str]) -> list[Straggler]:
        """Take the next reading. Returns the ranks that have been slow for long enough, each once.

        Args:
            ranks: The processes with markers.
            nodes: Rank of a pod -> name of its node.
        """
        found = {(each.rank, each.number): each for each in compare(self._before, ranks, nodes)}
        self._before = dict(ranks)
        self._slow = {process: self._slow.get(process, 0) + 1 for process in found}
        new = [found[process] for process, windows in self._slow.items() if windows >= WINDOWS]
        new = [each for each in new if (each.rank, each.number) not in self._named]
        self._named |= {(each.rank, each.number) for each in new}
        return new


def compare(before: Mapping[Process, Rank], after: Mapping[Process, Rank], nodes: Mapping[str, str]) -> list[Straggler]:
    """The stragglers between two readings, the slowest first; none if fewer than two ranks have made enough steps."""
    windows = {
        process: window
        for process, state in after.items()
        if process in before and (window := _window(before[process].marker, state.marker)) is not None
    }
    loading_only = any(each[DEVICE] > _DEVICE_SHARE * each["all"] for each in windows.values())
    own = {process: each[LOADING] if loading_only else each["all"] - each[WAITING] for process, each in windows.items()}
    whole = {process: each["all"] for process, each in windows.items()}
    # Step times that differ show ranks that do not wait for each other.
    slow = _outliers(whole, windows) or _outliers(own, windows)
    found = []
    for process, (seconds, median) in slow.items():
        window, (pod, number) = windows[process], process
        # With four digits, so that all show the same, also what reads it from the annotation.
        numbers = (float(f"{each:.4g}") for each in (seconds, median, window["all"], window[LOADING]))
        found.append(Straggler(pod, number, after[process].name, nodes.get(pod, ""), *numbers))
    return sorted(found, key=lambda each: each.median - each.seconds)


def _outliers(
    measured: Mapping[Process, float], windows: Mapping[Process, Mapping[str, float]]
) -> dict[Process, tuple[float, float]]:
    """The ranks with much higher times than the median: their time, and the median."""
    # The lower median: of two ranks, the slower one can be found.
    median = statistics.median_low(measured.values()) if measured else 0.0
    return {
        process: (seconds, median)
        for process, seconds in measured.items()
        if seconds > median and seconds >= FACTOR * median and seconds - median >= SHARE * windows[process]["all"]
    }


def _window(before: Marker, after: Marker) -> dict[str, float] | None:
    """Seconds per step between two readings of a rank; None if it has made too few steps, or has restarted."""
    if before.step is None or after.step is None or before.step[0] != after.step[0]:
        return None
    steps, counted = after.step[1] - before.step[1], after.count - before.count
    names = ("all", WAITING, DEVICE, LOADING)
    spent = {name: after.spent.get(name, 0.0) - before.spent.get(name, 0.0) for name in names}
    if steps < _STEPS or counted <= 0 or spent["all"] <= 0 or min(spent.values()) < 0:
        return None
    return {name: min(seconds, spent["all"]) / steps for name, seconds in spent.items()}


def stragglers_of(trainjob: Mapping[str, Any] | None) -> list[Straggler]:
    """The stragglers in the annotation of a job, which a person may have edited; only those that can be read."""
    found = annotated(trainjob, STRAGGLERS)
    return [each for each in map(_straggler, found if isinstance(found, list) else ()) if each is not None]


def _straggler(found: object) -> Straggler | None:
    known = found if isinstance(found, dict) else {}
    try:
        numbers = [float(known[field]) for field in ("seconds", "median", "step_seconds", "loading")]
        rank, name, node = (plain(str(known[field])) for field in ("rank", "name", "node"))
        straggler = Straggler(rank, int(known["number"]), name, node, *numbers)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return straggler if all(0 <= each < math.inf for each in numbers) and straggler.step_seconds > 0 else None


def annotation(known: Iterable[Straggler], new: Sequence[Straggler]) -> dict[str, str]:
    """The annotation with `new` stragglers beside the `known` ones. At most 8, those that cost most of their steps."""
    every = {(each.rank, each.number): each for each in (*known, *new)}
    kept = sorted(every.values(), key=lambda each: (each.median - each.seconds) / each.step_seconds)[:_KEPT]
    return {STRAGGLERS: json.dumps([each.as_dict() for each in kept])}


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1000:.3g} ms"
