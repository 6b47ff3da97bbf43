"""Containers and pods that failed, which of them is the root cause, and what its termination means."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from trainjob._diagnosis import reasons, termination_messages
from trainjob._diagnosis.kills import Kill, kills_in
from trainjob._diagnosis.log_tails import Tail
from trainjob._diagnosis.reasons import Category, Meaning
from trainjob._diagnosis.rules import USAGE
from trainjob._diagnosis.termination_messages import Verdict
from trainjob._support.kube_objects import (
    INITIALIZERS,
    mapping,
    mappings,
    name_of,
    parse_time,
    rank_of,
    sidecars_of,
    training_container,
)
from trainjob.verdicts import RetryVerdict

READ_LINES = 300
"""Lines of a failing rank's log that are read: for eight workers, torchrun adds a report of 40 lines."""

_SIGTERM, _SIGKILL, _SIGSEGV = 128 + signals.SIGTERM, 128 + signals.SIGKILL, 128 + signals.SIGSEGV
_USAGE_ERROR = 2  # exit code of argparse, click and Python itself
_GRACE_SECONDS = 30  # Kubernetes' default
_CLOCK_SKEW = timedelta(seconds=2)  # between the clocks of synchronized nodes


@dataclass(frozen=True)
class Crash:
    """The failed termination of a container, or the disruption of a pod.

    Attributes:
        rank: As ``node-1``.
        pod: Name of the pod.
        container: An init container or a sidecar; empty for the training container.
        exit_code: None for a pod that was disrupted before its container terminated.
        reason: Reason of the termination or the disruption.
        message: Message of the termination or the disruption.
        finished: Time of the termination.
        restarts: Number of restarts of the container.
        stopped: The pod was deleted before, and the container terminated because of that.
        sidecar: The container is a sidecar.
        disruption: Kubernetes stopped the pod, for `reason`.
        address: IP address of the pod.
        probe: Report of the failed probe or hook because of which the kubelet killed the container.
    """

    rank: str
    pod: str
    container: str = ""
    exit_code: int | None = None
    reason: str = ""
    message: str = ""
    finished: str = ""
    restarts: int = 0
    stopped: bool = False
    sidecar: bool = False
    disruption: bool = False
    address: str = ""
    probe: str = ""

    @property
    def killed(self) -> bool:
        """Whether SIGTERM or SIGKILL terminated it for an unknown reason."""
        return self.exit_code in (_SIGTERM, _SIGKILL) and self.meaning is None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that a program of this package wrote to its termination message; None if there is none."""
        return termination_messages.read(self.message) if self.exit_code and not self.disruption else None

    @property
    def meaning(self) -> reasons.Meaning | None:
        """The meaning of its reason; None if only the exit code tells more."""
        return reasons.find(self.reason, self.message)


def crashes_in(pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()) -> list[Crash]:
    """All failed terminations in the pods, once each.

    Args:
        pods: Pods of a job; earlier states of the same pods may be among them.
        events: Events of the job: only these report that the kubelet killed a container for a failed probe or hook.
    """
    kills = kills_in(events)
    found = [_with_kill(crash, pod, kills) for pod in pods for crash in pod_crashes(pod)]
    restarts: dict[tuple[str, str], int] = {}
    for crash in found:
        container = crash.pod, crash.container
        restarts[container] = max(crash.restarts, restarts.get(container, 0))
    counted = ((crash, restarts[crash.pod, crash.container]) for crash in found)
    return list(dict.fromkeys(c if c.restarts == count else replace(c, restarts=count) for c, count in counted))


def _with_kill(crash: Crash, pod: Mapping[str, Any], kills: Mapping[tuple[str, str], list[Kill]]) -> Crash:
    """Add the Event's reason if the kubelet killed the container."""
    found = kills.get((crash.pod, crash.container or training_container(pod)))
    ended = parse_time(crash.finished)
    if not found or crash.meaning is not None or crash.disruption or crash.stopped or ended is None:
        return crash
    grace = mapping(pod, "spec").get("terminationGracePeriodSeconds")
    seconds = grace if isinstance(grace, int) else _GRACE_SECONDS
    kill = next((kill for kill in found if kill.explains(ended, seconds)), None)
    return replace(crash, reason=kill.reason, message=kill.message, probe=kill.report) if kill else crash


def pod_crashes(pod: Mapping[str, Any]) -> Iterator[Crash]:
    """The failed terminations of one pod."""
    disruption = _disruption(pod)
    if disruption is not None:
        yield disruption
    status = mapping(pod, "status")
    sidecars = sidecars_of(pod)
    trains = training_container(pod)
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in mappings(status, kind):
            name = str(container.get("name", ""))
            main = kind == "containerStatuses" and name == trains
            sidecar = name in sidecars or (kind == "containerStatuses" and not main)
            for state in ("lastState", "state"):
                terminated = mapping(container, state, "terminated")
                code = terminated.get("exitCode")
                if not isinstance(code, int) or not code:
                    continue
                crash = Crash(
                    rank_of(pod),
                    name_of(pod),
                    "" if main else name,
                    code,
                    str(terminated.get("reason") or ""),
                    _no_limit(pod, kind, name, terminated) or str(terminated.get("message") or ""),
                    str(terminated.get("finishedAt") or ""),
                    _count(container.get("restartCount")),
                    sidecar=sidecar,
                    address=str(status.get("podIP") or ""),
                )
                stopped = _by_deletion(pod, crash)
                if disruption is None or not (stopped or code in (_SIGTERM, _SIGKILL)):
                    yield replace(crash, stopped=True) if stopped else crash


def _no_limit(pod: Mapping[str, Any], kind: str, name: str, terminated: Mapping[str, Any]) -> str:
    """The message for an OOMKilled container without a memory limit: its node ran out of memory."""
    specs = mappings(pod, "spec", "containers" if kind == "containerStatuses" else "initContainers")
    spec = next((each for each in specs if each.get("name") == name), {})
    if terminated.get("reason") != "OOMKilled" or "resources" not in spec:
        return ""
    limited = "memory" in mapping(spec, "resources", "limits") or "memory" in mapping(
        pod, "spec", "resources", "limits"
    )
    return "" if limited else reasons.NO_MEMORY_LIMIT


def _disruption(pod: Mapping[str, Any]) -> Crash | None:
    """The pod's disruption by Kubernetes: an eviction, a preemption, a lost node; None if there was none."""
    status = mapping(pod, "status")
    conditions = mappings(status, "conditions")
    target = next(
        (each for each in conditions if each.get("type") == "DisruptionTarget" and each.get("status") == "True"), None
    )
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    if target is None and (status.get("phase") != "Failed" or reasons.find(reason, message) is None):
        return None
    if target is not None and (not reason or target.get("reason") != "TerminationByKubelet"):
        reason, message = str(target.get("reason") or ""), str(target.get("message") or "")
    codes = [
        mapping(each, "state", "terminated").get("exitCode")
        for each in mappings(status, "containerStatuses")
        if each.get("name") == training_container(pod)
    ]
    return Crash(
        rank_of(pod),
        name_of(pod),
        exit_code=next((code for code in codes if isinstance(code, int) and code), None),
        reason=reason,
        message=message,
        finished=str((target or {}).get("lastTransitionTime") or ""),
        disruption=True,
        address=str(status.get("podIP") or ""),
    )


def _by_deletion(pod: Mapping[str, Any], crash: Crash) -> bool:
    """Whether the container terminated because its pod was deleted: by a suspension, by its Job, by a person."""
    metadata = mapping(pod, "metadata")
    deadline = parse_time(metadata.get("deletionTimestamp"))  # the end of the grace period
    if deadline is None or crash.reason == "OOMKilled":
        return False
    deleted = deadline - timedelta(seconds=min(_count(metadata.get("deletionGracePeriodSeconds")), 10**6))
    finished = parse_time(crash.finished)
    skew = _CLOCK_SKEW if crash.exit_code in (_SIGTERM, _SIGKILL) else timedelta()
    return finished is None or finished >= deleted - skew


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


# ---------------------------------------------------------------- root cause


def in_order(crashes: Sequence[Crash], tails: Mapping[str, Tail]) -> list[Crash]:
    """The crashes, the root cause first.

    Ranks that were terminated from outside (SIGTERM, SIGKILL), or that report a lost peer, come after those that failed
    by themselves, whatever the clocks of their nodes show. Kubernetes counts whole seconds. Of two ranks killed in the
    same second, the one with SIGTERM comes second: SIGKILL follows only after a grace period of seconds, so that rank
    was terminating already. Equal crashes keep their order.

    Args:
        crashes: Crashes that `crashes_in` found.
        tails: Pod -> end of its log, as far as it was read.
    """
    unread_tail = Tail()
    lost: list[datetime] = []
    explained: list[datetime] = []
    for crash in crashes:
        time, tail = parse_time(crash.finished), tails.get(crash.pod)
        if tail is not None and time is not None and not tail.terminated:
            (lost if tail.lost_peer or tail.lost_connection else explained).append(time)
    lost_since = min(lost) + _CLOCK_SKEW if lost else None
    explained_since = min(explained) - _CLOCK_SKEW if explained else None

    def level(crash: Crash) -> int:
        tail = tails.get(crash.pod, unread_tail)
        time = parse_time(crash.finished)
        # Killed before other ranks lost it: by the kernel, for lack of memory. Killed later: because the job ends.
        early = lost_since is not None and (time is None or time <= lost_since)
        # Of thousands of ranks not every log is read. At the same time, a rank whose log was read, and which reports no
        # other rank as the reason, comes first.
        unread = crash.pod not in tails and crash.meaning is None
        late = explained_since is not None and (time is None or time >= explained_since)
        levels = (
            (crash.stopped, 7),
            (crash.sidecar, 6),
            (crash.disruption, 0),
            (crash.killed and early and crash.exit_code == _SIGKILL, 2),
            (crash.killed or tail.terminated, 5),
            (tail.lost_peer, 4),
            (tail.lost_connection, 3),
            (unread and late, 1),
        )
        return next((number for applies, number in levels if applies), 0)

    return sorted(crashes, key=lambda crash: (level(crash), crash.finished, crash.exit_code == _SIGTERM))


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
