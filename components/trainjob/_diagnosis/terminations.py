"""What the termination of the root cause means, in words and for a retry."""

from __future__ import annotations

import re
import signal as signals
from dataclasses import dataclass, replace

from trainjob._diagnosis import reasons
from trainjob._diagnosis.crashes import Crash
from trainjob._diagnosis.log_tails import Tail
from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules import USAGE
from trainjob._support.kube_objects import INITIALIZERS
from trainjob.verdicts import Category, RetryVerdict

_SIGSEGV = 128 + signals.SIGSEGV
_USAGE_ERROR = 2  # exit code of argparse, click and Python itself


@dataclass(frozen=True)
class RootCause:
    """The first crash, and the end of its log.

    Attributes:
        crash: The crash.
        tail: The end of its log.
        nodes: Number of nodes that train; 0 if it is unknown.
    """

    crash: Crash
    tail: Tail
    nodes: int = 0


# ---------------------------------------------------------------- description


def describe(cause: RootCause) -> str:
    """Which container terminated, and how; as long as the message of Kubernetes."""
    crash = cause.crash
    subject = f"{crash.rank}'s container {crash.container}" if crash.container else crash.rank
    restarts = f" (restarted {crash.restarts} times)" if crash.restarts > 1 else ""
    return f"{subject} {_termination(cause)}{restarts}"


def _termination(cause: RootCause) -> str:
    crash = cause.crash
    if crash.stopped:
        return _STOPPED.termination
    if (meaning := crash.meaning) is not None:
        if meaning.termination:
            return f"{meaning.termination}: {crash.probe}" if crash.probe else meaning.termination
        if crash.reason in ("StartError", "ContainerCannotRun"):
            return f"could not be started: {_start_error(crash.message) or 'command not found'}"
        return f"was stopped: {crash.reason}: {crash.message}"
    if crash.disruption or crash.exit_code is None:
        return f"was stopped: {crash.reason}: {crash.message}"
    return _exit(crash.exit_code, cause)


_MOUNT_ERROR = re.compile(
    r'error mounting "[^"]*" (to rootfs at "[^"]*").*: ([^:]*: Are you[^:]*\?|[^:]*)(?:: unknown)?$', re.DOTALL
)


def _start_error(message: str) -> str:
    """The cause in runc's chain of errors."""
    if mount := _MOUNT_ERROR.search(message):
        return f"error mounting a volume {mount[1]}: {mount[2]}"
    found = re.search(r'exec: "[^"]*": .*|chdir to cwd .*|stat /.*', message)
    return (found[0] if found else message).removesuffix(": unknown")


def _exit(code: int, cause: RootCause) -> str:
    if name := _signal_name(code - 128):
        text = f"was killed by signal {code - 128} ({name})"
    else:
        text = f"exited with code {code}"
    if verdict := cause.crash.verdict:
        return f"{text}: {verdict.message}"
    if _is_by_error(cause):
        return f"{text}: {cause.tail.error}"
    # `sys.exit("message")`, or a message and `sys.exit(1)`.
    last = cause.tail.last if code == 1 and not cause.crash.container else ""
    return f"{text}; last log line: {last}" if last else text


def _signal_name(number: int) -> str:
    """Name of a signal; empty if it has none, as most real-time signals."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return ""


def _is_by_error(cause: RootCause) -> bool:
    """Whether the last error in the log is the cause of the exit.

    Python exits with 1 after an exception and with 2 after a wrong argument, shells exit with 126 and 127, C++ aborts
    with SIGABRT (as the first process of a container with SIGSEGV, because the kernel ignores its own SIGABRT), and
    mpirun exits as its worker did. Any other code was chosen by the program.
    """
    crash, tail = cause.crash, cause.tail
    matches = crash.exit_code in (1, 2, 126, 127, 134) or _is_aborted(cause) or tail.error.startswith("worker ")
    return bool(tail.error) and matches and not crash.container


def _is_aborted(cause: RootCause) -> bool:
    """Whether native code aborted because of the error in the log, so that this error has to be fixed."""
    crash, tail = cause.crash, cause.tail
    return (tail.torn_down or tail.aborted) and crash.exit_code == _SIGSEGV and not crash.container


# ---------------------------------------------------------------- meaning


_SIGNALS = {
    "SIGKILL": Meaning(
        Category.UNKNOWN,
        RetryVerdict.INFRASTRUCTURE,
        "find out what killed it from outside: often the machine ran out of memory (check its kernel log)",
    ),
    "SIGTERM": Meaning(
        Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, "find out what terminated it from outside the job"
    ),
    "SIGBUS": Meaning(
        Category.OUT_OF_MEMORY,
        RetryVerdict.UNKNOWN,
        "mount an emptyDir with medium Memory at /dev/shm in the runtime (docs/how-to/runtimes.md), or use fewer "
        "DataLoader workers: often /dev/shm is full (containers have 64 MiB)",
    ),
    "SIGILL": Meaning(
        Category.IMAGE,
        RetryVerdict.UNKNOWN,
        "use packages built for the node's CPU: it lacks an instruction that they use",
    ),
    "SIGSEGV": Meaning(
        Category.USER_CODE,
        RetryVerdict.UNKNOWN,
        "check that the versions of driver, CUDA and framework are compatible: native code crashed",
    ),
}
_STOPPED = Meaning(
    Category.DELETED,
    RetryVerdict.INFRASTRUCTURE,
    "find out who deletes pods in this namespace, then launch the job again",
    "was stopped: its pod was deleted",
)
_MEMORY = "raise the memory limit of this container in the runtime; resources_per_node applies to the nodes that train"
_NOT_ALL = Meaning(
    Category.UNKNOWN,
    RetryVerdict.UNKNOWN,
    "check that the script waits for the right number of processes ({} nodes), that no process failed earlier, and the "
    "network between the nodes: not all processes started in time",
)
_TOO_FEW = Meaning(
    Category.CONFIGURATION,
    RetryVerdict.UNKNOWN,
    "correct the number of processes in the script: it waits for {} processes, but the job has {} nodes",
)
_FAILED = Meaning(
    Category.USER_CODE,
    RetryVerdict.UNKNOWN,
    "fix the training code or its arguments; the last lines of the log show where it failed",
)
_INITIALIZER = Meaning(
    Category.USER_CODE,
    RetryVerdict.UNKNOWN,
    "check the URI of the dataset or model and its credentials; see the last lines of the log",
)
_CONTAINER = Meaning(
    Category.USER_CODE,
    RetryVerdict.UNKNOWN,
    "read the log of this container: it comes from the job's runtime or patches, not from the training code",
)
_LOST = Meaning(
    Category.UNKNOWN,
    RetryVerdict.INFRASTRUCTURE,
    "check the network between the nodes, and whether a rank hangs: no rank failed by itself, as far as known",
)


def meaning_of(cause: RootCause) -> Meaning:
    """Category, retry verdict and advice: by Kubernetes' reason, else by the program, its log, the signal, the step."""
    crash = cause.crash
    if crash.stopped:
        return _STOPPED
    if (meaning := crash.meaning) is not None:
        trains = not crash.container and not _is_initializer(crash)
        of_other_container = not trains and meaning.category is Category.OUT_OF_MEMORY
        return replace(meaning, advice=_MEMORY, resource="") if of_other_container else meaning
    if crash.disruption or crash.exit_code is None:
        return reasons.UNKNOWN
    by_signal = None if _is_aborted(cause) else _SIGNALS.get(_signal_name(crash.exit_code - 128))
    return _reported(cause) or by_signal or _by_step(crash, cause.tail)


def _reported(cause: RootCause) -> Meaning | None:
    """The failure that the program reports, in its termination message or in its log."""
    crash, tail = cause.crash, cause.tail
    if verdict := crash.verdict:
        return verdict.meaning
    if crash.container:
        return None
    if tail.usage and crash.exit_code == _USAGE_ERROR:
        return USAGE
    if tail.joining and tail.processes > cause.nodes > 0 and tail.joined == cause.nodes:
        return replace(_TOO_FEW, advice=_TOO_FEW.advice.format(tail.processes, cause.nodes))
    if tail.joining:
        return replace(_NOT_ALL, advice=_NOT_ALL.advice.format(cause.nodes or "its"))
    return tail.meaning if _is_by_error(cause) or not tail.error else None


def _by_step(crash: Crash, tail: Tail) -> Meaning:
    if crash.container:
        return _CONTAINER
    if _is_initializer(crash):
        return _INITIALIZER
    return _LOST if tail.lost_peer else _FAILED


def _is_initializer(crash: Crash) -> bool:
    return crash.rank.startswith(INITIALIZERS)
