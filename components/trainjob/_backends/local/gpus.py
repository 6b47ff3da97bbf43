"""The GPUs of this machine, and the queue of the jobs of a home for them.

::

    <home>/gpus/<ticket>-<uid>.json   a job that has GPUs or waits for some, in the order of arrival
    <home>/gpus/lock                  held while a ticket is taken or GPUs are booked

No count is kept: what is free follows from the bookings of live jobs. A booking begins before the first rank and ends
after the last process of its job, with its supervisor: where that was killed, the next job in the queue first kills
what is left of the job. So a kill at any moment neither leaves a GPU booked nor gives one to two jobs.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from trainjob._backends.local import permissions
from trainjob._backends.local.conditions import end_lost
from trainjob._backends.local.runtimes import num_nodes, replicated_jobs
from trainjob._backends.local.store import JobFiles, OtherFormat, read_json, write_json
from trainjob.settings import Settings

RESOURCE = "nvidia.com/gpu"
_CHECK_SECONDS = 0.5  # between two checks of the first job in the queue
_SLOWEST_CHECK = 10  # at the tenth place and after it, this many times as long: each check reads the whole queue
_DAEMON = "nvidia-cuda-mps-server"  # shares its GPU with the processes of other jobs


def per_node(trainjob: Mapping[str, Any]) -> int:
    """Number of GPUs that each node requests."""
    resources = (trainjob["spec"].get("trainer") or {}).get("resourcesPerNode") or {}
    return max(int((resources.get(kind) or {}).get(RESOURCE, 0)) for kind in ("limits", "requests"))


def present() -> Counter[str]:
    """Index of each GPU -> number of nodes that can have it at once.

    These are the GPUs that ``nvidia-smi`` lists and ``CUDA_VISIBLE_DEVICES`` does not hide, each once. With
    ``TRAINJOB_LOCAL_GPUS`` there are as many as it says, in turn on these GPUs.
    """
    found = dict(_query("gpu=index,uuid"))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        names = {name: index for index, uuid in found.items() for name in (index, uuid)}
        found = {names[name]: "" for each in visible.split(",") if (name := each.strip()) in names}
    count = Settings().local_gpus
    if count is None:
        return Counter(dict.fromkeys(found, 1))
    return Counter(islice(cycle(found or map(str, range(count))), count))


def _others() -> dict[str, str]:
    """Index of each GPU that processes use -> one of these. The GPUs of jobs are among them."""
    if Settings().local_gpus is not None:
        return {}
    indices = {uuid: index for index, uuid in _query("gpu=index,uuid")}
    used = _query("compute-apps=gpu_uuid,pid,process_name")
    return {
        indices[uuid]: f"process {pid} ({Path(name).name})"
        for uuid, pid, name in used
        if uuid in indices and Path(name).name != _DAEMON
    }


def _query(what: str) -> list[list[str]]:
    """The rows that ``nvidia-smi`` prints, with as many columns as were asked for; none without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{what}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    commas = what.count(",")
    rows = [[part.strip() for part in line.split(",", commas)] for line in answer.splitlines()]
    return [row for row in rows if len(row) == commas + 1]


def place(trainjob: Mapping[str, Any], free: Mapping[str, int]) -> list[list[str]] | None:
    """The GPUs of each rank, different ones within a rank; None if they do not fit. mpirun gets those of all nodes."""
    ranks = sum(replicated_jobs(trainjob).values())
    each = per_node(trainjob) * num_nodes(trainjob) // ranks
    left, placed = Counter(free), []
    for _ in range(ranks):
        chosen = [gpu for gpu, count in left.most_common(each) if count > 0]
        if len(chosen) < each:
            return None
        left.subtract(chosen)
        placed.append(chosen)
    return placed


def refusal(trainjob: Mapping[str, Any]) -> str:
    """Why this machine has too few GPUs for a job even if it runs no other; empty if it has enough."""
    if not (each := per_node(trainjob)) or place(trainjob, there := present()) is not None:
        return ""
    shared = "" if there.total() == len(there) else f" (TRAINJOB_LOCAL_GPUS: {there.total()})"
    return (
        f"cannot be scheduled on this machine: it requests {num_nodes(trainjob)} node(s) x {each} {RESOURCE}, and this "
        f"machine has {len(there)}{shared}; request fewer in resources_per_node, or run it on a cluster"
    )


@dataclass(frozen=True)
class Place:
    """A job in the queue: its file, its namespace and name, and its GPUs; none while it waits."""

    path: Path
    job: str
    gpus: Sequence[str]


def places(directory: Path) -> list[Place]:
    """The jobs in a queue, first those that have GPUs.

    Raises:
        OtherFormat: A place cannot be read: which GPUs it has is unknown.
    """
    found = []
    for path in sorted(directory.glob("[0-9]*.json")):
        if (content := read_json(path)) is None:  # it has left in the meantime
            continue
        job, gpus = content.get("job"), content.get("gpus")
        if not isinstance(job, str) or not isinstance(gpus, list):
            raise OtherFormat(f"{path} is damaged; remove it when no job with GPUs runs")
        found.append(Place(path, job, [str(gpu) for gpu in gpus]))
    return found


class GpuQueue:
    """The place of one job in the queue of its home. First in, first out: a job waits for all before it.

    Args:
        files: The files of the job.
        trainjob: Its object.

    Attributes:
        gpus: The GPUs of each rank; empty while the job waits, and if it needs none.
    """

    def __init__(self, files: JobFiles, trainjob: Mapping[str, Any]) -> None:
        self.gpus: list[list[str]] = []
        self._home, self._directory = files.home, files.home / "gpus"
        self._trainjob = trainjob
        self._job = f"{files.directory.parent.name}/{files.directory.name}"
        self._needs = per_node(trainjob) * num_nodes(trainjob)
        self._path: Path | None = None
        self._why = ""
        self._next_check = 0.0

    def enter(self) -> None:
        """Take the last place. Does nothing for a job that has one, or needs no GPUs."""
        if not self._needs or self._path is not None:
            return
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            last = max((int(each.path.name.partition("-")[0]) for each in places(self._directory)), default=0)
            path = self._directory / f"{last + 1:08}-{self._trainjob['metadata']['uid']}.json"
            write_json(path, {"job": self._job, "gpus": []})
        self._path = path

    def book(self) -> str:
        """Book the GPUs of the job. Returns what it waits for; empty once it has them, and if it needs none."""
        if not self._needs or self.gpus or time.monotonic() < self._next_check:
            return self._why
        position = 1
        try:
            self.enter()
            position, self._why = self._book()
        except OSError as error:
            self._why = f"GPUs cannot be booked in {self._directory}: {error.strerror}"
        except OtherFormat as error:
            self._why = f"GPUs cannot be booked: {error}"
        self._next_check = time.monotonic() + _CHECK_SECONDS * min(position, _SLOWEST_CHECK)
        return self._why

    def leave(self) -> None:
        """Give up the place and the GPUs. No process of the job may be left."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path, self.gpus, self._why, self._next_check = None, [], "", 0.0

    def _book(self) -> tuple[int, str]:
        """Book the GPUs if they are free. Returns the position in the queue, and why the job waits."""
        there = present()
        position, why, placed = self._plan(there, [each for each in places(self._directory) if self._is_live(each)], {})
        if not placed:
            return position, why
        others = _others()
        with self._locked():
            position, why, placed = self._plan(there, places(self._directory), others)
            if placed and self._path is not None:
                write_json(self._path, {"job": self._job, "gpus": [*chain.from_iterable(placed)]})
                self.gpus = placed
        return position, why

    def _plan(
        self, there: Counter[str], jobs: Sequence[Place], others: Mapping[str, str]
    ) -> tuple[int, str, list[list[str]]]:
        """The position of the job, why it waits, and its GPUs; none while it waits."""
        before = [each for each in jobs if not each.gpus and self._path is not None and each.path < self._path]
        users = {gpu: f"TrainJob {each.job}" for each in jobs for gpu in each.gpus}
        free = Counter(there)
        free.subtract(gpu for each in jobs for gpu in each.gpus)
        for gpu in others.keys() - users.keys():
            free[gpu] = 0
        placed = None if before else place(self._trainjob, free)
        if placed is not None:
            return 1, "", placed
        used = [f"GPU {gpu} is used by {who}" for gpu in there if (who := users.get(gpu) or others.get(gpu))]
        why = f"waiting for {self._needs} of the {there.total()} GPUs of this machine, position {len(before) + 1}"
        return len(before) + 1, "; ".join([why, *used]), []

    def _is_live(self, each: Place) -> bool:
        """Whether a job is in the queue rightly; otherwise removes it."""
        files = JobFiles(self._home / "jobs" / each.job)
        uid = each.path.stem.partition("-")[2]
        if each.path == self._path or (files.object.exists() and not end_lost(files, uid)):
            return True
        each.path.unlink(missing_ok=True)
        return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self._directory / "lock", "ab", opener=permissions.opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
