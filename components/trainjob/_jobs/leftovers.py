"""Remove the jobs that this package has left suspended on a cluster and that nobody has asked for since.

A job that its step gave up or that a cancel or the reaper suspended stays: the next launch of its key reads why it
failed, or resumes it. If no launch follows, only its age can tell that it is not needed any longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from trainjob._backends.base import Cluster, TrainJob
from trainjob._manifest.attempts import is_deleting, is_record, mark_of
from trainjob._manifest.unattended import MARK
from trainjob._support.display import short
from trainjob._support.kube_objects import mapping, mappings, parse_time
from trainjob.job import MANAGED_BY, JobRef
from trainjob.status import GIVEN_UP, QUEUE_LABEL, Phase, observe

if TYPE_CHECKING:  # imports httpx, which the local backend does without
    from trainjob._backends.base import Waiter

KEEP_FOR = timedelta(days=30)
"""How long the CronJob of `trainjob._install` keeps leftovers by default."""

_FIELD_MANAGER = "trainjob"  # of the requests of this package
_DEAD = timedelta(days=1)  # a Lease that was not renewed for so long belongs to a process that has ended


@dataclass(frozen=True)
class Leftover:
    """A job that was left suspended for too long.

    Attributes:
        trainjob: The job.
        reason: Why it was left suspended.
        since: When it was last used: suspended, failed, or waited for.
        age: For how long it has not been used.
    """

    trainjob: TrainJob = field(repr=False)
    reason: str
    since: datetime
    age: timedelta

    @property
    def ref(self) -> JobRef:
        """The job."""
        return JobRef.of(self.trainjob)

    def as_dict(self) -> dict[str, str | float]:
        """JSON values: ``job``, ``done``, ``reason``, and ``unused``, the age in seconds."""
        return {"job": str(self.ref), "done": "removed", "reason": self.reason, "unused": self.age.total_seconds()}

    def __str__(self) -> str:
        return f"TrainJob {self.ref} was removed: {self.reason}, not used for {short(self.age)}"


def leftover(
    trainjob: Mapping[str, Any], waiters: Iterable[Waiter], now: datetime, keep_for: timedelta
) -> Leftover | None:
    """Whether a job is left suspended by this package and was not used for longer than `keep_for`. Pure.

    None for a job that a person suspended, that waits in a queue, that trainjob did not launch, or that a process waits
    for.

    Args:
        trainjob: The job. With ``managedFields``, a person who suspended it again after this package is recognized.
        waiters: The processes that wait for jobs of its namespace, or waited for them.
        now: The present time by the clock of the API server.
        keep_for: How long leftovers are kept.
    """
    why = _why(trainjob)
    if not why or is_deleting(trainjob) or _suspended_by_another(trainjob):
        return None
    uid = trainjob["metadata"]["uid"]
    times = [parse_time(mapping(trainjob, "metadata").get("creationTimestamp"))]
    times += [parse_time(each.get("lastTransitionTime")) for each in mappings(trainjob, "status", "conditions")]
    for waiter in waiters:
        if uid in waiter.waiting and now - waiter.renewed < _DEAD:
            return None
        times.append(waiter.jobs.get(uid))
    since = max((each for each in times if each is not None), default=now)
    return Leftover(trainjob, why, since, now - since) if now - since > keep_for else None


def _why(trainjob: Mapping[str, Any]) -> str:
    """Why this package has left a job suspended; empty if it has not."""
    if not mapping(trainjob, "spec").get("suspend"):
        return ""
    if is_record(trainjob):
        return "it records why a deleted job failed"
    labels = mapping(trainjob, "metadata", "labels")
    if labels.get(MANAGED_BY) != "trainjob":
        return ""
    phase, reason = observe(trainjob).phase, ""
    if GIVEN_UP in mapping(trainjob, "metadata", "annotations"):
        reason = "its step gave it up"
    elif mark := mark_of(trainjob):
        reason = "it was suspended because no process waited for it" if mark == MARK else "it was cancelled"
    if phase is Phase.FAILED:
        return reason and "it failed"
    if QUEUE_LABEL in labels:  # Kueue may admit it, whatever its mark says
        return ""
    # Until Trainer has seen the suspension, nobody knows since when the job is suspended.
    seen = any(
        each.get("type") == "Suspended" and each.get("status") == "True"
        for each in mappings(trainjob, "status", "conditions")
    )
    return reason if phase is Phase.SUSPENDED and seen else ""


def _suspended_by_another(trainjob: Mapping[str, Any]) -> bool:
    """Whether a person or another program has set ``spec.suspend`` last, also of a job that has an older mark."""
    managers = {
        each.get("manager")
        for each in mappings(trainjob, "metadata", "managedFields")
        if "f:suspend" in mapping(each, "fieldsV1", "f:spec")
    }
    return bool(managers) and _FIELD_MANAGER not in managers


async def remove_leftovers(
    backend: Cluster,
    namespace: str,
    keep_for: timedelta,
    *,
    dry_run: bool = False,
    on_removed: Callable[[Leftover], None] | None = None,
) -> list[Leftover]:
    """Delete the leftovers of `namespace`, each by its UID and version: one that was changed meanwhile is kept.

    Args:
        backend: The cluster.
        namespace: Namespace of the jobs.
        keep_for: How long leftovers are kept.
        dry_run: Find them, and delete nothing.
        on_removed: Called with each leftover that was removed; with `dry_run`, that would be.

    Raises:
        BackendUnavailable: The API server did not respond for a minute.
        ApiError: Jobs or Leases may not be listed, or a job may not be deleted.
    """
    jobs = await backend.find(namespace, {})
    # After the jobs, so that a process that has started to wait since is included.
    waiters = await backend.waiters(namespace)
    candidates = [JobRef.of(job) for job in jobs if leftover(job, waiters, backend.now(), keep_for) is not None]
    removed = []
    for ref in candidates:
        latest = await backend.get(ref.namespace, ref.name)
        if latest is None or latest["metadata"]["uid"] != ref.uid:
            continue
        found = leftover(latest, await backend.waiters(namespace), backend.now(), keep_for)
        if found is None or not (dry_run or await _delete(backend, latest)):
            continue
        removed.append(found)
        if on_removed is not None:
            on_removed(found)
    return removed


async def _delete(backend: Cluster, trainjob: TrainJob) -> bool:
    """Delete a job, unless it was changed since it was read."""
    ref = JobRef.of(trainjob)
    await backend.delete(ref, str(trainjob["metadata"].get("resourceVersion") or ""))
    latest = await backend.get(ref.namespace, ref.name)
    return latest is None or latest["metadata"]["uid"] != ref.uid or is_deleting(latest)
