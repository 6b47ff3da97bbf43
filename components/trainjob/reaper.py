"""End the unattended jobs of a cluster: one run of ``trainjob reap``.

A job is ended when it has been unattended for as long as its policy says. An expired Lease proves that only if its
process was able to renew it. Therefore a run observes for `GRACE` seconds, longer than a waiting process needs to
reconnect after an outage of the API server, and starts over after each outage that it notices. Runs may overlap and may
be killed at any time: each job is ended by one request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

import anyio

from trainjob.backends.base import Cluster, TrainJob
from trainjob.backends.kubernetes.attendance import Waiter
from trainjob.errors import NotFound, Rejected
from trainjob.lifecycle import cancelling
from trainjob.manifest import JobRef
from trainjob.unattended import LABEL, MARK, policy_of, runs, unattended_for

REAPER = "trainjob-reaper"
"""Name of the CronJob that `trainjob.install` ships."""

GRACE = 90.0
"""Seconds: three renewals of a Lease; a request on a broken connection takes 40 s to fail, and is repeated after 10."""

_INTERVAL = 10.0  # seconds between two observations
_OLD = timedelta(days=1)  # a Lease this old belongs to a process that has ended


@dataclass(frozen=True)
class Reaped:
    """An unattended job that was ended.

    Attributes:
        job: ``namespace/name``.
        done: ``suspended`` or ``deleted``.
        unattended: For how long it was unattended.
        why: Why it was deleted instead of suspended; empty otherwise.
    """

    job: str
    done: str
    unattended: timedelta
    why: str = ""

    def as_dict(self) -> dict[str, str | float]:
        """The attributes as JSON values; ``unattended`` in seconds."""
        return {**asdict(self), "unattended": self.unattended.total_seconds()}

    def __str__(self) -> str:
        seconds = timedelta(seconds=round(self.unattended.total_seconds()))
        return f"TrainJob {self.job} was {self.done}: no process had waited for it for {seconds}{self.why}"


async def reap(
    backend: Cluster,
    namespace: str,
    *,
    grace: float = GRACE,
    interval: float = _INTERVAL,
    on_reaped: Callable[[Reaped], None] | None = None,
) -> list[Reaped]:
    """End the unattended jobs of `namespace`; return at once if there are no candidates.

    Args:
        backend: The cluster.
        namespace: Namespace of the jobs.
        grace: Seconds for which a job must be observed as unattended before it is ended.
        interval: Seconds between two observations.
        on_reaped: Called with each job that was ended.

    Raises:
        BackendUnavailable: The API server did not respond for a minute.
        ApiError: Jobs or Leases may not be listed.
    """
    reaped: list[Reaped] = []
    since: dict[str, float] = {}
    answered = time.monotonic()
    while True:
        waiters, found = await _observe(backend, namespace)
        now = time.monotonic()
        if now - answered > max(grace / 3, 2 * interval):  # after an outage of the API server
            since = {}
        answered = now
        since = {uid: since.get(uid, now) for uid in found}
        for uid, job in found.items():
            if now - since[uid] >= grace and (done := await _end(backend, job)) is not None:
                reaped.append(done)
                if on_reaped is not None:
                    on_reaped(done)
        if not found:
            await _forget(backend, namespace, waiters)
            return reaped
        await anyio.sleep(interval)


async def _observe(backend: Cluster, namespace: str) -> tuple[list[Waiter], dict[str, TrainJob]]:
    """The waiting processes, and the jobs that have been unattended for too long, by UID."""
    jobs = [job for action in ("suspend", "delete") for job in await backend.find(namespace, {LABEL: action})]
    # After the jobs, so that a process that has started to wait since is included.
    waiters = await backend.waiters(namespace)
    return waiters, {job["metadata"]["uid"]: job for job in jobs if _overdue(job, waiters, backend.now())}


def _overdue(job: TrainJob, waiters: list[Waiter], now: datetime) -> timedelta | None:
    """How long a job has been unattended, if that is longer than its policy allows."""
    policy = policy_of(job)
    if policy is None or not runs(job):
        return None
    times = (waiter.jobs.get(job["metadata"]["uid"]) for waiter in waiters)
    unattended = unattended_for(job, max((each for each in times if each is not None), default=None), now)
    return unattended if unattended > policy.after else None


async def _end(backend: Cluster, job: TrainJob) -> Reaped | None:
    """End a job, unless it is attended or was changed since it was observed."""
    ref = JobRef.of(job)
    latest = await backend.get(ref.namespace, ref.name)
    if latest is None or latest["metadata"]["uid"] != ref.uid:
        return None
    policy, unattended = policy_of(latest), _overdue(latest, await backend.waiters(ref.namespace), backend.now())
    if policy is None or unattended is None:
        return None
    patch = cancelling(latest, policy.action, MARK)
    why = (
        "; it could not be suspended, because Kueue would resume it"
        if patch is None and policy.action == "suspend"
        else ""
    )
    if patch is not None:
        # With the version that was read: the server refuses the patch if the job was changed since, e.g. resumed.
        patch["metadata"]["resourceVersion"] = latest["metadata"]["resourceVersion"]
        try:
            await backend.patch(ref, patch)
        except NotFound:
            return None
        except Rejected as error:
            why = f"; it could not be suspended: {error}"
        else:
            return Reaped(str(ref), "suspended", unattended)
    await backend.delete(ref)
    return Reaped(str(ref), "deleted", unattended, why)


async def _forget(backend: Cluster, namespace: str, waiters: list[Waiter]) -> None:
    """Remove the Leases of processes that ended long ago and whose jobs have finished."""
    old = [waiter for waiter in waiters if backend.now() - waiter.renewed > _OLD]
    if not old:
        return
    running = {
        job["metadata"]["uid"]
        for action in ("suspend", "delete")
        for job in await backend.find(namespace, {LABEL: action})
        if runs(job)
    }
    for waiter in old:
        if not running & set(waiter.jobs):
            await backend.forget(namespace, waiter)
