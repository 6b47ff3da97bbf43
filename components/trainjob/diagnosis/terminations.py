"""Containers and pods that ended badly, and which of them was the first to fail by itself."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from trainjob.diagnosis import reasons, termination_messages
from trainjob.diagnosis.kills import Kill, kills_in
from trainjob.diagnosis.known import USAGE
from trainjob.diagnosis.log_tails import Tail
from trainjob.diagnosis.reasons import Category, Meaning
from trainjob.diagnosis.termination_messages import Verdict
from trainjob.kube_objects import (
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
"""Lines of a failing rank's log that are read: torchrun writes 40 of its own after those of eight workers."""

"""How the ranks of Trainer's initializers begin."""

_SIGTERM, _SIGKILL = 143, 137
_GRACE_SECONDS = 30  # of a pod that sets none
_STRAYING = timedelta(seconds=2)  # of clocks that agree as well as clocks of nodes do


@dataclass(frozen=True)
class Crash:
    """A container that ended badly, or a pod that was stopped.

    Attributes:
        rank: As ``node-1``.
        pod: Name of the pod.
        container: The container if it is none that trains: an init container or a sidecar.
        exit_code: None for a pod that was stopped before its container ended.
        reason: Of the container's end, or why the pod was stopped.
        message: The same for people.
        finished: When.
        restarts: How often the container was started again.
        stopped: Its pod was deleted before: the end of the container is a consequence.
        helper: A sidecar.
        disruption: Kubernetes stopped the pod: `reason` says why.
        address: Of the pod.
        probe: What the probe or hook reported because of which the kubelet killed the container.
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
    helper: bool = False
    disruption: bool = False
    address: str = ""
    probe: str = ""

    @property
    def killed(self) -> bool:
        """Whether it was ended by SIGTERM or SIGKILL, and nothing is known of why."""
        return self.exit_code in (_SIGTERM, _SIGKILL) and self.meaning is None

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that a program of this package wrote to its termination message; None if there is none."""
        return termination_messages.read(self.message) if self.exit_code and not self.disruption else None

    @property
    def meaning(self) -> reasons.Meaning | None:
        """What its reason means; None where only the exit code can say more."""
        return reasons.find(self.reason, self.message)


def crashes_in(pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()) -> list[Crash]:
    """Every bad end that the pods tell of, once each: a pod may be given twice, as it was and as it is.

    Args:
        pods: Pods of a job.
        events: Its Events: only these say that the kubelet killed a container because a probe or a hook failed.
    """
    kills = kills_in(events)
    found = [_with_kill(crash, pod, kills) for pod in pods for crash in of_pod(pod)]
    restarts: dict[tuple[str, str], int] = {}
    for crash in found:
        container = crash.pod, crash.container
        restarts[container] = max(crash.restarts, restarts.get(container, 0))
    most = ((crash, restarts[crash.pod, crash.container]) for crash in found)
    return list(dict.fromkeys(c if c.restarts == count else replace(c, restarts=count) for c, count in most))


def _with_kill(crash: Crash, pod: Mapping[str, Any], kills: Mapping[tuple[str, str], list[Kill]]) -> Crash:
    """The crash, with the Event's reason if the kubelet killed the container."""
    found = kills.get((crash.pod, crash.container or training_container(pod)))
    ended = parse_time(crash.finished)
    if not found or crash.meaning is not None or crash.disruption or crash.stopped or ended is None:
        return crash
    grace = mapping(pod, "spec").get("terminationGracePeriodSeconds")
    seconds = grace if isinstance(grace, int) else _GRACE_SECONDS
    kill = next((kill for kill in found if kill.explains(ended, seconds)), None)
    return replace(crash, reason=kill.reason, message=kill.message, probe=kill.report) if kill else crash


def of_pod(pod: Mapping[str, Any]) -> Iterator[Crash]:
    """The bad ends of one pod."""
    stop = _stop(pod)
    if stop is not None:
        yield stop
    status = mapping(pod, "status")
    sidecars = sidecars_of(pod)
    trains = training_container(pod)
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in mappings(status, kind):
            name = str(container.get("name", ""))
            main = kind == "containerStatuses" and name == trains
            helper = name in sidecars or (kind == "containerStatuses" and not main)
            for state in ("lastState", "state"):
                ended = mapping(container, state, "terminated")
                code = ended.get("exitCode")
                if not isinstance(code, int) or not code:
                    continue
                crash = Crash(
                    rank_of(pod),
                    name_of(pod),
                    "" if main else name,
                    code,
                    str(ended.get("reason") or ""),
                    _no_limit(pod, kind, name, ended) or str(ended.get("message") or ""),
                    str(ended.get("finishedAt") or ""),
                    _count(container.get("restartCount")),
                    helper=helper,
                    address=str(status.get("podIP") or ""),
                )
                consequence = _was_told(pod, crash)
                if stop is None or not (consequence or code in (_SIGTERM, _SIGKILL)):
                    yield replace(crash, stopped=True) if consequence else crash


def _no_limit(pod: Mapping[str, Any], kind: str, name: str, ended: Mapping[str, Any]) -> str:
    """The message for a container that was OOMKilled and has no limit: its node ran out of memory."""
    specs = mappings(pod, "spec", "containers" if kind == "containerStatuses" else "initContainers")
    spec = next((each for each in specs if each.get("name") == name), {})
    if ended.get("reason") != "OOMKilled" or "resources" not in spec:
        return ""
    limited = "memory" in mapping(spec, "resources", "limits") or "memory" in mapping(
        pod, "spec", "resources", "limits"
    )
    return "" if limited else reasons.NO_MEMORY_LIMIT


def _stop(pod: Mapping[str, Any]) -> Crash | None:
    """That Kubernetes stopped the pod: evicted it, preempted it, lost its node."""
    status = mapping(pod, "status")
    conditions = mappings(status, "conditions")
    disruption = next(
        (each for each in conditions if each.get("type") == "DisruptionTarget" and each.get("status") == "True"), None
    )
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    if disruption is None and (status.get("phase") != "Failed" or reasons.find(reason, message) is None):
        return None
    if disruption is not None and (not reason or disruption.get("reason") != "TerminationByKubelet"):
        reason, message = str(disruption.get("reason") or ""), str(disruption.get("message") or "")
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
        finished=str((disruption or {}).get("lastTransitionTime") or ""),
        disruption=True,
        address=str(status.get("podIP") or ""),
    )


def _was_told(pod: Mapping[str, Any], crash: Crash) -> bool:
    """Whether the container ended because its pod was deleted: by a suspension, by its Job, by a person."""
    metadata = mapping(pod, "metadata")
    gone = parse_time(metadata.get("deletionTimestamp"))
    if gone is None or crash.reason == "OOMKilled":
        return False
    asked = gone - timedelta(seconds=min(_count(metadata.get("deletionGracePeriodSeconds")), 10**6))
    ended = parse_time(crash.finished)
    straying = _STRAYING if crash.exit_code in (_SIGTERM, _SIGKILL) else timedelta()
    return ended is None or ended >= asked - straying


def _count(value: object) -> int:
    return max(0, value) if isinstance(value, int) else 0


def in_order(crashes: Sequence[Crash], tails: Mapping[str, Tail]) -> list[Crash]:
    """The crashes, the one that is to blame first.

    Ranks that were only told to stop (SIGTERM, SIGKILL), or say that they lost a peer, come after those that failed by
    themselves, whatever the clocks of their nodes say. Kubernetes counts whole seconds. Of two killed in the same one,
    SIGTERM is the answer to the other's end: who has to be stopped by SIGKILL had a grace period of seconds before.
    What is equal stays in the order in which it was given.

    Args:
        crashes: What `crashes_in` found.
        tails: Pod -> what its log says, as far as it was read.
    """
    nothing = Tail()
    lost: list[datetime] = []
    explained: list[datetime] = []
    for crash in crashes:
        time, tail = parse_time(crash.finished), tails.get(crash.pod)
        if tail is not None and time is not None and not tail.told:
            (lost if tail.lost_peer or tail.lost_connection else explained).append(time)
    lost_since = min(lost) + _STRAYING if lost else None
    explained_since = min(explained) - _STRAYING if explained else None

    def level(crash: Crash) -> int:
        tail = tails.get(crash.pod, nothing)
        # Killed before others lost it: by the kernel, where memory was short. Later, by whoever ends the job.
        time = parse_time(crash.finished)
        early = lost_since is not None and (time is None or time <= lost_since)
        # Of thousands not every log is read: whose was, and says no other reason, comes before those of the same time.
        unread = crash.pod not in tails and crash.meaning is None
        late = explained_since is not None and (time is None or time >= explained_since)
        levels = (
            (crash.stopped, 7),
            (crash.helper, 6),
            (crash.disruption, 0),
            (crash.killed and early and crash.exit_code == _SIGKILL, 2),
            (crash.killed or tail.told, 5),
            (tail.lost_peer, 4),
            (tail.lost_connection, 3),
            (unread and late, 1),
        )
        return next((number for applies, number in levels if applies), 0)

    return sorted(crashes, key=lambda crash: (level(crash), crash.finished, crash.exit_code == _SIGTERM))


# ---------------------------------------------------------------- what a termination means


_SIGSEGV = 128 + signals.SIGSEGV
_MISUSED = 2  # argparse, click, Python itself


@dataclass(frozen=True)
class RootCause:
    """The first crash, and what its log says.

    Attributes:
        crash: The crash.
        tail: The end of its log.
        nodes: Number of nodes that train; 0 if it is unknown.
    """

    crash: Crash
    tail: Tail
    nodes: int = 0


def told(blamed: RootCause) -> str:
    """Who ended, and how; as long as what Kubernetes says of it."""
    crash = blamed.crash
    who = f"{crash.rank}'s container {crash.container}" if crash.container else crash.rank
    again = f" (started again {crash.restarts} times)" if crash.restarts > 1 else ""
    return f"{who} {_what(blamed)}{again}"


def _what(blamed: RootCause) -> str:
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


def _exited(code: int, blamed: RootCause) -> str:
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


def _by_error(blamed: RootCause) -> bool:
    """Whether the last error in its log is the cause of its exit.

    Python exits with 1 after an exception and with 2 after a wrong argument, shells exit with 126 and 127, C++ aborts
    with SIGABRT (as the first process of a container with SIGSEGV, because the kernel ignores its own SIGABRT), and
    mpirun exits as its worker did. Any other code was chosen by the program.
    """
    crash, tail = blamed.crash, blamed.tail
    told_by_code = crash.exit_code in (1, 2, 126, 127, 134) or _torn_down(blamed) or tail.error.startswith("worker ")
    return bool(tail.error) and told_by_code and not crash.container


def _torn_down(blamed: RootCause) -> bool:
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


def meaning_of(blamed: RootCause) -> Meaning:
    """What it means: for Kubernetes' own reasons by `meanings`, else by the program, the log, the signal, the step."""
    crash = blamed.crash
    if crash.stopped:
        return _STOPPED
    if (meaning := crash.meaning) is not None:
        memory_of_another = meaning.category is Category.OUT_OF_MEMORY and (crash.container or _initializes(crash))
        return replace(meaning, advice=_MORE_MEMORY) if memory_of_another else meaning
    if crash.disruption or crash.exit_code is None:
        return reasons.UNKNOWN
    by_signal = None if _torn_down(blamed) else _SIGNALS.get(_signal(crash.exit_code - 128))
    return _said(blamed) or by_signal or _of_step(crash, blamed.tail)


def _said(blamed: RootCause) -> Meaning | None:
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
