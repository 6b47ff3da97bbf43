"""Reads the end of a rank's log: the exceptions that ended its processes, a launcher's report, the last own line."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import Signals

from trainjob._diagnosis import log_patterns as known
from trainjob._diagnosis.markers import marker_of
from trainjob._diagnosis.rules import raised as table
from trainjob._diagnosis.rules.row import RaisedRule
from trainjob._diagnosis.tracebacks import Raised, Tracebacks
from trainjob._support.control_characters import plain, states
from trainjob._support.foreign import LENIENT, Unreadable, json_of
from trainjob._support.kube_objects import MAX_LINE, mappings
from trainjob.progress.watchdog import RANK_MARKER, STACK_MARKER

TAIL_LINES = 20
"""Lines of a failing rank's log that a diagnosis shows."""

READ_LINES = 300
"""Lines of a failing rank's log that are read: for eight workers, torchrun adds a report of 40 lines."""

_LAST_LINES = 7  # of those that are shown, if the error is in earlier lines
_LONGEST = 4096  # characters of a line that are searched

_WATCHDOG = re.compile(rf"{re.escape(RANK_MARKER)}\{{|{re.escape(STACK_MARKER)}\d+\| ")


@dataclass(frozen=True)
class Worker:
    """A launcher's report about the first of its workers that failed.

    Attributes:
        number: Number of the worker.
        code: Its exit code; None if a signal killed it.
        signal: That signal; None if it exited.
        line: Index of the line where the report begins.
    """

    number: int
    code: int | None
    signal: int | None
    line: int

    @property
    def end(self) -> str:
        """Its exit code, or the name of the signal."""
        with suppress(ValueError):
            return str(self.code) if self.signal is None else Signals(self.signal).name
        return ""

    def __str__(self) -> str:
        how = f"exited with code {self.code}" if self.signal is None else f"was killed by signal {self.signal}"
        return f"worker {self.number} {how}"


@dataclass(frozen=True)
class Collective:
    """A collective operation that NCCL's watchdog ended, since it took longer than its time-out.

    Attributes:
        operation: As ``ALLREDUCE``.
        seconds: The time-out.
        number: Sequence number.
        rank: Number of the process that reports it first, if another one than this; None otherwise.
    """

    operation: str = ""
    seconds: float = 0.0
    number: int = 0
    rank: int | None = None


@dataclass(frozen=True)
class Output:
    """What the end of a log shows.

    Attributes:
        raised: The exception that ended a process; of several, the first that no other process has caused.
        worker: A launcher's report about its first worker that failed.
        error: The final error of a program without a Python exception: its line; empty if there is none.
        line: Index of the line of the exception or error; -1 if there is none.
        last: The last line of a process's own output; empty if there is none.
        survived: The last exception after which its process continued; None if there is none.
        recent: `survived` is among the last lines, which are shown.
        usage: The program printed its usage, and an error.
        aborted: Native code aborted because of `error`.
        continued: Other lines follow, so that a child process may have aborted.
        torn_down: Native code crashed only because the process was already exiting after `raised`.
        terminated: Another process terminated it.
        lost_peer: Native code reports that another rank was gone or did not respond.
        peers: Addresses of those ranks.
        joined: Number of processes that joined at the start, and that it waited for; zeros if unknown.
        collective: A collective operation that took longer than its time-out, and that no exception explains.
        blamed: Number of the process that failed according to its exception, if another one wrote it; None otherwise.
        assertion: An assertion of a GPU's kernel; empty if there is none.
        processes: Number of processes that have prefixed their lines.
    """

    raised: Raised | None = None
    worker: Worker | None = None
    error: str = ""
    line: int = -1
    last: str = ""
    survived: Raised | None = None
    recent: bool = False
    usage: bool = False
    aborted: bool = False
    continued: bool = False
    torn_down: bool = False
    terminated: bool = False
    lost_peer: bool = False
    peers: tuple[str, ...] = ()
    joined: tuple[int, int] = (0, 0)
    collective: Collective | None = None
    blamed: int | None = None
    assertion: str = ""
    processes: int = 0

    @property
    def text(self) -> str:
        """The error in words; empty if there is none."""
        if self.raised is None:
            last = f"; last log line: {self.last}" if self.last else ""
            return self.error or (f"{self.worker}{last}" if self.worker else "")
        asserted = self.assertion and self.rule is not None and self.rule.id == "gpu-assert"
        return f"{self.raised.name}: {self.assertion}" if asserted else str(self.raised)

    @property
    def rule(self) -> RaisedRule | None:
        """The row for the exception, or for an error of native code; None if there is none."""
        if self.raised is not None:
            return self.raised.rule
        native = known.native_error(self.error)
        return table.rule_of(native[0], known.native_modules(native[1]), native[1]) if native else None

    @property
    def consequence(self) -> bool:
        """Whether the process failed because another rank was gone or did not respond."""
        rule = self.rule
        return rule.means in (table.PEER, table.JOINING) if rule is not None else self.raised is None and self.lost_peer

    @property
    def after_lost_peer(self) -> bool:
        """Whether it lost another rank and wrote a few more lines, so that it may have exited because of that."""
        rule = self.survived.rule if self.survived is not None and self.recent and not self.error else None
        return rule is not None and rule.means in (table.PEER, table.JOINING)


UNREAD = Output()
"""Of a rank whose log was not read."""


def read(log: Sequence[str]) -> Output:
    """Read the end of one rank's log, which may hold the lines of several processes."""
    clean = _of_last_attempt([shown(line)[:_LONGEST] for line in log])
    processes: dict[str, Tracebacks] = {}
    for number, line in enumerate(clean):
        if number and len(log[number - 1].encode("utf-8", "replace")) >= MAX_LINE:
            continue  # more of a line that the container runtime has cut
        for part in _parts(line):
            prefix = match[0] if (match := known.PREFIX.match(part)) else ""
            process = processes.setdefault(prefix.strip(), Tracebacks(hooked=prefix.startswith("[rank")))
            process.read(number, part[len(prefix) :])
    found = list(processes.values())
    for each in found:
        each.end()
    text = "\n".join(clean)
    worker = _worker(text)
    ended = sorted((each.ended for each in found if each.ended), key=lambda raised: raised.line)
    survived = max((each.survived for each in found if each.survived), key=lambda raised: raised.line, default=None)
    own_fault = [each for each in ended if (rule := each.rule) is None or rule.means is not table.PEER]
    # Without one, it may have lost the worker that a signal killed.
    raised = next(iter(own_fault or (ended if worker is None or worker.signal is None else ())), None)
    last = max((each.last for each in found), default=-1)
    said = _last_message(clean, last)
    handled = survived.line if survived else -1
    error, at = "", raised.line if raised else -1
    if raised is None:
        error, at = _final_error(clean, handled, len(clean) - 1 if worker is None else last)
    elif known.CALLED.search(raised.name):  # the program that it called has said why
        begins = max(n for n, line in enumerate(clean[: at + 1]) if n == 0 or known.TRACEBACK.search(line))
        if (child := _final_error(clean[:begins], handled, begins - 1))[0]:
            raised, (error, at) = None, child
    if not error and raised is None and worker is not None:
        at = worker.line
    aborted = not raised and bool(error) and bool(_abort(clean[at], ()))
    near = clean[max(at, 0) : at + 7 if at >= 0 else 0]
    shown_from = len(clean) - TAIL_LINES if worker is None else 0  # a launcher's report has more lines than are shown
    own = clean if worker is None else clean[: last + 1]
    end = [*near, *clean[max(last, shown_from, 0) :]]
    by_others = raised is None or (raised.rule is not None and raised.rule.means is table.PEER)
    return Output(
        raised,
        worker,
        error,
        at,
        next(_parts(clean[said]), "").strip("│ ") if 0 <= said < (worker.line if worker else len(clean)) else "",
        survived if at < 0 else None,
        recent=survived is not None and survived.line >= len(clean) - TAIL_LINES,
        usage=not raised and all(any(map(form.match, own[-TAIL_LINES:])) for form in (known.USAGE, known.REJECTED)),
        aborted=aborted,
        continued=aborted and at < last,
        torn_down=bool(raised and any(known.TORN_DOWN.search(after) for after in clean[raised.line :])),
        terminated=bool(known.TERMINATED.search(text if by_others else str(raised))),
        lost_peer=any(map(known.LOST_PEER.search, [error, *near] if aborted else filter(known.NATIVE_LINE.match, end))),
        peers=tuple(dict.fromkeys(known.PEER.findall(text))),
        joined=next(((int(seen[1]), int(seen[2])) for each in known.JOINED if (seen := each.search(text))), (0, 0)),
        collective=_collective(text) if by_others else None,
        blamed=_blamed("\n".join(clean[handled + 1 :]), processes, worker),
        assertion=next((found[1] for found in map(known.ASSERTION.search, clean) if found), ""),
        processes=len([prefix for prefix in processes if prefix]),
    )


def _of_last_attempt(clean: Sequence[str]) -> Sequence[str]:
    """The lines, empty where they are of workers after whose end the launcher, or a script, has started others."""
    text, begins = "\n".join(clean), 0
    for found in known.ATTEMPT.finditer(text):
        ends = text.count("\n", 0, found.end()) + 1
        if found[1] or sum(bool(line) and not known.SPECIAL.match(line) for line in clean[ends:]) > 1:
            begins = ends
    return [*[""] * begins, *clean[begins:]]


def of_training(log: Sequence[str]) -> Sequence[str]:
    """The lines without those that the watchdog of `trainjob.progress` wrote about its rank."""
    if not any(mark in line for line in log for mark in (RANK_MARKER, STACK_MARKER)):
        return log
    return [line for line in log if not _WATCHDOG.match(line)]


def without_stacks(log: Sequence[str]) -> Sequence[str]:
    """The lines with only the last line of the watchdog of each process: its steps."""
    latest: dict[object, int] = {}
    for number, line in enumerate(log):
        if (marker := marker_of(line)) is not None:
            latest[marker["rank"]] = number
    kept = set(latest.values())
    return [line for number, line in enumerate(log) if number in kept or not _WATCHDOG.match(line)]


def shown(line: str) -> str:
    """A line as a terminal shows it: progress bars overwrite earlier states. A single carriage return is kept."""
    line = line.rstrip()
    if "\r" not in line:
        return plain(line)
    found = [plain(state) for state in states(line)]
    return "\\r".join(found) if len(found) == line.count("\r") + 1 == 2 else found[-1] if found else ""


def excerpt(log: Sequence[str], output: Output) -> Sequence[str]:
    """The last lines of a log; for an earlier exception, its lines, too.

    Args:
        log: The end of the log.
        output: The result of `read` for these lines.
    """
    line = max(output.line, output.survived.line if output.survived else -1)
    if not 0 <= line < len(log) - TAIL_LINES:
        return [shown(each) for each in log[-TAIL_LINES:]]
    before = log[max(0, line + 1 - TAIL_LINES + _LAST_LINES + 1) : line + 1]
    left_out = len(log) - _LAST_LINES - line - 1
    return [*map(shown, before), f"[… {left_out} lines …]", *map(shown, log[-_LAST_LINES:])]


# ---------------------------------------------------------------- lines


def _parts(line: str) -> Iterator[str]:
    """The line, or the text in a record of a JSON log: its message, and the traceback in its other fields."""
    record = None
    if line.startswith("{") and line.endswith("}"):
        with suppress(Unreadable):
            record = json_of(line, "a log line", LENIENT)
    if not isinstance(record, dict):
        yield line
        return
    for names in known.JSON_FIELDS:
        text = next((record[name] for name in names if isinstance(record.get(name), str)), "")
        yield from text[: _LONGEST * 4].splitlines()
    yield from _traced(record.get("exception"))


def _traced(exceptions: object) -> Iterator[str]:
    """The traceback of a record of structlog, whose `dict_tracebacks` write it as JSON, the last exception first."""
    last = mappings({"all": exceptions}, "all")[:1]
    for each in last:
        yield "Traceback (most recent call last):"
        yield from (f'  File "{frame.get("filename")}", line 1, in x' for frame in mappings(each, "frames"))
        yield f"{each.get('exc_type')}: {each.get('exc_value')}"


# ---------------------------------------------------------------- errors


def _worker(text: str) -> Worker | None:
    """How the first worker ended, from its launcher's report."""
    for pattern in known.WORKERS:
        if reports := list(pattern.finditer(text)):
            found = reports[-1]  # torchrun writes the root cause last
            values = found.groupdict()
            code, by_signal = values.get("code") or "", values.get("signal") or ""
            by_signal = by_signal or (code[1:] if code.startswith("-") else "")
            heads = [head.start() for head in known.LAUNCHER.finditer(text) if head.start() <= found.start()]
            begins = text.rfind("\n", 0, heads[-1] if heads else found.start()) + 1
            line = text.count("\n", 0, begins)
            return Worker(
                int(values["n"]), None if by_signal else int(code), int(by_signal) if by_signal else None, line
            )
    return None


def _collective(text: str) -> Collective | None:
    """The collective operation that NCCL's watchdog ended."""
    found = known.COLLECTIVE.search(text)
    by = known.FIRST_TIMEOUT.search(text)
    if found is None and by is None:
        return None
    rank = int(by[1]) if by and by[1] else None
    if found is None:
        return Collective(rank=rank)
    return Collective(found["operation"], int(found["milliseconds"]) / 1000, int(found["number"]), rank)


def _blamed(text: str, processes: Mapping[str, Tracebacks], worker: Worker | None) -> int | None:
    """The number of the process of another log that failed, according to an exception."""
    found = known.BLAMED.search(text)
    own = found is not None and (f"[rank{found[1]}]:" in processes or (worker and str(worker.number) == found[1]))
    return None if found is None or own else int(found[1])


def _boxed(clean: Sequence[str], handled: int) -> tuple[str, int]:
    """The error between two rules at the end of the log, its first paragraph, and the index of its first line."""
    ends = [n for n in range(handled + 1, len(clean)) if known.RULE.match(clean[n])]
    if len(ends) < 2 or any(clean[ends[-1] + 1 :]):
        return "", -1
    before = [line for line in clean[max(0, ends[-2] - 1) : ends[-2]] if known.ERROR_LINE.match(line)]
    paragraph = itertools.takewhile(bool, clean[ends[-2] + 1 : ends[-1]])
    return "; ".join([*before, " ".join(paragraph)]), ends[-2] + 1


def _final_error(clean: Sequence[str], handled: int, last: int) -> tuple[str, int]:
    """The final error of a process without a Python exception, and the index of its line.

    Args:
        clean: Lines of the log.
        handled: Index of an exception that was handled; the error is in a later line.
        last: Index of the last line that it may be in.
    """
    for number, line in enumerate(clean):
        if error := _abort(line, clean[number + 1 : number + 2]):
            return error, number
    if last == len(clean) - 1 and (found := _boxed(clean, handled))[0]:
        return found
    number = _last_message(clean, last)
    panics = [n + 1 for n in range(max(handled, number - TAIL_LINES), number) if known.PANIC.match(clean[n])]
    number = panics[0] if panics else number
    if number > handled + 1 and clean[number - 1].endswith(":") and known.ERROR_LINE.match(clean[number - 1]):
        return f"{clean[number - 1]} {clean[number]}", number - 1  # Rust: where it panicked, and why in the next line
    # Indented lines belong to the one before them.
    number = next((n for n in range(number, handled, -1) if clean[n][:1].strip()), -1)
    return (clean[number], number) if number >= 0 and known.ERROR_LINE.match(clean[number]) else ("", -1)


def _last_message(clean: Sequence[str], last: int) -> int:
    """Index of the last line that says something: no frame of a stack, no address of a page alone; -1 if none does."""
    return next((n for n in range(last, -1, -1) if clean[n] and not known.NO_MESSAGE.match(clean[n])), -1)


def _abort(line: str, following: Sequence[str]) -> str:
    """Why native code aborted, from its line and the next one; empty for other lines."""
    if fatal := known.FATAL.match(line):
        return str(next(filter(None, fatal.groups())))
    found = known.CPP.search(line)
    if found is None:
        return ""
    if found[2]:
        return found[2]
    what = following[0].strip() if following else ""
    message = what.removeprefix("what():").strip() if what.startswith("what():") else ""
    return f"{found[1]}: {message}" if message else found[1]
