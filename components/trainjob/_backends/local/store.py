"""Jobs on disk.

::

    <home>/jobs/<namespace>/<name>/
        object.json     metadata and spec; written by clients, under `edit.lock`
        start.json      where and with which interpreter the job was launched
        status.json     status and pods; written only by the holder of `supervisor.lock`
        logs/           a CRI log file per rank
        termination/    a termination message per rank
        tmp/            TMPDIR of the ranks, while they run
        waiters.lock    shared by the processes that wait for the job
    <home>/jobs/<namespace>/.deleted/<name>     the name was used and is not used again

Each JSON file has the number of the format in `format`; a newer one is refused.

Directories have mode 0700 and files 0600; the home is checked at each access (`permissions`).

Every file is replaced atomically, so a reader sees the old or the new state. It is on the disk before anything relies
on it: a power failure loses neither a job nor the record that it has begun. The kernel releases a lock when its holder
ends: a process that gets `supervisor.lock` knows that no supervisor is alive, without a process ID, which another
process could have by now.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainjob import names
from trainjob._backends.local import permissions
from trainjob._support import durable
from trainjob._support.display import iso
from trainjob._support.foreign import Absent, Limits, Unreadable, mapping_of, read_regular
from trainjob._support.formats import wrong_format
from trainjob._support.kube_objects import mapping, mappings, name_of, rank_of
from trainjob.errors import ConfigurationError
from trainjob.progress.message import MAX_BYTES

DELETED = ".deleted"
KEEP = "trainjob.dev/keep"
"""Finalizer of a job that is cancelled and not removed: with it, ``deletionTimestamp`` requests a cancellation."""
FINAL = ("Complete", "Failed", "Cancelled")
"""Types of the conditions of a finished job."""
FORMAT = 1
"""Number of the format of all JSON files in the home."""
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
_LIMITS = Limits(64 << 20, depth=128, values=2_000_000, finite=False, of="a file of a job")

Stamp = tuple[int, int, int]


def now() -> str:
    """The current time as an API timestamp, with microseconds: a local job may finish within a second."""
    return iso(time.time(), "microseconds")


class OtherFormat(ConfigurationError):
    """A file in the home has another format than this trainjob reads, or is damaged."""


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None if the file does not exist.

    Raises:
        OtherFormat: A newer trainjob has written it, or it is not readable.
    """
    try:
        loaded = mapping_of(read_regular(path, _LIMITS.size), str(path), _LIMITS)
    except Absent:
        return None
    except Unreadable as error:
        raise _damaged(error, path) from None
    if problem := wrong_format(str(path), loaded.pop("format", None), FORMAT):
        raise OtherFormat(problem)
    return loaded


def _damaged(why: object, path: Path) -> OtherFormat:
    return OtherFormat(f"{why}; remove {path.parent}, or restore the file")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` atomically; the content is on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", opener=permissions.opener) as file:
        json.dump({"format": FORMAT, **value}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    durable.sync(path.parent)


class JobFiles:
    """The files of one job."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.object = directory / "object.json"
        self.start = directory / "start.json"
        self.status = directory / "status.json"
        self.home = directory.parents[2]

    @classmethod
    def create(cls, directory: Path, trainjob: Mapping[str, Any], start: Mapping[str, Any]) -> JobFiles:
        """Create the complete job under its name, atomically.

        Raises:
            FileExistsError: The name is or was in use.
            OSError: The disk is full, read-only, …
            ConfigurationError: Other users can write to the home.
        """
        permissions.make(directory.parents[2])
        make_namespace(directory.parent)
        draft = cls(directory.with_name(f".new-{uuid.uuid4().hex}"))
        try:
            for part in (".", "logs", "termination", "tmp"):
                (draft.directory / part).mkdir(mode=0o700)
            write_json(draft.object, trainjob)
            write_json(draft.start, start)
            if _tombstone(directory).exists():
                raise FileExistsError(directory)
            draft.directory.rename(directory)  # fails on a directory with content, as required
            durable.sync(directory.parent)
            if _tombstone(directory).exists():  # deleted between the two lines above: the name was used
                shutil.rmtree(directory, ignore_errors=True)
                raise FileExistsError(directory)
        except OSError as error:
            shutil.rmtree(draft.directory, ignore_errors=True)
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(directory) from error
            raise
        return cls(directory)

    def read(self) -> dict[str, Any] | None:
        """The TrainJob object with its status, or None if it does not exist."""
        trainjob = read_json(self.object)
        if trainjob is not None:
            trainjob["status"] = dict(mapping(read_json(self.status), "status"))
            known = mapping(trainjob, "metadata")
            texts = all(isinstance(known.get(name), str) for name in ("namespace", "name", "uid"))
            if not texts or not isinstance(trainjob.get("spec"), dict):
                raise _damaged(f"{self.object} is not a TrainJob", self.object)
            if _final(trainjob["status"]) and cancel_requested(trainjob):  # the cancellation is done, or came too late
                trainjob["metadata"].pop("deletionTimestamp", None)
                trainjob["metadata"].pop("finalizers", None)
        return trainjob

    def pods(self) -> list[dict[str, Any]]:
        """The pods of the job, from the last written status."""
        return [dict(pod) for pod in mappings(read_json(self.status) or {}, "pods")]

    def reported(self) -> str:
        """The termination message of rank 0 so far; empty without one."""
        for pod in self.pods():
            if rank_of(pod) in ("launcher-0", "node-0"):
                with suppress(Unreadable):
                    message = read_regular(self.directory / "termination" / name_of(pod), MAX_BYTES, cut=True)
                    return message.decode("utf-8", "replace")
        return ""

    def logged(self) -> dict[str, str]:
        """Pod -> rank, as ``node-0``, of all logs: a suspended job has logs and no pods."""
        prefix = f"{self.directory.name}-"
        pods = sorted(path.stem for path in (self.directory / "logs").glob(f"{prefix}*-0-*.log"))
        return {pod: pod.removeprefix(prefix).replace("-0-", "-", 1) for pod in pods}

    def stamp(self) -> tuple[Stamp, Stamp]:
        """A value that changes whenever the result of `read` does: one part for `object`, one for `status`."""
        return (_modified(self.object), _modified(self.status))

    def stored(self) -> float | None:
        """Unix time of the last write of the object; None if there is no object."""
        written, inode, _ = _modified(self.object)
        return written / 1e9 if inode else None

    def begun(self) -> bool:
        """Whether a supervisor has ever started the job: it writes a status before it starts ranks."""
        return bool((read_json(self.status) or {}).get("status"))

    def finished(self) -> bool:
        """Whether a final condition was written."""
        return _final(mapping(read_json(self.status), "status"))

    def write_status(self, status: Mapping[str, Any], pods: list[dict[str, Any]]) -> None:
        """Replace the status."""
        write_json(self.status, {"status": dict(status), "pods": pods})

    def write_object(self, trainjob: Mapping[str, Any]) -> None:
        """Replace metadata and spec."""
        write_json(self.object, trainjob)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Exclude other writers of `object`; FileNotFoundError if the job does not exist."""
        with open(self.directory / "edit.lock", "ab", opener=permissions.opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def remove(self) -> None:
        """Delete the job; its name cannot be used again."""
        tombstone = _tombstone(self.directory)
        tombstone.parent.mkdir(mode=0o700, exist_ok=True)
        tombstone.touch(0o600)
        durable.sync(tombstone.parent)
        removed = tombstone.with_name(f".{self.directory.name}.{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            self.directory.rename(removed)  # readers see an atomic removal
        shutil.rmtree(removed, ignore_errors=True)

    def wait(self) -> int | None:
        """Register this process as a waiter: an open file descriptor to keep, or None if the job does not exist."""
        try:
            descriptor = permissions.opener(str(self._waiters), os.O_RDWR | os.O_CREAT)
        except OSError:  # no job, or no space for a file: the job counts as unattended from now on
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # `waited_for` holds the lock for some microseconds
        return descriptor

    def waited_for(self) -> bool:
        """Whether a process waits for the job."""
        try:
            descriptor = permissions.opener(str(self._waiters), os.O_RDWR)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def _waiters(self) -> Path:
        return self.directory / "waiters.lock"

    def supervise(self, *, wait_seconds: float = 0.0) -> int | None:
        """Become the only writer of `status`: an open file descriptor to keep, or None while another process is."""
        try:
            descriptor = permissions.opener(str(self.directory / "supervisor.lock"), os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            return None
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    os.close(descriptor)
                    return None
                time.sleep(0.02)
            else:
                return descriptor

    def supervised(self) -> bool:
        """Whether a supervisor is alive."""
        lock = self.supervise()
        if lock is not None:
            os.close(lock)
        return lock is None and self.object.exists()


def _final(status: Mapping[str, Any]) -> bool:
    conditions = mappings(status, "conditions")
    return any(each.get("type") in FINAL and each.get("status") == "True" for each in conditions)


def cancel_metadata() -> dict[str, Any]:
    """Metadata that request the cancellation of a job; `cancel_requested` recognizes them."""
    return {"deletionTimestamp": now(), "finalizers": [KEEP]}


def cancel_requested(trainjob: Mapping[str, Any]) -> bool:
    """Whether the cancellation of a job is requested: it is terminated, and its files are kept."""
    return KEEP in (trainjob["metadata"].get("finalizers") or ())


def job_names(directory: Path) -> list[str]:
    """The names of the jobs of a namespace, by its directory; other files are left out."""
    try:
        with os.scandir(directory) as found:
            return sorted(each.name for each in found if names.JOB.fullmatch(each.name) and not each.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return []


def leftovers(home: Path, namespace: str, before: float) -> list[Path]:
    """Directories of interrupted launches and deletions, last changed before that Unix time."""
    directory = home / "jobs" / namespace
    found = [*directory.glob(".new-*"), *(directory / DELETED).glob(".*")]
    return sorted(path for path in found if path.lstat().st_mtime < before)


def make_namespace(directory: Path) -> None:
    """Create the directory of the jobs of a namespace, and the one above it, in a home that exists."""
    for level in (directory.parent, directory):
        if not level.exists():
            level.mkdir(mode=0o700, exist_ok=True)
            durable.sync(level.parent)


def _tombstone(directory: Path) -> Path:
    return directory.parent / DELETED / directory.name


def _modified(path: Path) -> Stamp:
    """Time, inode and size: two writes within one tick of the clock of the kernel (4 ms) have the same time."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)
