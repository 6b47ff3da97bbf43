"""Log lines of ranks: the form in which kubelets and the local backend write them, labelled and merged.

A carriage return ends a line for the reader, too: progress bars write their next state over the last one. `Splitter` is
the one place that knows how, and `Throttle` limits how often a reader gets a new state.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainjob.sanitizing import states

STATE_SECONDS = 10.0
"""Seconds between two states of a progress bar in a log that keeps every line: Airflow's, KFP's, a file."""

TERMINAL_SECONDS = 1.0
"""The same on a terminal, for a person who looks on."""

MAX_LINE = 16 * 1024
"""Bytes of a line that are kept together; the container runtimes split longer ones as well (CRI log format)."""


@dataclass(frozen=True, order=True)
class LogLine:
    """One line that a rank wrote.

    Attributes:
        time: RFC 3339 time with nanoseconds, in UTC, so that text order is time order.
        rank: ``<replicated job>-<index>``, as ``node-1``.
        text: The line without its end; of a progress bar, its latest state.
        transient: The rank has not ended the line: the next line of the rank replaces this state of a progress bar.
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

    What is not in that format is passed over.
    """
    for line in lines:
        time, _, rest = line.rstrip(b"\n").partition(b" ")
        stream, _, rest = rest.partition(b" ")
        tag, _, text = rest.partition(b" ")
        if stream in (b"stdout", b"stderr") and tag in (b"F", b"P"):
            yield time.decode("ascii", "replace"), text.decode("utf-8", "replace"), tag == b"F"


class Splitter:
    """Lines of one rank, from the parts in which its runtime writes them.

    A part that does not end its line is a line by itself, of at most `MAX_LINE` bytes, unless the line has carriage
    returns: then it is a progress bar, and the reader gets its latest state.

    Args:
        rank: As ``node-0``.
        raw: Leave carriage returns in a line that comes as one part: a diagnosis looks for those of a script with CRLF.
    """

    def __init__(self, rank: str, *, raw: bool = False) -> None:
        self._rank = rank
        self._raw = raw
        self._open = ""  # what follows the last carriage return of a bar whose line has not ended
        self._latest: str | None = None  # state of that bar; None while no line with carriage returns is open

    def take(self, time: str, text: str, *, ended: bool) -> Iterator[LogLine]:
        """The line, or the state, after the next part; nothing where it shows no new one."""
        if self._latest is None:
            whole = text.rstrip("\r") if ended else text
            if "\r" not in whole or (self._raw and ended):
                yield LogLine(time, self._rank, whole)
                return
        before, text = self._latest, self._open + text
        shown = next(reversed(states(text)), before or "")
        self._open, self._latest = ("", None) if ended else (text.rpartition("\r")[2][-MAX_LINE:], shown)
        if ended or shown != before:
            yield LogLine(time, self._rank, shown, transient=not ended)


def latest(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Lines of one rank without the states that the next one of them replaces."""
    held: LogLine | None = None
    for line in lines:
        if held is not None and not held.transient:
            yield held
        held = line
    if held is not None:
        yield held


class Throttle:
    """Passes lines on at once; of a progress bar, the first state, then the latest one at most every `seconds`.

    The last state before the line's end is always passed on, by a timer where nothing follows: an event loop must run.

    Args:
        show: Called with each line.
        seconds: Between two states of a rank.
    """

    def __init__(self, show: Callable[[LogLine], None], seconds: float = STATE_SECONDS) -> None:
        self._show = show
        self._seconds = seconds
        self._shown: dict[str, str] = {}  # rank -> text of the state that was passed on last, of a line that is open
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
        """No more lines will come."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for rank in [*self._held]:
            self._emit(rank)

    def _pass_on(self, rank: str) -> None:
        """Show the state that is held, and no other one for a while."""
        self._timers.pop(rank, None)
        if rank in self._held:
            self._emit(rank)
            # It runs on over the line's end: the bars of short epochs follow each other.
            self._timers[rank] = asyncio.get_running_loop().call_later(self._seconds, self._pass_on, rank)

    def _emit(self, rank: str) -> None:
        line = self._held.pop(rank)
        if self._shown.get(rank) != line.text:
            self._shown[rank] = line.text
            self._show(line)


def merge(*ranks: Iterable[LogLine]) -> Iterator[LogLine]:
    """Lines of several ranks in the order of their times; each rank's own order is kept."""
    return heapq.merge(*ranks, key=lambda line: line.time)
