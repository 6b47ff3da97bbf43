"""What must hold after cancels, and for the reaper."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from tests.fakes.kube.objects import Object, annotation, has_condition, in_queue, is_active, is_deleting
from tests.fakes.kube.server import Entry
from tests.simulation.facts import Facts, Moment
from tests.simulation.processes import STOPS, STOPS_OF_A_TRY, Launch, Process
from tests.simulation.virtual import EPOCH

UNATTENDED_SECONDS = 3600.0
"""``unattended_after`` of the jobs: how long a process may not renew its Lease."""
ADOPTED_SECONDS = 90.0
"""For how long the reaper observes: a process that has adopted a job has so long to write its Lease."""
RECORD_SECONDS = 3600.0
"""How long the record of a cancel is kept."""


def running(facts: Facts, moment: Moment) -> Iterator[str]:
    """After a cancel, nothing of the key runs that was launched before it (after a kill of a try: by that try).

    Unless a person has resumed it since. Once all is answered, this holds for what the cancel has seen and for what a
    launch has created that has read the record since; for what a killed process or a late request has created, and for
    what a webhook did not let it suspend, after the reaper's next run. A cancel that may not leave a record concerns
    what it has seen, unless a launch has looked at the job after that, or has seen that it was suspended. The record is
    kept for an hour.
    """
    if moment not in ("quiet", "reaped"):
        return
    for key, attempts in facts.attempts().items():
        for stop, record in facts.stops(key):
            for job in filter(is_active, attempts):
                if why := _must_not_run(facts, moment, job, stop, record):
                    yield f"{job['metadata']['name']} runs after the {stop.kind} of {stop.name}: {why}"


def _must_not_run(facts: Facts, moment: Moment, job: Object, stop: Process, record: int | None) -> str:
    """Why a job must not run after a stop; empty if it may."""
    uid = job["metadata"]["uid"]
    if not stop.done or (stop.kind == "cancelref" and (stop.ref is None or stop.ref.uid != uid)):
        return ""
    own = [each for each in facts.server.log[stop.begin : stop.end] if each.who == stop.name]
    looks = list(facts.lists(stop, "trainjobs", stop.begin, stop.end))
    back = any(each.who == "trainer" and each.uid == uid for each in facts.server.log[stop.begin :])
    statuses = (403, 500) if back else ()  # a stop leaves a failed job that refuses to be suspended
    refused = any(each.status in statuses and each.name == facts.name(uid) for each in own)
    seen = bool(looks) and facts.server.born[uid] <= looks[-1].version and not refused
    if record is None:
        ends = [*looks[-1:], *(each for each in own if each.uid == uid and each.suspends() and each.status == 200)]
        later = facts.server.log[min(map(facts.server.log.index, ends)) + 1 :] if ends else []
        lists = [each for pair in facts.launched(uid) for each in _looks(facts, *pair)]
        newer = any(each in later for each in lists)
        newer = newer or _is_of_a_later_try(facts, stop, facts.name(uid))
        newer = newer or (bool(looks) and _resumed(facts, uid, stop, looks[0].version))
        return "it was there" if seen and not newer and stop.outcome == "stopped" else ""
    newer = any(facts.is_newer(process, launch, stop, record) for process, launch in facts.launched(uid))
    if newer or _came_back(facts, uid, stop, record):
        return ""
    if moment == "reaped":
        reaped = _has_been_reaped(facts, uid, stop, record)
        return "it was launched before, and the reaper has run since" if reaped else ""
    if stop.outcome != "stopped":
        return ""
    until = _written(facts, stop, record) + RECORD_SECONDS
    return _seen_by_a_launch(facts, job, record, until) or ("it was there" if seen else "")


def _looks(facts: Facts, process: Process, launch: Launch) -> Iterator[Entry]:
    return facts.lists(process, "trainjobs", launch.begin, launch.end)


def _came_back(facts: Facts, uid: str, stop: Process, record: int) -> bool:
    """Whether a job was resumed by a person, or by Trainer if the stop leaves failed jobs; or the record is too old."""
    too_late = facts.server.claims[uid][1] - _written(facts, stop, record) > RECORD_SECONDS
    return too_late or _resumed(facts, uid, stop, record)


def _resumed(facts: Facts, uid: str, stop: Process, since: int) -> bool:
    """Whether a person, or Trainer if the stop leaves failed jobs, has resumed a job after that version."""
    by = ("person",) if stop.kind != "cancelref" else ("person", "trainer")
    changes = (each for each in facts.server.log if each.uid == uid and each.version > since)
    return any(each.who in by and not each.suspends() for each in changes)


def _written(facts: Facts, stop: Process, record: int) -> float:
    """When the record of a stop was written."""
    ended = facts.server.log[stop.end - 1].at
    return next((each.at for each in facts.server.log if each.who == stop.name and each.version == record), ended)


def _has_been_reaped(facts: Facts, uid: str, stop: Process, record: int) -> bool:
    """Whether a reaper has seen a job that could know the record of a stop, while that was kept."""
    log, until = facts.server.log, _written(facts, stop, record) + RECORD_SECONDS
    for reaper in (each for each in facts.processes if each.kind == "reap"):
        knows = any(each.version >= record for each in log[: reaper.begin])
        for entry in (each for each in log[reaper.begin :] if each.who == reaper.name and each.at <= until):
            knows = knows or (entry.is_list("leases") and entry.version >= record)
            if knows and entry.is_list("trainjobs") and entry.version >= facts.server.born[uid]:
                return True
    return False


def _seen_by_a_launch(facts: Facts, job: Object, record: int, until: float) -> str:
    """Whose launch has read record and jobs after the creation of a job, or has freed its name; empty if none has.

    In a queue a launch must free the name, since Kueue would resume a suspended job.
    """
    uid = job["metadata"]["uid"]
    since = max(record, facts.server.born[uid])
    for process, launch in facts.launched(uid):
        if not in_queue(job) and facts.name(uid) in facts.deleted_own(process, launch, record):
            return f"{process.name} has deleted its job of that name, so that a late create was accepted"
        looks = [each for each in facts.lists(process, "leases", launch.begin, launch.end) if each.at <= until]
        jobs = [each.version for each in _looks(facts, process, launch) if each.at <= until]
        read = bool(looks) and looks[-1].version >= since and bool(jobs) and jobs[-1] >= since
        if read and launch.end is not None and not process.dead:
            return f"{process.name} has read its record"
    return ""


def unstopped(facts: Facts, moment: Moment) -> Iterator[str]:
    """A cancel that fails has sent a DELETE for each active job that it has seen, and that it concerns."""
    for process in facts.new_ends():
        if process.kind not in STOPS or process.action != "cancel" or process.error is None:
            continue
        seen = {
            name
            for entry in facts.server.log[process.begin : process.end]
            if entry.who == process.name and entry.plural == "trainjobs"
            for name in entry.active
            if not _is_newer(facts, process, name)
        }
        deleted = {name for method, _, name in process.sent if method == "DELETE"}
        if seen - deleted:
            yield f"{process.name} has failed without a DELETE for {sorted(seen - deleted)}: {process.error!r}"


def _is_newer(facts: Facts, stop: Process, name: str) -> bool:
    """Whether a launch that a stop does not concern has launched the job of a name."""
    record = facts.record(stop)
    uids = {each.uid for each in facts.server.log if each.name == name and each.method == "POST" and each.uid}
    launches = [each for uid in uids for each in facts.launched(uid)]
    newer = record is not None and any(facts.is_newer(*each, stop, record) for each in launches)
    return newer or _is_of_a_later_try(facts, stop, name)


def _is_of_a_later_try(facts: Facts, stop: Process, name: str) -> bool:
    if stop.kind not in STOPS_OF_A_TRY:
        return False
    uids = {each.uid for each in facts.server.log if each.name == name and each.method == "POST" and each.uid}
    return any(process.tried > stop.tried for uid in uids for process, _ in facts.launched(uid))


def reaped(facts: Facts, moment: Moment) -> Iterator[str]:
    """The reaper ends nothing that a living process has launched or waits for.

    Unless another attempt of the key replaced it, is complete and was not delivered, or has been active for at least as
    long, or the key was cancelled since the launch. A process that gets no reply, or may not write Leases, and has not
    renewed its Lease for `UNATTENDED_SECONDS`, does not count as living; nor one that has adopted the job and has not
    written its Lease for `ADOPTED_SECONDS`. One that has not launched the job, or could not change it because of a
    webhook, counts since the reaper's last look at the Leases.
    """
    for number, entry in enumerate(facts.new_entries(), facts.judged):
        reaper = facts.process_of(entry)
        ends = entry.changes("trainjobs") and (entry.method == "DELETE" or entry.suspends())
        if reaper is None or reaper.kind != "reap" or not ends:
            continue
        for process in facts.processes:
            waits = process.ref is not None and process.ref.uid == entry.uid and process.kind not in STOPS
            if process.is_living and waits and _is_attended(facts, process, entry, number):
                yield f"the reaper sends {entry.method} for {entry.name}, for which {process.name} waits"


def _is_attended(facts: Facts, process: Process, entry: Entry, number: int) -> bool:
    """Whether the reaper must leave a job, at an entry of the log with that number."""
    if _another_counts(facts, entry) or _is_cancelled(facts, process, entry.uid):
        return False
    log = facts.server.log[:number]
    own = [each for each in log if each.who == process.name]
    created = [each for each in own if each.method == "POST" and each.uid == entry.uid]
    launch = process.launches[-1] if process.launches else Launch(process.begin)
    refused = any(each.status == 500 and each.name == entry.name for each in own)
    adopted = launch.uid == entry.uid and launch.end is not None and not refused
    if created and entry.at - created[-1].at <= UNATTENDED_SECONDS:
        return True
    if adopted and launch.end is not None and entry.at - log[launch.end - 1].at < ADOPTED_SECONDS:
        return True
    writes = [each for each in own if each.changes("leases")]
    if writes and entry.at - _renewed(writes[-1]) <= UNATTENDED_SECONDS:
        looks = [each.version for each in log if each.who == entry.who and each.is_list("leases")]
        return writes[0].version <= looks[-1]
    served = process.stage == "wait" and not any(process.unanswered.values())
    return served and "leases" not in facts.server.forbidden[1]


def _renewed(write: Entry) -> float:
    """The time that a Lease says: a request can have been on its way for long."""
    text = ((write.body or {}).get("spec") or {}).get("renewTime")
    return write.at if text is None else datetime.fromisoformat(text).timestamp() - EPOCH


def _another_counts(facts: Facts, entry: Entry) -> bool:
    """Whether another attempt replaced it, has an undelivered result, or has been active for as long as it.

    Of two that were created in the same second, as ``creationTimestamp`` shows it, the lower attempt counts.
    """
    since = facts.server.claimed.get(entry.uid) or facts.server.claims[entry.uid]
    for job in facts.server.jobs(facts.server.works[entry.uid]):
        uid = job["metadata"]["uid"]
        if uid != entry.uid and not is_deleting(job):
            claim = facts.server.claims.get(uid)
            lower = _number(job["metadata"]["name"]) < _number(entry.name)
            same = _created(facts, uid) == _created(facts, entry.uid)
            as_old = claim is not None and (claim <= since or (same and lower))
            complete = has_condition(job, "Complete") and not _was_delivered(facts, uid, entry)
            if complete or as_old or (_was_active(facts, job, entry) and _replaced(facts, job, entry.uid)):
                return True
    return False


def _was_active(facts: Facts, job: Object, entry: Entry) -> bool:
    """Whether a job is active, or has changed since the process began that has sent a request."""
    reaper = facts.process_of(entry)
    since = facts.server.log[reaper.begin :] if reaper is not None else ()
    return is_active(job) or any(each.uid == job["metadata"]["uid"] for each in since)


def _replaced(facts: Facts, job: Object, uid: str) -> bool:
    """Whether a job records that it replaced another one, which no launch that began later has adopted."""
    last = max((launch.begin for _, launch in facts.launched(job["metadata"]["uid"])), default=-1)
    adopted = any(launch.begin > last for _, launch in facts.launched(uid))
    return uid in annotation(job, "replaces").split(",") and not adopted


def _was_delivered(facts: Facts, uid: str, entry: Entry) -> bool:
    """Whether the result of a job was delivered before the process began that has sent a request."""
    reaper = facts.process_of(entry)
    delivered = facts.server.delivered.get(uid)
    if reaper is None or reaper.begin == 0 or delivered is None:
        return False
    return delivered <= facts.server.log[reaper.begin - 1].version


def _number(name: str) -> int:
    """The number of an attempt."""
    return int(name.rpartition("-")[2])


def _created(facts: Facts, uid: str) -> int:
    """The second in which a job was created."""
    return next(int(EPOCH + each.at) for each in facts.server.log if each.uid == uid and each.method == "POST")


def _is_cancelled(facts: Facts, process: Process, uid: str) -> bool:
    """Whether a job was cancelled since a process has launched it last; if it has not, since all its launches.

    Also by a process that has waited for it until its timeout.
    """
    launches = list(facts.recorded(uid))
    launches = [pair for pair in launches if pair[0] is process][-1:] or launches
    for waiter in (each for each in facts.processes if each.key == process.key and each.kind not in STOPS):
        record = facts.cancel_of(waiter, uid)
        if record is not None and not any(facts.is_newer(*each, waiter, record) for each in launches):
            return True
    for stop, _ in facts.stops(process.key):
        record = facts.latest_record(stop)
        concerns = stop.kind != "cancelref" or (stop.ref is not None and stop.ref.uid == uid)
        written = any(each.who == stop.name and each.changes("leases") for each in facts.server.log)
        if record is None or not (concerns and written):
            continue
        if any(facts.is_newer(*each, stop, record) for each in launches):
            continue
        of_job = [each for each in facts.server.log if each.uid == uid and each.version > record]
        suspends = [each.version for each in of_job if each.suspends() and each.who != "person"]
        resumes = [each.version for each in of_job if each.who == "person" and each.resumes()]
        # A cancel or the reaper leaves a mark; without one, nobody can know that a person has resumed the job.
        if not suspends or max(resumes, default=0) < min(suspends):
            return True
    return False
