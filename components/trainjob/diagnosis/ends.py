"""How the crash that is to blame ended, in words, and what that means where Kubernetes gives no reason."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass, replace

from trainjob.diagnosis import meanings
from trainjob.diagnosis.crashes import INITIALIZERS, Crash
from trainjob.diagnosis.known import USAGE
from trainjob.diagnosis.meanings import Category, Meaning
from trainjob.diagnosis.tails import Tail
from trainjob.errors import RetryVerdict

_SIGSEGV = 128 + signals.SIGSEGV
_MISUSED = 2  # argparse, click, Python itself


@dataclass(frozen=True)
class Blamed:
    """The first crash, and what its log says.

    Attributes:
        crash: The crash.
        tail: The end of its log.
        nodes: Number of nodes that train; 0 if it is unknown.
    """

    crash: Crash
    tail: Tail
    nodes: int = 0


def told(blamed: Blamed) -> str:
    """Who ended, and how; as long as what Kubernetes says of it."""
    crash = blamed.crash
    who = f"{crash.rank}'s container {crash.container}" if crash.container else crash.rank
    again = f" (started again {crash.restarts} times)" if crash.restarts > 1 else ""
    return f"{who} {_what(blamed)}{again}"


def _what(blamed: Blamed) -> str:
    crash = blamed.crash
    if crash.stopped:
        return _STOPPED.says
    if (meaning := crash.meaning) is not None:
        if meaning.says:
            return f"{meaning.says}: {crash.probe}" if crash.probe else meaning.says
        if crash.reason in ("StartError", "ContainerCannotRun"):
            return f"could not be started: {_exec_error(crash.message) or 'command not found'}"
        return f"was stopped: {crash.reason}: {crash.message}"
    if crash.disruption or crash.exit_code is None:
        return f"was stopped: {crash.reason}: {crash.message}"
    return _exited(crash.exit_code, blamed)


def _exited(code: int, blamed: Blamed) -> str:
    if name := _signal(code - 128):
        ended = f"was killed by signal {code - 128} ({name})"
    else:
        ended = f"exited with code {code}"
    if verdict := blamed.crash.verdict:
        return f"{ended}: {verdict.message}"
    if _by_error(blamed):
        return f"{ended}: {blamed.tail.error}"
    # `sys.exit("words")`, or words and `sys.exit(1)`.
    said = blamed.tail.last if code == 1 and not blamed.crash.container else ""
    return f"{ended}; last log line: {said}" if said else ended


def _by_error(blamed: Blamed) -> bool:
    """Whether the last error in its log is the cause of its exit.

    Python exits with 1 after an exception and with 2 after a wrong argument, shells exit with 126 and 127, C++ aborts
    with SIGABRT (as the first process of a container with SIGSEGV, because the kernel ignores its own SIGABRT), and
    mpirun exits as its worker did. Any other code was chosen by the program.
    """
    crash, tail = blamed.crash, blamed.tail
    told_by_code = crash.exit_code in (1, 2, 126, 127, 134) or _torn_down(blamed) or tail.error.startswith("worker ")
    return bool(tail.error) and told_by_code and not crash.container


def _torn_down(blamed: Blamed) -> bool:
    """Whether native code aborted because of the error in the log, which is what has to be fixed."""
    crash = blamed.crash
    return (blamed.tail.torn_down or blamed.tail.aborted) and crash.exit_code == _SIGSEGV and not crash.container


_SIGNALS = {
    "SIGKILL": Meaning(
        Category.UNKNOWN,
        RetryVerdict.INFRASTRUCTURE,
        "something outside the job killed it: often the machine ran out of memory (check its kernel log and memory)",
    ),
    "SIGTERM": Meaning(Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, "something outside the job terminated it"),
    "SIGBUS": Meaning(
        Category.OUT_OF_MEMORY,
        RetryVerdict.UNKNOWN,
        "often /dev/shm is full: containers have 64 MiB of it; mount an emptyDir with medium Memory at /dev/shm in the "
        "runtime (docs/runtimes.md), or use fewer DataLoader workers",
    ),
    "SIGILL": Meaning(
        Category.IMAGE,
        RetryVerdict.UNKNOWN,
        "use packages built for the node's CPU: it lacks an instruction that they need",
    ),
    "SIGSEGV": Meaning(
        Category.USER_CODE,
        RetryVerdict.UNKNOWN,
        "native code crashed: check that driver, CUDA and framework versions fit together",
    ),
}
_STOPPED = Meaning(
    Category.DELETED,
    RetryVerdict.INFRASTRUCTURE,
    "find out who deletes pods in this namespace, then launch it again",
    "was stopped: somebody deleted its pod",
)
_MORE_MEMORY = (
    "raise the memory limit of this container in the runtime; resources_per_node applies to the nodes that train"
)
_NOT_ALL = Meaning(
    Category.UNKNOWN,
    RetryVerdict.UNKNOWN,
    "not all processes started in time: check that the script waits for as many as there are ({} nodes), that none of "
    "them failed before, and the network between nodes",
)
_TOO_FEW = Meaning(
    Category.CONFIGURATION,
    RetryVerdict.UNKNOWN,
    "check the number of processes in the script: it waits for {} processes, and the job has {} nodes",
)
_FAILED = Meaning(
    Category.USER_CODE,
    RetryVerdict.UNKNOWN,
    "fix the training code or its arguments; the last lines of the log show where it stopped",
)
_INITIALIZER = Meaning(
    Category.USER_CODE,
    RetryVerdict.UNKNOWN,
    "check the URI of the dataset or model, and the keys for it; the last lines of the log say more",
)
_CONTAINER = Meaning(
    Category.USER_CODE,
    RetryVerdict.UNKNOWN,
    "read its log: this container is of the job's runtime or patches, the training code is not to blame",
)
_LOST = Meaning(
    Category.UNKNOWN,
    RetryVerdict.INFRASTRUCTURE,
    "no rank is known to have failed by itself: look at the network between the nodes, and for a rank that hangs",
)


def meaning_of(blamed: Blamed) -> Meaning:
    """What it means: for Kubernetes' own reasons by `meanings`, else by the program, the log, the signal, the step."""
    crash = blamed.crash
    if crash.stopped:
        return _STOPPED
    if (meaning := crash.meaning) is not None:
        memory_of_another = meaning.category is Category.OUT_OF_MEMORY and (crash.container or _initializes(crash))
        return replace(meaning, advice=_MORE_MEMORY) if memory_of_another else meaning
    if crash.disruption or crash.exit_code is None:
        return meanings.UNKNOWN
    by_signal = None if _torn_down(blamed) else _SIGNALS.get(_signal(crash.exit_code - 128))
    return _said(blamed) or by_signal or _of_step(crash, blamed.tail)


def _said(blamed: Blamed) -> Meaning | None:
    """The failure that the program reports, in its termination message or in its log."""
    crash, tail = blamed.crash, blamed.tail
    if verdict := crash.verdict:
        return verdict.meaning
    if crash.container:
        return None
    if tail.usage and crash.exit_code == _MISUSED:
        return USAGE
    if tail.joining and tail.processes > blamed.nodes > 0 and tail.joined == blamed.nodes:
        return replace(_TOO_FEW, advice=_TOO_FEW.advice.format(tail.processes, blamed.nodes))
    if tail.joining:
        return replace(_NOT_ALL, advice=_NOT_ALL.advice.format(blamed.nodes or "its"))
    return tail.meaning if _by_error(blamed) or not tail.error else None


def _of_step(crash: Crash, tail: Tail) -> Meaning:
    if crash.container:
        return _CONTAINER
    if _initializes(crash):
        return _INITIALIZER
    return _LOST if tail.lost_peer else _FAILED


def _initializes(crash: Crash) -> bool:
    return crash.rank.startswith(INITIALIZERS)


def _signal(number: int) -> str:
    """Name of signal `number`; empty if there is none (most real-time signals have no name)."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return ""


_MOUNT_ERROR = re.compile(
    r'error mounting "[^"]*" (to rootfs at "[^"]*").*: ([^:]*: Are you[^:]*\?|[^:]*)(?:: unknown)?$', re.DOTALL
)


def _exec_error(message: str) -> str:
    """Of runc's chain of errors the one that says something."""
    if mount := _MOUNT_ERROR.search(message):
        return f"error mounting a volume {mount[1]}: {mount[2]}"
    found = re.search(r'exec: "[^"]*": .*|chdir to cwd .*|stat /.*', message)
    return (found[0] if found else message).removesuffix(": unknown")
