"""What the end of the rank that is the root cause means, and how it is described. Pure."""

from __future__ import annotations

import re
from dataclasses import replace

from trainjob._diagnosis.cluster import Termination
from trainjob._diagnosis.meaning import ENDED_EARLY, NOTHING_KNOWN, Meaning
from trainjob._diagnosis.output import Output
from trainjob._diagnosis.ranks import Rank
from trainjob._diagnosis.rules import lines, raised
from trainjob._support.kube_objects import INITIALIZERS
from trainjob.errors import Category, RetryVerdict

# fmt: off
_STOPPED = Meaning(Category.DELETED, RetryVerdict.INFRASTRUCTURE,
    "find out who deletes pods in this namespace, then launch the job again", "was stopped: its pod was deleted")
_EARLY = Meaning(Category.USER_CODE, RetryVerdict.UNKNOWN, ENDED_EARLY)
_SLOW_COLLECTIVE = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "find the rank that did not join the collective operation, by the sequence numbers in the logs, and read its "
    "stack; if all joined, check the network between the nodes")
_SLOW_KERNEL = Meaning(Category.HANG, RetryVerdict.UNKNOWN,
    "find the kernel that does not end: with one process it cannot be the network; the GPU was still busy with earlier "
    "kernels of this rank")
_TOO_FEW = Meaning(Category.CONFIGURATION, RetryVerdict.CONFIGURATION,
    "correct num_nodes, or the number of processes in the script (world_size)")
_FAILED = Meaning(Category.USER_CODE, RetryVerdict.UNKNOWN,
    "fix the training code or its arguments; the last lines of the log show where it failed")
_INITIALIZER = Meaning(Category.USER_CODE, RetryVerdict.UNKNOWN,
    "check the URI of the dataset or model and its credentials; see the last lines of the log")
_CONTAINER = Meaning(Category.USER_CODE, RetryVerdict.UNKNOWN,
    "read the log of this container: it comes from the job's runtime or patches, not from the training code")
_CONTAINER_MEMORY = (
    "raise the memory limit of this container in the runtime; resources_per_node applies to the nodes that train")
# fmt: on


def meaning_of(rank: Rank, nodes: int) -> Meaning:
    """Category, retry verdict and advice: by Kubernetes' reason, else by the program, its output, the signal, the step.

    Args:
        rank: The root cause.
        nodes: Number of nodes that train; 0 if it is unknown.
    """
    ended = rank.termination
    if ended.stopped:
        return _STOPPED
    if (meaning := ended.meaning) is not None and not _is_of_a_child(rank):
        trains = not ended.container and not _is_initializer(ended)
        of_other_container = not trains and meaning.category is Category.OUT_OF_MEMORY
        return replace(meaning, advice=_CONTAINER_MEMORY, node_memory=False) if of_other_container else meaning
    if ended.disruption or ended.exit_code is None:
        return NOTHING_KNOWN
    if not ended.exit_code:
        return _EARLY
    terminated = rank.output.terminated and not ended.container and ended.verdict is None
    return lines.SIGTERM if terminated else _reported(rank, nodes) or _by_step(ended, rank.output)


def _is_of_a_child(rank: Rank) -> bool:
    """Whether only a child process was killed because memory ran out, and the program ended by another exception."""
    ended, raised_ = rank.termination, rank.output.raised
    if ended.reason != "OOMKilled" or ended.exit_code != 1 or raised_ is None:
        return False
    meaning = raised_.rule.means if raised_.rule is not None else None
    return meaning is None or (meaning.category is not Category.OUT_OF_MEMORY and meaning not in raised.OF_CHILDREN)


def _reported(rank: Rank, nodes: int) -> Meaning | None:
    """The failure that the program reports, in its termination message or its output; else what its signal means."""
    ended, out = rank.termination, rank.output
    if verdict := ended.verdict:
        return verdict.meaning
    if ended.container:
        return rule.means if ended.signal and (rule := lines.rule_of(ended.signal, "")) else None
    by_error = _is_by_error(ended, out)
    found = out.rule if by_error else None
    if out.collective is not None and (found is None or found.means is raised.PEER):
        alone = nodes == 1 and out.processes < 2 and out.collective.rank is None
        return _SLOW_KERNEL if alone else _SLOW_COLLECTIVE
    if found is not None:
        return _weighed(_joined(found.means, out, nodes), out)
    code = "" if _is_aborted(ended, out) else ended.signal or (out.worker.end if out.worker else str(ended.exit_code))
    line = out.error or (str(out.worker) if out.worker else out.last)
    if out.raised is not None and (by_error or not ended.signal):
        return None
    return rule.means if (rule := lines.rule_of(code, f"usage: {line}" if out.usage else line)) else None


def _weighed(meaning: Meaning, out: Output) -> Meaning:
    """The meaning of an error; of an outage while another error was handled, it is unknown which of the two repeats."""
    if meaning.category is not Category.OUTAGE or out.raised is None or out.raised.handled is None:
        return meaning
    return replace(meaning, retry=RetryVerdict.UNKNOWN)


def _joined(meaning: Meaning, out: Output, nodes: int) -> Meaning:
    """The meaning of an error; if processes did not join at the start, by their number."""
    if meaning is not raised.JOINING:
        return meaning
    joined, expected = out.joined
    if expected > nodes > 0 and joined == nodes:
        return _TOO_FEW
    return replace(meaning, advice=meaning.advice.replace("processes,", f"processes ({nodes or 'its'} nodes),", 1))


def _by_step(ended: Termination, out: Output) -> Meaning:
    if ended.container:
        return _CONTAINER
    if _is_initializer(ended):
        return _INITIALIZER
    return raised.PEER if out.consequence else _FAILED


def _is_initializer(ended: Termination) -> bool:
    return ended.rank.startswith(INITIALIZERS)


def _is_by_error(ended: Termination, out: Output) -> bool:
    """Whether the last error in the output is the cause of the exit.

    Python exits with 1 after an exception, C++ aborts with SIGABRT (as the first process of a container with SIGSEGV,
    because the kernel ignores its own SIGABRT), and launchers exit as their worker did, or kill all others. Any other
    code was chosen by the program, after a Python exception that it has caught.
    """
    if ended.container or not out.text:
        return False
    if out.raised is not None:
        return ended.exit_code in (1, 2, 134) or out.worker is not None or _is_aborted(ended, out)
    return out.worker is not None or not ended.signal or ended.signal == "SIGABRT" or _is_aborted(ended, out)


def _is_aborted(ended: Termination, out: Output) -> bool:
    """Whether native code aborted because of the error in the output, so that this error has to be fixed."""
    return (out.torn_down or out.aborted) and ended.signal == "SIGSEGV" and not ended.container


# ---------------------------------------------------------------- words

_MOUNT_ERROR = re.compile(
    r'error mounting "[^"]*" (to rootfs at "[^"]*").*: ([^:]*: Are you[^:]*\?|[^:]*)(?:: unknown)?$', re.DOTALL
)


def describe(rank: Rank) -> str:
    """Which container ended, and how; as long as the message of Kubernetes."""
    ended = rank.termination
    subject = f"{ended.rank}'s container {ended.container}" if ended.container else ended.rank
    restarts = f" (restarted {ended.restarts} times)" if ended.restarts > 1 else ""
    return f"{subject} {_how(rank)}{restarts}"


def _how(rank: Rank) -> str:
    ended = rank.termination
    if ended.stopped:
        return _STOPPED.ended
    if (meaning := ended.meaning) is not None and not _is_of_a_child(rank):
        if meaning.ended:
            return f"{meaning.ended}: {ended.probe}" if ended.probe else meaning.ended
        if ended.reason in ("StartError", "ContainerCannotRun"):
            return f"could not be started: {_start_error(ended.message) or 'command not found'}"
        return f"was stopped: {ended.reason}: {ended.message}"
    if ended.disruption or ended.exit_code is None:
        return f"was stopped: {ended.reason}: {ended.message}"
    return _exit(rank, ended, ended.exit_code)


def _start_error(message: str) -> str:
    """The cause in runc's chain of errors."""
    if mount := _MOUNT_ERROR.search(message):
        return f"error mounting a volume {mount[1]}: {mount[2]}"
    found = re.search(r'exec: "[^"]*": .*|chdir to cwd .*|stat /.*', message)
    return (found[0] if found else message).removesuffix(": unknown")


def _exit(rank: Rank, ended: Termination, code: int) -> str:
    out = rank.output
    if not code:
        said = f" (its last line: {out.last})" if out.last else ""
        return f"ended with code 0{rank.at_step}{said} before the others, which then lost it"
    text = f"was killed by signal {code - 128} ({ended.signal})" if ended.signal else f"exited with code {code}"
    if verdict := ended.verdict:
        return f"{text}: {verdict.message}"
    if (slow := out.collective) is not None and (out.rule is None or out.rule.means is raised.PEER):
        first_ = f"; rank {slow.rank} reported it first" if slow.rank is not None else ""
        what = f"{slow.operation} (sequence number {slow.number})" if slow.operation else "a collective operation"
        limit = f" within {slow.seconds:g} s" if slow.seconds else " in time"
        return f"{text}: {what} did not end{limit}{first_}"
    if _is_by_error(ended, out):
        child = "; one of its processes was killed because memory ran out" if _is_of_a_child(rank) else ""
        joined, expected = out.joined
        if out.rule is not None and out.rule.means is raised.JOINING and expected:
            return f"{text}: {expected} processes expected, {joined} exist: {out.text}"
        return f"{text}: {out.text}{child}"
    # `sys.exit("message")`, or a message and `sys.exit(1)`, in any language.
    crashed = not ended.signal or ended.signal in ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT")
    said = f"; last log line: {out.last}" if out.last and not ended.container and crashed else ""
    return text + said + (f"; an exception before that: {out.survived}" if said and out.survived and out.recent else "")
