"""What is recorded for the next launch of a key: that a result was delivered, and why an attempt failed."""

from __future__ import annotations

import json
from contextlib import suppress

from trainjob._backends.base import Backend, TrainJob
from trainjob._diagnosis.serialization import pack_diagnosis
from trainjob._manifest.attempts import failure_record
from trainjob.errors import Diagnosis, NotFound, TrainJobError
from trainjob.job import DELIVERED, FAILURE, KEY, JobRef
from trainjob.status import QUEUE_LABEL


async def mark_delivered(backend: Backend, ref: JobRef) -> None:
    """Record on the job that its result was delivered: the next launch of its key then creates a new attempt."""
    with suppress(NotFound):
        await backend.patch(ref, {"metadata": {"annotations": {DELIVERED: "true"}}})


async def record_failure(backend: Backend, ref: JobRef, diagnosis: Diagnosis) -> None:
    """Record on a job with `on_retry` why it failed, or did not start in time: the next launch of its key reads it.

    Never raises because of the job or an outage: the next launch then reads the evidence that is left.
    """
    packed = json.dumps(pack_diagnosis(diagnosis), ensure_ascii=False)
    with suppress(TrainJobError):
        await backend.patch(ref, {"metadata": {"annotations": {FAILURE: packed}}})


async def keep_reason(backend: Backend, trainjob: TrainJob, diagnosis: Diagnosis) -> None:
    """Record why a job is about to be cancelled, for the next launch of its key. Never raises."""
    if backend.cluster is None:  # it keeps the job
        await record_failure(backend, JobRef.of(trainjob), diagnosis)
        return
    if KEY not in (trainjob["metadata"].get("annotations") or {}):
        return
    record = failure_record(trainjob, json.dumps(pack_diagnosis(diagnosis), ensure_ascii=False))
    with suppress(TrainJobError):
        stored = await backend.create(record)
        if QUEUE_LABEL in (stored["metadata"].get("labels") or {}):  # Kueue's LocalQueueDefaulting: it would be started
            await backend.delete(JobRef.of(stored))
