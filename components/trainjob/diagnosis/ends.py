"""How the crash that is to blame ended, in words, and what that means where Kubernetes gives no reason."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass

from trainjob.diagnosis import meanings
from trainjob.diagnosis.crashes import Crash
from trainjob.diagnosis.meanings import Category, Meaning
from trainjob.diagnosis.tails import Tail
from trainjob.errors import RetryVerdict

_SIGSEGV = 128 + signals.SIGSEGV


@dataclass(frozen=True)
class Blamed:
    """The first crash, and what its log says."""

    crash: Crash
    tail: Tail


def told(blamed: Blamed) -> str:
    """Who ended, and how; as long as what Kubernetes says of it."""
    crash = blamed.crash
    who = f"{crash.rank}'s container {crash.container}" if crash.container else crash.rank
    again = f" (started again {crash.restarts} times)" if crash.restarts > 1 else ""
    return f"{who} {_what(blamed)}{again}"


def _what(blamed: Blamed) -> str:
    crash, tail = blamed.crash, blamed.tail
    if crash.stopped:
        return _STOPPED.says
    if (meaning := crash.meaning) is not None:
        if meaning.says:
            return meaning.says
        if crash.reason in ("StartError", "ContainerCannotRun"):
            return f"could not be started: {_exec_error(crash.message) or 'command not found'}"
        return f"was stopped: {crash.reason}: {crash.message}"
    if crash.disruption or crash.exit_code is None:
        return f"was stopped: {crash.reason}: {crash.message}"
    if name := _signal(crash.exit_code - 128):
        ended = f"was killed by signal {crash.exit_code - 128} ({name})"
    else:
        ended = f"exited with code {crash.exit_code}"
    # Python ends with 1 after an exception, C++ by SIGABRT, mpirun as its worker; whoever gave another code meant that.
    by_error = crash.exit_code in (1, 2, 134) or _torn_down(blamed) or tail.error.startswith("worker ")
    return f"{ended}: {tail.error}" if tail.error and by_error and not crash.container else ended


def _torn_down(blamed: Blamed) -> bool:
    """Whether native code crashed on the way out of an exception of Python's, which is what is to be mended."""
    crash = blamed.crash
    return blamed.tail.torn_down and crash.exit_code == _SIGSEGV and not crash.container


_SIGNALS = {
    "SIGKILL": Meaning(
        Category.UNKNOWN,
        RetryVerdict.INFRASTRUCTURE,
        "something outside the job killed it: often the machine ran out of memory (see its kernel log)",
    ),
    "SIGTERM": Meaning(Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, "something asked it to stop from outside"),
    "SIGSEGV": Meaning(
        Category.USER_CODE,
        RetryVerdict.USER,
        "native code crashed: check that driver, CUDA and framework versions fit together",
    ),
}
_STOPPED = Meaning(
    Category.DELETED,
    RetryVerdict.INFRASTRUCTURE,
    "find out who deletes pods in this namespace, then run it again",
    "was stopped: somebody deleted its pod",
)
_FAILED = Meaning(
    Category.USER_CODE,
    RetryVerdict.USER,
    "mend the training code or its arguments; the last lines of the log say where it stopped",
)
_INITIALIZER = Meaning(
    Category.USER_CODE,
    RetryVerdict.USER,
    "check the URI of the dataset or model, and the keys for it; the last lines of the log say more",
)
_CONTAINER = Meaning(
    Category.USER_CODE,
    RetryVerdict.USER,
    "read its log: this container is of the job's runtime or patches, the training code is not to blame",
)
_LOST = Meaning(
    Category.UNKNOWN,
    RetryVerdict.INFRASTRUCTURE,
    "no rank is known to have failed by itself: look at the network between the nodes, and for a rank that hangs",
)


def meaning_of(blamed: Blamed) -> Meaning:
    """What it means: for Kubernetes' own reasons by `meanings`, else by the log, the signal, the step."""
    crash, tail = blamed.crash, blamed.tail
    if crash.stopped:
        return _STOPPED
    if (meaning := crash.meaning) is not None:
        return meaning
    if crash.disruption or crash.exit_code is None:
        return meanings.UNKNOWN
    if tail.meaning is not None and not crash.container:
        return tail.meaning
    by_signal = None if _torn_down(blamed) else _SIGNALS.get(_signal(crash.exit_code - 128))
    return by_signal or _of_step(crash, tail)


def _of_step(crash: Crash, tail: Tail) -> Meaning:
    if crash.container:
        return _CONTAINER
    if crash.rank.startswith(("dataset-initializer-", "model-initializer-")):
        return _INITIALIZER
    return _LOST if tail.lost_peer else _FAILED


def _signal(number: int) -> str:
    """Name of signal `number`; empty if there is none (most real-time signals have no name)."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return ""


def _exec_error(message: str) -> str:
    """Of runc's chain of errors the one that says something."""
    found = re.search(r'exec: "[^"]*": .*|chdir to cwd .*|stat /.*', message)
    return (found[0] if found else message).removesuffix(": unknown")
