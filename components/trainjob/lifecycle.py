"""Launch or adopt, and cancel: the one flow, with `trainjob.waiting`. Written against `Backend`; every face uses it.

Whoever runs it may die at any instruction. Nothing is remembered between the steps but the key: the job's name follows
from it, creating a name twice fails, and everything else is read back from the object.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import anyio

from trainjob import unattended
from trainjob.backends.base import Backend, TrainJob
from trainjob.diagnosis import Diagnosis, diagnose
from trainjob.errors import (
    AlreadyExists,
    NotFound,
    Rejected,
    SpecMismatch,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.kube_objects import mapping
from trainjob.manifest import (
    DELIVERED,
    GIVEN_UP,
    JobRef,
    check_key,
    differences,
    job_name,
    labels_of,
    render,
    spec_hash,
)
from trainjob.serialization import pack_diagnosis, unpack_diagnosis
from trainjob.spec import TrainJobSpec
from trainjob.status import CANCELLED, QUEUE_LABEL, Phase, observe

AfterFailure = Literal["retry", "verdict", "infrastructure"]
"""When an earlier attempt that failed is followed by the next one: always, unless its verdict is final, or only where
the cause lay outside the training code."""

CANCEL_SECONDS = 60.0
"""How long `cancel` waits for the last pod by default: Kubernetes' grace period of 30 s and as much again."""


async def launch(
    backend: Backend,
    spec: TrainJobSpec,
    key: str,
    *,
    namespace: str,
    first_attempt: int = 1,
    after_failure: AfterFailure = "retry",
    origin: Mapping[str, str] | None = None,
) -> JobRef:
    """Create the job of `key`, or adopt the one that is there. A fresh launch is one request.

    An attempt that is under way, suspended, or complete and not yet delivered is adopted; one that `cancel` suspended
    is resumed, one that a person suspended is left to that person. After one that failed, was given up, cancelled or
    deleted, or whose result was delivered, the next attempt is made, under a name never used before.

    Args:
        backend: Where.
        spec: What to run.
        key: Which piece of work this is; the same on every try of the same work.
        namespace: Kubernetes namespace.
        first_attempt: Lowest ordinal for a new attempt, where the caller counts its tries (Airflow's ``try_number``):
            a name whose job was deleted is then not used again.
        after_failure: When a failed earlier attempt is followed by the next one: always (``retry``), unless its verdict
            is final (``verdict``), or only where the cause lay outside the training code (``infrastructure``).
        origin: Labels for a new job that say where it comes from, such as DAG, run and try. They replace labels of the
            spec with the same names, and are no part of it: a job with others is adopted all the same.

    Raises:
        SpecMismatch: the attempt that would be adopted was made from another spec.
        TrainJobFailed: the earlier attempt's verdict is final by `after_failure`.
        LaunchError: the job was refused.
        InvalidSpec: the spec is wrong, or the key is blank.
    """
    spec.check()
    attempt = first_attempt
    earlier: list[TrainJob] = await backend.find(namespace, labels_of(key)) if first_attempt > 1 else []
    while True:
        latest = max(earlier, key=lambda job: JobRef.of(job).attempt, default=None)
        if latest is not None:
            if await _adopts(backend, latest, after_failure):
                ref = _same_spec(latest, render(spec, key, JobRef.of(latest).attempt, namespace))
                await backend.recover(ref)
                await _resume(backend, latest)
                return ref
            attempt = max(attempt, JobRef.of(latest).attempt + 1)
        try:
            return JobRef.of(await backend.create(render(spec, key, attempt, namespace, origin=origin)))
        except AlreadyExists:
            earlier = await backend.find(namespace, labels_of(key))
            if not any(job["metadata"]["name"] == job_name(key, attempt) for job in earlier):
                attempt += 1  # it existed once; whoever deleted it took its memory along, but not its name


async def dry_run(backend: Backend, spec: TrainJobSpec, key: str, *, namespace: str) -> TrainJob:
    """What a first launch of `key` would store, with the defaults of the server and its webhooks; creates nothing.

    Raises:
        LaunchError: the job would be refused.
    """
    spec.check()
    check_key(key)
    # Under a name that is free, since a job that is there is no reason to refuse this one.
    trainjob = render(spec, f"{key}/dry-run/{secrets.token_hex(6)}", 1, namespace)
    stored = await backend.create(trainjob, dry_run=True)
    wanted = render(spec, key, 1, namespace)["metadata"]
    return {**stored, "metadata": {**stored["metadata"], **wanted}}


async def _adopts(backend: Backend, trainjob: TrainJob, after_failure: AfterFailure) -> bool:
    phase = observe(trainjob).phase
    if "deletionTimestamp" in trainjob["metadata"] or phase is Phase.CANCELLED:
        return False
    if phase is Phase.COMPLETE:
        return DELIVERED not in (trainjob["metadata"].get("annotations") or {})
    diagnosis = given_up(trainjob)
    if phase is Phase.FAILED and after_failure != "retry":
        diagnosis = diagnose(await backend.evidence(JobRef.of(trainjob)))
    user_errors = after_failure != "infrastructure"
    if diagnosis is not None and after_failure != "retry" and not diagnosis.retry.retried(user_errors=user_errors):
        raise TrainJobFailed(diagnosis)
    return phase is not Phase.FAILED and diagnosis is None


async def _resume(backend: Backend, trainjob: TrainJob) -> None:
    """Take back a suspension by `cancel` or the reaper: a launch of the same key asks for the job to run."""
    if CANCELLED not in (trainjob["metadata"].get("annotations") or {}) or observe(trainjob).phase.terminal:
        return
    await backend.patch(JobRef.of(trainjob), unattended.resuming(trainjob))


def _same_spec(present: TrainJob, wanted: TrainJob) -> JobRef:
    if spec_hash(present) != spec_hash(wanted):
        changes = differences(wanted, present) or ["(labels or annotations)"]
        raise SpecMismatch(
            f"TrainJob {present['metadata']['namespace']}/{present['metadata']['name']} was launched for the same key "
            "with another spec; cancel or delete it, or launch under another key. Present -> wanted:"
            + "".join(f"\n  {change}" for change in changes)
        )
    return JobRef.of(present)


async def mark_delivered(backend: Backend, ref: JobRef) -> None:
    """Note on the job that its result has arrived: the same key asked for again then means "once more"."""
    with suppress(NotFound):
        await backend.patch(ref, {"metadata": {"annotations": {DELIVERED: "true"}}})


CancelAction = Literal["delete", "suspend"]


async def request_cancel(backend: Backend, trainjob: TrainJob, action: CancelAction = "delete") -> None:
    """Send the one request that stops `trainjob`, and wait for nothing else: for those who are about to be killed.

    A job that may not be suspended is deleted: Trainer's webhook refuses every change to one whose runtime is gone.
    """
    ref, patch = JobRef.of(trainjob), cancelling(trainjob, action)
    if patch is not None:
        try:
            await backend.patch(ref, patch)
        except NotFound:
            return
        except Rejected:
            patch = None
    if patch is None:
        await backend.cancel(ref)


def cancelling(trainjob: TrainJob, action: CancelAction, mark: str = "true") -> dict[str, Any] | None:
    """The patch that stops `trainjob`; None if it has to be ended. `mark` is the value of its annotation.

    A job that Kueue manages is deleted also where it was to be suspended: Kueue starts an admitted job that somebody
    else suspends again (its reconciler: "start the job if the workload has been admitted").
    """
    if action == "suspend" and QUEUE_LABEL not in (trainjob["metadata"].get("labels") or {}):
        return {"metadata": {"annotations": {CANCELLED: mark}}, "spec": {"suspend": True}}
    return None


async def cancel(
    backend: Backend,
    ref: JobRef,
    action: CancelAction = "delete",
    *,
    timeout_seconds: float = CANCEL_SECONDS,
) -> bool:
    """Stop a job and see to it that nothing of it is left running. A finished job is left as it is.

    A job that is suspended here is resumed when its key is launched again. With ``delete``, the local backend ends the
    job as `Phase.CANCELLED` and keeps its logs and metrics; on a cluster the job is deleted with them.

    Returns:
        True once its last pod has ended; False if some were still ending after `timeout_seconds`.
    """
    trainjob = await backend.get(ref.namespace, ref.name)
    if trainjob is None or trainjob["metadata"]["uid"] != ref.uid or observe(trainjob).phase.terminal:
        return True
    if cancelling(trainjob, action) is None:  # others who wait for the job report that it was cancelled
        with suppress(NotFound, Rejected):
            await backend.patch(ref, {"metadata": {"annotations": {CANCELLED: "true"}}})
    await request_cancel(backend, trainjob, action)
    pause, deadline = 0.05, time.monotonic() + timeout_seconds
    while not await backend.stopped(ref):
        if time.monotonic() >= deadline:
            return False
        await anyio.sleep(pause)
        pause = min(2.0, pause * 1.5)
    return True


CrashAction = Literal["suspend", "cancel", "keep"]


async def give_up(backend: Backend, ref: JobRef, diagnosis: Diagnosis, action: CrashAction = "suspend") -> str:
    """Do what was asked with a job whose step has failed at its first crash, by one request, and say what was done.

    Never raises because of the job or an outage: the step fails anyway, and its reason is the crash.

    Args:
        backend: Where it is.
        ref: The job.
        diagnosis: Why the step has failed.
        action: ``suspend`` stops it and keeps the object, with the diagnosis as an annotation, since its pods go;
            ``cancel`` deletes it; ``keep`` lets it go on. A job that Kueue manages is deleted also where it was to be
            suspended, see `request_cancel`.
    """
    if action == "keep":
        return f"{ref} goes on"
    try:
        trainjob = await backend.get(ref.namespace, ref.name)
        if trainjob is None or trainjob["metadata"]["uid"] != ref.uid or observe(trainjob).phase.terminal:
            return f"{ref} has ended"
        return await _stop(backend, trainjob, diagnosis, action)
    except NotFound:
        return f"{ref} has ended"
    except TrainJobError as error:
        return f"{ref} could not be stopped, and goes on: {error}"


async def _stop(backend: Backend, trainjob: TrainJob, diagnosis: Diagnosis, action: CrashAction) -> str:
    ref, why = JobRef.of(trainjob), ""
    if action == "suspend" and QUEUE_LABEL in (trainjob["metadata"].get("labels") or {}):
        why = ": Kueue would start it again"
    elif action == "suspend":
        told = json.dumps(pack_diagnosis(diagnosis), ensure_ascii=False)
        try:
            await backend.patch(ref, {"metadata": {"annotations": {GIVEN_UP: told}}, "spec": {"suspend": True}})
        except Rejected as error:
            why = f": it could not be suspended: {error}"
        else:
            return f"{ref} was suspended"
    await backend.delete(ref)
    return f"{ref} was deleted{why}"


def given_up(trainjob: TrainJob) -> Diagnosis | None:
    """Why `give_up` has suspended a job; None if it has not, or somebody has resumed it."""
    why = mapping(trainjob, "metadata", "annotations").get(GIVEN_UP)
    if not isinstance(why, str) or observe(trainjob).phase is not Phase.SUSPENDED:
        return None
    with suppress(ValueError):
        return unpack_diagnosis(json.loads(why))
    return unpack_diagnosis(None)
