"""Which rank hangs, from the states of the ranks. Pure.

Compares counters and stacks, never clocks of different nodes. A culprit is named only if the evidence rules out
the other ranks that are known; otherwise the diagnosis reports that it is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from trainjob._diagnosis.meaning import ENDED_EARLY, Meaning
from trainjob._diagnosis.ranks import SAME_ON_ALL, Rank
from trainjob._support.control_characters import one_line, plain
from trainjob._support.display import short
from trainjob._support.masking import masked_lines
from trainjob.errors import Category, Diagnosis, RetryVerdict

_PYTHON = re.compile(r"\.py:\d+\)$|^<")  # a Python frame of py-spy
_NAMELESS = re.compile(r"^(0x[0-9a-f]+|\?+) \(")  # a native frame without a symbol

_SHOWN = 8  # innermost frames of a stack: two stacks with their headings fit into the lines that are stored
_NATIVE_SHOWN = 4  # of them, native frames that the innermost Python frame has called
_FRAME = 160  # characters of a frame: names of C++ templates have hundreds
_NAMED = 3  # ranks that a summary names


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
    culprit: Rank | None = None
    waiting: Rank | None = None


# fmt: off
# A loop or a lock may not repeat, so their verdict is not final.
_SILENT = Meaning(Category.HANG, RetryVerdict.INFRASTRUCTURE,
    "check the node of that rank, then launch the job again: its process is stopped, its node is lost, or native code "
    "blocks its interpreter")
_ALONE = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "read the stack: its first frames show where the training code waits or loops. For a long pause of a healthy "
    "training, raise stall_timeout")
_EARLY = Meaning(Category.HANG, RetryVerdict.UNKNOWN, ENDED_EARLY)
_CRASHED = Meaning(Category.HANG, RetryVerdict.UNKNOWN, "read the log of that rank: its process failed")
_ELSEWHERE = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "read the stack of that rank: its first frames show an endless loop, a lock, or a read that never returns")
_BEHIND = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "read the stack of that rank, and compare its data with that of others")
_MISMATCHED = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "let all ranks call the same collectives in the same order: look for a condition on the rank or on its data")
_ALL_WAIT = Meaning(Category.HANG, RetryVerdict.INFRASTRUCTURE,
    "check the network between the nodes, then launch the job again. If it hangs again, check whether all ranks call "
    "the same collectives in the same order: no rank is outside of them")
_UNKNOWN = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "read the stacks: their first frames show where the training code waits or loops")
_UNCOUNTED = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "call trainjob.progress.step() on every rank: its watchdog then reports which rank hangs, with its stack (see "
    "docs/how-to/hangs.md)")
# fmt: on


def judge(ranks: Sequence[Rank], pods: int = 0) -> Hang:
    """Find the rank that hangs among those whose state is known.

    Args:
        ranks: The known processes of a job that makes no progress.
        pods: Number of pods that train; 0 if unknown. Counts if no process reports how many there are.
    """
    # A rank that never counts while others do has reported one stall, long ago: its state is out of date. Without that
    # report it has been stopped before.
    counting = any(rank.marker.count for rank in ranks)
    current = [rank for rank in ranks if rank.marker.count or not rank.stalled or not counting]
    complete = len(current) >= (max((rank.marker.world for rank in ranks), default=0) or pods)
    active = [rank for rank in current if not rank.ended]
    stalled = [rank for rank in active if rank.stalled]
    waiting = [rank for rank in stalled if rank.waits_in]
    if silent := _silent(active, stalled, waiting):
        return silent
    if not complete or not stalled:
        return _unknown(stalled, waiting, complete=complete)
    if len(current) == 1:
        alone = stalled[0]
        where = f" in {alone.place}" if alone.place else ""
        return Hang(f"{alone.name} makes no step{where}{alone.at_step}", _ALONE, alone)
    return (
        _ended([rank for rank in current if rank.ended], stalled, waiting)
        or _elsewhere(stalled, waiting)
        or _behind(stalled, waiting)
        or _mismatched(waiting)
        or _unknown(stalled, waiting, complete=True)
    )


def _silent(active: Sequence[Rank], stalled: Sequence[Rank], waiting: Sequence[Rank]) -> Hang | None:
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
        f"{culprit.at_step and culprit.at_step + ' or later'}{lost}, while {_count(stalled)} {others}",
        _SILENT,
        culprit,
        next(iter([*waiting, *stalled])),
    )


def _ended(ended: Sequence[Rank], stalled: Sequence[Rank], waiting: Sequence[Rank]) -> Hang | None:
    """A rank that has ended while all others wait for it: in a collective, or in a barrier of their own.

    A rank that has made as many steps as it should is ahead of others that hang for another reason.
    """
    gone = [rank for rank in ended if not any(_ahead(rank, other) for other in stalled)]
    counted = all(rank.marker.step for rank in (*gone, *stalled))
    own = [rank for rank in stalled if rank.waits_in == ""]
    if not gone or (own and not counted) or not (waiting or own):
        return None
    ended, waiting = gone, waiting or own
    culprit = next((rank for rank in ended if rank.exit_code), ended[0])
    later = " or later" if culprit.at_step and not culprit.marker.ended else ""  # it has written no last marker
    code = "" if culprit.exit_code is None else f" with code {culprit.exit_code}"
    names = _names([culprit, *(rank for rank in ended if rank is not culprit)])
    return Hang(
        f"{names} ended{code}{culprit.at_step}{later}, while "
        f"{_count(waiting)} {_wait(waiting)} in {waiting[0].waits_in or waiting[0].place}",
        _CRASHED if culprit.exit_code else _EARLY,
        culprit,
        waiting[0],
    )


def _elsewhere(stalled: Sequence[Rank], waiting: Sequence[Rank]) -> Hang | None:
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
        f"{culprit.name} is in {culprit.place}{culprit.at_step}, while {_count(others)} {_wait(others)} in {where}",
        _ELSEWHERE,
        culprit,
        others[0],
    )


def _behind(stalled: Sequence[Rank], waiting: Sequence[Rank]) -> Hang | None:
    """The only rank that is behind all others. One step does not count in a collective, where ranks finish in turn."""
    kinds = {rank.marker.step[0] if rank.marker.step else "" for rank in stalled}
    if len(kinds) != 1 or "" in kinds or len(stalled) < 2:
        return None
    first, second, *_ = ordered = sorted(stalled, key=_number)
    gap = _number(second) - _number(first)
    if gap < (2 if first in waiting else 1):
        return None
    others = [rank for rank in ordered if rank is not first]
    return Hang(
        f"{first.name} is{first.at_step}, and {_count(others)} {'is' if len(others) == 1 else 'are'} at step "
        f"{_number(second)} or later",
        _BEHIND,
        first,
        next((rank for rank in waiting if rank is not first), second),
    )


def _mismatched(waiting: Sequence[Rank]) -> Hang | None:
    """Ranks that wait in different collectives, so that none completes."""
    calls = {rank.process: _operation(rank) for rank in waiting}
    names = dict.fromkeys(calls.values())  # in the order of the ranks
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


def _unknown(stalled: Sequence[Rank], waiting: Sequence[Rank], *, complete: bool) -> Hang:
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


def hang_of(hang: Hang, seconds: float, job: str) -> Diagnosis:
    """The diagnosis of a job in which no rank has made progress for `seconds`."""
    shown = [(hang.culprit, "the rank that hangs"), (hang.waiting, "waits" if hang.culprit else "as it was")]
    lines = [
        line for rank, role in shown if rank is not None and rank.marker.stack for line in _stack_lines(rank, role)
    ]
    return Diagnosis(
        Category.HANG,
        hang.meaning.retry,
        f"no rank has made progress for {short(seconds)}: {hang.summary}",
        rank=hang.culprit.process[0] if hang.culprit else "",
        log=tuple(masked_lines(map(plain, lines))),
        advice=hang.meaning.advice,
        job=job,
    )


def _stack_lines(rank: Rank, role: str) -> list[str]:
    native = takewhile(lambda line: not _PYTHON.search(line), rank.marker.native)
    inner = [f"  {one_line(line, _FRAME)}" for line in native if not _NAMELESS.match(line)][:_NATIVE_SHOWN]
    frames = [f'  File "{frame.file}", line {frame.line} in {frame.function}' for frame in rank.marker.stack]
    shown = [*inner, *frames][:_SHOWN]
    return [f"stack of {rank.name} ({role}), innermost frame first:", *shown]


def _operation(rank: Rank) -> str | None:
    name = rank.waits_in or ""
    return name.lower() if SAME_ON_ALL.match(name) else None


def _number(rank: Rank) -> int:
    return rank.marker.step[1] if rank.marker.step else 0


def _ahead(rank: Rank, other: Rank) -> bool:
    comparable = rank.marker.step and other.marker.step and rank.marker.step[0] == other.marker.step[0]
    return bool(comparable) and _number(rank) > _number(other)


def _names(ranks: Sequence[Rank]) -> str:
    names = [rank.name for rank in ranks[:_NAMED]]
    if len(ranks) > _NAMED:
        return f"{', '.join(names)} and {len(ranks) - _NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def _count(ranks: Sequence[Rank]) -> str:
    return ranks[0].name if len(ranks) == 1 else f"{len(ranks)} ranks"


def _wait(ranks: Sequence[Rank]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
