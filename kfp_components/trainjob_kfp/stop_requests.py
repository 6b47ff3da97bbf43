"""The requests that stop TrainJobs: prepared in advance for one job, or new ones for several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPException
from itertools import chain, repeat
from typing import TYPE_CHECKING

import anyio

from trainjob import JobRef, Phase, TrainJobClient, TrainJobError
from trainjob._backends.base import TrainJob
from trainjob._jobs.cancellation import cancelling, request_cancel
from trainjob._manifest.attempts import CancelAction, given_up, mark_without_version, stops_by
from trainjob._support.kube_objects import mapping
from trainjob.job import KEY, key_hash
from trainjob.status import observe

if TYPE_CHECKING:
    from trainjob._backends.base import PreparedRequest

_WARM_SECONDS = 20.0  # between two requests that keep a connection open: some load balancers close it after 30 idle s
_FIRST_SECONDS = (1.0, 2.0)  # the first pauses, shorter, to measure early how long a PATCH takes
_MARK_SECONDS = 0.5  # for a read of the records of cancels before a suspension by a new request

_DELETED = 'the TrainJob was deleted; "Retry run" launches a new one, which resumes from checkpoints if there are any'


class StopRequests:
    """The prepared requests that stop one job.

    Args:
        job: The job.
        action: ``suspend`` or ``cancel``.
    """

    def __init__(self, job: TrainJob, action: str) -> None:
        self.job, self._action = job, action
        self._suspend: PreparedRequest | None = None
        self._delete: PreparedRequest | None = None

    async def keep_ready(self, client: TrainJobClient) -> None:
        """Keep the requests prepared, and their connections open, until this call is cancelled."""
        cluster = client.backend.cluster
        if cluster is None:
            return
        work = str(mapping(self.job, "metadata", "labels").get(KEY) or "")
        mark = await _version_mark(client, work) or mark_without_version()
        ref, patch = JobRef.of(self.job), cancelling(self.job, stops_by(self._action), mark)
        self._delete = await cluster.prepared_request(ref, None)
        if patch is not None:
            self._suspend = await cluster.prepared_request(ref, patch)
        requests = [each for each in (self._delete, self._suspend) if each is not None]
        try:
            async with anyio.create_task_group() as tasks:
                for each in requests:
                    tasks.start_soon(keep_warm, each)
        finally:
            self._delete = self._suspend = None
            for each in requests:
                each.close()

    def send(self, suspended_by: float) -> str:
        """Stop the job.

        Args:
            suspended_by: Deadline for the answer to a suspend, by the monotonic clock.

        Returns:
            What was done, as text; empty if no request could be sent.
        """
        suspend, delete = self._suspend, self._delete
        if suspend is not None and delete is not None:
            sent = suspend.send_or(delete, max(0.0, suspended_by - time.monotonic()))
            if sent is delete:
                return f"{_DELETED}: the API server takes too long to suspend it"
            return self.outcome if sent is suspend else ""
        return self.outcome if delete is not None and delete.send() else ""

    @property
    def outcome(self) -> str:
        """What was done if the request succeeded, as text."""
        if self._action == "suspend" and cancelling(self.job, "suspend") is None:
            return f"{_DELETED}: Kueue would resume a suspended job"
        return f"the TrainJob was asked to stop ({self._action})"


def pauses() -> Iterator[float]:
    """Seconds between two requests that keep something ready, without an end."""
    return chain(_FIRST_SECONDS, repeat(_WARM_SECONDS))


async def keep_warm(request: PreparedRequest) -> None:
    """Keep the connection of a prepared request open until this call is cancelled."""
    for pause in pauses():
        with suppress(TrainJobError, OSError, HTTPException):  # a new request remains possible
            await request.warm()
        await anyio.sleep(pause)


async def all_at_once(requests: Iterable[Awaitable[object]]) -> None:
    """Send all requests, and raise the first error once all have been answered."""
    for each in await asyncio.gather(*requests, return_exceptions=True):
        if isinstance(each, BaseException):
            raise each


async def mark_for(client: TrainJobClient, key: str, action: CancelAction) -> str:
    """The mark of jobs that are going to be suspended by new requests: the present version of the records of cancels.

    A waiter of a later launch compares it with that launch, and resumes a job whose suspension arrives late. On the
    local backend no request arrives late, and its versions count cancels only.

    Args:
        client: A client of the jobs' backend and namespace.
        key: Selects the records in the reply, whose version is that of all records.
        action: ``suspend``; a deletion needs no mark.

    Returns:
        The version; a text which no waiter undoes, if it is unknown or not needed.
    """
    if action == "suspend" and client.backend.cluster is not None:
        with anyio.move_on_after(_MARK_SECONDS):
            return await _version_mark(client, key_hash(key)) or mark_without_version()
    return mark_without_version()


async def _version_mark(client: TrainJobClient, work: str) -> str:
    """The present version of the records of cancels, as a mark; empty if it cannot be read."""
    with suppress(TrainJobError):
        version, _ = await client.backend.cancels(client.namespace, work)
        return "" if version is None else str(version)
    return ""


async def request_all(client: TrainJobClient, jobs: Sequence[TrainJob], action: CancelAction, mark: str) -> None:
    """Request that the jobs stop: all active ones at once, then those that are suspended or given up.

    Args:
        client: A client of the jobs' backend.
        jobs: The jobs.
        action: ``suspend`` or ``cancel``.
        mark: The mark of suspended jobs, see `mark_for`.

    Raises:
        TrainJobError: A request failed; the others of its group were sent.
    """
    active = [job for job in jobs if is_active(job)]
    for group in (active, [job for job in jobs if not is_active(job)]):
        await all_at_once(request_cancel(client.backend, job, action, mark) for job in group)


def is_active(job: TrainJob) -> bool:
    """Whether the job runs or waits to run, and is not suspended or given up."""
    return observe(job).phase is not Phase.SUSPENDED and given_up(job) is None


def must_stop(trainjob: TrainJob, action: CancelAction) -> bool:
    """Whether `action` has to be applied: the job runs or waits to run, or is suspended and is to be deleted."""
    phase = observe(trainjob).phase
    if phase.terminal or "deletionTimestamp" in trainjob["metadata"]:
        return False
    return phase is not Phase.SUSPENDED or action == "cancel"
