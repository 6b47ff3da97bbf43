"""Reads the end of a rank's log: the exception that ended it, or the loss of its peers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules import meaning_of_error
from trainjob._diagnosis.tracebacks import Raised, trace
from trainjob._support.control_characters import plain, states
from trainjob.progress.watchdog import RANK_MARKER, STACK_MARKER

_CPP = re.compile(r"terminate called after throwing an instance of '([^']+)'")
# Fatal errors of native code (glog, Abseil): the process aborts.
_FATAL = re.compile(r"^\[?F\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ \S+\] (.+)")
# libstdc++, if threads of native code (PyTorch's Gloo) still run at exit: the process ends by SIGABRT or SIGSEGV.
_TORN_DOWN = re.compile(r"terminate called without an active exception")
_USAGE = re.compile(r"^[Uu]sage: ")  # argparse, click
# argparse and click; Python, shells and env that cannot start a program; the programs of this package.
_ERROR_LINE = re.compile(
    r"^(\S+: )?error: .+|^Error: .+|^\S*python[\d.]*: (No module named|can't (open file|find)) .*"
    r"|^\S*(sh|env)\b.*: .*(not found|No such file or directory|Permission denied|cannot execute.*|format error)$"
    r"|^\S+: \d+: .*: (not found|Illegal option -)$"
)

_TORCHRUN_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_TORCHRUN_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) ")

# Open MPI's report of the first process that failed.
_MPI_PROCESS = re.compile(r"^\s*Process name: \[.*,(\d+)\]$")
_MPI_CODE = re.compile(r"^\s*Exit code:\s+(-?\d+)$")
_MPI_SIGNAL = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")

_LOST_PEER = re.compile(
    r"connection closed by (remote )?peer"  # Gloo, NCCL
    r"|gloo.*(timed? ?out|broken pipe|connection (reset|refused)|read error|connectFullMesh)"
    r"|application timeout caused pair closure"  # Gloo
    r"|watchdog caught collective operation timeout|NCCL (watchdog|.*(timeout|timed out))|ncclRemoteError"
    r"|remote process exited or there was a network error"
    r"|process group watchdog|collective operation timeout"
    r"|(recvValue|sendBytes|recvVector).*failed|DistNetworkError|DistStoreError|TCPStore.*(timed? out|timeout|closed)"
    r"|RendezvousConnectionError|RendezvousTimeoutError"
    r"|stopped sending heartbeats|heartbeat timeout|distributed service detected (fatal|an?) error"  # JAX
    r"|coordination service.*(error|unavailable|failed)|another task died|barrier timed out|ShutdownBarrier"
    r"|HorovodInternalError|rabit.*(reset|closed|timeout|failed)",
    re.IGNORECASE,
)
# JAX's coordination service and PyTorch's store, if processes did not join at the start.
_JOINING = re.compile(r"CoordinationService/RegisterTask|Wait_for_all_tasks_to_register|\d+/\d+ clients joined")
_JOINED = re.compile(r"reached the barrier: (\d+)/(\d+)|(\d+)/(\d+) clients joined")
_LOST_CONNECTION = re.compile(
    r"\b(ConnectionResetError|ConnectionAbortedError|BrokenPipeError|ConnectionRefusedError)\b"
)
_TERMINATED = re.compile(r"SignalException: Process \d+ got signal: (15|2)\b")
_WATCHDOG = re.compile(rf"{re.escape(RANK_MARKER)}\{{|{re.escape(STACK_MARKER)}\d+\| ")
_PEER = re.compile(r"[Cc]losed by (?:remote )?peer \[([0-9a-fA-F.:]+)\]|[Rr]ead error \[([0-9a-fA-F.:]+)\]")


TAIL_LINES = 20
"""Lines of a failing rank's log that a diagnosis shows."""

READ_LINES = 300
"""Lines of a failing rank's log that are read: for eight workers, torchrun adds a report of 40 lines."""

_LAST_LINES = 7  # of them, if the error is in earlier lines
_MORE = 6  # lines after an error that belong to it
_LONGEST = 4096  # characters of a line that are searched


@dataclass(frozen=True)
class Tail:
    """The end of a log.

    Attributes:
        error: The exception or another final error, one line; empty if there is none.
        line: Index of its line; -1 if there is none.
        last: The last line of a process's own output; empty if there is none.
        meaning: The meaning of the error, if it is a known one.
        survived: Index of the line of an exception that was followed by output, and so was perhaps handled; -1 if there
            is none, or `error` explains the termination.
        lost_peer: The rank failed because another rank was gone or did not respond.
        lost_connection: The rank failed because a connection broke, to a peer or another service.
        terminated: Another process terminated it.
        usage: The program printed its usage.
        torn_down: Native code crashed only because the process was already exiting after `error`.
        peers: Addresses of the lost peers.
        aborted: Native code aborted because of `error`.
        joining: The rank waited at the start for processes that did not join.
        joined: Number of processes that joined; 0 if unknown.
        processes: Number of processes that it waited for.
    """

    error: str = ""
    line: int = -1
    last: str = ""
    meaning: Meaning | None = None
    survived: int = -1
    lost_peer: bool = False
    lost_connection: bool = False
    terminated: bool = False
    usage: bool = False
    torn_down: bool = False
    peers: tuple[str, ...] = ()
    aborted: bool = False
    joining: bool = False
    joined: int = 0
    processes: int = 0


def parse(lines: Sequence[str]) -> Tail:
    """Read the end of one rank's log, which may hold the lines of several processes."""
    clean = [shown(line)[:_LONGEST] for line in lines]
    traced = trace(clean)
    raised = _root_exception(traced.ended)
    error, line = (str(raised), raised.line) if raised else _final_error(clean)
    last = clean[traced.last] if traced.last >= 0 else ""
    # Earlier output that is no final error did not end the process.
    more = clean[line + 1 : line + 1 + _MORE] if line >= 0 else []
    end = [error, *more, *clean[max(traced.last, len(clean) - TAIL_LINES) :]]
    searched = raised.chain if raised else "\n".join(end)
    joined, processes = next(((a or c, b or d) for a, b, c, d in _JOINED.findall("\n".join(clean))), (0, 0))
    return Tail(
        error,
        line,
        last,
        meaning_of_error(searched),
        survived=traced.survived if line < 0 else -1,
        lost_peer=bool(_LOST_PEER.search(searched)),
        lost_connection=bool(raised and _LOST_CONNECTION.search(raised.chain)),
        terminated=bool(_TERMINATED.search("\n".join(clean))),
        usage=not raised and any(_USAGE.match(each) for each in clean[-TAIL_LINES:]),
        torn_down=bool(raised and any(_TORN_DOWN.search(after) for after in clean[raised.line :])),
        peers=tuple(dict.fromkeys(first or second for first, second in _PEER.findall("\n".join(clean)))),
        aborted=not raised and line >= 0 and bool(_abort(clean[line], ())),
        joining=bool(_JOINING.search(searched)),
        joined=int(joined),
        processes=int(processes),
    )


def of_training(lines: Sequence[str]) -> Sequence[str]:
    """The lines without those that the watchdog of `trainjob.progress` wrote about its rank."""
    if not any(mark in line for line in lines for mark in (RANK_MARKER, STACK_MARKER)):
        return lines
    return [line for line in lines if not _WATCHDOG.match(line)]


def shown(line: str) -> str:
    """A line as a terminal shows it: progress bars overwrite earlier states. A single carriage return is kept."""
    line = line.rstrip()
    if "\r" not in line:
        return plain(line)
    found = [plain(state) for state in states(line)]
    return "\\r".join(found) if len(found) == line.count("\r") + 1 == 2 else found[-1] if found else ""


def excerpt(lines: Sequence[str], tail: Tail) -> Sequence[str]:
    """The last lines of a log; for an earlier exception, its lines, too.

    Args:
        lines: The end of the log.
        tail: The result of `read` for these lines.
    """
    line = max(tail.line, tail.survived)
    if not 0 <= line < len(lines) - TAIL_LINES:
        return [shown(each) for each in lines[-TAIL_LINES:]]
    before = lines[max(0, line + 1 - TAIL_LINES + _LAST_LINES + 1) : line + 1]
    left_out = len(lines) - _LAST_LINES - line - 1
    return [*map(shown, before), f"[… {left_out} lines …]", *map(shown, lines[-_LAST_LINES:])]


def _root_exception(ended: Sequence[Raised]) -> Raised | None:
    """The first exception that ended a process and was not caused by the loss of another process."""
    first = ended[0] if ended else None
    return next((each for each in ended if not _LOST_PEER.search(each.chain)), first)


def _final_error(lines: Sequence[str]) -> tuple[str, int]:
    """The final error of a process without a Python exception, and the index of its line."""
    for number, line in enumerate(lines):
        if error := _abort(line, lines[number + 1 : number + 2]):
            return error, number
        if _TORCHRUN_CAUSE.search(line):
            return _worker(lines[number : number + 12], _TORCHRUN_RANK, _TORCHRUN_CODE), number
        if _MPI_PROCESS.match(line):
            return _worker(lines[number : number + 2], _MPI_PROCESS, _MPI_CODE), number
        if found := _MPI_SIGNAL.search(line):
            return f"worker {found[1]} was killed by signal {found[2]}", number
    for number in range(len(lines) - 1, max(-1, len(lines) - 4), -1):
        if _ERROR_LINE.match(lines[number]):
            return lines[number], number
    return "", -1


def _abort(line: str, following: Sequence[str]) -> str:
    """Why native code aborted, from its line and the next one; empty for other lines."""
    if fatal := _FATAL.match(line):
        return fatal[1]
    found = _CPP.search(line)
    if found is None:
        return ""
    what = following[0].strip() if following else ""
    message = what.removeprefix("what():").strip() if what.startswith("what():") else ""
    return f"{found[1]}: {message}" if message else found[1]


def _worker(report: Sequence[str], rank: re.Pattern[str], code: re.Pattern[str]) -> str:
    """How the first worker terminated, from its launcher's report; empty if the report is incomplete."""
    worker = next((found[1] for line in report if (found := rank.match(line))), "")
    ended = next((found[1] for line in report if (found := code.match(line))), "")
    if not (worker and ended):
        return ""
    how = f"was killed by signal {ended[1:]}" if ended.startswith("-") else f"exited with code {ended}"
    return f"worker {worker} {how}"
