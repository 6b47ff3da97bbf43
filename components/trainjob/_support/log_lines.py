"""Log lines of ranks: parsed from the format of kubelets and of the local backend, labelled and merged.

A carriage return ends a line, too: progress bars overwrite their last state with the next one. `Splitter` implements
this, and `Throttle` limits how often a reader gets a new state.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainjob._support.control_characters import states
from trainjob._support.kube_objects import MAX_LINE

STATE_SECONDS = 10.0
"""Seconds between two states of a progress bar in a log that keeps all lines: that of Airflow or KFP, a file."""

TERMINAL_SECONDS = 1.0
"""The same on a terminal."""


@dataclass(frozen=True, order=True)
class LogLine:
    """One line that a rank wrote.

    Attributes:
        time: RFC 3339 time with nanoseconds, in UTC, so that text order is time order.
        rank: ``<replicated job>-<index>``, as ``node-1``.
        text: The line without its end; of a progress bar, its latest state.
        transient: The line has not ended: the next line of the rank replaces this state of a progress bar.
    """

    time: str
    rank: str
    text: str
    transient: bool = False

    def __str__(self) -> str:
        return f"[{self.rank}] {self.text}"


def cri_line(time: str, text: bytes, *, partial: bool) -> bytes:
    """One line of a log file in the CRI format (``<time> stdout F <text>``; P for the first parts of a long line)."""
    return b"%s stdout %s %s\n" % (time.encode(), b"P" if partial else b"F", text)


def parse_cri(lines: Iterable[bytes]) -> Iterator[tuple[str, str, bool]]:
    """Parts of one rank's lines from its CRI log file, as time, text, and whether the part ends its line.

    Lines in another format are skipped.
    """
    for line in lines:
        time, _, rest = line.rstrip(b"\n").partition(b" ")
        stream, _, rest = rest.partition(b" ")
        tag, _, text = rest.partition(b" ")
        if stream in (b"stdout", b"stderr") and tag in (b"F", b"P"):
            yield time.decode("ascii", "replace"), text.decode("utf-8", "replace"), tag == b"F"


class Splitter:
    """Joins the parts in which a runtime writes the lines of one rank.

    A part that does not end its line becomes a line of at most `MAX_LINE` bytes. A line with carriage returns is a
    progress bar instead, of which the reader gets the latest state.

    Args:
        rank: As ``node-0``.
        raw: Keep carriage returns in a line of one part: the diagnosis detects scripts with CRLF line endings by them.
    """

    def __init__(self, rank: str, *, raw: bool = False) -> None:
        self._rank = rank
        self._raw = raw
        self._open = ""  # text after the last carriage return of a bar whose line has not ended
        self._latest: str | None = None  # state of that bar; None while no line with carriage returns is open

    def take(self, time: str, text: str, *, ended: bool) -> Iterator[LogLine]:
        """The line or the state after the next part; nothing if the state has not changed."""
        if self._latest is None:
            line = text.rstrip("\r") if ended else text
            if "\r" not in line or (self._raw and ended):
                yield LogLine(time, self._rank, line)
                return
        before, text = self._latest, self._open + text
        shown = next(reversed(states(text)), before or "")
        self._open, self._latest = ("", None) if ended else (text.rpartition("\r")[2][-MAX_LINE:], shown)
        if ended or shown != before:
            yield LogLine(time, self._rank, shown, transient=not ended)


def latest(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Lines of one rank without the states that a later line replaces."""
    held: LogLine | None = None
    for line in lines:
        if held is not None and not held.transient:
            yield held
        held = line
    if held is not None:
        yield held


class Throttle:
    """Passes lines on at once; of a progress bar, the first state, then the latest one at most every `seconds`.

    The last state of a line is always passed on, by a timer if no line follows: an event loop must be running.

    Args:
        show: Called with each line.
        seconds: Seconds between two states of a rank.
    """

    def __init__(self, show: Callable[[LogLine], None], seconds: float = STATE_SECONDS) -> None:
        self._show = show
        self._seconds = seconds
        self._shown: dict[str, str] = {}  # rank -> text of the last state passed on, of an unfinished line
        self._held: dict[str, LogLine] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def line(self, line: LogLine) -> None:
        """Take the next line."""
        rank = line.rank
        if line.transient:
            self._held[rank] = line
            if rank not in self._timers:
                self._pass_on(rank)
            return
        self._held.pop(rank, None)
        if self._shown.pop(rank, None) != line.text:
            self._show(line)

    def end(self) -> None:
        """Pass on the last states: no more lines follow."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for rank in [*self._held]:
            self._emit(rank)

    def _pass_on(self, rank: str) -> None:
        """Pass on the held state, and no other one for `seconds`."""
        self._timers.pop(rank, None)
        if rank in self._held:
            self._emit(rank)
            # The timer continues after the line's end, since the bars of short epochs follow each other.
            self._timers[rank] = asyncio.get_running_loop().call_later(self._seconds, self._pass_on, rank)

    def _emit(self, rank: str) -> None:
        line = self._held.pop(rank)
        if self._shown.get(rank) != line.text:
            self._shown[rank] = line.text
            self._show(line)


def merge(*ranks: Iterable[LogLine]) -> Iterator[LogLine]:
    """Lines of several ranks by time; the order within each rank is kept."""
    return heapq.merge(*ranks, key=lambda line: line.time)
