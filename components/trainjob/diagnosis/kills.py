"""Containers that the kubelet killed because a probe or a hook failed, which only Events tell.

The status of such a container is the one of any other that got SIGTERM or SIGKILL: exit code 137, reason ``Error``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from trainjob.diagnosis import reasons
from trainjob.kube_objects import mapping, parse_time

_REASONS = ("Killing", "FailedPostStartHook")
_FIELD = re.compile(r"spec\.(?:init)?containers\{(.+)\}", re.IGNORECASE)
_CLOCK = timedelta(seconds=2)  # whole seconds, written by two parts of the kubelet
_LATE = timedelta(seconds=10)  # a container may end so long after its grace period


@dataclass(frozen=True)
class Kill:
    """Why the kubelet killed a container.

    Attributes:
        reason: Of the Event.
        message: Of the Event.
        report: What the probe or hook reported; empty if no Event has it.
        first: When it happened first: an Event counts repetitions.
        last: When it happened last.
    """

    reason: str
    message: str
    report: str
    first: datetime
    last: datetime

    def explains(self, ended: datetime, grace_seconds: int) -> bool:
        """Whether a container that ended at that time, with that grace period, was ended by it."""
        return self.first - _CLOCK <= ended <= self.last + timedelta(seconds=grace_seconds) + _LATE


def kills_in(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Kill]]:
    """The kills in the Events of a job, by name of pod and container."""
    found: dict[tuple[str, str], list[Kill]] = {}
    reports: dict[tuple[str, str], list[str]] = {}
    for event in events:
        about = mapping(event, "involvedObject")
        field = _FIELD.search(str(about.get("fieldPath") or ""))
        if field is None:
            continue
        container = str(about.get("name")), field[1]
        reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
        first, last = parse_time(event.get("firstTimestamp")), parse_time(event.get("lastTimestamp"))
        if reason in _REASONS and first and last and reasons.find(reason, message):
            found.setdefault(container, []).append(Kill(reason, message, "", first, last))
        elif reason == "Unhealthy":
            reports.setdefault(container, []).append(message)
    return {
        container: [_with_report(kill, reports.get(container, ())) for kill in kills]
        for container, kills in found.items()
    }


def _with_report(kill: Kill, reports: Iterable[str]) -> Kill:
    probe = next((probe for probe in ("Liveness", "Startup") if probe.lower() in kill.message), None)
    report = next((each for each in reports if probe and each.startswith(probe)), "")
    return Kill(kill.reason, kill.message, report.partition(": ")[2].strip(), kill.first, kill.last)
