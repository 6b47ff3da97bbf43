"""The controller of a namespace: ends jobs that must not run as soon as that is known (``trainjob reap --watch``).

A step that is terminated has between 20 ms and 3 s, and cannot tell why it ends. The orchestrator's own object can, for
as long as it exists: a Workflow that was terminated, or deleted before it had completed, ends the jobs of its run as
each job says; one that keeps running while a pod of it is evicted ends nothing. The controller also does at once what a
run of `reap` does.

Everything is decided anew from what is seen, and each job is read again before it is ended. So the controller may be
killed at any time, and two of them are harmless.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import anyio

from trainjob._backends.base import Cluster, Overview, Run, TrainJob
from trainjob._jobs import reaper
from trainjob._jobs.ended_runs import end_with_run, ends_with, is_of_one_run, others_wait, run_of
from trainjob._jobs.leftovers import Leftover, remove_leftovers
from trainjob._jobs.reaper import GRACE, End, Reaped
from trainjob._manifest.attempts import is_deleting
from trainjob.errors import TrainJobError
from trainjob.job import JobRef

_log = logging.getLogger(__name__)

CONTROLLER = "trainjob-controller"
"""Name of the Deployment that `trainjob._install` ships."""

INTERVAL = 10.0
"""Seconds after which everything is decided anew, if nothing changes before."""

_COLLECT = 0.2  # seconds in which further changes are collected
_SHARE = 9.0  # the least pause, in times of what the decision before took: at most a tenth of a core
_CLEAN = 3600.0  # seconds between two removals of what is left over


@dataclass
class Counters:
    """What the controller has seen and done, for its metrics.

    Attributes:
        ended: Number of ended jobs by what was done: ``suspended`` or ``deleted``.
        failed: Number of attempts to end a job that have failed.
        jobs: Jobs of the namespace that trainjob has launched.
        runs: Runs that were terminated or deleted, as far as they are remembered.
        decided: Monotonic time of the latest decision; None before the first.
    """

    ended: dict[str, int] = field(default_factory=lambda: {"suspended": 0, "deleted": 0})
    failed: int = 0
    jobs: int = 0
    runs: int = 0
    decided: float | None = None


class Controller:
    """Ends the jobs of one namespace that must not run.

    Args:
        backend: The cluster.
        namespace: Namespace of the jobs.
        keep_for: How long jobs that trainjob has left suspended are kept; for ever if None.
        grace: Seconds from the start, and from an outage of the API server, until an expired Lease proves that nobody
            waits.
        on_done: Called with each job that was ended, and with each leftover that was removed.

    Attributes:
        counters: What it has seen and done.
    """

    def __init__(
        self,
        backend: Cluster,
        namespace: str,
        *,
        keep_for: timedelta | None = None,
        grace: float = GRACE,
        on_done: Callable[[Reaped | Leftover], None] = lambda _: None,
    ) -> None:
        self._backend, self._namespace = backend, namespace
        self._keep_for, self._grace, self._on_done = keep_for, grace, on_done
        self._ended: dict[str, str] = {}  # UID -> version of a job that was ended, whose change may not be seen yet
        self._cleaned = time.monotonic()
        self.counters = Counters()

    async def run(self) -> None:
        """Watch the namespace until this call is cancelled.

        Raises:
            TrainJobError: Jobs or Leases cannot be listed, or an outage has lasted for too long.
        """
        observer = self._backend.observer(self._namespace)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(observer.run)
                while True:
                    seen = await observer.next(INTERVAL)
                    begun = time.thread_time()
                    await self._decide(seen)
                    await anyio.sleep(max(_COLLECT, _SHARE * (time.thread_time() - begun)))
        except ExceptionGroup as group:  # a task group wraps every exception
            raise group.exceptions[0] from None

    async def _decide(self, seen: Overview) -> None:
        self.counters.jobs, self.counters.runs = len(seen.jobs), len(seen.ended)
        now = self._backend.now()
        waits = others_wait(seen.waiters, now)
        ends: list[tuple[TrainJob, End]] = [
            (job, partial(self._end_with_run, job, run))
            for job in seen.jobs
            if (run := seen.ended.get(run_of(job))) is not None and ends_with(job, run, waits) is not None
        ]
        ends += reaper.extra_ends(self._backend, seen.jobs, seen.cancels)
        if time.monotonic() - seen.reliable_since >= self._grace:
            ends += [
                (job, partial(reaper.end_unattended, self._backend, job))
                for job in seen.jobs
                if reaper.overdue(job, seen.waiters, now) is not None
            ]
        ends = [(job, end) for job, end in ends if not is_deleting(job) and not self._was_ended(job)]
        outcomes = await asyncio.gather(*(end() for _, end in ends), return_exceptions=True)
        for (job, _), outcome in zip(ends, outcomes, strict=True):
            if isinstance(outcome, TrainJobError):
                self.counters.failed += 1
                _log.warning("a job could not be ended, which is tried again: %s", outcome)
            elif isinstance(outcome, BaseException):
                raise outcome
            elif outcome is not None:
                self._ended[job["metadata"]["uid"]] = str(job["metadata"].get("resourceVersion"))
                self.counters.ended[outcome.done] += 1
                self._on_done(outcome)
        if time.monotonic() - self._cleaned >= _CLEAN:
            self._cleaned = time.monotonic()
            await self._clean(seen)
        self.counters.decided = time.monotonic()

    async def _end_with_run(self, job: TrainJob, run: Run) -> Reaped | None:
        """End a job with its run, unless another run has begun to wait for it."""
        ref = JobRef.of(job)
        latest = await self._backend.get(ref.namespace, ref.name)
        if latest is None or latest["metadata"]["uid"] != ref.uid:
            return None
        waiters = [] if is_of_one_run(latest) else await self._backend.waiters(ref.namespace)
        waits = others_wait(waiters, self._backend.now())
        if (action := ends_with(latest, run, waits)) is None:
            return None
        deleted = await end_with_run(self._backend, latest, action)
        reason = f"its run {run.label} was {run.state} (Workflow {run.workflow})"
        await self._backend.report_event(latest, "StoppedWithRun", reason)
        return Reaped(str(ref), "deleted" if deleted else "suspended", reason)

    def _was_ended(self, job: TrainJob) -> bool:
        return self._ended.get(job["metadata"]["uid"]) == str(job["metadata"].get("resourceVersion"))

    async def _clean(self, seen: Overview) -> None:
        """Remove what is left over, and forget requests for jobs that are gone."""
        present = {job["metadata"]["uid"] for job in seen.jobs}
        self._ended = {uid: version for uid, version in self._ended.items() if uid in present}
        try:
            if self._keep_for is not None:
                await remove_leftovers(self._backend, self._namespace, self._keep_for, on_removed=self._on_done)
            await reaper.forget(self._backend, self._namespace, seen.waiters)
        except TrainJobError as error:
            self.counters.failed += 1
            _log.warning("what is left over could not be removed: %s", error)
