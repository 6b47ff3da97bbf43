"""Reads the lines that the watchdogs of `trainjob.progress` write to the logs: steps, ends and stacks. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainjob._support.foreign import Unreadable, json_of
from trainjob.progress.watchdog import NATIVE_HEADING, RANK_MARKER, STACK_MARKER

_MARKER = re.compile(re.escape(RANK_MARKER) + r"(\{.*\})")
_STACK = re.compile(re.escape(STACK_MARKER) + r"([0-9]{1,9})\| ?(.*)")
_FRAME = re.compile(r'\s*File "(.*)", line (\d+|\?+) in (.*)')


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function}() ({self.file.rpartition('/')[2]}, line {self.line})"


@dataclass(frozen=True)
class Marker:
    """What a process has reported of itself last.

    Attributes:
        world: Number of processes of the training; 0 if unknown.
        count: Steps counted in its present run.
        step: ``step`` or ``steps`` and its value, see `trainjob.progress.watchdog`; None if unknown.
        stalled: It reports that it makes no step.
        ended: Its interpreter exits.
        stack: Its main thread, innermost frame first, when it reported the stall; empty if unknown.
        native: The same by py-spy: native and Python frames; empty if unknown.
        spent: Seconds of its present run up to the latest step: ``all``, and ``waiting`` for ranks, ``device`` and
            ``loading`` among them, see `trainjob.progress.watchdog`. Empty if unknown.
    """

    world: int = 0
    count: int = 0
    step: tuple[str, int] | None = None
    stalled: bool = False
    ended: bool = False
    stack: tuple[Frame, ...] = ()
    native: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)


def marker_of(text: str) -> dict[str, Any] | None:
    """The content of a line that a watchdog wrote about its rank; None for other lines, and for lines that are cut."""
    found = _MARKER.search(text) if RANK_MARKER in text else None
    try:
        content = json_of(found[1], "a line of a watchdog") if found else None
    except Unreadable:
        return None
    known = isinstance(content, dict) and _natural(content.get("rank")) is not None
    return content if known else None


def markers_in(lines: Iterable[str]) -> dict[int, Marker]:
    """Number of a process -> the last marker that it wrote to this log, with its stack."""
    found: dict[int, Marker] = {}
    stacks: dict[int, _Stack] = {}
    for text in lines:
        if (content := marker_of(text)) is not None:
            number = content["rank"]
            names = (name for name in ("step", "steps") if _natural(content.get(name)) is not None)
            found[number] = Marker(
                _natural(content.get("world")) or 0,
                _natural(content.get("count")) or 0,
                next(((name, content[name]) for name in names), None),
                stalled="stalled_seconds" in content,
                ended=content.get("ended") is True,
                spent=_spent(content),
            )
            stacks[number] = _Stack()
        elif STACK_MARKER in text and (line := _STACK.search(text)) and (stack := stacks.get(int(line[1]))):
            stack.take(line[2])
    return {
        number: replace(marker, stack=tuple(stacks[number].frames), native=tuple(stacks[number].native))
        if marker.stalled
        else marker
        for number, marker in found.items()
    }


class _Stack:
    """The main thread of a process, from the lines of its stacks. The main thread is the first one, by both ways."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.native: list[str] = []
        self._part: list[Frame] | list[str] | None = self.frames  # which is read; None if it is complete

    def take(self, line: str) -> None:
        """Take the next line."""
        if line == NATIVE_HEADING:
            self._part = self.native
        elif self._part is self.frames:
            if frame := _FRAME.match(line):
                self.frames.append(Frame(*frame.groups()))
            elif self.frames:  # the heading of the next thread
                self._part = None
        elif self._part is self.native:
            if not line.startswith("Thread "):
                self.native.append(line.strip())
            elif self.native:
                self._part = None


def _spent(content: Mapping[str, Any]) -> dict[str, float]:
    spent = content.get("spent")
    return {
        str(name): float(seconds)
        for name, seconds in (spent.items() if isinstance(spent, dict) else ())
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf
    }


def _natural(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
