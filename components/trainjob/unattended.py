"""What happens to a job that nobody waits for: what its author asked for, and since when nobody has waited. Pure.

A workflow's last try may be lost with its worker, and then a training keeps its GPUs with nobody to take its result.
So each process that waits records its jobs, on a cluster in a Lease (`Backend.attend`), and a
reaper (`trainjob reap`; on one machine the job's supervisor) ends what nobody has waited for longer than the job's
bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from trainjob.kube_objects import mapping, mappings, parse_time
from trainjob.status import CANCELLED, observe

if TYPE_CHECKING:  # pydantic, which the local backend's supervisors do without
    from trainjob.spec import TrainJobSpec

Action = Literal["suspend", "delete"]

LABEL = "trainjob.dev/unattended"
"""Label of a job that is not kept when nobody waits for it: ``suspend`` or ``delete``."""
AFTER = "trainjob.dev/unattended-after"
"""Annotation: after so many seconds."""
MARK = "unattended"
"""Value of the annotation `trainjob.status.CANCELLED` of a job that was suspended because nobody waited for it."""

DEFAULT_AFTER = timedelta(hours=1)

SUSPEND: dict[str, str] = {LABEL: "suspend"}
"""Label of a workflow's jobs, which its steps wait for; what a spec says has precedence."""


@dataclass(frozen=True)
class Policy:
    """What happens to a job that nobody waits for.

    Attributes:
        action: ``suspend`` or ``delete``.
        after: Once nobody has waited for so long.
    """

    action: Action
    after: timedelta


def metadata_of(spec: TrainJobSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations for what `spec` asks for. What it leaves out is for the launcher to decide."""
    labels: dict[str, str] = {} if spec.unattended is None else {LABEL: spec.unattended}
    after = spec.unattended_after
    return labels, {} if after is None else {AFTER: f"{after.total_seconds():g}"}


def policy_of(trainjob: Mapping[str, Any]) -> Policy | None:
    """What is asked for a job; None if it is kept."""
    action = mapping(trainjob, "metadata", "labels").get(LABEL)
    if action not in ("suspend", "delete"):
        return None
    try:
        after = timedelta(seconds=float(mapping(trainjob, "metadata", "annotations")[AFTER]))
    except (KeyError, TypeError, ValueError, OverflowError):
        after = DEFAULT_AFTER
    return Policy(cast("Action", action), after)


def marked(trainjob: Mapping[str, Any]) -> bool:
    """Whether a job was suspended because nobody waited for it. It may have been resumed by hand since."""
    return bool(mapping(trainjob, "metadata", "annotations").get(CANCELLED) == MARK)


def resuming(trainjob: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that takes back a suspension by this package.

    The mark goes also where somebody has resumed the job by hand: a later suspension is that person's.
    """
    patch: dict[str, Any] = {"metadata": {"annotations": {CANCELLED: None}}}
    if mapping(trainjob, "spec").get("suspend"):
        patch["spec"] = {"suspend": False}
    return patch


def runs(trainjob: Mapping[str, Any]) -> bool:
    """Whether a job runs, or is about to: one that is paused, by Kueue or a person, costs nothing."""
    paused = mapping(trainjob, "spec").get("suspend") or "deletionTimestamp" in mapping(trainjob, "metadata")
    return not paused and not observe(trainjob).phase.terminal


def unattended_for(trainjob: Mapping[str, Any], attended: datetime | None, now: datetime) -> timedelta:
    """How long nobody has waited for a job that runs.

    Args:
        trainjob: The job. Its creation and its latest resume count as if somebody had waited at that moment: who
            launched or resumed it may need time until somebody waits.
        attended: When somebody last waited for it, as far as that is known.
        now: The present, by the clock of the API server, as all times here.
    """
    created = parse_time(mapping(trainjob, "metadata").get("creationTimestamp"))
    resumed = [parse_time(each.get("lastTransitionTime")) for each in mappings(trainjob, "status", "conditions")]
    return now - max((each for each in (created, attended, *resumed) if each is not None), default=now)
