"""Questions about the history of a world, from the server's log: who looked when, who launched what, who stopped it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from tests.fakes.kube.cluster import Cluster
from tests.fakes.kube.objects import Object
from tests.fakes.kube.server import Entry
from tests.simulation.processes import STOPS, STOPS_OF_A_TRY, Launch, Process
from tests.simulation.virtual import EPOCH

_KEY = "trainjob.dev/key="  # in the selector of all attempts of a key

Moment = Literal["step", "quiet", "reaped", "end"]
"""When properties are judged, see `tests.simulation.properties`."""


@dataclass
class Facts:
    """What properties are judged by: the server's state and log, and which processes live.

    Attributes:
        server: The cluster.
        processes: All processes.
        judged: Length of the log that has been judged.
        ended: Names of the processes whose end has been judged.
        seen: Version of the server, and number of ended processes and launches, at the latest check.
    """

    server: Cluster
    processes: Sequence[Process]
    judged: int = 0
    ended: set[str] = field(default_factory=set)
    seen: tuple[int, int] = (0, 0)

    # --- what is new since the latest check

    def new_entries(self) -> list[Entry]:
        """The entries of the log that have not been judged."""
        return self.server.log[self.judged :]

    def new_ends(self) -> list[Process]:
        """The processes that have ended by themselves, and whose end has not been judged."""
        return [each for each in self.processes if each.done and each.name not in self.ended]

    def process_of(self, entry: Entry) -> Process | None:
        """The process that has sent a request."""
        return next((each for each in self.processes if each.name == entry.who), None)

    # --- jobs

    def attempts(self) -> dict[str, list[Object]]:
        """The attempts that exist, by their key."""
        found: dict[str, list[Object]] = {}
        for job in self.server.jobs():
            if key := self.server.works[job["metadata"]["uid"]]:
                found.setdefault(key, []).append(job)
        return found

    def counting(self, key: str) -> list[Object]:
        """The attempts of a key that are active or queued."""
        return [job for job in self.server.jobs(key) if job["metadata"]["uid"] in self.server.claims]

    def name(self, uid: str) -> str:
        """Name of a job, also after its deletion."""
        return next((each.name for each in self.server.log if each.uid == uid and each.plural == "trainjobs"), uid)

    def deleting_seconds(self, job: Object) -> float:
        """For how long a job is being deleted."""
        since = job["metadata"].get("deletionTimestamp")
        if since is None:
            return 0.0
        return EPOCH + self.server.now - datetime.strptime(since, "%Y-%m-%dT%H:%M:%S%z").timestamp()

    # --- looks

    def lists(self, process: Process, plural: str, begin: int, end: int | None = None) -> Iterator[Entry]:
        """The lists that a process got, between two lengths of the log; of TrainJobs those of its key."""
        for entry in self.server.log[begin:end]:
            if (
                entry.who == process.name
                and entry.is_list(plural)
                and (plural != "trainjobs" or _KEY in entry.selector)
            ):
                yield entry

    def first_look(self, process: Process, launch: Launch, plural: str = "trainjobs") -> int | None:
        """Version of the first list in a launch."""
        return next((each.version for each in self.lists(process, plural, launch.begin, launch.end)), None)

    def last_look(self, process: Process, launch: Launch, plural: str = "trainjobs") -> int | None:
        """Version of the last list in a launch."""
        looks = list(self.lists(process, plural, launch.begin, launch.end))
        return looks[-1].version if looks else None

    # --- launches

    def launches(self, key: str) -> Iterator[tuple[Process, Launch]]:
        """The launches of a key."""
        for process in self.processes:
            if process.key == key:
                for launch in process.launches:
                    yield process, launch

    def creation(self, uid: str) -> tuple[Process, Launch, int] | None:
        """Who has created a job, in which launch, and the length of the log before it."""
        for index, entry in enumerate(self.server.log):
            if entry.uid == uid and entry.method == "POST" and entry.plural == "trainjobs":
                process = self.process_of(entry)
                if process is not None:
                    begun = [launch for launch in process.launches if launch.begin <= entry.sent]
                    return process, begun[-1], index
        return None

    def launched(self, uid: str) -> Iterator[tuple[Process, Launch]]:
        """The launches that have created, changed or returned a job, also by a request that arrived after them."""
        for process in self.processes:
            for number, launch in enumerate(process.launches):
                following = process.launches[number + 1 :]
                entries = self.server.log[launch.begin : following[0].begin if following else None]
                own = [each for each in entries if each.who == process.name and each.uid == uid]
                during = self.server.log[launch.begin : launch.end]
                changed = any(each.changes("trainjobs") and (each in during or each.adopts()) for each in own)
                if launch.uid == uid or changed:
                    yield process, launch

    def recorded(self, uid: str) -> Iterator[tuple[Process, Launch]]:
        """The launches that a job shows: where changes are refused, an adoption is not written on it."""
        for process, launch in self.launched(uid):
            entries = self.server.log[launch.begin : launch.end]
            if any(each.who == process.name and each.uid == uid and each.adopts() for each in entries):
                yield process, launch

    def created_in(self, process: Process, launch: Launch) -> set[str]:
        """UIDs of the jobs that a launch has created."""
        entries = self.server.log[launch.begin : launch.end]
        created = [each for each in entries if each.method == "POST" and each.plural == "trainjobs"]
        return {each.uid for each in created if each.who == process.name}

    def deleted_own(self, process: Process, launch: Launch, record: int) -> set[str]:
        """Names of the jobs that a launch has created, and has deleted after the record of a cancel."""
        own = self.created_in(process, launch)
        entries = (each for each in self.server.log[launch.begin : launch.end] if each.who == process.name)
        return {each.name for each in entries if each.method == "DELETE" and each.uid in own and each.version > record}

    def is_launching(self, key: str) -> bool:
        """Whether a living process is launching that key."""
        return any(each.key == key and each.is_launching for each in self.processes)

    # --- stops

    def stops(self, key: str) -> Iterator[tuple[Process, int | None]]:
        """The stops of a key, each with the version of its record; None if it left none, see `record`."""
        for process in self.processes:
            if process.kind in STOPS and process.key == key:
                yield process, self.record(process)

    def record(self, stop: Process) -> int | None:
        """Version of the record that a stop has left: of its last write while it ran; without one, that after its
        latest look.

        None if it may not write Leases.
        """
        end = stop.end if stop.done else None
        written = [
            each for each in self.server.log[stop.begin : end] if each.who == stop.name and each.changes("leases")
        ]
        if written or "leases" in self.server.forbidden[1]:
            return written[-1].version if written else None
        looks = list(self.lists(stop, "trainjobs", stop.begin, end))
        return looks[-1].version + 1 if looks else None

    def cancel_of(self, process: Process, uid: str) -> int | None:
        """Version of the latest record of a cancel of that job that a process has written; None without one."""
        own = (each for each in self.server.log if each.who == process.name and each.changes("leases"))
        return max((each.version for each in own if "cancelled" in each.name and uid in str(each.body)), default=None)

    def latest_record(self, stop: Process) -> int | None:
        """The same, of its last write also if that arrived after the stop had ended."""
        late = [each.version for each in self.server.log if each.who == stop.name and each.changes("leases")]
        return late[-1] if late else self.record(stop)

    def is_newer(self, process: Process, launch: Launch, stop: Process, record: int) -> bool:
        """Whether a launch does not obey a stop: it began after the stop's record, or is that of a later try."""
        if stop.kind in STOPS_OF_A_TRY and process.tried > stop.tried:
            return True
        begin = self.first_look(process, launch, "leases")
        return begin is not None and begin >= record
