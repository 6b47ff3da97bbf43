"""Which jobs end with a run of a pipeline: the controller, the exit handler and cancels by run decide it here.

Jobs whose key has the id of the run belong to it alone. Others can have been adopted by another run: runs of one study
key share its trials. Who waits (`Backend.waiters`) decides then, not the label of the run that launched them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime

from trainjob._backends.base import Backend, Run, TrainJob, Waiter
from trainjob._jobs.cancellation import cancel_key, request_cancel
from trainjob._manifest.attempts import CancelAction, is_deleting, stops_by
from trainjob._manifest.unattended import ON_KILL, is_placed, policy_of
from trainjob._manifest.workflow_labels import KFP_RUN
from trainjob._support.kube_objects import mapping
from trainjob.job import KEY, JobRef
from trainjob.status import Phase, observe

Waits = Callable[[TrainJob, Run], bool]


def run_of(job: TrainJob) -> str:
    """The label of the run that launched a job; empty if none did."""
    return str(mapping(job, "metadata", "labels").get(KFP_RUN) or "")


def is_of_one_run(job: TrainJob) -> bool:
    """Whether no other run can have the key of a job."""
    key = str(mapping(job, "metadata", "annotations").get(KEY) or "")
    return bool(run_of(job)) and key.startswith(f"kfp/{run_of(job)}/")


def action_of(job: TrainJob) -> CancelAction | None:
    """What happens to a job whose run ends, as its launcher has noted; None if it is kept."""
    noted = mapping(job, "metadata", "annotations").get(ON_KILL)
    if noted is None:
        policy = policy_of(job)
        return None if policy is None else policy.action
    return None if noted == "keep" else stops_by(noted)


def must_stop(job: TrainJob, action: CancelAction) -> bool:
    """Whether `action` has to be applied: the job runs or waits to run, or is suspended and is to be deleted."""
    phase = observe(job).phase
    if phase.terminal or is_deleting(job):
        return False
    return phase is not Phase.SUSPENDED or action == "cancel"


def others_wait(waiters: Iterable[Waiter], now: datetime) -> Waits:
    """Whether a process outside of a run waits for a job. KFP's pods have the name of their Workflow and a suffix."""
    living = [each for each in waiters if now - each.renewed < each.lasts]
    holders: dict[str, list[str]] = {}
    for each in living:
        for uid in each.waiting:
            holders.setdefault(uid, []).append(each.holder)

    def waits(job: TrainJob, run: Run) -> bool:
        found = holders.get(job["metadata"]["uid"], ())
        return not is_of_one_run(job) and any(not holder.startswith(f"{run.workflow}-") for holder in found)

    return waits


def ends_with(job: TrainJob, run: Run, waits: Waits) -> CancelAction | None:
    """What has to be done with a job because its run has ended; None if nothing."""
    action = action_of(job)
    if action is None or is_placed(job):
        return None
    return action if must_stop(job, action) and not waits(job, run) else None


async def end_with_run(backend: Backend, job: TrainJob, action: CancelAction) -> bool:
    """Stop a job of a run that has ended; whether it was deleted.

    With a record of the cancel if no other run can have its key: a launch of the run may be on its way.
    """
    ref = JobRef.of(job)
    if is_of_one_run(job):
        key = str(mapping(job, "metadata", "annotations")[KEY])
        await cancel_key(backend, key, namespace=ref.namespace, action=action, timeout_seconds=0)
    else:
        await request_cancel(backend, job, action)
    left = await backend.get(ref.namespace, ref.name)
    return left is None or left["metadata"]["uid"] != ref.uid or is_deleting(left)
