"""The conditions of a job of this machine, and the end of a job without a supervisor."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainjob._backends.local.ranks import sweep
from trainjob._backends.local.store import JobFiles, OtherFormat, cancel_requested, now
from trainjob._manifest import unattended
from trainjob.status import ADMITTED

SUSPENDED = ("Suspended", "True", "Suspended", "TrainJob is suspended")
RESUMED = ("Suspended", "False", "Resumed", "TrainJob is resumed")
BOOKED = ("Suspended", "False", ADMITTED, "the job has its GPUs")
COMPLETE = ("Complete", "True", "AllJobsCompleted", "jobset completed successfully")
DEADLINE = ("Failed", "True", "DeadlineExceeded", "TrainJob exceeded its active deadline")
CANCEL = ("Cancelled", "True", "Cancelled", "the job was cancelled with trainjob")
UNATTENDED = ("Cancelled", "True", "Unattended", "the job was cancelled because nobody waited for it")
LOST = ("Failed", "True", "SupervisorLost", "the local supervisor of this job was killed; its ranks were stopped")


def is_removed(trainjob: Mapping[str, Any]) -> bool:
    """Whether the deletion of a job is requested."""
    return "deletionTimestamp" in trainjob["metadata"] and not cancel_requested(trainjob)


def cancelled(trainjob: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """The final condition of a job whose cancellation is requested."""
    return UNATTENDED if unattended.marked(trainjob) else CANCEL


def with_condition(status: Mapping[str, Any], condition: tuple[str, str, str, str]) -> list[dict[str, Any]]:
    """The conditions of `status` with `condition` (type, status, reason, message) set, since now if it is new."""
    before = {c["type"]: c for c in status.get("conditions") or []}
    fields = dict(zip(("type", "status", "reason", "message"), condition, strict=True))
    was = before.pop(condition[0], {})
    same = (was.get("status"), was.get("reason")) == condition[1:3]
    return [*before.values(), {**fields, "lastTransitionTime": was["lastTransitionTime"] if same else now()}]


def write_status(files: JobFiles, status: Mapping[str, Any], pods: list[dict[str, Any]]) -> OSError | None:
    """Write the status; return the error that prevents it, such as a full disk. Does nothing for a deleted job."""
    try:
        files.write_status(status, pods)
    except FileNotFoundError:  # the job was deleted in the meantime
        return None
    except OSError as error:
        return error
    return None


def record_loss(files: JobFiles) -> None:
    """Finish a job without a supervisor: kill its ranks and write a condition with the reason. The caller has the lock.

    Writes nothing on a full disk: the next read of the job retries.
    """
    trainjob = files.read()
    if trainjob is None or files.finished():
        return
    sweep(trainjob["metadata"]["uid"])
    if is_removed(trainjob):
        with suppress(OSError):
            files.remove()
        return
    jobs = [{**job, "active": 0, "ready": 0, "failed": 1} for job in trainjob["status"].get("jobsStatus") or []]
    ended = with_condition(trainjob["status"], cancelled(trainjob) if cancel_requested(trainjob) else LOST)
    status = {**trainjob["status"], "jobsStatus": jobs, "conditions": ended}
    write_status(files, status, files.pods())


def end_lost(files: JobFiles, uid: str, wait_seconds: float = 0.0) -> bool:
    """Kill what is left of a job without a supervisor, also if its files cannot be read; False if it has one."""
    lock = files.supervise(wait_seconds=wait_seconds)
    if lock is None:
        return False
    sweep(uid)
    with suppress(OtherFormat):
        record_loss(files)
    os.close(lock)
    return True
