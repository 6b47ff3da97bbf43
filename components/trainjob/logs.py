"""Log lines of ranks: the form in which kubelets and the local backend write them, labelled and merged."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_LINE = 16 * 1024
"""Bytes of a line that are kept together; the container runtimes split longer ones as well (CRI log format)."""


@dataclass(frozen=True, order=True)
class LogLine:
    """One line that a rank wrote.

    Attributes:
        time: RFC 3339 time with nanoseconds, in UTC, so that text order is time order.
        rank: ``<replicated job>-<index>``, as ``node-1``.
        text: The line without its end.
    """

    time: str
    rank: str
    text: str

    def __str__(self) -> str:
        return f"[{self.rank}] {self.text}"


def cri_line(time: str, text: bytes, *, partial: bool) -> bytes:
    """One line of a log file in the CRI format (``<time> stdout F <text>``; P for the first parts of a long line)."""
    return b"%s stdout %s %s\n" % (time.encode(), b"P" if partial else b"F", text)


def parse_cri(rank: str, lines: Iterable[bytes]) -> Iterator[LogLine]:
    """Log lines of one rank from its CRI log file; what is not in that format is passed over."""
    for line in lines:
        time, _, rest = line.rstrip(b"\n").partition(b" ")
        stream, _, rest = rest.partition(b" ")
        tag, _, text = rest.partition(b" ")
        if stream in (b"stdout", b"stderr") and tag in (b"F", b"P"):
            yield LogLine(time.decode("ascii", "replace"), rank, text.decode("utf-8", "replace"))


def merge(*ranks: Iterable[LogLine]) -> Iterator[LogLine]:
    """Lines of several ranks in the order of their times; each rank's own order is kept."""
    return heapq.merge(*ranks, key=lambda line: line.time)
