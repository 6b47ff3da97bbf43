"""How the containers and pods of a job ended, and by whom, as Kubernetes reports it. Pure."""

from __future__ import annotations

import re
import signal as signals
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from trainjob._diagnosis import termination_messages
from trainjob._diagnosis.meaning import Meaning
from trainjob._diagnosis.rules import objects
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

SIGTERM, SIGKILL = 128 + signals.SIGTERM, 128 + signals.SIGKILL
CLOCK_SKEW = timedelta(seconds=2)
"""Between the clocks of synchronized nodes, and between two parts of a kubelet, which write whole seconds."""

_GRACE_SECONDS = 30  # Kubernetes' default
_KILLED_LATE = timedelta(seconds=10)  # a container may end this long after its grace period
_KILLS = ("Killing", "FailedPostStartHook")
_FIELD = re.compile(r"spec\.(?:init)?containers\{(.+)\}", re.IGNORECASE)


class Container(NamedTuple):
    """A container of a pod.

    Attributes:
        name: Its name.
        kind: ``main`` for the one that trains, ``init``, or ``sidecar`` for one that runs beside it.
        native: A sidecar that Kubernetes stops with the main container: an init container that keeps running.
        state: Its state: ``waiting``, ``running`` or ``terminated``.
        last: The same of its run before.
        restarts: How often it was restarted.
        started: Its startup probe has succeeded, or it has none.
        spec: Its spec; empty if unknown.
    """

    name: str
    kind: str
    native: bool
    state: Mapping[str, Any]
    last: Mapping[str, Any]
    restarts: int
    started: bool
    spec: Mapping[str, Any]


def containers_of(pod: Mapping[str, Any]) -> list[Container]:
    """The containers of a pod that have a status, init containers first."""
    native, main = sidecars_of(pod), training_container(pod)
    found = []
    for statuses, specs, kind in (
        ("initContainerStatuses", "initContainers", "init"),
        ("containerStatuses", "containers", "sidecar"),
    ):
        known = {str(each.get("name", "")): each for each in mappings(pod, "spec", specs)}
        for status in mappings(pod, "status", statuses):
            name = str(status.get("name", ""))
            of_kind = "sidecar" if name in native else "main" if kind == "sidecar" and name == main else kind
            count = status.get("restartCount")
            found.append(
                Container(
                    name,
                    of_kind,
                    name in native,
                    mapping(status, "state"),
                    mapping(status, "lastState"),
                    max(0, count) if isinstance(count, int) else 0,
                    status.get("started") is not False,
                    known.get(name, {}),
                )
            )
    return found


@dataclass(frozen=True)
class Termination:
    """The end of a container, or the disruption of a pod.

    Attributes:
        rank: As ``node-1``.
        pod: Name of the pod.
        container: An init container or a sidecar; empty for the training container.
        exit_code: None for a pod that was disrupted before its container ended. A signal N counts as 128 + N.
        exited: It exited by itself, also with a code above 128: only the local backend knows.
        reason: Reason of the end or the disruption.
        message: Message of the end or the disruption.
        finished: Time of the end.
        restarts: Number of restarts of the container.
        stopped: The pod was deleted before, and the container ended because of that.
        sidecar: The container is a sidecar.
        disruption: Kubernetes stopped the pod, for `reason`.
        address: IP address of the pod.
        probe: Report of the failed probe or hook because of which the kubelet killed the container.
    """

    rank: str = ""
    pod: str = ""
    container: str = ""
    exit_code: int | None = None
    exited: bool = False
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
    def failed(self) -> bool:
        """Whether it is a failure."""
        return self.disruption or bool(self.exit_code)

    @property
    def killed(self) -> bool:
        """Whether SIGTERM or SIGKILL ended it for an unknown reason."""
        return self.signal in ("SIGTERM", "SIGKILL") and self.meaning is None

    @property
    def signal(self) -> str:
        """Name of the signal that ended it; empty if it exited, or if the signal has no name, as real-time signals."""
        try:
            return "" if self.exited or self.exit_code is None else signals.Signals(self.exit_code - 128).name
        except ValueError:
            return ""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that a program of this package wrote to its termination message; None if there is none."""
        return termination_messages.verdict_of(self.message) if self.exit_code and not self.disruption else None

    @property
    def meaning(self) -> Meaning | None:
        """The meaning of its reason; None if only exit code and output tell more."""
        return objects.meaning_of(self.reason, self.message)


def terminations_in(pods: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]] = ()) -> list[Termination]:
    """How the containers of the pods ended, once each: failures, and successes of the containers that train.

    Args:
        pods: Pods of a job; earlier states of the same pods may be among them.
        events: Events of the job: only these report that the kubelet killed a container for a failed probe or hook.
    """
    kills = _kills_in(events)
    found = [_with_kill(each, pod, kills) for pod in pods for each in terminations_of(pod)]
    restarts: dict[tuple[str, str], int] = {}
    for each in found:
        container = each.pod, each.container
        restarts[container] = max(each.restarts, restarts.get(container, 0))
    counted = ((each, restarts[each.pod, each.container]) for each in found)
    return list(dict.fromkeys(e if e.restarts == count else replace(e, restarts=count) for e, count in counted))


def terminations_of(pod: Mapping[str, Any]) -> Iterator[Termination]:
    """How the containers of one pod ended: failures, and the success of the one that trains."""
    containers = containers_of(pod)
    disruption = _disruption(pod, containers)
    if disruption is not None:
        yield disruption
    for container in containers:
        for state in (container.last, container.state):
            ended = _termination(pod, container, mapping(state, "terminated"))
            if ended is None:
                continue
            stopped = ended.failed and _by_deletion(pod, ended)
            if disruption is None or not (stopped or ended.exit_code in (0, SIGTERM, SIGKILL)):
                yield replace(ended, stopped=True) if stopped else ended


def _termination(pod: Mapping[str, Any], container: Container, terminated: Mapping[str, Any]) -> Termination | None:
    code = terminated.get("exitCode")
    main = container.kind == "main"
    if not isinstance(code, int) or not (code or main):
        return None
    return Termination(
        rank_of(pod),
        name_of(pod),
        "" if main else container.name,
        code,
        terminated.get("signal") == 0 and code != SIGTERM,  # a handler of SIGTERM exits with 143 by convention
        str(terminated.get("reason") or "") if code else "",
        _no_limit(pod, container, terminated) or str(terminated.get("message") or ""),
        str(terminated.get("finishedAt") or ""),
        container.restarts,
        sidecar=container.kind == "sidecar",
        address=str(mapping(pod, "status").get("podIP") or ""),
    )


def _no_limit(pod: Mapping[str, Any], container: Container, terminated: Mapping[str, Any]) -> str:
    """The message for an OOMKilled container without a memory limit: its node ran out of memory."""
    if terminated.get("reason") != "OOMKilled" or "resources" not in container.spec:
        return ""
    limits = mapping(container.spec, "resources", "limits"), mapping(pod, "spec", "resources", "limits")
    return "" if any("memory" in each for each in limits) else objects.NO_MEMORY_LIMIT


def _disruption(pod: Mapping[str, Any], containers: Iterable[Container]) -> Termination | None:
    """The pod's disruption by Kubernetes: an eviction, a preemption, a lost node; None if there was none."""
    status = mapping(pod, "status")
    conditions = mappings(status, "conditions")
    target = next(
        (each for each in conditions if each.get("type") == "DisruptionTarget" and each.get("status") == "True"), None
    )
    reason, message = str(status.get("reason") or ""), str(status.get("message") or "")
    codes = [mapping(each.state, "terminated").get("exitCode") for each in containers if each.kind == "main"]
    unstarted = bool(reason) and not any(isinstance(code, int) for code in codes)
    if target is None and (status.get("phase") != "Failed" or not (unstarted or objects.meaning_of(reason, message))):
        return None
    if target is not None and (not reason or target.get("reason") != "TerminationByKubelet"):
        reason, message = str(target.get("reason") or ""), str(target.get("message") or "")
    return Termination(
        rank_of(pod),
        name_of(pod),
        exit_code=next((code for code in codes if isinstance(code, int) and code), None),
        reason=reason,
        message=message,
        finished=str((target or {}).get("lastTransitionTime") or ""),
        disruption=True,
        address=str(status.get("podIP") or ""),
    )


def _by_deletion(pod: Mapping[str, Any], ended: Termination) -> bool:
    """Whether the container ended because its pod was deleted: by a suspension, by its Job, by a person."""
    metadata = mapping(pod, "metadata")
    deadline = parse_time(metadata.get("deletionTimestamp"))  # the end of the grace period
    if deadline is None or ended.reason == "OOMKilled":
        return False
    grace = metadata.get("deletionGracePeriodSeconds")
    deleted = deadline - timedelta(seconds=min(max(0, grace) if isinstance(grace, int) else 0, 10**6))
    finished = parse_time(ended.finished)
    skew = CLOCK_SKEW if ended.exit_code in (SIGTERM, SIGKILL) else timedelta()
    return finished is None or finished >= deleted - skew


# ---------------------------------------------------------------- kills by the kubelet


@dataclass(frozen=True)
class _Kill:
    """Why the kubelet killed a container: only Events report that.

    The status of such a container equals that of any container with SIGTERM or SIGKILL: exit code 137, reason
    ``Error``. One Event counts repetitions, from `first` to `last`.
    """

    reason: str
    message: str
    report: str
    first: datetime
    last: datetime


def _kills_in(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[_Kill]]:
    """The kills in the Events of a job, by name of pod and container."""
    found: dict[tuple[str, str], list[_Kill]] = {}
    reports: dict[tuple[str, str], list[str]] = {}
    for event in events:
        subject = mapping(event, "involvedObject")
        field = _FIELD.search(str(subject.get("fieldPath") or ""))
        if field is None:
            continue
        container = str(subject.get("name")), field[1]
        reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
        first, last = parse_time(event.get("firstTimestamp")), parse_time(event.get("lastTimestamp"))
        if reason in _KILLS and first and last and objects.rule_of(reason, message):
            found.setdefault(container, []).append(_Kill(reason, message, "", first, last))
        elif reason == "Unhealthy":
            reports.setdefault(container, []).append(message)
    return {
        container: [_with_report(kill, reports.get(container, ())) for kill in kills]
        for container, kills in found.items()
    }


def _with_report(kill: _Kill, reports: Iterable[str]) -> _Kill:
    """Add what the probe reported."""
    probe = next((probe for probe in ("Liveness", "Startup") if probe.lower() in kill.message), None)
    report = next((each for each in reports if probe and each.startswith(probe)), "")
    return replace(kill, report=report.partition(": ")[2].strip())


def _with_kill(ended: Termination, pod: Mapping[str, Any], kills: Mapping[tuple[str, str], list[_Kill]]) -> Termination:
    """Add the Event's reason if the kubelet killed the container."""
    found = kills.get((ended.pod, ended.container or training_container(pod)))
    time = parse_time(ended.finished)
    if not found or not ended.failed or ended.meaning is not None or ended.disruption or ended.stopped or time is None:
        return ended
    grace = mapping(pod, "spec").get("terminationGracePeriodSeconds")
    late = timedelta(seconds=grace if isinstance(grace, int) else _GRACE_SECONDS) + _KILLED_LATE
    kill = next((each for each in found if each.first - CLOCK_SKEW <= time <= each.last + late), None)
    return replace(ended, reason=kill.reason, message=kill.message, probe=kill.report) if kill else ended
