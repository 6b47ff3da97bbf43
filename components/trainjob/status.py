"""TrainJob object -> `Phase` and `Observation`. Pure: no clock, no I/O.

A TrainJob has only three conditions (``Suspended``, ``Complete``, ``Failed``), and none while it runs. Everything else
is read from ``jobsStatus``, which counts Jobs, not pods. Measured on Trainer 2.1.0, 2.2.1 and 2.3.0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob._support.masking import public
from trainjob.progress.reading import metrics_of

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
CANCELLED = "trainjob.dev/cancelled"
"""Annotation of a job that `trainjob.cancel` suspended, terminated or deleted. Launching the key again
resumes a suspended job."""

GIVEN_UP = "trainjob.dev/given-up"
"""Annotation with the diagnosis as JSON: the job was suspended because its step failed at the first crash. It counts as
failed while it is suspended: launching the same key again starts the next attempt."""

WAITING, ADMITTED = "WaitingInQueue", "Admitted"
"""Reasons of the condition ``Suspended`` of a job in the queue of this machine for GPUs, and after it."""

STALL_TIMEOUT = "trainjob.dev/stall-timeout"
"""Annotation: ``stall_timeout`` of the spec in seconds, which waiters read."""


class Phase(StrEnum):
    """The phase of a job. Only `COMPLETE`, `FAILED`, `CANCELLED` and `DELETED` are final."""

    NOT_STARTED = "NotStarted"
    """Accepted, but without a JobSet yet. If its creation is refused, only Events report it."""
    QUEUED = "Queued"
    """Suspended by Kueue until capacity is available; on the local backend until GPUs are free."""
    INITIALIZING = "Initializing"
    """A dataset or model initializer is running."""
    STARTING = "Starting"
    """Pods are being scheduled, pulled and started."""
    RUNNING = "Running"
    """All its pods were running. Stays so if one finishes before the others, or is restarted in place."""
    RESTARTING = "Restarting"
    """It ran before; its pods are being replaced, or a replaced pod is blocked."""
    SUSPENDED = "Suspended"
    """Suspended by a person or a program other than Kueue."""
    COMPLETE = "Complete"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    """Cancelled on the local backend, with logs and metrics kept. On a cluster, a cancelled job is deleted."""
    DELETED = "Deleted"

    @property
    def terminal(self) -> bool:
        """Whether the phase is final."""
        return self in (Phase.COMPLETE, Phase.FAILED, Phase.CANCELLED, Phase.DELETED)

    @property
    def idle(self) -> bool:
        """Whether a job in this phase waits for something, so that a blocker may explain it."""
        return not self.terminal and self is not Phase.RUNNING


@dataclass(frozen=True)
class Blocker:
    """What blocks a job.

    Attributes:
        reason: In CamelCase, as the cluster reports it.
        message: The reason in words.
        permanent: It cannot resolve itself: a person has to change the spec or the cluster.
        advice: What to do.
    """

    reason: str
    message: str
    permanent: bool = False
    advice: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Observation:
    """The state of a job at one moment.

    Attributes:
        phase: The phase.
        reason: CamelCase reason of the deciding condition or of the blocker; empty if there is neither.
        message: The reason in words.
        created: When the object was created.
        admitted: Time of its latest admission (creation, or the latest resume); None while queued or suspended.
        waiting_since: Since when it is queued or suspended; None otherwise.
        finished: When it finished; None before.
        progress: Percentage that the training script reported, 0..100.
        remaining_seconds: The script's own estimate, or one that `trainjob.progress` derived from its progress.
        metrics: The script's metrics, by name: bools, numbers, text.
        details: `trainjob.progress.Report.details`: ``step``, ``checkpoint``, ``estimate``; only what was reported.
        has_run: Whether its pods were observed running, now or earlier, or reported progress.
        pods_gone: Whether it has run and no pod counts anymore: it is about to finish or to restart.
        stuck: Whether the blocker is permanent, so that a person has to act; `message` explains it.
        advice: What that person should do.
        cancelled: Whether `trainjob.cancel` was called for it.
        stall_timeout: Seconds without progress after which a waiter fails the job; None for no limit.
    """

    phase: Phase
    reason: str = ""
    message: str = ""
    created: datetime | None = None
    admitted: datetime | None = None
    waiting_since: datetime | None = None
    finished: datetime | None = None
    progress: float | None = None
    remaining_seconds: float | None = None
    metrics: Mapping[str, bool | float | str] = field(default_factory=dict)
    details: Mapping[str, bool | float | str] = field(default_factory=dict)
    has_run: bool = False
    pods_gone: bool = False
    stuck: bool = False
    advice: str = ""
    cancelled: bool = False
    stall_timeout: float | None = None

    @property
    def step(self) -> int | None:
        """Step of the latest report that had one; None if unknown."""
        step = self.details.get("step")
        return step if isinstance(step, int) else None


def observe(
    trainjob: Mapping[str, Any] | None, previous: Observation | None = None, blocker: Blocker | None = None
) -> Observation:
    """Observe `trainjob` (None: it was deleted), given the previous observation of the same UID.

    While the job makes no progress, the blocker supplies reason and message: the object itself does not report it.

    The first final phase of a UID is kept: Trainer up to 2.3 can take ``Failed`` back and train again
    (kubeflow/trainer#3891).
    """
    observation = _observed(trainjob, previous, blocker)
    message = public(observation.message)
    return observation if message == observation.message else replace(observation, message=message)


def _observed(trainjob: Mapping[str, Any] | None, previous: Observation | None, blocker: Blocker | None) -> Observation:
    if previous is not None and previous.phase.terminal:
        return previous
    if trainjob is None:
        cancelled = previous is not None and previous.cancelled
        reason = "Cancelled" if cancelled else "Deleted"
        message = f"the TrainJob was {'cancelled with trainjob' if cancelled else 'deleted'} while it was waited for"
        return replace(previous or Observation(Phase.DELETED), phase=Phase.DELETED, reason=reason, message=message)

    conditions = {str(condition.get("type")): condition for condition in mappings(trainjob, "status", "conditions")}
    created = parse_time(mapping(trainjob, "metadata").get("creationTimestamp"))
    reported = mapping(trainjob, "status", "trainerStatus")
    has_run = bool(reported) or (previous is not None and previous.has_run)
    common = _reported(reported, previous) | {"created": created, "has_run": has_run}
    annotations = mapping(trainjob, "metadata", "annotations")
    common["cancelled"] = CANCELLED in annotations
    common["stall_timeout"] = _positive(annotations.get(STALL_TIMEOUT))

    for kind, phase in (("Complete", Phase.COMPLETE), ("Failed", Phase.FAILED), ("Cancelled", Phase.CANCELLED)):
        condition = mapping(conditions, kind)
        if condition.get("status") == "True":
            return Observation(
                phase,
                _text(condition, "reason"),
                _of_steps(_text(condition, "message"), mapping(trainjob, "metadata").get("name")),
                admitted=_admitted(conditions, created),
                finished=parse_time(condition.get("lastTransitionTime")),
                **common,
            )
    if mapping(trainjob, "spec").get("suspend") or _waits_here(mapping(conditions, "Suspended")):
        observation = _suspended(trainjob, mapping(conditions, "Suspended"), common)
    else:
        found = _progressing(mappings(trainjob, "status", "jobsStatus"), previous, blocker, has_run=has_run)
        observation = Observation(admitted=_admitted(conditions, created), **common | found)
    if blocker is None or not observation.phase.idle:
        return observation
    message = f"{observation.message}: {blocker.message}" if observation.message else blocker.message
    stuck, advice = blocker.permanent, blocker.advice
    return replace(observation, reason=blocker.reason, message=message, stuck=stuck, advice=advice)


def _text(condition: Mapping[str, Any], name: str) -> str:
    return str(condition.get(name) or "")


def _of_steps(message: str, name: object) -> str:
    """Rename the first failed Job. JobSet calls it ``x-node-0``, which reads as a rank, but is the Job of all ranks."""
    return re.sub(rf"first failed job: {re.escape(str(name))}-(\S+)-\d+\)", r"first failed step: \1)", message)


def _waits_here(condition: Mapping[str, Any]) -> bool:
    """Whether a job of this machine waits for GPUs."""
    return condition.get("reason") == WAITING and condition.get("status") == "True"


def _suspended(trainjob: Mapping[str, Any], condition: Mapping[str, Any], common: dict[str, Any]) -> Observation:
    if not condition:
        common |= {"waiting_since": common["created"]}
    elif condition.get("status") == "True":  # else it is 10-70 ms old, from the latest resume
        common |= {"waiting_since": parse_time(condition.get("lastTransitionTime"))}
    if _waits_here(condition) and not mapping(trainjob, "spec").get("suspend"):
        return Observation(Phase.QUEUED, WAITING, _text(condition, "message"), **common)
    labels = mapping(trainjob, "metadata", "labels")
    given_up = GIVEN_UP in mapping(trainjob, "metadata", "annotations")
    # In a queue only jobs that have failed are marked. Kueue does not admit one again whose failure Trainer takes back.
    if QUEUE_LABEL in labels and not common["cancelled"] and not given_up:
        state = "preempted, waiting again" if common["has_run"] else "waiting for admission"
        return Observation(Phase.QUEUED, WAITING, f"{state} in queue {labels[QUEUE_LABEL]}", **common)
    by_trainjob = ""
    if common["cancelled"]:
        unattended = mapping(trainjob, "metadata", "annotations")[CANCELLED] == "unattended"
        by_trainjob = (
            "suspended because nobody waited for it; to resume it, wait for it or launch the same key again"
            if unattended
            else "the job was cancelled with trainjob; to resume it, launch the same key again"
        )
    message = by_trainjob or _text(condition, "message") or "the TrainJob is suspended"
    return Observation(Phase.SUSPENDED, _text(condition, "reason") or "Suspended", message, **common)


def _progressing(
    jobs: list[Mapping[str, Any]], previous: Observation | None, blocker: Blocker | None, *, has_run: bool
) -> dict[str, Any]:
    """Phase, `has_run` and `pods_gone` of a job that is neither finished nor suspended."""
    if not any(job.get(count) for job in jobs for count in ("ready", "active", "succeeded", "failed", "suspended")):
        # All counters are zero before the first pod, and for seconds between the last pod and `Failed` or a restart.
        phase = previous.phase if previous is not None else Phase.RESTARTING
        phase = phase if has_run else Phase.NOT_STARTED
        return {"phase": phase, "has_run": has_run, "pods_gone": has_run}
    initializers = [job for job in jobs if str(job.get("name")).endswith("-initializer")]
    training = [job for job in jobs if job not in initializers]
    if any(job.get("ready") or job.get("succeeded") for job in training):
        return {"phase": Phase.RUNNING, "has_run": True}
    if any(not job.get("succeeded") for job in initializers):
        return {"phase": Phase.INITIALIZING, "has_run": has_run}
    # A rank that finished successfully is not ready for 1 to 2 s before it counts as succeeded. A rank that restarts in
    # place looks the same. Before a restart of all ranks, a Job fails and all counters are zero.
    ran = previous is not None and previous.phase is Phase.RUNNING and not previous.pods_gone
    if ran and blocker is None and any(job.get("active") for job in training):
        return {"phase": Phase.RUNNING, "has_run": True}
    return {"phase": Phase.RESTARTING if has_run else Phase.STARTING, "has_run": has_run}


def _positive(text: object) -> float | None:
    """A finite number above 0 in an annotation, which a person may have edited; None for anything else."""
    try:
        number = float(str(text))
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def _admitted(conditions: Mapping[str, Mapping[str, Any]], created: datetime | None) -> datetime | None:
    suspended = mapping(conditions, "Suspended")
    if not suspended:
        return created
    # Still True for 10-50 ms after a resume. The time of the resume is known only when it turns False.
    return parse_time(suspended.get("lastTransitionTime")) if suspended.get("status") == "False" else None


_NOTHING: Mapping[str, bool | float | str] = {}
"""Shared by the observations of all jobs that have reported nothing: 10,000 of them would have 1 MB of empty dicts."""


def _reported(trainer_status: Mapping[str, Any], previous: Observation | None) -> dict[str, Any]:
    if not trainer_status and previous is not None:
        return {
            "progress": previous.progress,
            "remaining_seconds": previous.remaining_seconds,
            "metrics": previous.metrics,
            "details": previous.details,
        }
    metrics, details = metrics_of(trainer_status.get("metrics"))
    return {
        "progress": _number(trainer_status, "progressPercentage"),
        "remaining_seconds": _number(trainer_status, "estimatedRemainingSeconds"),
        "metrics": metrics or _NOTHING,
        "details": details or _NOTHING,
    }


def _number(trainer_status: Mapping[str, Any], name: str) -> float | None:
    value = trainer_status.get(name)
    return value if isinstance(value, int | float) else None
