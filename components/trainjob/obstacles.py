"""What keeps a job from running, read from the objects around it. Pure: no clock, no I/O.

A TrainJob says nothing about it: one that waits in a queue is only suspended, one whose JobSet is refused has an empty
status for ever, and one whose image cannot be pulled counts as active (measured on Trainer 2.1 to 2.3, Kueue 0.18).
The reason is in Kueue's Workload, in Events and in the pods.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from trainjob.status import Obstacle, mapping, mappings


def in_workload(workload: Mapping[str, Any]) -> Obstacle | None:
    """Why Kueue does not start the job of this Workload; None if it has nothing to say yet."""
    conditions = {str(each.get("type")): each for each in mappings(workload, "status", "conditions")}
    if mapping(workload, "spec").get("active") is False:
        why = _text(conditions.get("Evicted"), "message") or "it was deactivated"
        return Obstacle("Deactivated", f"Kueue has given up on it: {why}", lasting=True)
    if _is(conditions, "Admitted"):
        return Obstacle(
            "AdmittedButSuspended",
            "Kueue has admitted it, and it is still suspended (Kueue since 0.17 cannot start TrainJobs of Trainer 2.1)",
        )
    for check in mappings(workload, "status", "admissionChecks"):
        if _is(conditions, "QuotaReserved") and check.get("state") != "Ready":
            state, said = check.get("state", "Pending"), check.get("message") or "no message"
            text = f"admission check {check.get('name')} is {state}: {said}"
            return Obstacle("AdmissionCheck", text, lasting=state == "Rejected")
    waiting = conditions.get("QuotaReserved")
    if waiting is None or _is(conditions, "QuotaReserved"):
        return None
    message = _text(waiting, "message")
    lasting = _text(waiting, "reason") == "Inadmissible" or "> maximum capacity" in message
    if _is(conditions, "Evicted"):
        message += f" (before: {_text(conditions['Evicted'], 'message')})"
    return Obstacle(_text(waiting, "reason"), message, lasting)


def in_events(events: Iterable[Mapping[str, Any]]) -> Obstacle | None:
    """Why nothing is created for a TrainJob: its controller only ever says so in Events (kubeflow/trainer#3671)."""
    refused = [each for each in events if each.get("reason") == "TrainJobResourcesCreationFailed"]
    if not refused:
        return None
    latest = max(refused, key=event_time)
    message = str(latest.get("message") or "").removeprefix("TrainJob resources reconciliation failed: ")
    # An API server that says no will say it again; a conflict or an outage is gone at the next try.
    return Obstacle(str(latest["reason"]), message, lasting=bool(_REFUSED.search(message)))


_REFUSED = re.compile(r"denied the request|is invalid:|is forbidden:")


def event_time(event: Mapping[str, Any]) -> str:
    """When an Event was last seen: Trainer and JobSet use the newer events API, which leaves the old times empty."""
    series = mapping(event, "series").get("lastObservedTime")
    times = (series, event.get("lastTimestamp"), event.get("eventTime"), event.get("firstTimestamp"))
    return next((time for time in times if isinstance(time, str)), "")


def in_pods(pods: Iterable[Mapping[str, Any]]) -> Obstacle | None:
    """Why pods do not start; of several reasons one that lasts, since that has to be mended first."""
    found = [obstacle for pod in pods for obstacle in _in_pod(pod)]
    return next((each for each in found if each.lasting), found[0] if found else None)


def _in_pod(pod: Mapping[str, Any]) -> Iterable[Obstacle]:
    name = mapping(pod, "metadata").get("name", "?")
    for status in (*mappings(pod, "status", "initContainerStatuses"), *mappings(pod, "status", "containerStatuses")):
        waiting = mapping(status, "state", "waiting")
        reason = _text(waiting, "reason")
        if reason and reason not in ("ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
            message = _text(waiting, "message")
            missing = "not found" in message or "pull access denied" in message
            yield Obstacle(reason, f"pod {name}: {reason}: {message}", reason in _NEEDS_A_PERSON or missing)
    for condition in mappings(pod, "status", "conditions"):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield Obstacle(_text(condition, "reason"), f"pod {name} is not scheduled: {_text(condition, 'message')}")


_NEEDS_A_PERSON = ("InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError")


def _is(conditions: Mapping[str, Mapping[str, Any]], kind: str) -> bool:
    return mapping(conditions, kind).get("status") == "True"


def _text(condition: Mapping[str, Any] | None, name: str) -> str:
    return str((condition or {}).get(name) or "")
