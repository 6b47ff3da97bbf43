"""What blocks a job, read from its related objects. Pure: no clock, no I/O.

A TrainJob does not report its blockers: a queued job is only suspended, the status of a job whose JobSet is refused
stays empty, and a job whose image cannot be pulled counts as active (measured on Trainer 2.1 to 2.3, Kueue 0.18). The
reason is in Kueue's Workload, in Events and in the pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from trainjob._diagnosis.cluster import containers_of
from trainjob._diagnosis.meaning import NOTHING_KNOWN, Meaning, while_running
from trainjob._diagnosis.rules import objects
from trainjob._support.kube_objects import mapping, mappings, name_of, parse_time, rank_of
from trainjob._support.numbers import count_of
from trainjob.errors import Category, RetryVerdict
from trainjob.status import Blocker

_GRACE = timedelta(minutes=10)  # as Flyte gives pending tasks; a registry that restarts answers again before
KEPT = "SidecarRuns"
"""Reason of a rank that has ended and whose pod a sidecar keeps running."""
_HELD = re.compile(r"[Vv]olume is already used by pod\(s\) (.+)")
_USED = re.compile(r"exceeded quota: .*, used: (\S+), limited: ")


@dataclass(frozen=True)
class Finding:
    """What one object reports about why a job makes no progress.

    Attributes:
        reason: In CamelCase.
        message: In words.
        meaning: What it means.
        subject: The object concerned, as ``pod x``; empty for the job itself.
        rank: The rank concerned, as ``node-1``; empty if there is none.
    """

    reason: str
    message: str
    meaning: Meaning
    subject: str = ""
    rank: str = ""

    @property
    def text(self) -> str:
        """Reason and message, to follow the name of the subject."""
        if self.reason == KEPT:
            return self.message
        if self.reason in ("Unschedulable", "SchedulingGated", "NoScheduler"):
            return f"is not scheduled: {self.message}"
        return f"{self.reason}: {self.message}"

    @property
    def blocker(self) -> Blocker:
        """As a waiter reports it."""
        if not self.subject:
            message = self.message
        elif self.text.startswith(("is ", "has ")):
            message = f"{self.subject} {self.text}"
        else:
            message = f"{self.subject}: {self.text}"
        return Blocker(self.reason, message, self.meaning.permanent, while_running(self.meaning.advice))


def first(findings: Iterable[Finding]) -> Finding | None:
    """The first permanent finding, since it has to be fixed first; else the first."""
    every = list(findings)
    return next((each for each in every if each.meaning.permanent), every[0] if every else None)


def around(pods: Sequence[Mapping[str, Any]] | None, events: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """The findings of pods and Events; `pods` is None if they may not be listed."""
    known = list(events)
    return [*of_pods(pods or (), known), *of_events(known, pods)]


def of_missing(name: str) -> Finding:
    """The finding for an object that the job needs and that does not exist.

    Trainer's webhook refuses every change to a job whose runtime was deleted. Kueue makes no Workload for a job whose
    WorkloadPriorityClass does not exist.

    Args:
        name: Kind and name of the object, as ``TrainingRuntime x``.
    """
    if name.startswith("WorkloadPriorityClass"):
        return _finding("NoWorkloadPriorityClass", f"the job is not queued: its {name} does not exist")
    return _finding("RuntimeNotFound", f"the job cannot start: its {name} does not exist anymore")


# ---------------------------------------------------------------- Kueue


def without_queue() -> Finding:
    """The finding for a job without a queue that Kueue has suspended: nothing will start it."""
    return _finding("NoQueueLabel", "Kueue suspended the job, which names no queue")


def in_workload(workload: Mapping[str, Any], related: Iterable[Mapping[str, Any]] = ()) -> Blocker | None:
    """Why Kueue does not start the job of this Workload; None if Kueue has not reported a reason yet."""
    return found.blocker if (found := of_workload(workload, related)) else None


def of_workload(workload: Mapping[str, Any], related: Iterable[Mapping[str, Any]] = ()) -> Finding | None:
    """The finding for a Workload of Kueue; None if Kueue has not reported a reason yet.

    Args:
        workload: The Workload.
        related: Its LocalQueue and ClusterQueue, as far as they could be read: of a queue that admits nothing they
            report whether it was stopped or is incomplete, which the Workload does not.
    """
    conditions = {str(each.get("type")): each for each in mappings(workload, "status", "conditions")}
    found = _of_ended_workload(workload, conditions) or _of_waiting_workload(workload, conditions)
    if found is None or is_of_inactive_queue(found):
        return next(filter(None, map(_of_queue, related)), found)
    return found


def is_of_inactive_queue(finding: Finding) -> bool:
    """Whether a Workload waits because its queue admits nothing, for a reason that only the queue reports."""
    rule = objects.rule_of(finding.reason, finding.message)
    return rule is not None and rule.id == "queue-stopped"


def _of_queue(queue: Mapping[str, Any]) -> Finding | None:
    """The finding for a LocalQueue or ClusterQueue that admits nothing."""
    if queue.get("kind") not in ("LocalQueue", "ClusterQueue"):
        return None
    conditions = {str(each.get("type")): each for each in mappings(queue, "status", "conditions")}
    active = conditions.get("Active")
    reason = _text(active, "reason")
    if active is None or active.get("status") != "False" or reason == "ClusterQueueIsInactive":
        return None  # the ClusterQueue itself reports more
    kind = "QueueStopped" if reason in ("Stopped", "Terminating") else "QueueIncomplete"
    return _finding(kind, f"{queue.get('kind')} {name_of(queue)} is {reason}: {_text(active, 'message')}")


def of_flavors(related: Iterable[Mapping[str, Any]]) -> Finding | None:
    """The finding for a flavor whose labels no node has; a Node without a name stands for none behind its flavor."""
    flavor: Mapping[str, Any] = {}
    for each in related:
        if each.get("kind") == "ResourceFlavor":
            flavor = each
        elif each.get("kind") == "Node" and not name_of(each) and flavor:
            labels = ", ".join(f"{name}={value}" for name, value in mapping(flavor, "spec", "nodeLabels").items())
            return _finding("FlavorWithoutNodes", f"no node has the labels of flavor {name_of(flavor)}: {labels}")
    return None


def _of_ended_workload(workload: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    """Why Kueue will not admit the job again."""
    if mapping(workload, "spec").get("active") is False:
        why = _text(mapping(conditions, "Evicted"), "message") or "its Workload was deactivated"
        checks = mappings(workload, "status", "admissionChecks")
        rejected = "; ".join(str(each.get("message") or "") for each in checks if each.get("state") == "Rejected")
        return _finding("Deactivated", f"Kueue deactivated the job: {why}{rejected and ': '}{rejected}")
    if _is(conditions, "Finished"):  # Trainer up to 2.3 takes Failed back when the JobSet of the job is deleted
        return _finding("WorkloadFinished", "Kueue has finished with the job: it does not admit it again")
    return None


def _of_waiting_workload(workload: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> Finding | None:
    """Why Kueue has not admitted the job yet."""
    if _is(conditions, "Admitted"):
        return _finding(
            "AdmittedButSuspended",
            "Kueue admitted the job, but it is still suspended (Kueue 0.17+ cannot start TrainJobs of Trainer 2.1)",
        )
    for check in mappings(workload, "status", "admissionChecks"):
        if _is(conditions, "QuotaReserved") and check.get("state") != "Ready":
            state, message = check.get("state", "Pending"), check.get("message") or "no message"
            return _finding("AdmissionCheck", f"admission check {check.get('name')} is {state}: {message}")
    waiting = conditions.get("QuotaReserved")
    if waiting is None or _is(conditions, "QuotaReserved"):
        return None
    reason, message = _text(waiting, "reason"), _text(waiting, "message")
    if not _is(conditions, "Evicted"):
        return _finding(reason, message)
    evicted = mapping(conditions, "Evicted")
    meaning = objects.meaning_of(_text(evicted, "reason"), _text(evicted, "message"))
    return _finding(reason, f"{message} (before: {_text(evicted, 'message')})", meaning=meaning)


# ---------------------------------------------------------------- Events

_OF_STARTING = (
    *("FailedMount", "FailedAttachVolume", "FailedMapVolume"),
    *("FailedCreatePodSandBox", "FailedPrepareDynamicResources"),
)
"""Reasons of pods that only Events report. All others are in the pod's status, too, and an Event may be an hour old."""


def in_events(events: Iterable[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]] = ()) -> Blocker | None:
    """Why a TrainJob gets no JobSet, or its pods do not start, if only Events report the reason."""
    return found.blocker if (found := first(of_events(events, pods))) else None


def of_events(events: Iterable[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]] | None) -> Iterator[Finding]:
    """The findings of Events, the latest first.

    Only Events report that a controller cannot create an object (kubeflow/trainer#3671).

    Args:
        events: Events of the job and its related objects.
        pods: Its pods; None if they may not be listed, so that Events are the only source.
    """
    pending = {name_of(pod): pod for pod in pods or () if mapping(pod, "status").get("phase") == "Pending"}
    settled = {name_of(pod) for pod in pods or () if _is_settled(pod)}
    active = {name_of(pod) for pod in pods or () if not _has_ended(pod)}
    youngest = max((_seconds(mapping(pod, "metadata").get("creationTimestamp")) for pod in pods or ()), default="")
    for event in sorted(events, key=event_time, reverse=True):
        reason, message = _text(event, "reason"), _text(event, "message")
        subject = mapping(event, "involvedObject") or mapping(event, "regarding")
        kind, name = _text(subject, "kind"), _text(subject, "name")
        if kind == "Pod" and reason == "NodeNotReady":
            # Reported for a running pod. It is outdated if the pod is ready again, has terminated or was replaced.
            outdated = name in pending or name in settled or _seconds(event_time(event)) < youngest
        elif kind == "Pod" and pods is not None:
            outdated = reason not in _OF_STARTING or name not in pending or _is_mounted(pending[name])
        else:
            # An object that could not be created before the youngest pod was created since. The same second counts as
            # before: a permanent refusal is repeated, and its Event then has a later time.
            outdated = kind != "Pod" and bool(youngest) and _seconds(event_time(event)) <= youngest
        meaning = objects.meaning_of(reason, message)
        if outdated or meaning is None:
            continue
        if (held := _HELD.search(message)) and set(held[1].split(", ")) & active:
            yield _finding("VolumeOfItself", f"{reason}: {message}", f"{kind.lower()} {name}")
        elif _uses_its_quota(message, pods or ()):
            yield _finding("QuotaOfItself", f"{reason}: {message}", f"{kind.lower()} {name}")
        elif reason == "TrainJobResourcesCreationFailed":
            yield Finding(reason, message.removeprefix("TrainJob resources reconciliation failed: "), meaning)
        else:
            about = f"{kind.lower()} {name}" if kind else ""
            yield Finding(reason, message, meaning, about, rank_of(pending[name]) if name in pending else "")


def _uses_its_quota(message: str, pods: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a ResourceQuota refuses a pod of a job whose other pods use all of it: none will be free."""
    used = _USED.search(message)
    if used is None or not pods:
        return False
    counted = dict.fromkeys(("pods", "count/pods"), len([pod for pod in pods if not _has_ended(pod)]))
    for container in (each for pod in pods for each in mappings(pod, "spec", "containers")):
        for name, amount in mapping(container, "resources", "requests").items():
            counted[f"requests.{name}"] = counted.get(f"requests.{name}", 0) + (count_of(str(amount)) or 0)
    amounts = (part.partition("=") for part in used[1].split(","))
    return all(counted.get(name, -1) >= (count_of(amount) or 0) > 0 for name, _, amount in amounts)


def _has_ended(pod: Mapping[str, Any]) -> bool:
    return mapping(pod, "status").get("phase") in ("Succeeded", "Failed")


def _is_mounted(pod: Mapping[str, Any]) -> bool:
    """Whether the volumes of a pod are mounted and its sandbox exists, so that Events of earlier tries are outdated."""
    conditions = {str(each.get("type")): each for each in mappings(pod, "status", "conditions")}
    states = [mapping(each, "state") for each in mappings(pod, "status", "initContainerStatuses")]
    return _is(conditions, "PodReadyToStartContainers") or any("running" in each for each in states)


def _is_settled(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has terminated, or is ready."""
    conditions = {str(each.get("type")): each for each in mappings(pod, "status", "conditions")}
    return _has_ended(pod) or _is(conditions, "Ready")


def event_time(event: Mapping[str, Any]) -> str:
    """Time of an Event's latest occurrence: Trainer and JobSet use the newer events API, which lacks the old times."""
    series = mapping(event, "series").get("lastObservedTime")
    times = (series, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((time for time in times if isinstance(time, str)), "")


def _seconds(time: object) -> str:
    return str(time or "")[: len("2026-11-21T10:00:00")]


# ---------------------------------------------------------------- pods

# A container that has crashed is a rank's end.
_NO_FINDING = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")


def of_pods(pods: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]] = ()) -> Iterator[Finding]:
    """Why pods do not start, or do not end.

    Args:
        pods: Pods of the job.
        events: Its Events, which show for how long an image has not been pulled.
    """
    for pod in pods:
        if (kept := kept_by(pod)) is not None:
            yield kept
        subject = f"pod {mapping(pod, 'metadata').get('name', '?')}"
        for container in containers_of(pod):
            waiting = mapping(container.state, "waiting")
            reason = _text(waiting, "reason")
            crashed = mapping(container.last, "terminated") and mapping(pod, "status").get("phase") == "Running"
            if reason and reason not in _NO_FINDING and not crashed:
                message = _pull_error(reason, _text(waiting, "message"), pod, events)
                found = _finding(reason, message, subject, rank_of(pod))
                yield replace(found, meaning=_after_grace(found.meaning, pod, events))
        scheduler = str(mapping(pod, "spec").get("schedulerName") or "default-scheduler")
        conditions = mappings(pod, "status", "conditions")
        if scheduler != "default-scheduler" and _is_unseen(pod, conditions):
            message = f"no scheduler named {scheduler} has looked at the pod"
            yield _finding("NoScheduler", message, subject, rank_of(pod))
        for condition in conditions:
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                message = _text(condition, "message") + _claims(pod, condition)
                yield _finding(_text(condition, "reason"), message, subject, rank_of(pod))


def kept_by(pod: Mapping[str, Any]) -> Finding | None:
    """The finding for a pod whose training container has ended while a sidecar of it runs: the job never ends."""
    containers = containers_of(pod)
    ended = next((mapping(each.state, "terminated") for each in containers if each.kind == "main"), {})
    sidecars = [each for each in containers if each.kind == "sidecar" and not each.native]
    beside = [each.name for each in sidecars if "running" in each.state]
    if not ended or not beside or mapping(pod, "status").get("phase") != "Running":
        return None
    names = " and ".join(beside)
    message = f"has ended with code {ended.get('exitCode')}; its container {names} keeps its pod running"
    return _finding(KEPT, message, f"pod {name_of(pod)}", rank_of(pod))


def _is_unseen(pod: Mapping[str, Any], conditions: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a pod waits for a scheduler that has not reported anything of it."""
    waits = mapping(pod, "status").get("phase") == "Pending" and not mapping(pod, "spec").get("nodeName")
    return waits and not any(each.get("type") == "PodScheduled" for each in conditions)


def _pull_error(reason: str, message: str, pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> str:
    """The message of a container that waits; while the kubelet waits for the next pull, that of the latest error."""
    rule = objects.rule_of(reason, message)
    if reason != "ImagePullBackOff" or rule is None or rule.id != "image-other":
        return message
    errors = [
        event
        for event in events
        if mapping(event, "involvedObject").get("name") == name_of(pod)
        and _text(event, "message").startswith("Failed to pull image")
    ]
    return _text(max(errors, key=event_time, default={}), "message") or message


def _after_grace(meaning: Meaning, pod: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Meaning:
    """The failed pull of an image is permanent once it has failed for `_GRACE`, whatever the registry answers."""
    if meaning.category is not Category.IMAGE or meaning.permanent:
        return meaning
    about = [event for event in events if mapping(event, "involvedObject").get("name") == name_of(pod)]
    began = parse_time(mapping(pod, "status").get("startTime"))
    latest = parse_time(max(map(event_time, about), default=""))
    lasted = latest - began if began and latest else timedelta()
    return replace(meaning, retry=RetryVerdict.CONFIGURATION) if lasted >= _GRACE else meaning


def _claims(pod: Mapping[str, Any], condition: Mapping[str, Any]) -> str:
    """Names of the PersistentVolumeClaims, which the scheduler does not report for unbound ones."""
    if "unbound" not in _text(condition, "message"):
        return ""
    names = [_text(mapping(each, "persistentVolumeClaim"), "claimName") for each in mappings(pod, "spec", "volumes")]
    return f" (PersistentVolumeClaims: {', '.join(name for name in names if name)})" if any(names) else ""


def starting(pods: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    """What starting pods wait for: an image, an init container, the kubelet; empty if no pod is starting."""
    pulling = {
        _text(mapping(event, "involvedObject"), "name"): _text(event, "message")
        for event in sorted(events, key=event_time)
        if event.get("reason") in ("Pulling", "Pulled")
    }
    waits = [f"{rank_of(pod)} {wait}" for pod in pods if (wait := _wait(pod, pulling.get(name_of(pod), "")))]
    more = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
    return f"{waits[0]}{more}" if waits else ""


def _wait(pod: Mapping[str, Any], pulling: str) -> str:
    status = mapping(pod, "status")
    if status.get("phase") != "Pending":
        return ""
    for each in containers_of(pod):
        if "running" in each.state and each.kind == "init":
            return f"waits for its init container {each.name}"
        if "running" in each.state and each.native and not each.started:
            return f"waits for its sidecar {each.name} to start: its startup probe has not succeeded"
    since = f" since {status['startTime']}" if isinstance(status.get("startTime"), str) else ""
    if pulling.startswith("Pulling"):
        return f"waits for its image: {pulling}{since}"
    node = mapping(pod, "spec").get("nodeName")
    return f"is starting on {node}{since}" if node else "waits to be scheduled"


def _finding(reason: str, message: str, subject: str = "", rank: str = "", meaning: Meaning | None = None) -> Finding:
    return Finding(reason, message, meaning or objects.meaning_of(reason, message) or NOTHING_KNOWN, subject, rank)


def _is(conditions: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return mapping(conditions, kind).get("status") == "True"


def _text(value: Mapping[str, Any] | None, name: str) -> str:
    return str((value or {}).get(name) or "")
