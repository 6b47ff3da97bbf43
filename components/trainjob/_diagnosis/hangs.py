"""Which rank hangs, from the lines that the watchdogs of `trainjob.progress` wrote to the logs.

Pure. Compares counters and stacks, never clocks of different nodes. A culprit is named only if the evidence rules out
the other ranks that are known; otherwise the diagnosis reports that it is unknown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from trainjob._diagnosis.diagnose import Diagnosis
from trainjob._diagnosis.reasons import Category, Meaning
from trainjob._support.control_characters import plain
from trainjob._support.kube_objects import mapping, mappings, training_container
from trainjob._support.masking import masked_lines
from trainjob.progress import (
    BACKWARD_FILES,
    COLLECTIVE_FILES,
    DEVICE_FILES,
    NATIVE_HEADING,
    NEUTRAL_FILES,
    RANK_MARKER,
    STACK_MARKER,
)
from trainjob.verdicts import RetryVerdict

Process = tuple[str, int]
"""A process: the rank of its pod, as ``node-1``, and the number that the process reports, which other pods may, too."""

_MARKER = re.compile(re.escape(RANK_MARKER) + r"(\{.*\})")
_STACK = re.compile(re.escape(STACK_MARKER) + r"(\d+)\| ?(.*)")
_PYTHON = re.compile(r"\.py:\d+\)$|^<")  # a Python frame of py-spy
_FRAME = re.compile(r'\s*File "(.*)", line (\d+|\?+) in (.*)')

_SHOWN = 8  # innermost frames of a stack: two stacks with their headings fit into the lines that are stored
_NATIVE_SHOWN = 4  # of them, native frames that the innermost Python frame has called
_NAMED = 3  # ranks that a summary names

_NEUTRAL, _COLLECTIVE = re.compile(NEUTRAL_FILES), re.compile(COLLECTIVE_FILES)
_BACKWARD, _DEVICE = re.compile(BACKWARD_FILES), re.compile(DEVICE_FILES)
# Every rank of a group calls the same one. Others, such as send and recv, differ between ranks of a healthy training.
_SAME_ON_ALL = re.compile(
    r"(?i)^(all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|barrier|monitored_?barrier|reduce$|gather"
    r"|scatter|sync_global_devices|process_allgather)"
)


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
        number: ``step`` or ``steps`` and its value, see `trainjob.progress`; None if unknown.
        stalled: It reported that it makes no step.
        ended: Its interpreter has exited, or its container has.
        stack: Its main thread, innermost frame first, when it reported the stall; empty if unknown.
        exit_code: Exit code of its container; None if it has not ended.
        native: Its main thread by py-spy, innermost frame first: native and Python frames; empty if unknown.
        spent: Seconds of its present run up to the latest step: ``all``, and ``waiting`` for ranks, ``device`` and
            ``loading`` among them, see `trainjob.progress`. Empty if unknown.
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
        known = [function for function in inside if _SAME_ON_ALL.match(function)]
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


@dataclass(frozen=True)
class Hang:
    """Which rank hangs.

    Attributes:
        summary: A clause for people.
        meaning: Who has to act, and how.
        culprit: The rank that hangs; None if that is unknown.
        waiting: A rank that waits for it, or another one whose stack helps; None if there is none.
    """

    summary: str
    meaning: Meaning
    culprit: RankState | None = None
    waiting: RankState | None = None


def _meaning(seen: str, advice: str, retry: RetryVerdict = RetryVerdict.UNKNOWN) -> Meaning:
    return Meaning(Category.HANG, retry, advice, seen)


# A loop or a lock may not repeat, so their verdict is not final.
_SILENT = _meaning(
    "does not respond any more",
    "check the node of that rank, then launch the job again: its process is stopped, its node is lost, or native code "
    "blocks its interpreter",
    RetryVerdict.INFRASTRUCTURE,
)
_ALONE = _meaning(
    "makes no step",
    "read the stack: its first frames show where the training code waits or loops. For a long pause of a healthy "
    "training, raise stall_timeout",
)
_EARLY = _meaning(
    "ended while other ranks wait in a collective",
    "find out why that rank ends early: all ranks must run the same number of steps, also with a dataset that does not "
    "divide evenly",
)
_CRASHED = _meaning("exited while other ranks wait in a collective", "read the log of that rank: its process failed")
_ELSEWHERE = _meaning(
    "is elsewhere while other ranks wait in a collective",
    "read the stack of that rank: its first frames show an endless loop, a lock, or a read that never returns",
)
_BEHIND = _meaning("is behind the other ranks", "read the stack of that rank, and compare its data with that of others")
_MISMATCHED = _meaning(
    "mismatched collectives",
    "let all ranks call the same collectives in the same order: look for a condition on the rank or on its data",
)
_ALL_WAIT = _meaning(
    "all ranks wait in a collective",
    "check the network between the nodes, then launch the job again. If it hangs again, check whether all ranks call "
    "the same collectives in the same order: no rank is outside of them",
    RetryVerdict.INFRASTRUCTURE,
)
_UNKNOWN = _meaning(
    "it is unknown which rank hangs", "read the stacks: their first frames show where the training code waits or loops"
)
_UNCOUNTED = _meaning(
    "not all ranks report their steps",
    "call trainjob.progress.step() on every rank: its watchdog then reports which rank hangs, with its stack (see "
    "docs/how-to/hangs.md)",
)


def judge(ranks: Sequence[RankState], pods: int = 0) -> Hang:
    """Find the rank that hangs among those whose state is known.

    Args:
        ranks: The known processes of a job that makes no progress.
        pods: Number of pods that train; 0 if unknown. Counts if no process reports how many there are.
    """
    # A rank that never counts while others do has reported one stall, long ago: its state is out of date. Without that
    # report it has been stopped before.
    counting = any(rank.count for rank in ranks)
    current = [rank for rank in ranks if rank.count or not rank.stalled or not counting]
    complete = len(current) >= (max((rank.world for rank in ranks), default=0) or pods)
    active = [rank for rank in current if not rank.ended]
    stalled = [rank for rank in active if rank.stalled]
    waiting = [rank for rank in stalled if rank.waits_in]
    if silent := _silent(active, stalled, waiting):
        return silent
    if not complete or not stalled:
        return _unknown(stalled, waiting, complete=complete)
    if len(current) == 1:
        return _alone(stalled[0])
    return (
        _ended([rank for rank in current if rank.ended], stalled, waiting)
        or _elsewhere(stalled, waiting)
        or _behind(stalled, waiting)
        or _mismatched(waiting)
        or _unknown(stalled, waiting, complete=True)
    )


def _silent(active: Sequence[RankState], stalled: Sequence[RankState], waiting: Sequence[RankState]) -> Hang | None:
    """A rank whose watchdog has stopped, too: its process is stopped, or its node is gone."""
    silent = [rank for rank in active if not rank.stalled]
    if not silent or not stalled:
        return None
    culprit = next((rank for rank in silent if rank.lost), silent[0])
    verb = "does" if len(silent) == 1 else "do"
    others = "reported that it waits" if len(stalled) == 1 else "reported that they wait"
    lost = f": {culprit.lost}" if culprit.lost else ""
    return Hang(
        f"{_names([culprit, *(rank for rank in silent if rank is not culprit)])} {verb} not respond any more"
        f"{culprit.at_step}{lost}, while {_count(stalled)} {others}",
        _SILENT,
        culprit,
        next(iter([*waiting, *stalled])),
    )


def _alone(rank: RankState) -> Hang:
    where = f" in {rank.place}" if rank.place else ""
    return Hang(
        f"{name_of(rank)} makes no step{where}{rank.at_step}",
        _ALONE,
        rank,
    )


def _ended(ended: Sequence[RankState], stalled: Sequence[RankState], waiting: Sequence[RankState]) -> Hang | None:
    """A rank that has ended while all others wait for it."""
    if not ended or not waiting or any(rank.waits_in == "" for rank in stalled):
        return None
    culprit = next((rank for rank in ended if rank.exit_code), ended[0])
    code = "" if culprit.exit_code is None else f" with code {culprit.exit_code}"
    return Hang(
        f"{_names([culprit, *(rank for rank in ended if rank is not culprit)])} ended{code}{culprit.at_step}, while "
        f"{_count(waiting)} {_wait(waiting)} in {waiting[0].waits_in}",
        _CRASHED if culprit.exit_code else _EARLY,
        culprit,
        waiting[0],
    )


def _elsewhere(stalled: Sequence[RankState], waiting: Sequence[RankState]) -> Hang | None:
    """The only rank that does not wait in the collective, in which the others wait."""
    elsewhere = [rank for rank in stalled if rank.waits_in == ""]
    if len(elsewhere) + len(waiting) < len(stalled):  # the place of a rank is unknown: it may be the one
        return None
    others = waiting
    if len(elsewhere) > 1 and not waiting:
        # Waits that are no known collective: of a library, or for a device. One rank differs from two or more others.
        places = [rank.place for rank in elsewhere]
        single = [rank for rank in elsewhere if places.count(rank.place) == 1]
        if len(single) != 1 or len(set(places)) != 2 or len(elsewhere) < 3:
            return None
        others, elsewhere = [rank for rank in elsewhere if rank is not single[0]], single
    if len(elsewhere) != 1 or not others:
        return None
    culprit = elsewhere[0]
    if any(_ahead(culprit, rank) for rank in stalled):  # another rank is behind it: contradictory
        return None
    where = others[0].waits_in or str(others[0].place)
    return Hang(
        f"{name_of(culprit)} is in {culprit.place}{culprit.at_step}, while {_count(others)} {_wait(others)} in {where}",
        _ELSEWHERE,
        culprit,
        others[0],
    )


def _behind(stalled: Sequence[RankState], waiting: Sequence[RankState]) -> Hang | None:
    """The only rank that is behind all others. One step does not count in a collective, where ranks finish in turn."""
    kinds = {rank.number[0] if rank.number else "" for rank in stalled}
    if len(kinds) != 1 or "" in kinds or len(stalled) < 2:
        return None
    first, second, *_ = ordered = sorted(stalled, key=_number)
    gap = _number(second) - _number(first)
    if gap < (2 if first in waiting else 1):
        return None
    others = [rank for rank in ordered if rank is not first]
    return Hang(
        f"{name_of(first)} is{first.at_step}, and {_count(others)} {'is' if len(others) == 1 else 'are'} at step "
        f"{_number(second)} or later",
        _BEHIND,
        first,
        next((rank for rank in waiting if rank is not first), second),
    )


def _mismatched(waiting: Sequence[RankState]) -> Hang | None:
    """Ranks that wait in different collectives, so that none completes."""
    calls = {rank.process: _operation(rank) for rank in waiting}
    names = set(calls.values())
    if len(names) < 2 or None in names:
        return None
    groups = sorted(([rank for rank in waiting if calls[rank.process] == name] for name in names), key=len)
    few, many = groups[0], groups[-1]
    single = len(groups) == 2 and len(few) == 1 and len(many) > 1
    return Hang(
        f"mismatched collectives: {_names(few)} {_wait(few)} in {few[0].waits_in}, and {_names(many)} {_wait(many)} in "
        f"{many[0].waits_in}" + ("" if single else "; it is unknown which rank is wrong"),
        _MISMATCHED,
        few[0] if single else None,
        many[0],
    )


def _unknown(stalled: Sequence[RankState], waiting: Sequence[RankState], *, complete: bool) -> Hang:
    if complete and waiting and len(waiting) == len(stalled):
        return Hang(
            f"{_count(waiting)} {_wait(waiting)} in {waiting[0].waits_in}, and it is unknown for which rank",
            _ALL_WAIT,
            waiting=waiting[0],
        )
    others = "" if complete else "; not all ranks report their steps"
    return Hang(
        f"it is unknown which rank hangs{others}",
        _UNKNOWN if stalled and complete else _UNCOUNTED,
        waiting=stalled[0] if stalled else None,
    )


def diagnosis_of(hang: Hang, seconds: float, job: str) -> Diagnosis:
    """The diagnosis of a job in which no rank has made progress for `seconds`."""
    shown = [(hang.culprit, "the rank that hangs"), (hang.waiting, "waits" if hang.culprit else "as it was")]
    lines = [line for rank, role in shown if rank is not None and rank.stack for line in _stack_lines(rank, role)]
    return Diagnosis(
        Category.HANG,
        hang.meaning.retry,
        f"no rank has made progress for {_duration(seconds)}: {hang.summary}",
        rank=hang.culprit.process[0] if hang.culprit else "",
        log=tuple(masked_lines(map(plain, lines))),
        advice=hang.meaning.advice,
        job=job,
    )


def _stack_lines(rank: RankState, role: str) -> list[str]:
    inner = [f"  {line}" for line in takewhile(lambda line: not _PYTHON.search(line), rank.native)][:_NATIVE_SHOWN]
    frames = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in rank.stack]
    shown = [*inner, *frames][:_SHOWN]
    return [f"stack of {name_of(rank)} ({role}), innermost frame first:", *shown]


def _operation(rank: RankState) -> str | None:
    name = rank.waits_in or ""
    return name.lower() if _SAME_ON_ALL.match(name) else None


def _number(rank: RankState) -> int:
    return rank.number[1] if rank.number else 0


def _ahead(rank: RankState, other: RankState) -> bool:
    comparable = rank.number and other.number and rank.number[0] == other.number[0]
    return bool(comparable) and _number(rank) > _number(other)


def name_of(rank: RankState) -> str:
    """The process for people: its pod, and its number if that differs from the pod's."""
    pod, number = rank.process
    return pod if pod == f"node-{number}" and not rank.shared else f"rank {number} ({pod})"


def _names(ranks: Sequence[RankState]) -> str:
    names = [name_of(rank) for rank in ranks[:_NAMED]]
    if len(ranks) > _NAMED:
        return f"{', '.join(names)} and {len(ranks) - _NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _count(ranks: Sequence[RankState]) -> str:
    return name_of(ranks[0]) if len(ranks) == 1 else f"{len(ranks)} ranks"


def _wait(ranks: Sequence[RankState]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m"), (rest, "s")) if value]
    return " ".join(parts) or f"{seconds:g}s"


def _spent(marker: Mapping[str, Any]) -> dict[str, float]:
    spent = marker.get("spent")
    return {
        str(name): float(seconds)
        for name, seconds in (spent.items() if isinstance(spent, dict) else ())
        if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf
    }


def _natural(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
