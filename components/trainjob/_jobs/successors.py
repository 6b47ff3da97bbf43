"""What a waiter does when its job is gone, was given up, or was suspended before its latest launch."""

from __future__ import annotations

from dataclasses import replace

from trainjob._backends.base import Backend, TrainJob
from trainjob._manifest import unattended
from trainjob._manifest.attempts import (
    Cancel,
    cancel_of,
    decide,
    ended_before_creation,
    given_up,
    is_stale,
    launched_at,
    version_of,
    work_of,
)
from trainjob.errors import Category, Diagnosis, NotFound, Rejected, RetryVerdict, TrainJobFailed
from trainjob.job import KEY, MANAGED_BY, JobRef
from trainjob.status import Observation, Phase


class JobReplaced(Exception):
    """The job is gone or was given up, and another attempt of its key counts.

    Attributes:
        by: The attempt that counts.
    """

    def __init__(self, by: JobRef) -> None:
        self.by = by
        super().__init__(f"replaced by TrainJob {by}")


async def _successor(backend: Backend, ref: JobRef) -> JobRef | None:
    """The attempt that counts in place of one that is gone or was given up; None if there is no other one.

    None also for an account that may not list jobs.
    """
    if not (work := work_of(ref.name)):
        return None
    try:
        found = await backend.find(ref.namespace, {MANAGED_BY: "trainjob", KEY: work})
    except Rejected:
        return None
    counts, _ = decide([job for job in found if job["metadata"]["uid"] != ref.uid])
    return None if counts is None else JobRef.of(counts)


async def last_observation(
    backend: Backend, ref: JobRef, observation: Observation | None, trainjob: TrainJob | None
) -> Observation | None:
    """The latest observation of a job that is gone, with whether it was cancelled: its deletion does not tell.

    Raises:
        JobReplaced: another attempt of its key counts.
    """
    if observation is not None and observation.phase.terminal:
        return observation
    if (other := await _successor(backend, ref)) is not None:
        raise JobReplaced(other)
    if observation is None or observation.cancelled or trainjob is None or not (work := work_of(ref.name)):
        return observation
    _, cancels = await backend.cancels(ref.namespace, work)
    return replace(observation, cancelled=any(_deleted(each, trainjob, observation) for each in cancels))


def _deleted(cancel: Cancel, trainjob: TrainJob, observation: Observation) -> bool:
    """Whether a cancel has deleted a job that is gone. The version at the start of its launch may be unknown."""
    if launched_at(trainjob) is not None or cancel.uid or cancel.at is None or observation.created is None:
        return cancel_of([cancel], trainjob) is not None or cancel.uid == trainjob["metadata"]["uid"]
    return cancel.at >= observation.created


async def check_given_up(backend: Backend, ref: JobRef, trainjob: TrainJob) -> None:
    """Raise if another waiter has given up the job: it never runs again.

    Raises:
        JobReplaced: another attempt of its key counts.
        TrainJobFailed: none does; has the recorded diagnosis.
    """
    if (why := given_up(trainjob)) is not None:
        if (other := await _successor(backend, ref)) is not None:
            raise JobReplaced(other)
        raise TrainJobFailed(replace(why, job=str(ref)))


async def check_verdict(backend: Backend, ref: JobRef, observation: Observation) -> None:
    """Raise if the end of a job that trainjob launched is that of an earlier job of the name, after deleting it.

    Its JobSet tells; once that is gone, the time of the end.

    Trainer finds a JobSet by its name. A job that takes over the JobSet of a deleted one gets its ``Complete`` or
    ``Failed``, and never runs (kubeflow/trainer 2.3, ``plugins/jobset/jobset.go``, ``Status``).

    Raises:
        JobReplaced: the end is that of another job, and another attempt of its key counts.
        TrainJobFailed: the end is that of another job, and no attempt counts.
    """
    if backend.cluster is None or observation.phase not in (Phase.COMPLETE, Phase.FAILED) or not work_of(ref.name):
        return
    own = await backend.cluster.has_own_jobset(ref)
    if own is False or (own is None and ended_before_creation(observation)):
        present = await backend.get(ref.namespace, ref.name)
        if present is not None and present["metadata"]["uid"] == ref.uid:
            await backend.delete(ref, version_of(present).get("resourceVersion", ""))
        if (other := await _successor(backend, ref)) is not None:
            raise JobReplaced(other)
        summary = "its state was that of the JobSet of an earlier job of the same name: it has not run, and was deleted"
        raise TrainJobFailed(Diagnosis(Category.UNKNOWN, RetryVerdict.INFRASTRUCTURE, summary, job=str(ref)))


async def resume_if_stale(backend: Backend, ref: JobRef, trainjob: TrainJob) -> str:
    """Resume a job whose suspension is older than its latest launch. Returns a notice about it, or an empty text."""
    if not is_stale(trainjob):
        return ""
    present = await backend.get(ref.namespace, ref.name)
    if present is None or present["metadata"]["uid"] != ref.uid or not is_stale(present):
        return ""  # the next snapshot shows it
    work = work_of(ref.name)
    if work and cancel_of((await backend.cancels(ref.namespace, work))[1], present) is not None:
        return ""  # an older suspension, which came late, has replaced the mark of a newer cancel
    why = "because nobody waited for it" if unattended.marked(present) else "by a cancel before its latest launch"
    patch = unattended.resuming(present)
    patch["metadata"] |= version_of(present)
    try:
        await backend.patch(ref, patch)
    except NotFound:
        return ""
    except Rejected as error:
        return f"it was suspended {why}, and cannot be resumed: {error}"
    return f"it was suspended {why}; it is resumed" if "spec" in patch else ""
