"""Launch or adopt a TrainJob, cancel it, give it up. Works with any `Backend`; all integrations use it.

The calling process may be killed at any instruction. The key is the only state between two calls: the job's name
follows from it, a name cannot be created twice, and everything else is read from the TrainJob object.
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
    FAILURE,
    FAILURE_OF,
    GIVEN_UP,
    KEY,
    JobRef,
    check_key,
    differences,
    failure_record,
    job_name,
    key_hash,
    labels_of,
    render,
    spec_hash,
)
from trainjob.retry_changes import Changes, changed, recorded
from trainjob.serialization import pack_diagnosis, unpack_diagnosis
from trainjob.spec import TrainJobSpec
from trainjob.status import CANCELLED, QUEUE_LABEL, Phase, observe

AfterFailure = Literal["retry", "verdict", "infrastructure"]
"""When a new attempt follows one that failed: always, unless its verdict is final, or only if the cause was outside the
training code."""

NOT_STARTED = (Phase.QUEUED, Phase.NOT_STARTED, Phase.STARTING)
"""Phases of a job that waits for capacity."""

CANCEL_SECONDS = 60.0
"""How long `cancel` waits for the last pod by default: twice Kubernetes' grace period of 30 s."""


async def launch(
    backend: Backend,
    spec: TrainJobSpec,
    key: str,
    *,
    namespace: str,
    first_attempt: int = 1,
    last_attempt: int | None = None,
    after_failure: AfterFailure = "retry",
    origin: Mapping[str, str] | None = None,
) -> JobRef:
    """Create the job of `key`, or adopt the existing one. A first launch is one request, with `on_retry` two.

    An attempt is adopted while it is active or suspended, and when it is complete but its result was not delivered. An
    attempt that `cancel` suspended is resumed; one that a person suspended stays suspended. After an attempt that
    failed, was given up, cancelled or deleted, or whose result was delivered, a new attempt is created under a name
    that was never used before.

    After a failure for which `on_retry` of the spec has a rule, the new attempt is changed, by what is recorded on the
    failed one; if that was deleted, by its `failure_record`, which a launch deletes. Two launchers may see different
    evidence: as for any launch, the first object of a name counts.

    Args:
        backend: Backend that runs the job.
        spec: What to run.
        key: Identity of the work; the same on every try of the same work.
        namespace: Kubernetes namespace.
        first_attempt: Lowest ordinal of a new attempt, for callers that count their tries (Airflow's ``try_number``):
            the name of a deleted job is then not used again.
        last_attempt: No new attempt follows once one with this ordinal or a higher one has failed, whatever
            `after_failure` says.
        after_failure: When a new attempt follows one that failed: always (``retry``), unless its verdict is final
            (``verdict``), or only if the cause was outside the training code (``infrastructure``).
        origin: Labels of a new job that record where it comes from, such as DAG, run and try. They replace labels of
            the spec with the same names and are not part of the spec: a job with other such labels is adopted, too.

    Raises:
        SpecMismatch: the attempt to adopt was created from another spec.
        TrainJobFailed: the earlier attempt failed, and `after_failure` or `last_attempt` rules out a new one.
        LaunchError: the job was refused.
        InvalidSpec: the spec is invalid, or the key is blank.
    """
    spec.check()
    check_key(key)
    attempt = first_attempt
    records = await _records(backend, spec, key, namespace)
    earlier: list[TrainJob] = await backend.find(namespace, labels_of(key)) if first_attempt > 1 or records else []
    while True:
        latest = max([*records, *earlier], key=_age, default=None)
        changes = Changes()
        if latest is not None:
            present = recorded(latest)
            over = last_attempt is not None and JobRef.of(latest).attempt >= last_attempt
            read = over or after_failure != "retry" or spec.on_retry is not None
            why = await _failure(backend, latest, read=read)
            after = changed(spec, why, present)
            replaced = after != present and await _lacks_capacity(backend, latest, why)
            if _adopts(latest, why, after_failure, over=over) and not replaced:
                ref = _same_spec(latest, render(spec, key, JobRef.of(latest).attempt, namespace, changes=present))
                await backend.recover(ref)
                await _resume(backend, latest)
                await _forget(backend, records)
                return ref
            if replaced:
                await cancel(backend, JobRef.of(latest))
                records = await _records(backend, spec, key, namespace)
            if observe(latest).phase is not Phase.COMPLETE:  # of which the next attempt would be new work
                changes = after
            attempt = max(attempt, JobRef.of(latest).attempt + 1)
        try:
            made = render(spec, key, attempt, namespace, origin=origin, changes=changes)
            ref = JobRef.of(await backend.create(made))
            await _forget(backend, records)
            return ref
        except AlreadyExists:
            earlier = await backend.find(namespace, labels_of(key))
            if not any(job["metadata"]["name"] == job_name(key, attempt) for job in earlier):
                attempt += 1  # the name belonged to a deleted job; try the next attempt


async def _records(backend: Backend, spec: TrainJobSpec, key: str, namespace: str) -> list[TrainJob]:
    """Why deleted attempts of `key` failed. The local backend keeps the annotations of a job that is cancelled."""
    if spec.on_retry is None or backend.cluster is None:
        return []
    return await backend.find(namespace, {FAILURE_OF: key_hash(key)})


def _age(trainjob: TrainJob) -> tuple[int, bool]:
    """Orders attempts; the record of one is older than it, unless it is being deleted."""
    metadata = trainjob["metadata"]
    exists = FAILURE_OF not in (metadata.get("labels") or {}) and "deletionTimestamp" not in metadata
    return JobRef.of(trainjob).attempt, exists


async def _keep_reason(backend: Backend, trainjob: TrainJob, diagnosis: Diagnosis) -> None:
    """Record why a job is about to be deleted, if `on_retry` changes the next attempt by that. Never raises."""
    if not diagnosis.change or backend.cluster is None or KEY not in (trainjob["metadata"].get("annotations") or {}):
        return
    record = failure_record(trainjob, json.dumps(pack_diagnosis(diagnosis), ensure_ascii=False))
    with suppress(TrainJobError):
        stored = await backend.create(record)
        if QUEUE_LABEL in (stored["metadata"].get("labels") or {}):  # Kueue's LocalQueueDefaulting: it would be started
            await _forget(backend, [stored])


async def _forget(backend: Backend, records: list[TrainJob]) -> None:
    """Delete records of failures. A record that stays is older than the next attempt, and changes nothing."""
    for record in records:
        with suppress(TrainJobError):
            await backend.delete(JobRef.of(record))


async def dry_run(backend: Backend, spec: TrainJobSpec, key: str, *, namespace: str) -> TrainJob:
    """The object that a first launch of `key` would store, with the defaults of the server and its webhooks.

    Creates nothing.

    Raises:
        LaunchError: the job would be refused.
    """
    spec.check()
    check_key(key)
    # Under a free name: an existing job must not make the server refuse this one.
    trainjob = render(spec, f"{key}/dry-run/{secrets.token_hex(6)}", 1, namespace)
    stored = await backend.create(trainjob, dry_run=True)
    wanted = render(spec, key, 1, namespace)["metadata"]
    return {**stored, "metadata": {**stored["metadata"], **wanted}}


def _adopts(trainjob: TrainJob, failure: Diagnosis | None, after_failure: AfterFailure, *, over: bool) -> bool:
    phase = observe(trainjob).phase
    if "deletionTimestamp" in trainjob["metadata"] or phase is Phase.CANCELLED:
        return False
    if phase is Phase.COMPLETE:
        return DELIVERED not in (trainjob["metadata"].get("annotations") or {})
    if phase is not Phase.FAILED and given_up(trainjob) is None:
        return True
    if failure is not None:
        final = not failure.retry.retried(user_errors=after_failure != "infrastructure")
        if over or (final and after_failure != "retry"):
            raise TrainJobFailed(failure)
    return False


async def _failure(backend: Backend, trainjob: TrainJob, *, read: bool) -> Diagnosis | None:
    """Why an attempt failed, or did not start in time; None if it did neither, or that is unknown.

    The diagnosis of its waiter comes first: the evidence is deleted with the pods.

    Args:
        backend: Backend that runs the job.
        trainjob: The attempt.
        read: Read the evidence of a failed attempt whose diagnosis is not recorded.
    """
    phase = observe(trainjob).phase
    why = given_up(trainjob) or _diagnosis_in(trainjob, FAILURE)
    if phase is Phase.COMPLETE or (phase is Phase.FAILED and why is not None and not why.failed):
        why = None
    if phase is Phase.FAILED and why is None and read:
        return diagnose(await backend.evidence(JobRef.of(trainjob)))
    return why


def is_replaced(trainjob: TrainJob) -> bool:
    """Whether the next launch of its key replaces a job that has not started in time, unless it starts before."""
    why = _diagnosis_in(trainjob, FAILURE)
    return why is not None and not why.failed and bool(why.change) and observe(trainjob).phase in NOT_STARTED


async def _lacks_capacity(backend: Backend, trainjob: TrainJob, failure: Diagnosis | None) -> bool:
    """Whether the job has still not started, after the timeout that its waiter recorded."""
    if failure is None or failure.failed or observe(trainjob).phase not in NOT_STARTED:
        return False
    return "deletionTimestamp" not in trainjob["metadata"] and not await backend.has_run(JobRef.of(trainjob))


async def _resume(backend: Backend, trainjob: TrainJob) -> None:
    """Resume a job that `cancel` or the reaper suspended: a launch of the same key means that the job should run."""
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
    """Record on the job that its result was delivered: the next launch of its key then creates a new attempt."""
    with suppress(NotFound):
        await backend.patch(ref, {"metadata": {"annotations": {DELIVERED: "true"}}})


CancelAction = Literal["delete", "suspend"]


async def request_cancel(backend: Backend, trainjob: TrainJob, action: CancelAction = "delete") -> None:
    """Send the one request that stops `trainjob`, and do not wait: for a process that is about to be killed.

    A job that cannot be suspended is deleted: Trainer's webhook refuses every change to a job whose runtime is gone.
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
    """The patch that suspends `trainjob`; None if it must be deleted. `mark` is the value of its annotation.

    A job that Kueue manages is deleted instead of suspended: Kueue resumes an admitted job that another client suspends
    (its reconciler: "start the job if the workload has been admitted").
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
    """Stop a job, and wait until none of its pods is running. A job that has ended is not changed.

    A suspended job is resumed when its key is launched again. With ``delete``, the local backend ends the job as
    `Phase.CANCELLED` and keeps its logs and metrics; on a cluster the job is deleted with its logs and metrics. If it
    did not start in time, and `on_retry` changes the next attempt by that, a record of the reason stays.

    Returns:
        True once its last pod has ended; False if some were still ending after `timeout_seconds`.
    """
    trainjob = await backend.get(ref.namespace, ref.name)
    if trainjob is None or trainjob["metadata"]["uid"] != ref.uid or observe(trainjob).phase.terminal:
        return True
    if cancelling(trainjob, action) is None:
        if is_replaced(trainjob) and (why := _diagnosis_in(trainjob, FAILURE)) is not None:
            await _keep_reason(backend, trainjob, why)
        # By this mark, other waiters report the job as cancelled.
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
    """Apply `action` to a job that failed its step at the first crash, by one request. Returns what was done, as text.

    Never raises because of the job or an outage: the step fails anyway, and the crash is the reason.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        diagnosis: Diagnosis of the crash.
        action: ``suspend`` stops the job and keeps the object, with the diagnosis as an annotation, since the pods are
            deleted; ``cancel`` deletes the job; ``keep`` lets it run. A job that Kueue manages is deleted instead of
            suspended: Kueue would resume it. Of a deleted job a record of the reason stays if `on_retry` changes the
            next attempt by that.
    """
    if action == "keep":
        return f"{ref} keeps running"
    try:
        trainjob = await backend.get(ref.namespace, ref.name)
        if trainjob is None or trainjob["metadata"]["uid"] != ref.uid or observe(trainjob).phase.terminal:
            return f"{ref} has ended"
        return await _stop(backend, trainjob, diagnosis, action)
    except NotFound:
        return f"{ref} has ended"
    except TrainJobError as error:
        return f"{ref} could not be stopped and keeps running: {error}"


async def _stop(backend: Backend, trainjob: TrainJob, diagnosis: Diagnosis, action: CrashAction) -> str:
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
    await _keep_reason(backend, trainjob, diagnosis)
    await backend.delete(ref)
    return f"{ref} was deleted{why}"


def given_up(trainjob: TrainJob) -> Diagnosis | None:
    """The diagnosis with which `give_up` suspended a job; None if it did not, or the job was resumed since."""
    return _diagnosis_in(trainjob, GIVEN_UP) if observe(trainjob).phase is Phase.SUSPENDED else None


async def record_failure(backend: Backend, ref: JobRef, diagnosis: Diagnosis) -> None:
    """Record on a job with `on_retry` why it failed, or did not start in time: the next launch of its key reads it.

    Never raises because of the job or an outage: the next launch then reads the evidence that is left.
    """
    packed = json.dumps(pack_diagnosis(diagnosis), ensure_ascii=False)
    with suppress(TrainJobError):
        await backend.patch(ref, {"metadata": {"annotations": {FAILURE: packed}}})


def _diagnosis_in(trainjob: TrainJob, annotation: str) -> Diagnosis | None:
    why = mapping(trainjob, "metadata", "annotations").get(annotation)
    if not isinstance(why, str):
        return None
    with suppress(ValueError):
        return unpack_diagnosis(json.loads(why))
    return unpack_diagnosis(None)
