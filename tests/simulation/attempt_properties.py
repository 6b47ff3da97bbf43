"""What must hold for the attempts of a key: how many may run, and which may be created beside which."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from tests.fakes.kube.objects import OWNER, is_active, is_deleting, is_queued
from tests.fakes.kube.server import Entry
from tests.simulation.facts import Facts, Moment


def twice(facts: Facts, moment: Moment) -> Iterator[str]:
    """Never two active jobs of one key.

    Until a launch of the key that has looked at both, or has created one of them, has returned; else until the reaper's
    next run. No launch sends a create beside an active attempt that it has seen.
    """
    for entry in facts.new_entries():
        if entry.method == "POST" and entry.uid in facts.server.claims and entry.uid in facts.server.works:
            yield from _beside_a_seen_one(facts, entry)
    yield from _side_by_side(facts, moment, queued=False)


def _beside_a_seen_one(facts: Facts, entry: Entry) -> Iterator[str]:
    created = facts.creation(entry.uid)
    if created is None:
        return
    process, launch, _ = created
    looks = list(facts.lists(process, "trainjobs", launch.begin, entry.sent))
    for job in facts.counting(facts.server.works[entry.uid]):
        uid, name = job["metadata"]["uid"], job["metadata"]["name"]
        if uid != entry.uid and looks and facts.server.claims[uid][0] <= looks[-1].version:
            yield f"{process.name} has created {entry.name} beside {name}, which it has seen active or queued"


def again(facts: Facts, moment: Moment) -> Iterator[str]:
    """No attempt beside one that waits in a queue, as long as that one exists. Bounded as `twice`."""
    yield from _side_by_side(facts, moment, queued=True)


def _side_by_side(facts: Facts, moment: Moment, *, queued: bool) -> Iterator[str]:
    for key, attempts in facts.attempts().items():
        both = [job for job in attempts if job["metadata"]["uid"] in facts.server.claims]
        if len(both) < 2 or any(map(is_queued, both)) is not queued:
            continue
        names = [job["metadata"]["name"] for job in both]
        since = max(facts.server.claims[job["metadata"]["uid"]][0] for job in both)
        for process, launch in facts.launches(key):
            if not launch.uid or launch.end is None or process.dead:
                continue
            look = facts.last_look(process, launch) or 0
            if look >= since:
                yield f"{names} are active or queued, which the launch of {process.name} has seen"
            elif launch.uid in facts.created_in(process, launch) and look < facts.server.born[launch.uid]:
                yield f"{names} are active or queued, and {process.name} has not looked after its create"
        if moment == "reaped" and not facts.is_launching(key):
            yield f"{names} are active or queued after a run of the reaper"


def lost(facts: Facts, moment: Moment) -> Iterator[str]:
    """No new attempt beside one that is complete and was not delivered when the launch began.

    Unless another attempt had replaced that one before, or the new one has ended at once, in the second of its
    creation, with the end of an earlier job of its name. Until the launch returns; else until the reaper's next run.
    """
    for attempts in facts.attempts().values():
        for old in attempts:
            uid = old["metadata"]["uid"]
            done = facts.server.complete.get(uid)
            if done is None or uid not in facts.server.completed or uid in facts.server.replaced or is_deleting(old):
                continue
            for new in attempts:
                made = new["metadata"]["uid"]
                if made in facts.server.taken_over:
                    continue
                if facts.server.born[made] <= done or (created := facts.creation(made)) is None:
                    continue
                process, launch, _ = created
                begin, delivered = facts.first_look(process, launch), facts.server.delivered.get(uid)
                if begin is None or (delivered is not None and delivered <= begin):
                    continue
                text = f"{process.name} has created {new['metadata']['name']}; {old['metadata']['name']} is complete"
                if launch.uid == made:
                    yield f"{text}, and was not delivered when that launch began"
                elif moment == "reaped" and delivered is None and made in facts.server.claims:
                    yield f"{text} and undelivered, after a run of the reaper"


def overlap(facts: Facts, moment: Moment) -> Iterator[str]:
    """No ranks of two attempts of a key at once. A terminating rank counts, one whose node did not answer does not.

    Unless the ranks of the earlier attempt were started after the look at the ranks that preceded the create of the
    later attempt: then both attempts are active, which `twice` bounds.
    """
    found: dict[str, dict[str, int]] = {}  # key -> UID -> version of its latest pod
    for pod in facts.server.items("pods"):
        if pod["status"]["phase"] == "Running" and pod["metadata"]["name"] not in facts.server.lost:
            uid = pod["metadata"]["annotations"][OWNER]
            uids = found.setdefault(facts.server.works[uid], {})
            uids[uid] = max(uids.get(uid, 0), facts.server.born[pod["metadata"]["uid"]])
    for key, uids in found.items():
        for older, newer in combinations(sorted(uids, key=lambda uid: facts.server.born[uid]), 2):
            if (created := facts.creation(newer)) is None:
                continue
            process, launch, index = created
            looks = list(facts.lists(process, "pods", launch.begin, min(index, launch.end or index)))
            if looks and looks[-1].version < uids[older]:
                continue
            yield f"ranks of {facts.name(older)} and {facts.name(newer)} of {key} run at once"


def foreign(facts: Facts, moment: Moment) -> Iterator[str]:
    """No job of another key is adopted, changed or deleted."""
    for entry in facts.new_entries():
        process = facts.process_of(entry)
        if process is not None and process.kind != "reap" and entry.changes("trainjobs") and entry.uid:
            key = facts.server.works.get(entry.uid)
            if key not in ("", None, process.key):
                yield f"{process.name} of {process.key} sends {entry.method} for {entry.name} of {key}"
    for process in facts.processes:
        key = facts.server.works.get(process.ref.uid) if process.ref is not None else None
        if key not in ("", None, process.key):
            yield f"{process.name} of {process.key} waits for a job of {key}"


def stale(facts: Facts, moment: Moment) -> Iterator[str]:
    """Who reports success waited for a job whose own ranks have completed.

    Unless the job has taken over the end of an earlier job of its name, in the second of its own creation, and the
    JobSet of that one is gone.
    """
    for process in facts.new_ends():
        if process.outcome != "success" or process.ref is None:
            continue
        if process.ref.uid not in facts.server.completed | facts.server.taken_over:
            yield f"{process.name} reports success of {process.ref.name}, whose ranks have not completed"


def reused(facts: Facts, moment: Moment) -> Iterator[str]:
    """No name is used again while a JobSet of it is left, which Trainer would take for that of the new job.

    Unless that JobSet was created after the latest look that has found none: the create was on its way then.
    """
    for entry in facts.new_entries():
        born = facts.server.reused.get(entry.uid)
        if born is None or entry.method != "POST" or (created := facts.creation(entry.uid)) is None:
            continue
        process, launch, _ = created
        looks = [
            each.version
            for each in facts.server.log[launch.begin : entry.sent]
            if each.who == process.name and each.plural == "jobsets" and each.name == entry.name and each.status == 404
        ]
        if not looks or looks[-1] >= born:
            yield f"{process.name} has created {entry.name}, whose name has the JobSet of an earlier job"


def revived(facts: Facts, moment: Moment) -> Iterator[str]:
    """An attempt that had failed when the next one was launched does not run again by itself."""
    for entry in facts.new_entries():
        job = facts.server.job(entry.uid) if entry.who == "trainer" else None
        if job is None or not is_active(job):
            continue
        for other in facts.counting(facts.server.works[entry.uid]):
            created = facts.creation(other["metadata"]["uid"])
            if created is None or facts.server.born[other["metadata"]["uid"]] <= facts.server.born[entry.uid]:
                continue
            process, launch, index = created
            looks = list(facts.lists(process, "trainjobs", launch.begin, index))
            if looks and looks[-1].version >= entry.failed:
                next_one = other["metadata"]["name"]
                yield f"{entry.name} runs again beside {next_one}, whose launch has seen that it failed"
