"""Directories and files that belong to the user of this process and that other users can neither read nor write.

A job on disk is a program: its supervisor runs the command in ``object.json`` and ``start.json``. So jobs are read only
from directories and files that no other user can have written, and the backend creates everything without access for
other users.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from trainjob._support import durable
from trainjob._support.foreign import Absent, Unreadable, open_regular, read_opened
from trainjob.errors import ConfigurationError

_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ANY = stat.S_IRWXG | stat.S_IRWXO


def check(directory: Path, *, link: bool = False) -> bool:
    """Whether `directory` exists. Removes the access that other users have to one of this user.

    Checks only `directory` itself: other users cannot reach anything below a directory that passed.

    Args:
        directory: The directory.
        link: Whether it may be a link, of this user or root, to a directory that passes.

    Raises:
        ConfigurationError: It belongs to another user, other users can write to it, or it is not a directory.
    """
    status = _status(directory, link)
    if status is None:
        return False
    if problem := _problem_of_directory(directory, status):
        raise ConfigurationError(problem)
    if status.st_mode & _ANY:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if link else os.O_NOFOLLOW))
        try:
            status = os.fstat(descriptor)
            if problem := _problem(directory, status):  # it was replaced in the meantime
                raise ConfigurationError(problem)
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_ANY)
        finally:
            os.close(descriptor)
    return True


def refusal(directory: Path, *, link: bool = False) -> str:
    """Why `check` refuses `directory`; empty if it accepts it. Changes nothing."""
    status = _status(directory, link)
    return "" if status is None else _problem_of_directory(directory, status)


def read_private(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes.

    Raises:
        FileNotFoundError: It does not exist.
        ConfigurationError: It is a link, belongs to another user, or other users can write to it.
        Unreadable: It is longer, is not a regular file, or cannot be read.
    """
    try:
        with open_regular(path) as file:
            if problem := _problem(path, os.fstat(file.fileno())):
                raise ConfigurationError(problem)
            return read_opened(file, path, limit)
    except Absent:
        raise FileNotFoundError(path) from None
    except Unreadable:
        status = path.lstat()
        if problem := _link(path, status) if stat.S_ISLNK(status.st_mode) else _problem(path, status):
            raise ConfigurationError(problem) from None
        raise


def make(directory: Path, *, link: bool = False) -> None:
    """Create `directory` with mode 0700 unless it exists; missing parents get the mode of the umask.

    Raises:
        ConfigurationError: It exists, and `check` refuses it.
    """
    if check(directory, link=link):
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigurationError(f"{directory} is a link to a directory that does not exist; create it") from None
    durable.sync(directory.parent)
    check(directory, link=link)  # another process may have created it


def opener(path: str, flags: int) -> int:
    """Opener for `open`: creates files with mode 0600, follows no link and waits for no reader of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


_RULE = "trainjob runs only jobs that no other user can have written"


def _status(directory: Path, link: bool) -> os.stat_result | None:
    """Status of the directory, or of a link that may not be followed; None if neither exists."""
    try:
        status = directory.lstat()
        trusted = link and status.st_uid in (os.geteuid(), 0)
        return directory.stat() if trusted and stat.S_ISLNK(status.st_mode) else status
    except (FileNotFoundError, NotADirectoryError):
        return None


def _problem_of_directory(directory: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return _link(directory, status)
    if not stat.S_ISDIR(status.st_mode):
        return f"{directory} is not a directory; remove it, or set TRAINJOB_HOME to another directory"
    return _problem(directory, status)


def _problem(path: Path, status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return (
            f"{path} belongs to another user{_of(status)}; {_RULE}. "
            "Remove it, or set TRAINJOB_HOME to a directory that you own"
        )
    if status.st_mode & _WRITE:
        return (
            f"{path} is writable by other users{_of(status)}; {_RULE}. Remove files that you do not know, then run: "
            f"chmod -R go-rwx {shlex.quote(str(path))}; or set TRAINJOB_HOME to a directory that you own"
        )
    return ""


def _link(path: Path, status: os.stat_result) -> str:
    return f"{path} is a link{_of(status)}; {_RULE}. Remove the link"


def _of(status: os.stat_result) -> str:
    return f" (uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; this process has uid {os.geteuid()})"
