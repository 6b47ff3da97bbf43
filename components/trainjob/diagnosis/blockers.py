"""What keeps a job from running, read from the objects around it. Pure: no clock, no I/O.

A TrainJob says nothing about it: one that waits in a queue is only suspended, one whose JobSet is refused has an empty
status for ever, and one whose image cannot be pulled counts as active (measured on Trainer 2.1 to 2.3, Kueue 0.18).
The reason is in Kueue's Workload, in Events and in the pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainjob.diagnosis import reasons
from trainjob.kube_objects import mapping, mappings, name_of, rank_of, sidecars_of
from trainjob.status import Blocker


@dataclass(frozen=True)
class Finding:
    """What one object says about why a job does not get on.

    Attributes:
        reason: In CamelCase.
        message: The same for people.
        meaning: What it means.
        subject: The object that it is about, as ``pod x``; empty for the job itself.
        rank: The rank that it is about, as ``node-1``; empty if it is none.
    """

    reason: str
    message: str
    meaning: reasons.Meaning
    subject: str = ""
    rank: str = ""

    @property
    def text(self) -> str:
        """What it says of its subject."""
        if self.reason in ("Unschedulable", "SchedulingGated"):
            return f"is not scheduled: {self.message}"
        return f"{self.reason}: {self.message}"

    @property
    def blocker(self) -> Blocker:
        """As it is shown while the job is waited for."""
        if not self.subject:
            message = self.message
        elif self.text.startswith("is "):
            message = f"{self.subject} {self.text}"
        else:
            message = f"{self.subject}: {self.text}"
        return Blocker(self.reason, message, self.meaning.permanent, reasons.while_running(self.meaning.advice))


def first(found: Iterable[Finding]) -> Finding | None:
    """Of several findings one that lasts, since that has to be mended first."""
    every = list(found)
    return next((each for each in every if each.meaning.permanent), every[0] if every else None)


def around(pods: Sequence[Mapping[str, Any]] | None, events: Iterable[Mapping[str, Any]]) -> list[Finding]:
    """What pods and Events say; `pods` is None where they may not be seen."""
    return [*of_pods(pods or ()), *of_events(events, pods)]


def of_missing_runtime(name: str) -> Finding:
    """What it means that the job's runtime is gone: Trainer's webhook refuses every change to the job.

    Args:
        name: Of the runtime, as ``TrainingRuntime x``.
    """
    return _finding("RuntimeNotFound", f"its {name} does not exist any more, and the job cannot start without it")


# ---------------------------------------------------------------- Kueue


def in_workload(workload: Mapping[str, Any]) -> Blocker | None:
    """Why Kueue does not start the job of this Workload; None if it has nothing to say yet."""
    found = of_workload(workload)
    return found.blocker if found else None


def of_workload(workload: Mapping[str, Any]) -> Finding | None:
    """The same as a finding."""
    conditions = {str(each.get("type")): each for each in mappings(workload, "status", "conditions")}
    evicted = mapping(conditions, "Evicted")
    if mapping(workload, "spec").get("active") is False:
        why = _text(evicted, "message") or "it was deactivated"
        return _finding("Deactivated", f"Kueue has given up on it: {why}")
    if _is(conditions, "Admitted"):
        return _finding(
            "AdmittedButSuspended",
            "Kueue has admitted it, and it is still suspended (Kueue since 0.17 cannot start TrainJobs of Trainer 2.1)",
        )
    for check in mappings(workload, "status", "admissionChecks"):
        if _is(conditions, "QuotaReserved") and check.get("state") != "Ready":
            state, said = check.get("state", "Pending"), check.get("message") or "no message"
            return _finding("AdmissionCheck", f"admission check {check.get('name')} is {state}: {said}")
    waiting = conditions.get("QuotaReserved")
    if waiting is None or _is(conditions, "QuotaReserved"):
        return None
    reason, message = _text(waiting, "reason"), _text(waiting, "message")
    if not _is(conditions, "Evicted"):
        return _finding(reason, message)
    meaning = reasons.find(_text(evicted, "reason"), _text(evicted, "message"))
    return _finding(reason, f"{message} (before: {_text(evicted, 'message')})", meaning=meaning)


# ---------------------------------------------------------------- Events

_OF_STARTING = ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
"""What is only in Events about a pod; all else its own status says, too, and an Event may be an hour old."""


def in_events(events: Iterable[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]] = ()) -> Blocker | None:
    """Why nothing is created for a TrainJob, or its pods do not start, as far as only Events tell."""
    found = first(of_events(events, pods))
    return found.blocker if found else None


def of_events(events: Iterable[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]] | None) -> Iterator[Finding]:
    """What Events say, the latest first.

    Controllers say there, and nowhere else, that they cannot create something (kubeflow/trainer#3671).

    Args:
        events: Of the job and of all that belongs to it.
        pods: Its pods; None where they may not be seen, so that Events are all there is.
    """
    pending = {name_of(pod): pod for pod in pods or () if mapping(pod, "status").get("phase") == "Pending"}
    settled = {name_of(pod) for pod in pods or () if _is_settled(pod)}
    youngest = max((_seconds(mapping(pod, "metadata").get("creationTimestamp")) for pod in pods or ()), default="")
    for event in sorted(events, key=event_time, reverse=True):
        reason, message = _text(event, "reason"), _text(event, "message")
        subject = mapping(event, "involvedObject") or mapping(event, "regarding")
        kind, name = _text(subject, "kind"), _text(subject, "name")
        if kind == "Pod" and reason == "NodeNotReady":
            # Said of a pod that runs. It does not count any more if the pod is ready again, has ended or was replaced.
            told_elsewhere = name in pending or name in settled or _seconds(event_time(event)) < youngest
        elif kind == "Pod" and pods is not None:
            told_elsewhere = reason not in _OF_STARTING or name not in pending or _is_mounted(pending[name])
        else:
            # Whatever could not be created before the youngest pod was: it could then. Also within the same second, all
            # that is known of a pod: what is refused for good is refused again, and the Event then has a later time.
            told_elsewhere = kind != "Pod" and bool(youngest) and _seconds(event_time(event)) <= youngest
        meaning = reasons.find(reason, message)
        if told_elsewhere or meaning is None:
            continue
        if reason == "TrainJobResourcesCreationFailed":
            yield Finding(reason, message.removeprefix("TrainJob resources reconciliation failed: "), meaning)
        else:
            about = f"{kind.lower()} {name}" if kind else ""
            yield Finding(reason, message, meaning, about, rank_of(pending[name]) if name in pending else "")


def _is_mounted(pod: Mapping[str, Any]) -> bool:
    """Whether the volumes of a pod are mounted and its sandbox is there: Events of earlier tries are old then."""
    conditions = {str(each.get("type")): each for each in mappings(pod, "status", "conditions")}
    states = [mapping(each, "state") for each in mappings(pod, "status", "initContainerStatuses")]
    return _is(conditions, "PodReadyToStartContainers") or any("running" in each for each in states)


def _is_settled(pod: Mapping[str, Any]) -> bool:
    """Whether a pod has ended, or is ready."""
    conditions = {str(each.get("type")): each for each in mappings(pod, "status", "conditions")}
    return mapping(pod, "status").get("phase") in ("Succeeded", "Failed") or _is(conditions, "Ready")


def event_time(event: Mapping[str, Any]) -> str:
    """When an Event was last seen: Trainer and JobSet use the newer events API, which leaves the old times empty."""
    series = mapping(event, "series").get("lastObservedTime")
    times = (series, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((time for time in times if isinstance(time, str)), "")


def _seconds(time: object) -> str:
    return str(time or "")[: len("2026-11-21T10:00:00")]


# ---------------------------------------------------------------- pods

_ON_THE_WAY = ("ContainerCreating", "PodInitializing", "CrashLoopBackOff")  # the last is a crash, told of as such


def in_pods(pods: Iterable[Mapping[str, Any]]) -> Blocker | None:
    """Why pods do not start; of several reasons one that lasts, since that has to be mended first."""
    found = first(of_pods(pods))
    return found.blocker if found else None


def of_pods(pods: Iterable[Mapping[str, Any]]) -> Iterator[Finding]:
    """What keeps each of the pods from starting."""
    for pod in pods:
        subject = f"pod {mapping(pod, 'metadata').get('name', '?')}"
        statuses = (
            *mappings(pod, "status", "initContainerStatuses"),
            *mappings(pod, "status", "containerStatuses"),
        )
        for status in statuses:
            waiting = mapping(status, "state", "waiting")
            reason = _text(waiting, "reason")
            if reason and reason not in _ON_THE_WAY:
                yield _finding(reason, _text(waiting, "message"), subject, rank_of(pod))
        for condition in mappings(pod, "status", "conditions"):
            if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
                message = _text(condition, "message") + _claims(pod, condition)
                yield _finding(_text(condition, "reason"), message, subject, rank_of(pod))


def _claims(pod: Mapping[str, Any], condition: Mapping[str, Any]) -> str:
    """Names of the volume claims, which the scheduler does not give where they are not bound."""
    if "unbound" not in _text(condition, "message"):
        return ""
    names = [_text(mapping(each, "persistentVolumeClaim"), "claimName") for each in mappings(pod, "spec", "volumes")]
    return f" (volume claims: {', '.join(name for name in names if name)})" if any(names) else ""


def starting(pods: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> str:
    """What pods that are on their way wait for: an image, an init container, the kubelet; empty if none is."""
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
    sidecars = sidecars_of(pod)
    for init in mappings(status, "initContainerStatuses"):
        if "running" in mapping(init, "state") and init.get("name") not in sidecars:
            return f"waits for its init container {init.get('name')}"
    since = f" since {status['startTime']}" if isinstance(status.get("startTime"), str) else ""
    if pulling.startswith("Pulling"):
        return f"waits for its image: {pulling}{since}"
    node = mapping(pod, "spec").get("nodeName")
    return f"is being started on {node}{since}" if node else "waits to be scheduled"


def _finding(
    reason: str, message: str, subject: str = "", rank: str = "", meaning: reasons.Meaning | None = None
) -> Finding:
    return Finding(reason, message, meaning or reasons.find(reason, message) or reasons.UNKNOWN, subject, rank)


def _is(conditions: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return mapping(conditions, kind).get("status") == "True"


def _text(value: Mapping[str, Any] | None, name: str) -> str:
    return str((value or {}).get(name) or "")
