"""Jobs on disk.

::

    <home>/jobs/<namespace>/<name>/
        object.json     metadata and spec; written by clients, under `edit.lock`
        start.json      where and with which interpreter the job was launched
        status.json     status and pods; written only by whoever holds `supervisor.lock`
        logs/           a CRI log file per rank
        termination/    a termination message per rank
        tmp/            TMPDIR of the ranks, while they run
        waiters.lock    shared by the processes that wait for the job
        spare           room for the last status, or to cancel the job, when the disk is full
    <home>/jobs/<namespace>/.deleted/<name>     the name was used and will not be used again

Directories have mode 0700 and files 0600, and all must belong to the user of this process (`private`).

Every file is replaced as a whole, so a reader sees an old or a new state and never half of one. It is on the disk
before anything relies on it: a machine that loses its power forgets neither a job nor that it has begun. A lock is the
kernel's and ends with its holder: a process that gets `supervisor.lock` knows that no supervisor is alive, without a
process ID that could belong to another process.
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainjob import durable, names
from trainjob.backends.local import private

DELETED = ".deleted"
KEEP = "trainjob.dev/keep"
"""Finalizer of a job that is to be ended and not removed: with it, ``deletionTimestamp`` asks for a cancel."""
FINAL = ("Complete", "Failed", "Cancelled")
"""Types of the conditions that end a job."""
_SPARE = 64 * 1024  # bytes: the status of a dozen ranks with termination messages as long as they may be

Stamp = tuple[int, int, int]


def now() -> str:
    """The present as an API timestamp, with microseconds: a local job may be over within one second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`, or None if the file is not there.

    Raises:
        ConfigurationError: another user can have written it.
    """
    try:
        loaded: dict[str, Any] = json.loads(private.read(path))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return loaded


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` as a whole; on the disk when this returns."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", opener=private.opener) as file:
        json.dump(value, file, indent=1)
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
        self._spare = directory / "spare"

    @classmethod
    def opened(cls, directory: Path) -> JobFiles:
        """The files of a job, which need not be there.

        Raises:
            ConfigurationError: the home, the job, or a directory between them is not this user's alone.
        """
        check_levels(directory)
        return cls(directory)

    @classmethod
    def create(cls, directory: Path, trainjob: Mapping[str, Any], start: Mapping[str, Any]) -> JobFiles:
        """Put a whole job under its name in one step.

        Raises:
            FileExistsError: the name is or was in use.
            OSError: the disk is full, read-only, …
            ConfigurationError: the directories above are not this user's alone.
        """
        for level in _levels(directory)[:-1]:
            private.make(level, link=level == _home(directory))
        draft = cls(directory.with_name(f".new-{uuid.uuid4().hex}"))
        try:
            for part in (".", "logs", "termination", "tmp"):
                (draft.directory / part).mkdir(mode=0o700)
            write_json(draft.object, trainjob)
            write_json(draft.start, start)
            with open(draft._spare, "wb", opener=private.opener) as spare:
                spare.write(os.urandom(_SPARE))  # file systems may compress what is simpler
            if _tombstone(directory).exists():
                raise FileExistsError(directory)
            os.rename(draft.directory, directory)  # noqa: PTH104 - fails on a directory with content, as it should
            durable.sync(directory.parent)
            if _tombstone(directory).exists():  # deleted between the two lines above: the name is used up
                shutil.rmtree(directory, ignore_errors=True)
                raise FileExistsError(directory)
        except OSError as error:
            shutil.rmtree(draft.directory, ignore_errors=True)
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(directory) from error
            raise
        return cls(directory)

    def read(self) -> dict[str, Any] | None:
        """The TrainJob object with its status, or None if it is gone."""
        trainjob = read_json(self.object)
        if trainjob is not None:
            trainjob["status"] = (read_json(self.status) or {}).get("status") or {}
            if _final(trainjob["status"]) and kept(trainjob):  # what was asked for is done, or came too late
                trainjob["metadata"].pop("deletionTimestamp", None)
                trainjob["metadata"].pop("finalizers", None)
        return trainjob

    def pods(self) -> list[dict[str, Any]]:
        """The job's pods as they were written last."""
        return list((read_json(self.status) or {}).get("pods") or [])

    def logged(self) -> dict[str, str]:
        """Pod -> rank, as ``node-0``, of all that have a log: those of a suspended job are no pods any more."""
        prefix = f"{self.directory.name}-"
        pods = sorted(path.stem for path in (self.directory / "logs").glob(f"{prefix}*-0-*.log"))
        return {pod: pod.removeprefix(prefix).replace("-0-", "-", 1) for pod in pods}

    def stamp(self) -> tuple[Stamp, Stamp]:
        """Changes whenever `read` would give something new: one part for `object`, one for `status`."""
        return (_modified(self.object), _modified(self.status))

    def stored(self) -> float | None:
        """When the object was last written, as Unix time; None if there is none."""
        written, inode, _ = _modified(self.object)
        return written / 1e9 if inode else None

    def begun(self) -> bool:
        """Whether a supervisor has taken charge of the job at any time: it writes a status before it starts ranks."""
        return bool((read_json(self.status) or {}).get("status"))

    def finished(self) -> bool:
        """True once a final condition was written."""
        return _final((read_json(self.status) or {}).get("status") or {})

    def write_status(self, status: Mapping[str, Any], pods: list[dict[str, Any]]) -> None:
        """Replace the status. The last one need not wait for room."""
        value = {"status": dict(status), "pods": pods}
        if not _final(status):
            write_json(self.status, value)
            return
        self._write_anyhow(self.status, value)
        self._spare.unlink(missing_ok=True)

    def write_object(self, trainjob: Mapping[str, Any]) -> None:
        """Replace metadata and spec. This need not wait either: it may be to cancel the job that fills the disk."""
        self._write_anyhow(self.object, trainjob)

    def _write_anyhow(self, path: Path, value: Mapping[str, Any]) -> None:
        try:
            write_json(path, value)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._spare.exists():
                raise
            self._spare.unlink(missing_ok=True)
            write_json(path, value)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Exclude other writers of `object`; FileNotFoundError if the job is gone."""
        with open(self.directory / "edit.lock", "ab", opener=private.opener) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def remove(self) -> None:
        """Delete the job for good; its name stays taken."""
        self._spare.unlink(missing_ok=True)  # the name of what is gone takes room, too
        tombstone = _tombstone(self.directory)
        private.make(tombstone.parent)
        tombstone.touch(0o600)
        durable.sync(tombstone.parent)
        grave = tombstone.with_name(f".{self.directory.name}.{uuid.uuid4().hex}")
        with suppress(FileNotFoundError):
            os.rename(self.directory, grave)  # noqa: PTH104 - gone for readers in one step
        shutil.rmtree(grave, ignore_errors=True)

    def wait(self) -> int | None:
        """Become one of those who wait for the job: an open file descriptor to keep, or None if the job is gone."""
        try:
            descriptor = private.opener(str(self._waiters), os.O_RDWR | os.O_CREAT)
        except OSError:  # gone, or no room for a file: the job counts as unattended from now on
            return None
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # `waited_for` holds it for some microseconds
        return descriptor

    def waited_for(self) -> bool:
        """Whether some process waits for the job."""
        try:
            descriptor = os.open(self._waiters, os.O_RDWR | os.O_CLOEXEC)
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
        """Become the one who may write `status`: an open file descriptor to keep, or None while another one is."""
        try:
            descriptor = private.opener(str(self.directory / "supervisor.lock"), os.O_RDWR | os.O_CREAT)
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


def _final(status: Mapping[str, Any]) -> bool:
    conditions = status.get("conditions") or []
    return any(c["type"] in FINAL and c["status"] == "True" for c in conditions)


def ending() -> dict[str, Any]:
    """Metadata that ask for a job to be cancelled; `kept` recognizes them."""
    return {"deletionTimestamp": now(), "finalizers": [KEEP]}


def kept(trainjob: Mapping[str, Any]) -> bool:
    """Whether a job is to be cancelled, and its files kept."""
    return KEEP in (trainjob["metadata"].get("finalizers") or ())


def job_names(home: Path, namespace: str) -> list[str]:
    """The names of the jobs of a namespace; files beside them are left out.

    Raises:
        ConfigurationError: a directory down to the namespace is not this user's alone.
    """
    directory = home / "jobs" / namespace
    check_levels(directory / DELETED)
    try:
        with os.scandir(directory) as found:
            return sorted(each.name for each in found if names.JOB.fullmatch(each.name) and not each.is_file())
    except FileNotFoundError:
        return []


def leftovers(home: Path, namespace: str, before: float) -> list[Path]:
    """Directories of launches and deletions that were killed midway, last changed before that Unix time.

    Raises:
        ConfigurationError: a directory down to the namespace is not this user's alone.
    """
    directory = home / "jobs" / namespace
    check_levels(directory / DELETED)
    found = [*directory.glob(".new-*"), *(directory / DELETED).glob(".*")]
    return sorted(path for path in found if path.lstat().st_mtime < before)


def check_levels(directory: Path) -> None:
    """Check the directory of a job, and those above it up to the home, as far as they are there.

    Raises:
        ConfigurationError: one of them is not this user's alone.
    """
    for level in _levels(directory):
        if not private.check(level, link=level == _home(directory)):
            return


def _home(directory: Path) -> Path:
    return directory.parents[2]


def _levels(directory: Path) -> list[Path]:
    """The home, ``jobs``, the namespace, the job."""
    return [*reversed(directory.parents[:3]), directory]


def _tombstone(directory: Path) -> Path:
    return directory.parent / DELETED / directory.name


def _modified(path: Path) -> Stamp:
    """A file's time alone would not do: two writes within one tick of the kernel's clock (4 ms) have the same."""
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return (0, 0, 0)
    return (stat.st_mtime_ns, stat.st_ino, stat.st_size)
