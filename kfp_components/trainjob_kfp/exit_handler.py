"""Stops all TrainJobs of a run from its exit handler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import anyio

from trainjob import JobRef, Phase, TimedOut, TrainJobClient, TrainJobError, cancel_key
from trainjob._backends.base import TrainJob
from trainjob._jobs.fencing import suspend_failed
from trainjob._manifest.attempts import CancelAction
from trainjob._support.kube_objects import mapping
from trainjob.job import KEY
from trainjob.status import observe
from trainjob_kfp.execution import run_label
from trainjob_kfp.sharing import SharedJobs
from trainjob_kfp.steplog import write_line
from trainjob_kfp.stop_requests import all_at_once, is_active, mark_for, must_stop, request_all
from trainjob_kfp.stopping import command_of

_CHANGES = 5  # a request to suspend a failed job is repeated so often if the job was changed meanwhile


def stop_all(client: TrainJobClient, run: str, action: CancelAction, seconds: float, *, own: bool = True) -> list[str]:
    """Stop the jobs of a run, including jobs that are created meanwhile, except those that another run waits for.

    Args:
        client: A client of the jobs' backend and namespace.
        run: Id of the run.
        action: ``suspend`` or ``cancel``.
        seconds: How long to wait for the last pods.
        own: Whether this process is in a pod of that run.

    Returns:
        The names of the jobs that were running.

    Raises:
        TimedOut: pods of some jobs still exist after `seconds`.
    """
    stop = _StopRun(client, run, action, own=own)
    return client.call(lambda: stop.run(seconds))


class _StopRun:
    """One call of `stop_all`."""

    def __init__(self, client: TrainJobClient, run: str, action: CancelAction, *, own: bool) -> None:
        self._client, self._run, self._action = client, run, action
        self._jobs = SharedJobs(client, run, own=own)
        self._stopped: dict[str, JobRef] = {}
        self._cancelled: set[str] = set()  # keys
        self._seen: set[str] = set()  # UIDs of failed and of kept jobs

    async def run(self, seconds: float) -> list[str]:
        deadline = time.monotonic() + seconds
        while True:
            active = await self._look()
            remaining = [ref for ref in self._stopped.values() if not await self._client.backend.stopped(ref)]
            if not remaining and not active:
                return sorted(ref.name for ref in self._stopped.values())
            if time.monotonic() > deadline:
                names = ", ".join(str(ref) for ref in remaining)
                raise TimedOut(
                    f"{seconds:g} s after the stop request, pods of these TrainJobs still exist: {names}; "
                    f"look for the reason: {command_of(self._client)} diagnose NAME"
                )
            await anyio.sleep(0.5)

    async def _look(self) -> bool:
        """Stop the jobs that exist; whether there were some."""
        found = await self._client.backend.find(self._client.namespace, run_label(self._run))
        if any(self._jobs.is_shared(_key_of(job)) for job in found):
            await self._jobs.refresh()
        wanted = [job for job in found if must_stop(job, self._action)]
        mine = [job for job in wanted if self._jobs.may_stop(job)]
        for job in mine:
            ref = JobRef.of(job)
            if ref.uid not in self._stopped:
                write_line(f"TrainJob {ref} is still {observe(job).phase}: {self._action}")
        kept = [JobRef.of(job) for job in wanted if job not in mine]
        for ref in kept:
            if ref.uid not in self._seen:
                self._seen.add(ref.uid)
                write_line(f"TrainJob {ref} keeps running: another run waits for it")
        await self._stop(mine)
        await self._suspend_failed([job for job in found if observe(job).phase is Phase.FAILED])
        return bool(mine)

    async def _stop(self, jobs: Sequence[TrainJob]) -> None:
        """Stop jobs; where no other run has the key, with a record of the cancel for launches on their way."""
        again = {job["metadata"]["uid"] for job in jobs} & self._stopped.keys()
        self._stopped |= {ref.uid: ref for ref in map(JobRef.of, jobs)}
        alone = {_key_of(job) for job in jobs if is_active(job)} - {""} - self._cancelled
        alone = {key for key in alone if not self._jobs.is_shared(key)}
        self._cancelled |= alone
        cancels = (
            cancel_key(
                self._client.backend, key, namespace=self._client.namespace, action=self._action, timeout_seconds=0
            )
            for key in sorted(alone)
        )
        # A suspension takes a moment to be observed; a second request would change its mark.
        others = [
            job
            for job in jobs
            if _key_of(job) not in alone and not (job["metadata"]["uid"] in again and job["spec"].get("suspend"))
        ]
        active = [job for job in others if is_active(job)]
        mark = await mark_for(self._client, self._run, self._action) if others else ""
        await all_at_once([*cancels, request_all(self._client, active, self._action, mark)])
        await request_all(self._client, [job for job in others if job not in active], self._action, mark)

    async def _suspend_failed(self, jobs: Sequence[TrainJob]) -> None:
        """Suspend failed jobs, with their diagnosis: Trainer up to 2.3 can take ``Failed`` back and train again."""
        if self._client.backend.cluster is None:
            return
        failed = [job for job in jobs if not job["spec"].get("suspend") and self._jobs.may_stop(job)]
        failed = [job for job in failed if job["metadata"]["uid"] not in self._seen]
        self._seen |= {job["metadata"]["uid"] for job in failed}
        with suppress(TrainJobError):
            await all_at_once(map(self._suspend_failed_job, failed))

    async def _suspend_failed_job(self, job: TrainJob) -> None:
        ref, found = JobRef.of(job), job
        for _ in range(_CHANGES):
            if await suspend_failed(self._client.backend, found):
                return
            present = await self._client.backend.get(ref.namespace, ref.name)
            if present is None or JobRef.of(present).uid != ref.uid:
                return
            found = present


def _key_of(job: TrainJob) -> str:
    return str(mapping(job, "metadata", "annotations").get(KEY) or "")
