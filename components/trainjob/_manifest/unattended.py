"""Policy for unattended jobs, which no process waits for, and for how long a job has been unattended. Pure.

If the last try of a workflow is lost with its worker, the training keeps its GPUs although no process takes its
result. Therefore each waiting process records its jobs, on a cluster in a Lease (`Backend.attend`), and a reaper
(`trainjob reap`; on one machine the job's supervisor) ends jobs that have been unattended for longer than their policy
allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob.status import CANCELLED, observe

if TYPE_CHECKING:  # pydantic, which the local backend's supervisors do without
    from trainjob._spec import TrainJobSpec

Action = Literal["suspend", "cancel"]

LABEL = "trainjob.dev/unattended"
"""Label of a job that is not kept when it is unattended: ``suspend`` or ``cancel``."""
AFTER = "trainjob.dev/unattended-after"
"""Annotation: seconds after which the action is taken."""
MARK = "unattended"
"""Value of the annotation `trainjob.status.CANCELLED` of a job that was suspended because it was unattended."""

ON_KILL = "trainjob.dev/on-kill-action"
"""Annotation: what happens to the job if its run is terminated: ``suspend``, ``cancel`` or ``keep``."""

DEFAULT_AFTER = timedelta(hours=1)

SUSPEND: dict[str, str] = {LABEL: "suspend"}
"""Default label of a workflow's jobs, which its steps wait for; the spec has precedence."""


def of_step(on_kill_action: str) -> dict[str, str]:
    """What a step of a pipeline notes on its jobs: what its run's end does with them, and the default label."""
    return {ON_KILL: on_kill_action} | (SUSPEND if on_kill_action != "keep" else {})


_MULTIKUEUE_ORIGIN = "kueue.x-k8s.io/multikueue-origin"


def is_placed(trainjob: Mapping[str, Any]) -> bool:
    """Whether Kueue has placed a job here from another cluster: its waiters and its run are there."""
    return _MULTIKUEUE_ORIGIN in mapping(trainjob, "metadata", "labels")


@dataclass(frozen=True)
class Policy:
    """What happens to an unattended job.

    Attributes:
        action: ``suspend`` or ``cancel``.
        after: How long the job must be unattended.
    """

    action: Action
    after: timedelta


def metadata_of(spec: TrainJobSpec) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and annotations for the policy of `spec`. The launcher decides about fields that are left out."""
    labels: dict[str, str] = {} if spec.unattended is None else {LABEL: spec.unattended}
    after = spec.unattended_after
    return labels, {} if after is None else {AFTER: f"{after.total_seconds():g}"}


def policy_of(trainjob: Mapping[str, Any]) -> Policy | None:
    """The policy of a job; None if the job is kept."""
    action = mapping(trainjob, "metadata", "labels").get(LABEL)
    if action not in ("suspend", "cancel"):
        return None
    try:
        after = timedelta(seconds=float(mapping(trainjob, "metadata", "annotations")[AFTER]))
    except (KeyError, TypeError, ValueError, OverflowError):
        after = DEFAULT_AFTER
    return Policy(cast("Action", action), after)


def marked(trainjob: Mapping[str, Any]) -> bool:
    """Whether a job was suspended because it was unattended. A person may have resumed it since."""
    return bool(mapping(trainjob, "metadata", "annotations").get(CANCELLED) == MARK)


def resuming(trainjob: Mapping[str, Any]) -> dict[str, Any]:
    """The patch that undoes a suspension by this package.

    The mark is removed also if a person has resumed the job: a later suspension is that person's.
    """
    patch: dict[str, Any] = {"metadata": {"annotations": {CANCELLED: None}}}
    if mapping(trainjob, "spec").get("suspend"):
        patch["spec"] = {"suspend": False}
    return patch


def runs(trainjob: Mapping[str, Any]) -> bool:
    """Whether a job is running or about to run. A job that Kueue or a person suspended uses no resources."""
    paused = mapping(trainjob, "spec").get("suspend") or "deletionTimestamp" in mapping(trainjob, "metadata")
    return not paused and not observe(trainjob).phase.terminal


def unattended_for(trainjob: Mapping[str, Any], attended: datetime | None, now: datetime) -> timedelta:
    """How long a running job has been unattended.

    Args:
        trainjob: The job. Its creation and its latest resume count as attended, since the launching process may need
            time before it waits.
        attended: When a process last waited for the job, if known.
        now: The current time by the clock of the API server, as all times here.
    """
    created = parse_time(mapping(trainjob, "metadata").get("creationTimestamp"))
    resumed = [parse_time(each.get("lastTransitionTime")) for each in mappings(trainjob, "status", "conditions")]
    return now - max((each for each in (created, attended, *resumed) if each is not None), default=now)
