"""What the last lines of a rank's log say: the exception that ended it, or that it lost its peers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trainjob.diagnosis.known import meaning_of_error
from trainjob.diagnosis.reasons import Meaning
from trainjob.diagnosis.tracebacks import Raised, trace
from trainjob.sanitizing import plain, states

_CPP = re.compile(r"terminate called after throwing an instance of '([^']+)'")
# Fatal errors of native code (glog, Abseil): the process aborts.
_FATAL = re.compile(r"^\[?F\d{4} \d\d:\d\d:\d\d\.\d+\s+\d+ \S+\] (.+)")
# libstdc++, where threads of native code (PyTorch's Gloo) still run while the process ends: by SIGABRT, or SIGSEGV.
_TORN_DOWN = re.compile(r"terminate called without an active exception")
_USAGE = re.compile(r"^[Uu]sage: ")  # argparse, click
# The same two; Python, shells and env, of what they cannot start; the programs of this package.
_WORDS = re.compile(
    r"^(\S+: )?error: .+|^Error: .+|^\S*python[\d.]*: (No module named|can't (open file|find)) .*"
    r"|^\S*(sh|env)\b.*: .*(not found|No such file or directory|Permission denied|cannot execute.*|format error)$"
    r"|^\S+: \d+: .*: (not found|Illegal option -)$"
)

_TORCHRUN_CAUSE = re.compile(r"Root Cause \(first observed failure\)")
_TORCHRUN_RANK = re.compile(r"^\s*rank\s*: (\d+) \(local_rank")
_TORCHRUN_CODE = re.compile(r"^\s*exitcode\s*: (-?\d+) ")

# Open MPI, of the first process that failed.
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
# JAX's coordination service and PyTorch's store, when processes did not come to the start.
_JOINING = re.compile(r"CoordinationService/RegisterTask|Wait_for_all_tasks_to_register|\d+/\d+ clients joined")
_JOINED = re.compile(r"reached the barrier: (\d+)/(\d+)|(\d+)/(\d+) clients joined")
_LOST_CONNECTION = re.compile(
    r"\b(ConnectionResetError|ConnectionAbortedError|BrokenPipeError|ConnectionRefusedError)\b"
)
_TERMINATED = re.compile(r"SignalException: Process \d+ got signal: (15|2)\b")
_PEER = re.compile(r"[Cc]losed by (?:remote )?peer \[([0-9a-fA-F.:]+)\]|[Rr]ead error \[([0-9a-fA-F.:]+)\]")


TAIL_LINES = 20
"""Lines of a failing rank's log that a diagnosis shows."""

_ENDING = 7  # of them, where an exception stands before the others
_MORE = 6  # lines after the last words that belong to them
_LONGEST = 4096  # characters of a line that are looked at


@dataclass(frozen=True)
class Tail:
    """What the end of a log says.

    Attributes:
        error: The exception or other last words, one line; empty if none is found.
        line: Index of its line; -1 if there is none.
        last: The last line that a process wrote by itself; empty if there is none.
        meaning: What the error means, where it is one of the known ones.
        survived: Index of the line of an exception after which more was written, so that it was perhaps handled; -1 if
            there is none, or `error` explains the end.
        lost_peer: It ended because another rank was gone, or did not answer.
        lost_connection: It ended because some connection broke: to a peer, or to anything else.
        terminated: Another process terminated it.
        usage: It said how it is used.
        torn_down: Native code crashed only because the process was ending already, of `error`.
        peers: Addresses of the peers that it lost.
        aborted: Native code aborted because of `error`.
        joining: It waited at the start for processes that did not come.
        joined: Number of processes that came to the start; 0 if it is unknown.
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


def read(lines: Sequence[str]) -> Tail:
    """Read the end of one rank's log, which may hold the lines of several processes."""
    clean = [shown(line)[:_LONGEST] for line in lines]
    traced = trace(clean)
    raised = _first_to_blame(traced.ended)
    error, line = (str(raised), raised.line) if raised else _last_words(clean)
    last = clean[traced.last] if traced.last >= 0 else ""
    # What is said before the end, and is no last word, was survived.
    more = clean[line + 1 : line + 1 + _MORE] if line >= 0 else []
    end = [error, *more, *clean[max(traced.last, len(clean) - TAIL_LINES) :]]
    said = raised.chain if raised else "\n".join(end)
    joined, processes = next(((a or c, b or d) for a, b, c, d in _JOINED.findall("\n".join(clean))), (0, 0))
    return Tail(
        error,
        line,
        last,
        meaning_of_error(said),
        survived=traced.survived if line < 0 else -1,
        lost_peer=bool(_LOST_PEER.search(said)),
        lost_connection=bool(raised and _LOST_CONNECTION.search(raised.chain)),
        terminated=bool(_TERMINATED.search("\n".join(clean))),
        usage=not raised and any(_USAGE.match(each) for each in clean[-TAIL_LINES:]),
        torn_down=bool(raised and any(_TORN_DOWN.search(after) for after in clean[raised.line :])),
        peers=tuple(dict.fromkeys(first or second for first, second in _PEER.findall("\n".join(clean)))),
        aborted=not raised and line >= 0 and bool(_abort(clean[line], ())),
        joining=bool(_JOINING.search(said)),
        joined=int(joined),
        processes=int(processes),
    )


def shown(line: str) -> str:
    """A line as a terminal shows it, plain: progress bars write over what was there. One carriage return is shown."""
    line = line.rstrip()
    if "\r" not in line:
        return plain(line)
    found = [plain(state) for state in states(line)]
    return "\\r".join(found) if len(found) == line.count("\r") + 1 == 2 else found[-1] if found else ""


def excerpt(lines: Sequence[str], tail: Tail) -> Sequence[str]:
    """The last lines of a log; where its exception stands before them, its lines, too.

    Args:
        lines: The end of the log.
        tail: What it says.
    """
    line = max(tail.line, tail.survived)
    if not 0 <= line < len(lines) - TAIL_LINES:
        return [shown(each) for each in lines[-TAIL_LINES:]]
    before = lines[max(0, line + 1 - TAIL_LINES + _ENDING + 1) : line + 1]
    left_out = len(lines) - _ENDING - line - 1
    return [*map(shown, before), f"[… {left_out} lines …]", *map(shown, lines[-_ENDING:])]


def _first_to_blame(ended: Sequence[Raised]) -> Raised | None:
    """Of the exceptions that ended processes, the first that is no consequence of another process's end."""
    first = ended[0] if ended else None
    return next((each for each in ended if not _LOST_PEER.search(each.chain)), first)


def _last_words(lines: Sequence[str]) -> tuple[str, int]:
    """What a process that raised no exception of Python's says of its end."""
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
        if _WORDS.match(lines[number]):
            return lines[number], number
    return "", -1


def _abort(line: str, following: Sequence[str]) -> str:
    """Why native code aborted, by the line that it writes then and the one after it; empty for any other line."""
    if fatal := _FATAL.match(line):
        return fatal[1]
    found = _CPP.search(line)
    if found is None:
        return ""
    what = following[0].strip() if following else ""
    said = what.removeprefix("what():").strip() if what.startswith("what():") else ""
    return f"{found[1]}: {said}" if said else found[1]


def _worker(report: Sequence[str], rank: re.Pattern[str], code: re.Pattern[str]) -> str:
    """How the first worker ended, by what its launcher reports of it; empty if that is cut off."""
    worker = next((found[1] for line in report if (found := rank.match(line))), "")
    ended = next((found[1] for line in report if (found := code.match(line))), "")
    if not (worker and ended):
        return ""
    how = f"was killed by signal {ended[1:]}" if ended.startswith("-") else f"exited with code {ended}"
    return f"worker {worker} {how}"
