"""What is known of each process of a job that runs. Pure.

From the lines that the watchdogs of `trainjob.progress` wrote to the logs, and from the pods.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainjob._support.kube_objects import mapping, mappings, training_container
from trainjob.progress.watchdog import (
    BACKWARD_FILES,
    COLLECTIVE_FILES,
    DEVICE_FILES,
    NATIVE_HEADING,
    NEUTRAL_FILES,
    RANK_MARKER,
    STACK_MARKER,
)

Process = tuple[str, int]
"""A process: the rank of its pod, as ``node-1``, and the number that the process reports, which other pods may, too."""

_MARKER = re.compile(re.escape(RANK_MARKER) + r"(\{.*\})")
_STACK = re.compile(re.escape(STACK_MARKER) + r"(\d+)\| ?(.*)")
_FRAME = re.compile(r'\s*File "(.*)", line (\d+|\?+) in (.*)')

_NEUTRAL, _COLLECTIVE = re.compile(NEUTRAL_FILES), re.compile(COLLECTIVE_FILES)
_BACKWARD, _DEVICE = re.compile(BACKWARD_FILES), re.compile(DEVICE_FILES)
SAME_ON_ALL = re.compile(
    r"(?i)^(all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|barrier|monitored_?barrier|reduce$|gather"
    r"|scatter|sync_global_devices|process_allgather)"
)
"""Collectives of which every rank of a group calls the same one. Others, as send, differ between healthy ranks."""


@dataclass(frozen=True)
class Frame:
    """A frame of a Python stack."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f"{self.function}() ({self.file.rpartition('/')[2]}, line {self.line})"


@dataclass(frozen=True)
class RankState:
    """What is known of one process.

    Attributes:
        process: The process.
        world: Number of processes of the training; 0 if unknown.
        count: Steps counted in its present run.
        number: ``step`` or ``steps`` and its value, see `trainjob.progress.watchdog`; None if unknown.
        stalled: It reported that it makes no step.
        ended: Its interpreter has exited, or its container has.
        stack: Its main thread, innermost frame first, when it reported the stall; empty if unknown.
        exit_code: Exit code of its container; None if it has not ended.
        native: Its main thread by py-spy, innermost frame first: native and Python frames; empty if unknown.
        spent: Seconds of its present run up to the latest step: ``all``, and ``waiting`` for ranks, ``device`` and
            ``loading`` among them, see `trainjob.progress.watchdog`. Empty if unknown.
        shared: Other processes of its pod write markers, too.
        lost: Why its pod cannot respond, such as a node that is not ready; empty if it can.
    """

    process: Process
    world: int = 0
    count: int = 0
    number: tuple[str, int] | None = None
    stalled: bool = False
    ended: bool = False
    stack: tuple[Frame, ...] = ()
    exit_code: int | None = None
    native: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
    shared: bool = False
    lost: str = ""

    @property
    def waits_in(self) -> str | None:
        """The collective in which it waits for others, "" if it is elsewhere; None if that is unknown."""
        device, inside = False, []
        for frame in self.stack:
            if _BACKWARD.search(frame.file):
                return "backward"
            if _COLLECTIVE.search(frame.file) and not _NEUTRAL.search(frame.file):
                inside.append(frame.function)
                continue
            device = device or bool(_DEVICE.search(frame.file))
            if not _NEUTRAL.search(frame.file) and not _DEVICE.search(frame.file):
                break
        else:
            if not inside:
                return None
        # The outermost one that a script calls; it may call others of its library.
        known = [function for function in inside if SAME_ON_ALL.match(function)]
        return next(iter([*reversed(known), *inside]), None if device else "")

    @property
    def place(self) -> Frame | None:
        """The innermost frame that is no wait of a library; None if the stack is unknown."""
        return next((frame for frame in self.stack if not _NEUTRAL.search(frame.file)), None)

    @property
    def at_step(self) -> str:
        """Where it is, for a summary; empty if unknown."""
        return f" at step {self.number[1]}" if self.number else ""


def marker_of(text: str) -> dict[str, Any] | None:
    """The content of a line that a watchdog wrote about its rank; None for other lines, and for lines that are cut."""
    found = _MARKER.search(text) if RANK_MARKER in text else None
    try:
        content = json.loads(found[1]) if found else None
    except (ValueError, RecursionError):
        return None
    known = isinstance(content, dict) and _natural(content.get("rank")) is not None
    return content if known else None


def states_of(pod: str, lines: Iterable[str]) -> dict[Process, RankState]:
    """The processes of one pod, from the end of its log.

    Args:
        pod: Rank of the pod, as ``node-1``.
        lines: Lines of its log, oldest first; may begin anywhere, and lines may be cut.
    """
    found: dict[Process, RankState] = {}
    stacks: dict[Process, _Stack] = {}
    for text in lines:
        if (marker := marker_of(text)) is not None:
            process = pod, marker["rank"]
            names = (name for name in ("step", "steps") if _natural(marker.get(name)) is not None)
            number = next(((name, marker[name]) for name in names), None)
            found[process] = RankState(
                process,
                _natural(marker.get("world")) or 0,
                _natural(marker.get("count")) or 0,
                number,
                stalled="stalled_seconds" in marker,
                ended=marker.get("ended") is True,
                spent=_spent(marker),
            )
            stacks[process] = _Stack()
        elif STACK_MARKER in text and (line := _STACK.search(text)) and (stack := stacks.get((pod, int(line[1])))):
            stack.take(line[2])
    for process, state in found.items():
        stack = stacks[process]
        frames, native = (stack.frames, stack.native) if state.stalled else ((), ())
        found[process] = replace(state, stack=tuple(frames), native=tuple(native), shared=len(found) > 1)
    return found


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


def with_pod(state: RankState, pod: Mapping[str, Any]) -> RankState:
    """Add what the pod of a process shows: its end, a node that does not respond."""
    status = mapping(pod, "status")
    name = training_container(pod)
    container = next((each for each in mappings(status, "containerStatuses") if each.get("name") == name), {})
    code = mapping(container, "state", "terminated").get("exitCode")
    ready = next((each for each in mappings(status, "conditions") if each.get("type") == "Ready"), {})
    running = "running" in mapping(container, "state")
    node = mapping(pod, "spec").get("nodeName") or "its node"
    lost = ""
    if status.get("reason") == "NodeLost" or (running and ready.get("status") == "Unknown"):
        lost = f"{node} does not respond"
    elif running and ready.get("status") == "False":
        lost = f"its pod on {node} is not ready"
    exited = code if isinstance(code, int) else None
    return replace(state, exit_code=exited, ended=state.ended or exited is not None, lost=lost)


def name_of(rank: RankState) -> str:
    """The process for people: its pod, and its number if that differs from the pod's."""
    pod, number = rank.process
    return pod if pod == f"node-{number}" and not rank.shared else f"rank {number} ({pod})"


def _spent(marker: Mapping[str, Any]) -> dict[str, float]:
    spent = marker.get("spent")
    return {
        str(name): float(seconds)
        for name, seconds in (spent.items() if isinstance(spent, dict) else ())
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf
    }


def _natural(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
