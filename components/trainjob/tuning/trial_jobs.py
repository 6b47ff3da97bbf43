"""The jobs of the trials of a study: find and cancel them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from trainjob._backends.base import Backend, TrainJob
from trainjob._jobs import cancellation, telemetry
from trainjob._manifest.workflow_labels import STUDY
from trainjob.errors import TrainJobError
from trainjob.goodput import Goodput
from trainjob.job import RESERVED_PREFIX, JobRef, key_hash
from trainjob.status import observe

_log = logging.getLogger(__name__)

TRIAL = RESERVED_PREFIX + "trial"
"""Label of a trial's job: its number."""

_LAUNCH_SECONDS = 1.0  # for which the job of an interrupted launch is looked for


async def cancel_trials(backend: Backend, key: str, *, namespace: str, launching: Collection[int] = ()) -> int:
    """Cancel the running trials of a study whose launcher has ended; returns how many.

    They have no outcome: the next launch of the study runs them again.

    Args:
        backend: Backend of the trials.
        key: Identity of the study.
        namespace: Namespace of the trials.
        launching: Numbers of trials that were being launched: a request may be on its way that creates a job.
    """
    jobs = [job for job in await find_trials(backend, key, namespace=namespace) if not observe(job).phase.terminal]
    cancels = [cancellation.cancel(backend, JobRef.of(job), timeout_seconds=0) for job in jobs]
    found = {job["metadata"]["uid"] for job in jobs}
    late = [
        cancellation.cancel_key(
            backend, f"{key}/{number}", namespace=namespace, timeout_seconds=0, look_seconds=_LAUNCH_SECONDS
        )
        for number in launching
    ]
    _, cancelled = await asyncio.gather(asyncio.gather(*cancels), asyncio.gather(*late))
    return len(found | {ref.uid for each in cancelled for ref in each.jobs})


async def find_trials(backend: Backend, key: str, *, namespace: str) -> list[TrainJob]:
    """The jobs of the trials of a study, in no particular order."""
    return await backend.find(namespace, {STUDY: key_hash(key)})


class EndedJobs:
    """Cancels the jobs of ended trials.

    Args:
        backend: Backend of the trials.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._uncancelled: list[JobRef] = []

    async def cancel(self, ref: JobRef, spent: Goodput | None = None) -> None:
        """Cancel the job of an ended trial; after an outage, with the next poll. Record how its time was `spent`.

        Leaves no record of the cancel, which for 1,000 pruned trials would be 1,000 Leases: launchers of the trial read
        its outcome in the journal after their launch.
        """
        telemetry.record_goodput(ref, spent)
        try:
            job = await self._backend.get(ref.namespace, ref.name)
            if job is not None and job["metadata"]["uid"] == ref.uid and not observe(job).phase.terminal:
                await cancellation.request_cancel(self._backend, job)
        except TrainJobError as error:
            _log.warning("TrainJob %s of an ended trial cannot be cancelled now: %s", ref, error)
            self._uncancelled.append(ref)

    async def cancel_again(self) -> None:
        """Cancel the jobs that an outage has left."""
        refs, self._uncancelled = self._uncancelled, []
        for ref in refs:
            await self.cancel(ref)
