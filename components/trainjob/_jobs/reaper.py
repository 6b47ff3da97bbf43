"""End the jobs of a cluster that must not run: one run of ``trainjob reap``.

At once: of two active attempts of a key the one that does not count, and what a launch created that was killed before
it read that its key was cancelled. A suspension that the API server refused for too long is repeated. After a grace
period: unattended jobs.

A job is ended when it has been unattended for as long as its policy says. An expired Lease proves that only if its
process was able to renew it. Therefore a run observes for `GRACE` seconds, longer than a waiting process needs to
reconnect after an outage of the API server, and starts over after each outage that it notices. Runs may overlap and may
be killed at any time: each job is ended by one request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial

import anyio

from trainjob._backends.base import Cluster, TrainJob, Waiter
from trainjob._jobs.cancellation import cancelling, end_attempt
from trainjob._manifest.attempts import (
    CANCEL_KEPT,
    Cancel,
    CancelAction,
    adoption_of,
    cancel_of,
    decide,
    is_deleting,
    is_resumed_since,
    may_come_back,
    may_run,
    recent,
    version_of,
)
from trainjob._manifest.unattended import DEFAULT_AFTER, LABEL, MARK, is_placed, policy_of, runs, unattended_for
from trainjob._support.display import short
from trainjob._support.kube_objects import mappings, parse_time
from trainjob.errors import NotFound, Rejected, TrainJobError
from trainjob.job import KEY, MANAGED_BY, JobRef
from trainjob.status import Phase, observe

REAPER = "trainjob-reaper"
"""Name of the CronJob that `trainjob._install` ships."""

GRACE = 90.0
"""Seconds: three renewals of a Lease; a request on a broken connection takes 40 s to fail, and is repeated after 10."""

_INTERVAL = 10.0  # seconds between two observations
_OLD = timedelta(days=1)  # a Lease this old belongs to a process that has ended


@dataclass(frozen=True)
class Reaped:
    """A job that was ended.

    Attributes:
        job: ``namespace/name``.
        done: ``suspended`` or ``deleted``.
        reason: Why it was ended, and why it was deleted instead of suspended.
        unattended: For how long it was unattended, if that is the reason; None otherwise.
    """

    job: str
    done: str
    reason: str
    unattended: timedelta | None = None

    def as_dict(self) -> dict[str, str | float | None]:
        """The attributes as JSON values; ``unattended`` in seconds."""
        seconds = None if self.unattended is None else self.unattended.total_seconds()
        return {**asdict(self), "unattended": seconds}

    def __str__(self) -> str:
        return f"TrainJob {self.job} was {self.done}: {self.reason}"


End = Callable[[], Awaitable[Reaped | None]]
"""Ends one job; returns None if it need not be ended any more."""


async def reap(
    backend: Cluster,
    namespace: str,
    *,
    grace: float = GRACE,
    interval: float = _INTERVAL,
    on_reaped: Callable[[Reaped], None] | None = None,
) -> list[Reaped]:
    """End the jobs of `namespace` that must not run; return at once if none may be unattended.

    Args:
        backend: The cluster.
        namespace: Namespace of the jobs.
        grace: Seconds for which a job must be observed as unattended before it is ended.
        interval: Seconds between two observations.
        on_reaped: Called with each job that was ended.

    Raises:
        BackendUnavailable: The API server did not respond for a minute.
        Rejected: Jobs may not be listed.
        ApiError: Leases may not be listed.
    """
    reaped: list[Reaped] = []

    def report(done: Reaped | None) -> None:
        if done is not None:
            reaped.append(done)
            if on_reaped is not None:
                on_reaped(done)

    failed: TrainJobError | None = None
    cancels = await backend.all_cancels(namespace)
    for _, end in extra_ends(backend, await backend.find(namespace, {MANAGED_BY: "trainjob"}), cancels):
        try:
            report(await end())
        except TrainJobError as error:  # of one job; the others do not wait for it
            failed = failed or error
    since: dict[tuple[str, str], float] = {}  # by UID and adoption: who adopts a job waits for it soon
    answered = time.monotonic()
    while True:
        waiters, found = await _observe(backend, namespace)
        now = time.monotonic()
        if now - answered > max(grace / 3, 2 * interval):  # after an outage of the API server
            since = {}
        answered = now
        observed = {(uid, adoption_of(job)): job for uid, job in found.items()}
        since = {each: since.get(each, now) for each in observed}
        for each, job in observed.items():
            if now - since[each] >= grace:
                report(await end_unattended(backend, job))
        if not found:
            await forget(backend, namespace, waiters)
            if failed is not None:
                raise failed
            return reaped
        await anyio.sleep(interval)


async def _observe(backend: Cluster, namespace: str) -> tuple[list[Waiter], dict[str, TrainJob]]:
    """The waiting processes, and the jobs that have been unattended for too long, by UID."""
    jobs = [job for action in ("suspend", "cancel") for job in await backend.find(namespace, {LABEL: action})]
    # After the jobs, so that a process that has started to wait since is included.
    waiters = await backend.waiters(namespace)
    return waiters, {job["metadata"]["uid"]: job for job in jobs if overdue(job, waiters, backend.now())}


def overdue(job: TrainJob, waiters: Sequence[Waiter], now: datetime) -> timedelta | None:
    """How long a job has been unattended, if that is longer than its policy allows."""
    policy = policy_of(job)
    if policy is None or is_placed(job) or not runs(job):
        return None
    times = (waiter.jobs.get(job["metadata"]["uid"]) for waiter in waiters)
    unattended = unattended_for(job, max((each for each in times if each is not None), default=None), now)
    return unattended if unattended > policy.after else None


def extra_ends(
    backend: Cluster, found: Iterable[TrainJob], cancels: Mapping[str, Sequence[Cancel]]
) -> list[tuple[TrainJob, End]]:
    """What ends attempts that do not count, and those that a cancel of their key applies to.

    Args:
        backend: The cluster.
        found: The jobs that trainjob has launched.
        cancels: The records of cancels, by the hash of the key.
    """
    keys: dict[str, list[TrainJob]] = {}
    for job in found:
        if is_placed(job):
            continue
        keys.setdefault(job["metadata"]["labels"].get(KEY, ""), []).append(job)
    keys.pop("", None)
    ends: list[tuple[TrainJob, End]] = []
    suspends: list[tuple[TrainJob, End]] = []
    for work, jobs in keys.items():
        counts, losers = decide(jobs)
        if counts is None or observe(counts).phase is Phase.SUSPENDED:
            ends += [(job, partial(_end_returned, backend, job)) for job in losers]
        else:
            reason = f"another attempt of its key counts ({counts['metadata']['name']})"
            ends += [(job, partial(_delete, backend, job, reason)) for job in losers]
        for job in jobs:
            cancel = cancel_of(recent(cancels.get(work, ()), backend.now()), job)
            if cancel is None or job in losers or is_resumed_since(job, cancel):
                continue
            if not may_run(job) and not may_come_back(job):
                continue
            if cancel.action == "cancel" or observe(job).phase is not Phase.SUSPENDED:
                end = partial(_end, backend, job, cancel.action, cancel.mark, "its key was cancelled")
                suspends.append((job, end))
    return [*ends, *suspends]  # a webhook that hangs delays suspensions, and no deletion


async def _end_returned(backend: Cluster, job: TrainJob) -> Reaped | None:
    """Delete a job that runs again although another attempt had followed, which does not run.

    Unless a process waits for it, or may soon: a person has resumed it then.
    """
    uid, now = job["metadata"]["uid"], backend.now()
    policy = policy_of(job)
    after = DEFAULT_AFTER if policy is None else policy.after
    waiters = await backend.waiters(JobRef.of(job).namespace)
    conditions = (each for each in mappings(job, "status", "conditions") if each.get("type") == "Suspended")
    times = [parse_time(each.get("lastTransitionTime")) for each in conditions if each.get("status") == "False"]
    times += [waiter.renewed for waiter in waiters if uid in waiter.waiting]
    if any(each is not None and now - each <= after for each in times):
        return None
    return await _delete(backend, job, "it ran again after another attempt of its key had followed")


async def end_unattended(backend: Cluster, job: TrainJob) -> Reaped | None:
    """End a job, unless it is attended or was changed since it was observed."""
    ref = JobRef.of(job)
    latest = await backend.get(ref.namespace, ref.name)
    if latest is None or latest["metadata"]["uid"] != ref.uid:
        return None
    if adoption_of(latest) != adoption_of(job):
        return None
    policy, unattended = policy_of(latest), overdue(latest, await backend.waiters(ref.namespace), backend.now())
    if policy is None or unattended is None:
        return None
    done = await _end(backend, latest, policy.action, MARK, f"no process had waited for it for {short(unattended)}")
    return None if done is None else replace(done, unattended=unattended)


async def _end(backend: Cluster, job: TrainJob, action: CancelAction, mark: str, reason: str) -> Reaped | None:
    """Suspend or delete a job by one request with the version that was read: a job that was changed since is kept."""
    ref, patch = JobRef.of(job), cancelling(job, action, mark)
    if patch is None and action == "suspend":
        reason += "; it could not be suspended, because Kueue would resume it"
    if patch is not None:
        patch["metadata"] |= version_of(job)
        try:
            await backend.patch(ref, patch)
        except NotFound:
            return None
        except Rejected as error:
            reason += f"; it could not be suspended: {error}"
        else:
            return Reaped(str(ref), "suspended", reason)
    return await _delete(backend, job, reason)


async def _delete(backend: Cluster, job: TrainJob, reason: str) -> Reaped | None:
    """Delete a job, unless it was changed since it was read."""
    ref = JobRef.of(job)
    await end_attempt(backend, job)
    left = await backend.get(ref.namespace, ref.name)
    kept = left is not None and left["metadata"]["uid"] == ref.uid and not is_deleting(left)
    return None if kept else Reaped(str(ref), "deleted", reason)


async def forget(backend: Cluster, namespace: str, waiters: Sequence[Waiter]) -> None:
    """Remove old records of cancels, and the Leases of processes that ended long ago and whose jobs have finished."""
    for cancels in (await backend.all_cancels(namespace)).values():
        for cancel in cancels:
            if cancel.at is None or backend.now() - cancel.at > CANCEL_KEPT:
                await backend.forget_cancel(namespace, cancel)
    old = [waiter for waiter in waiters if backend.now() - waiter.renewed > _OLD]
    if not old:
        return
    running = {
        job["metadata"]["uid"]
        for action in ("suspend", "cancel")
        for job in await backend.find(namespace, {LABEL: action})
        if runs(job)
    }
    for waiter in old:
        if not running & set(waiter.jobs):
            await backend.forget(namespace, waiter)
