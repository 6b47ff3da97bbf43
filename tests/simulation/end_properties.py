"""What must hold when processes end, and at the end of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.fakes.kube.objects import annotation, is_active, is_ended, is_queued, is_suspended
from tests.fakes.kube.server import Entry
from tests.simulation.facts import Facts, Moment
from tests.simulation.processes import STOPS, Process

from trainjob import TimedOut, TrainJobFailed
from trainjob.errors import BackendUnavailable, LaunchError

DELETION_SECONDS = 100.0
"""Grace period of a job and a minute, and time for a last look."""


def deserted(facts: Facts, moment: Moment) -> Iterator[str]:
    """A waiter whose job a launcher or the reaper has ended follows the attempt that counts instead of failing.

    Unless it has read before that the job had failed: it reports that failure, also if Trainer has taken it back since.
    """
    for process in facts.new_ends():
        if process.outcome != "failed" or process.ref is None or facts.server.job(process.ref.uid) is not None:
            continue
        ends = [each for each in facts.server.log if each.uid == process.ref.uid and each.method == "DELETE"]
        by = facts.process_of(ends[-1]) if ends else None
        if by is None or by.kind in STOPS or _has_read_failure(facts, process, ends[-1].version):
            continue
        looks = list(facts.lists(process, "trainjobs", process.begin, process.end))
        looks = [each for each in looks if each.version >= ends[-1].version] or ends
        running = [job for job in facts.counting(process.key) if is_active(job)]
        before = [job for job in running if facts.server.claims[job["metadata"]["uid"]][0] <= looks[-1].version]
        if before:
            yield f"{process.name} fails because {process.ref.name} is gone, while {before[0]['metadata']['name']} runs"


def _has_read_failure(facts: Facts, process: Process, end: int) -> bool:
    """Whether a waiter has read its job while that had failed, before it ended at that version."""
    if process.ref is None:
        return False
    uid, log = process.ref.uid, facts.server.log
    failed = [(each.failed, each.version) for each in log if each.uid == uid and each.who == "trainer" and each.failed]
    failed += [(facts.server.failed[uid], end)] if uid in facts.server.failed else []
    own = [each for each in log if each.who == process.name and each.method == "GET" and each.plural == "trainjobs"]
    reads = [each.version for each in own if each.name in ("", process.ref.name)]  # a list shows it, too
    return any(since <= read < until for since, until in failed for read in reads)


def waits(facts: Facts, moment: Moment) -> Iterator[str]:
    """Every wait and launch ends; the wait for a job that is being deleted after `DELETION_SECONDS`.

    Unless the job was suspended by a person, or by a cancel that is newer than its latest launch: then the waiter shows
    that it is suspended or queued, and its queue_timeout counts. Kueue does not admit a job that has failed once.
    """
    for process in facts.processes:
        if not process.is_living or moment not in ("reaped", "end"):
            continue
        job = facts.server.job(process.ref.uid) if process.ref is not None else None
        if moment == "reaped":
            if process.stage == "wait" and job is not None and facts.deleting_seconds(job) > DELETION_SECONDS:
                yield f"{process}: the deletion of {process.ref} does not end"
        elif process.stage != "wait" or job is None or not is_suspended(job) or is_ended(job) or _in_queue(facts, job):
            yield f"{process}: it does not end"
        elif process.observation is None or process.observation.waiting_since is None:
            yield f"{process}: it does not show that {process.ref} is suspended"
        elif by := _suspended_without_need(facts, job["metadata"]["uid"]):
            yield f"{process}: it waits for {process.ref}, which {by} has suspended"


def _in_queue(facts: Facts, job: Mapping[str, Any]) -> bool:
    """Whether Kueue will admit a job: its Workload has not finished."""
    return is_queued(job) and job["metadata"]["uid"] not in facts.server.finished


def _suspended_without_need(facts: Facts, uid: str) -> str:
    """Who has suspended a job that must be resumed or reported as failed; empty if it may stay suspended."""
    changes = [each for each in facts.server.log if each.uid == uid and each.suspends() and each.status == 200]
    if not changes or changes[-1].who == "person":
        return ""
    if annotation(facts.server.job(uid) or {"metadata": {}}, "given-up"):
        return f"{changes[-1].who}, which has given it up,"
    for stop, record in facts.stops(facts.server.works[uid]):
        if stop.kind == "cancelref" and (stop.ref is None or stop.ref.uid != uid):
            continue
        if record is None or not any(facts.is_newer(*each, stop, record) for each in facts.recorded(uid)):
            return ""
    return changes[-1].who


def orphan(facts: Facts, moment: Moment) -> Iterator[str]:
    """No job runs that no process looks at and that has no policy for unattended jobs.

    Unless the processes may not write Leases: then they remove the policy, as documented.
    """
    if moment != "reaped" or "leases" in facts.server.forbidden[1]:
        return
    for key, attempts in facts.attempts().items():
        for job in filter(is_active, attempts):
            uid, labels = job["metadata"]["uid"], job["metadata"].get("labels") or {}
            looked = any(each.is_living and each.ref is not None and each.ref.uid == uid for each in facts.processes)
            if not looked and not facts.is_launching(key) and "trainjob.dev/unattended" not in labels:
                yield f"{job['metadata']['name']} runs, and nothing looks at it"


def _refuses(entry: Entry) -> bool:
    """Whether a reply is a refusal; one of a name that is taken is none."""
    return entry.status in (403, 500) or (entry.status == 409 and entry.reason == "Conflict")


def error(facts: Facts, moment: Moment) -> Iterator[str]:
    """Nothing raises an error that it does not document.

    `BackendUnavailable` and `LaunchError` only after replies 403, 409 or 500 to that process. The stop of a killed task
    of Airflow may exceed its time.
    """
    for process in facts.new_ends():
        failure = process.error
        if failure is None or isinstance(failure, TrainJobFailed | TimedOut):
            continue
        if process.kind == "airflowstop" and isinstance(failure, TimeoutError):
            continue
        refused = any(each.who == process.name and _refuses(each) for each in facts.server.log)
        if not (refused and isinstance(failure, BackendUnavailable | LaunchError)):
            yield f"{process} in stage {process.stage}: {type(failure).__name__}: {failure}"
