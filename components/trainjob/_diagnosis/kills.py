"""Containers that the kubelet killed because a probe or a hook failed. Only Events report this.

The status of such a container equals that of any container with SIGTERM or SIGKILL: exit code 137, reason ``Error``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from trainjob._diagnosis import reasons
from trainjob._support.kube_objects import mapping, parse_time

_REASONS = ("Killing", "FailedPostStartHook")
_FIELD = re.compile(r"spec\.(?:init)?containers\{(.+)\}", re.IGNORECASE)
_CLOCK_SKEW = timedelta(seconds=2)  # whole seconds, written by two parts of the kubelet
_DELAY = timedelta(seconds=10)  # a container may terminate this long after its grace period


@dataclass(frozen=True)
class Kill:
    """Why the kubelet killed a container.

    Attributes:
        reason: Reason of the Event.
        message: Message of the Event.
        report: What the probe or hook reported; empty if no Event has it.
        first: Time of the first occurrence; one Event counts repetitions.
        last: Time of the latest occurrence.
    """

    reason: str
    message: str
    report: str
    first: datetime
    last: datetime

    def explains(self, ended: datetime, grace_seconds: int) -> bool:
        """Whether this kill terminated a container that ended at that time, with that grace period."""
        return self.first - _CLOCK_SKEW <= ended <= self.last + timedelta(seconds=grace_seconds) + _DELAY


def kills_in(events: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Kill]]:
    """The kills in the Events of a job, by name of pod and container."""
    found: dict[tuple[str, str], list[Kill]] = {}
    reports: dict[tuple[str, str], list[str]] = {}
    for event in events:
        subject = mapping(event, "involvedObject")
        field = _FIELD.search(str(subject.get("fieldPath") or ""))
        if field is None:
            continue
        container = str(subject.get("name")), field[1]
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
