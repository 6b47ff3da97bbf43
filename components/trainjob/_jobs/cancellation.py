"""Stop a job, all attempts of a key, or a job whose step has failed. Works with any `Backend`.

Who stops a job may have little time to live. So the request that stops a running job is sent before anything else, and
a record of the cancel (on a cluster a Lease) tells launches of the key that began earlier to stop what they create.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import anyio

from trainjob._backends.base import Backend, TrainJob
from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._jobs.records import keep_reason
from trainjob._manifest.attempts import (
    Cancel,
    CancelAction,
    diagnosis_in,
    given_up,
    has_later_mark,
    is_deleting,
    is_marked_after,
    is_replaced,
    launched_at,
    mark_of,
    mark_without_version,
    may_come_back,
    try_of,
    version_of,
)
from trainjob._support.kube_objects import mapping
from trainjob.errors import Diagnosis, NotFound, Rejected, TrainJobError
from trainjob.job import FAILURE, KEY, JobRef, key_hash, labels_of
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL, Phase, observe

CANCEL_SECONDS = 60.0
"""How long `cancel` waits for the last pod by default: twice Kubernetes' grace period of 30 s."""

CrashAction = Literal["suspend", "cancel", "keep"]

_CHANGES = 3  # of a job between a read and its suspension, after which no version is named

_POLL = (0.05, 2.0)  # seconds: the first and the longest pause between two looks whether ranks have ended


async def cancel(
    backend: Backend,
    ref: JobRef,
    action: CancelAction = "cancel",
    *,
    timeout_seconds: float = CANCEL_SECONDS,
    tried: int | None = None,
) -> bool:
    """Stop a job, and wait until none of its pods is running. A job that has ended is not changed.

    A suspended job is resumed when its key is launched again. With ``cancel``, the local backend ends the job as
    `Phase.CANCELLED` and keeps its logs and metrics; on a cluster the job is deleted with its logs and metrics. If it
    did not start in time, and `on_retry` changes the next attempt by that, a record of the reason stays.

    A launch of the same key that began before stops what it creates, see `cancel_key`.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        action: ``cancel`` or ``suspend``.
        timeout_seconds: How long to wait for the last pod.
        tried: The caller's try that is ended; a launch of a later try does not obey. None: every launch before does.

    Returns:
        True once its last pod has ended, or if a later try has adopted the job; False if some were still ending after
        `timeout_seconds`.
    """
    trainjob = await backend.get(ref.namespace, ref.name)
    if trainjob is None or trainjob["metadata"]["uid"] != ref.uid or observe(trainjob).phase.terminal:
        return True
    work = str(mapping(trainjob, "metadata", "labels").get(KEY) or "")
    record = Cancel(0, tried, ref.uid, action)
    announce = partial(backend.announce_cancel, ref.namespace, work, record)
    stop = _Stop(backend, action, tried, announce if work else None)
    await stop.run([trainjob])
    if ref.uid not in stop.stopped:  # a person had suspended it, and may have resumed it before the record was written
        latest = await backend.get(ref.namespace, ref.name)
        await stop.run([] if latest is None or latest["metadata"]["uid"] != ref.uid else [latest])
    is_adopted = tried is not None and try_of(trainjob) > tried
    return is_adopted or await _have_stopped(backend, [ref], timeout_seconds)


@dataclass(frozen=True)
class Cancelled:
    """What `cancel_key` did.

    Attributes:
        jobs: The attempts that were stopped.
        ended: Whether their last pods have ended; False if nobody has waited for that.
    """

    jobs: tuple[JobRef, ...]
    ended: bool


async def cancel_key(
    backend: Backend,
    key: str,
    *,
    namespace: str,
    action: CancelAction = "cancel",
    timeout_seconds: float = CANCEL_SECONDS,
    tried: int | None = None,
    look_seconds: float = 0.0,
) -> Cancelled:
    """Stop all attempts of a key, also one whose launch is on its way, and wait until none of their pods is running.

    The record of the cancel is kept for an hour. A launch of the key that began before it reads the record after it has
    created a job, and stops that job; so does the reaper for a launch that was killed in between. A launch that begins
    afterwards is not concerned. All of them suspend attempts that have failed (`may_come_back`).

    Args:
        backend: Backend that runs the jobs.
        key: The key.
        namespace: Namespace of the jobs.
        action: ``cancel`` or ``suspend``, as for `cancel`.
        timeout_seconds: How long to wait for the last pod; 0 to send the requests only.
        tried: The caller's try that is ended; a launch of a later try does not obey. None: every launch before does.
        look_seconds: How long to look for an active attempt, for a process that is killed during its launch.
    """
    record = Cancel(0, tried, "", action)
    stop = _Stop(backend, action, tried, partial(backend.announce_cancel, namespace, key_hash(key), record))
    deadline = time.monotonic() + look_seconds
    await stop.run(await backend.find(namespace, labels_of(key)))
    while True:
        # After the record was written: who creates a job from now on reads the record afterwards.
        found = await backend.find(namespace, labels_of(key))
        await stop.run(found)
        if stop.found_active or time.monotonic() >= deadline:
            break
        await anyio.sleep(_POLL[0])
    await stop.suspend_failed(found)
    jobs = tuple(stop.stopped.values())
    return Cancelled(jobs, await _have_stopped(backend, jobs, timeout_seconds))


class _Stop:
    """Stops attempts of a key, each once, and writes the record of the cancel.

    Args:
        backend: Backend that runs the jobs.
        action: ``cancel`` or ``suspend``.
        tried: The caller's try that is ended.
        announce: Writes the record of the cancel; None for jobs that trainjob did not launch.

    Attributes:
        stopped: UID -> the attempts that were stopped.
        found_active: Whether one of them was active, not given up.
    """

    def __init__(
        self,
        backend: Backend,
        action: CancelAction,
        tried: int | None,
        announce: Callable[[], Awaitable[Cancel | None]] | None,
    ) -> None:
        self._backend = backend
        self._action = action
        self._tried = tried
        self._announce = announce
        self._mark = mark_without_version() if tried is None else Cancel(0, tried).mark
        self._record: Cancel | None = None
        self.stopped: dict[str, JobRef] = {}
        self.found_active = False

    async def run(self, jobs: Sequence[TrainJob]) -> None:
        """Stop `jobs`: active ones first and all at once, deletions beside the record of the cancel.

        A suspension comes after the record, whose version is its mark.

        Raises:
            TrainJobError: A request failed; all were sent.
        """
        stoppable = [each for each in jobs if self._must_stop(each)]
        active = [each for each in stoppable if given_up(each) is None]
        deleted = [each for each in active if cancelling(each, self._action) is None]
        self.found_active = self.found_active or bool(active)
        suspended = [each for each in active if each not in deleted]
        rest = [each for each in stoppable if each not in active and self._action == "cancel"]
        results = await asyncio.gather(*map(self._stop, deleted), self._write_record(), return_exceptions=True)
        results += await asyncio.gather(*map(self._stop, suspended), return_exceptions=True)
        results += await asyncio.gather(*map(self._stop, rest), return_exceptions=True)
        for each in results:
            if isinstance(each, BaseException):
                raise each

    def _must_stop(self, job: TrainJob) -> bool:
        """Whether a job has to be stopped: it has not ended, and this cancel is newer than its latest launch."""
        if observe(job).phase.terminal or is_deleting(job) or job["metadata"]["uid"] in self.stopped:
            return False
        suspended = mapping(job, "spec").get("suspend") and observe(job).phase is Phase.SUSPENDED
        if self._action == "suspend" and suspended and not mark_of(job):
            return False  # by a person, and no launch resumes it
        if self._tried is not None and try_of(job) > self._tried:  # a later try has adopted the job
            return False
        launched, record = launched_at(job), self._record
        if record is None or launched is None:
            return True
        # A later cancel may have suspended the job, whose mark must stay.
        return record.version > launched and not (self._action == "suspend" and is_marked_after(job, record.version))

    def _still_must_stop(self, job: TrainJob) -> bool:
        """The same of a job that was changed meanwhile; one that need not be stopped any more was not stopped."""
        del self.stopped[job["metadata"]["uid"]]
        must = self._must_stop(job)
        if must:
            self.stopped[job["metadata"]["uid"]] = JobRef.of(job)
        return must

    async def suspend_failed(self, jobs: Sequence[TrainJob]) -> None:
        """Suspend the failed ones of `jobs`, so that they do not come back."""
        for job in filter(may_come_back, jobs):
            if (patch := cancelling(job, "suspend", self._mark)) is not None:
                with suppress(TrainJobError):
                    await self._backend.patch(JobRef.of(job), patch)

    async def _write_record(self) -> None:
        announce, self._announce = self._announce, None
        if announce is not None and (record := await announce()) is not None:
            self._record, self._mark = record, record.mark

    async def _stop(self, job: TrainJob) -> None:
        ref = JobRef.of(job)
        self.stopped[ref.uid] = ref
        stop = request_cancel(self._backend, job, self._action, self._mark, self._still_must_stop)
        if is_replaced(job) and (why := diagnosis_in(job, FAILURE)) is not None:
            await asyncio.gather(stop, keep_reason(self._backend, job, why))  # a webhook may delay the record
        else:
            await stop


async def _have_stopped(backend: Backend, refs: Sequence[JobRef], seconds: float) -> bool:
    """Whether the last pods of all jobs end within `seconds`; of 0, nobody looks, and it is unknown."""
    if seconds <= 0:
        return not refs
    pause, deadline = _POLL[0], time.monotonic() + seconds
    for ref in refs:
        while not await backend.stopped(ref):
            if time.monotonic() >= deadline:
                return False
            await anyio.sleep(pause)
            pause = min(_POLL[1], pause * 1.5)
    return True


async def request_cancel(
    backend: Backend,
    trainjob: TrainJob,
    action: CancelAction = "cancel",
    mark: str = "",
    must_stop: Callable[[TrainJob], bool] = lambda _: True,
) -> None:
    """Send the one request that stops `trainjob`, and do not wait: for a process that is about to be killed.

    A job that cannot be suspended is deleted: Trainer's webhook refuses every change to a job whose runtime is gone.
    A suspension names the version that was read, so that it does not replace the mark of a later cancel. If the job was
    changed since, it is read again.

    Args:
        backend: Backend that runs the job.
        trainjob: The job.
        action: ``cancel`` or ``suspend``.
        mark: Mark of the cancel; a new one of an unknown version if empty.
        must_stop: Whether a job that was changed still has to be suspended, beside that it has no later mark.
    """
    ref, mark = JobRef.of(trainjob), mark or mark_without_version()
    for number in range(_CHANGES + 1):
        patch = cancelling(trainjob, action, mark)
        if patch is None:
            break
        patch["metadata"] |= version_of(trainjob) if number < _CHANGES else {}
        try:
            return await backend.patch(ref, patch)
        except Rejected:
            break
        except NotFound:
            latest = await backend.get(ref.namespace, ref.name) if number < _CHANGES else None
        if latest is None or latest["metadata"]["uid"] != ref.uid:
            return None
        if has_later_mark(latest, mark) or not must_stop(latest):
            return None
        trainjob = latest
    return await backend.cancel(ref)


def cancelling(trainjob: TrainJob, action: CancelAction, mark: str = "") -> dict[str, Any] | None:
    """The patch that suspends `trainjob`; None if it must be deleted. `mark` is the value of its annotation.

    A job that Kueue manages is deleted instead of suspended: Kueue resumes an admitted job that another client suspends
    (its reconciler: "start the job if the workload has been admitted"). One that has failed is suspended in any case.
    """
    queued = QUEUE_LABEL in (trainjob["metadata"].get("labels") or {})
    if may_come_back(trainjob) or (action == "suspend" and not queued):
        annotations: dict[str, str | None] = {CANCELLED: mark}
        if given_up(trainjob) is None and GIVEN_UP in (trainjob["metadata"].get("annotations") or {}):
            annotations[GIVEN_UP] = None  # a person has resumed it since
        return {"metadata": {"annotations": annotations}, "spec": {"suspend": True}}
    return None


async def end_attempt(backend: Backend, trainjob: TrainJob) -> None:
    """Delete an attempt that nobody asked for, unless it was changed since it was read."""
    await backend.delete(JobRef.of(trainjob), version_of(trainjob).get("resourceVersion", ""))


async def give_up(backend: Backend, ref: JobRef, diagnosis: Diagnosis, action: CrashAction = "suspend") -> str:
    """Apply `action` to a job that failed its step at the first crash, by one request. Returns what was done, as text.

    Never raises because of the job or an outage: the step fails anyway, and the crash is the reason.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        diagnosis: Diagnosis of the crash.
        action: ``suspend`` stops the job and keeps the object, with the diagnosis as an annotation, since the pods are
            deleted; ``cancel`` deletes the job; ``keep`` lets it run. A job that Kueue manages is deleted instead of
            suspended: Kueue would resume it. Of a deleted job a record of the reason stays, by which the next launch
            decides whether another attempt follows.
    """
    if action == "keep":
        return f"{ref} keeps running"
    try:
        trainjob = await backend.get(ref.namespace, ref.name)
        if trainjob is None or trainjob["metadata"]["uid"] != ref.uid or observe(trainjob).phase.terminal:
            return f"{ref} has ended"
        return await _give_up(backend, trainjob, diagnosis, action)
    except NotFound:
        return f"{ref} has ended"
    except TrainJobError as error:
        return f"{ref} could not be stopped and keeps running: {error}"


async def _give_up(backend: Backend, trainjob: TrainJob, diagnosis: Diagnosis, action: CrashAction) -> str:
    ref, why = JobRef.of(trainjob), ""
    if action == "suspend" and QUEUE_LABEL in (trainjob["metadata"].get("labels") or {}):
        why = ": Kueue would start it again"
    elif action == "suspend":
        packed = json.dumps(pack_diagnosis(diagnosis), ensure_ascii=False)
        try:
            await backend.patch(ref, {"metadata": {"annotations": {GIVEN_UP: packed}}, "spec": {"suspend": True}})
        except Rejected as error:
            why = f": it could not be suspended: {error}"
        else:
            return f"{ref} was suspended"
    await keep_reason(backend, trainjob, diagnosis)
    await backend.cancel(ref)
    return f"{ref} was {'deleted' if backend.cluster else 'cancelled'}{why}"
