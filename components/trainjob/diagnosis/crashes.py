"""Containers and pods that ended badly, and which of them was the first to fail by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from trainjob.diagnosis import meanings, verdicts
from trainjob.diagnosis.kills import Kill, kills_in
from trainjob.diagnosis.tails import Tail
from trainjob.diagnosis.verdicts import Verdict
from trainjob.status import mapping, mappings, parse_time

READ_LINES = 300
"""Lines of a failing rank's log that are read: torchrun writes 40 of its own after those of eight workers."""

INITIALIZERS = ("dataset-initializer-", "model-initializer-")
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
        return verdicts.read(self.message) if self.exit_code and not self.disruption else None

    @property
    def meaning(self) -> meanings.Meaning | None:
        """What its reason means; None where only the exit code can say more."""
        return meanings.find(self.reason, self.message)


def rank_of(pod: Mapping[str, Any]) -> str:
    """``<replicated job>-<completion index>`` of a pod of a JobSet, as ``node-1``.

    A replicated job of several Jobs, which Trainer's own runtimes do not have: ``node-<job>-<completion index>``.
    """
    labels = mapping(pod, "metadata", "labels")
    name = labels.get("jobset.sigs.k8s.io/replicatedjob-name", "pod")
    job = str(labels.get("jobset.sigs.k8s.io/job-index", "0"))
    index = labels.get("batch.kubernetes.io/job-completion-index", "0")
    return f"{name}-{index}" if job == "0" else f"{name}-{job}-{index}"


def name_of(pod: Mapping[str, Any]) -> str:
    """Name of a pod."""
    return str(mapping(pod, "metadata").get("name", ""))


def training_container(pod: Mapping[str, Any]) -> str:
    """The container that trains: ``node`` in the runtimes that Trainer ships, else the first that is not a sidecar."""
    found = mappings(pod, "spec", "containers") or mappings(pod, "status", "containerStatuses")
    names = [str(container.get("name", "")) for container in found]
    step = mapping(pod, "metadata", "labels").get("jobset.sigs.k8s.io/replicatedjob-name", "")
    return next((name for name in ("node", str(step)) if name in names), names[0] if names else "")


def sidecars_of(pod: Mapping[str, Any]) -> set[str]:
    """Init containers that go on beside the others."""
    found = mappings(pod, "spec", "initContainers")
    return {str(container.get("name", "")) for container in found if container.get("restartPolicy") == "Always"}


def has_trained(pod: Mapping[str, Any]) -> bool:
    """Whether the training container of a pod has been running at any time."""
    name = training_container(pod)
    found = [each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == name]
    began = any(
        mapping(each, state, kind).get("startedAt")
        for each in found
        for state, kind in (("state", "running"), ("state", "terminated"), ("lastState", "terminated"))
    )
    return began and not rank_of(pod).startswith(INITIALIZERS)


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
    return "" if limited else meanings.NO_MEMORY_LIMIT


def _stop(pod: Mapping[str, Any]) -> Crash | None:
    """That Kubernetes stopped the pod: evicted it, preempted it, lost its node."""
    status = mapping(pod, "status")
    conditions = mappings(status, "conditions")
    disruption = next(
        (each for each in conditions if each.get("type") == "DisruptionTarget" and each.get("status") == "True"), None
    )
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    if disruption is None and (status.get("phase") != "Failed" or meanings.find(reason, message) is None):
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
