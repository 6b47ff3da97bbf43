"""End the jobs of a cluster that nobody waits for: one run of ``trainjob reap``.

A job is ended once nobody has waited for it for as long as its author said. A Lease that was not renewed proves that
only if its process could have renewed it: so a run keeps looking for `GRACE` seconds, longer than a waiting process
needs to return after an outage of the API server, and starts again after each outage that it notices. Runs may overlap,
and may be killed at any instant: each job is ended by one request.
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

_LOOK = 10.0  # seconds between two looks
_OLD = timedelta(days=1)  # of a Lease of a process that has ended


@dataclass(frozen=True)
class Reaped:
    """What was done with a job that nobody waited for.

    Attributes:
        job: ``namespace/name``.
        done: ``suspended`` or ``deleted``.
        unattended: For how long nobody had waited for it.
        why: Why it was deleted, and not suspended as asked; empty otherwise.
    """

    job: str
    done: str
    unattended: timedelta
    why: str = ""

    def as_dict(self) -> dict[str, str | float]:
        """All of it as JSON values; ``unattended`` in seconds."""
        return {**asdict(self), "unattended": self.unattended.total_seconds()}

    def __str__(self) -> str:
        seconds = timedelta(seconds=round(self.unattended.total_seconds()))
        return f"TrainJob {self.job} was {self.done}: nobody had waited for it for {seconds}{self.why}"


async def reap(
    backend: Cluster,
    namespace: str,
    *,
    grace: float = GRACE,
    look: float = _LOOK,
    on_reaped: Callable[[Reaped], None] | None = None,
) -> list[Reaped]:
    """End the jobs of `namespace` that nobody waits for; at once if there are none that might be.

    Args:
        backend: The cluster.
        namespace: Where to look.
        grace: Seconds for which a job has to be seen as unattended before it is ended.
        look: Seconds between two looks.
        on_reaped: Called with each job that was ended.

    Raises:
        BackendUnavailable: the API server has not answered for a minute.
        ApiError: jobs or Leases may not be listed.
    """
    reaped: list[Reaped] = []
    since: dict[str, float] = {}
    worked = time.monotonic()
    while True:
        waiters, found = await _look(backend, namespace)
        now = time.monotonic()
        if now - worked > max(grace / 3, 2 * look):  # the API server was away
            since = {}
        worked = now
        since = {uid: since.get(uid, now) for uid in found}
        for uid, job in found.items():
            if now - since[uid] >= grace and (done := await _end(backend, job)) is not None:
                reaped.append(done)
                if on_reaped is not None:
                    on_reaped(done)
        if not found:
            await _forget(backend, namespace, waiters)
            return reaped
        await anyio.sleep(look)


async def _look(backend: Cluster, namespace: str) -> tuple[list[Waiter], dict[str, TrainJob]]:
    """Who waits for jobs, and the jobs for which nobody has waited for too long, by UID."""
    jobs = [job for action in ("suspend", "delete") for job in await backend.find(namespace, {LABEL: action})]
    # After the jobs: who has begun to wait for one of them meanwhile is seen.
    waiters = await backend.waiters(namespace)
    return waiters, {job["metadata"]["uid"]: job for job in jobs if _overdue(job, waiters, backend.now())}


def _overdue(job: TrainJob, waiters: list[Waiter], now: datetime) -> timedelta | None:
    """How long nobody has waited for a job, if that is too long."""
    policy = policy_of(job)
    if policy is None or not runs(job):
        return None
    times = (waiter.jobs.get(job["metadata"]["uid"]) for waiter in waiters)
    unattended = unattended_for(job, max((each for each in times if each is not None), default=None), now)
    return unattended if unattended > policy.after else None


async def _end(backend: Cluster, job: TrainJob) -> Reaped | None:
    """End a job, unless somebody waits for it or has changed it since it was looked at."""
    ref = JobRef.of(job)
    latest = await backend.get(ref.namespace, ref.name)
    if latest is None or latest["metadata"]["uid"] != ref.uid:
        return None
    policy, unattended = policy_of(latest), _overdue(latest, await backend.waiters(ref.namespace), backend.now())
    if policy is None or unattended is None:
        return None
    patch = cancelling(latest, policy.action, MARK)
    why = "; Kueue would start it again, had it been suspended" if patch is None and policy.action == "suspend" else ""
    if patch is not None:
        # With the version that was looked at: the server refuses it if the job was changed since, such as resumed.
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
    """Remove the Leases of processes that have ended long ago, and whose jobs have ended, too."""
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
