"""Containers and pods that failed, and which of them was the first."""

from __future__ import annotations

import signal as signals
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from trainjob._diagnosis import reasons, termination_messages
from trainjob._diagnosis.kills import Kill, kills_in
from trainjob._diagnosis.log_tails import Tail
from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.reasons.containers import NO_MEMORY_LIMIT
from trainjob._diagnosis.termination_messages import Verdict
from trainjob._support.kube_objects import (
    mapping,
    mappings,
    name_of,
    parse_time,
    rank_of,
    sidecars_of,
    training_container,
)

_SIGTERM, _SIGKILL = 128 + signals.SIGTERM, 128 + signals.SIGKILL
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
        return termination_messages.verdict_of(self.message) if self.exit_code and not self.disruption else None

    @property
    def meaning(self) -> Meaning | None:
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
    return "" if limited else NO_MEMORY_LIMIT


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
        # Killed before other ranks lost it: by the kernel, because memory ran out. Killed later: because the job ends.
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
