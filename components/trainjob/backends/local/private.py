"""Directories and files that belong to the user of this process, and that other users can neither write nor read.

A job on disk is a program: its supervisor runs what ``object.json`` and ``start.json`` say. So jobs are read only from
directories and files that no other user can have written, and all that the backend creates is closed to other users.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from trainjob import durable
from trainjob.errors import ConfigurationError

_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ANY = stat.S_IRWXG | stat.S_IRWXO


def check(directory: Path, *, link: bool = False) -> bool:
    """Whether `directory` is there. One of this user that others can read, as earlier versions made it, is closed.

    Only `directory` itself is checked: all that lies below one that passed is out of reach for other users.

    Args:
        directory: The directory.
        link: Whether it may be a link, of this user or root, to a directory that passes.

    Raises:
        ConfigurationError: it belongs to another user, can be written by others, or is no directory.
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
            if problem := _problem(directory, status):  # it was replaced since
                raise ConfigurationError(problem)
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_ANY)
        finally:
            os.close(descriptor)
    return True


def refusal(directory: Path, *, link: bool = False) -> str:
    """Why `check` refuses `directory`; empty if it does not. Changes nothing."""
    status = _status(directory, link)
    return "" if status is None else _problem_of_directory(directory, status)


def read(path: Path) -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: it is not there.
        ConfigurationError: it is a link, belongs to another user, or can be written by others.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        if problem := _problem(path, path.lstat()):
            raise ConfigurationError(problem) from None
        raise
    except OSError:
        if path.is_symlink():
            raise ConfigurationError(_link(path, path.lstat())) from None
        raise
    with os.fdopen(descriptor, "rb") as file:
        if problem := _problem(path, os.fstat(descriptor)):
            raise ConfigurationError(problem)
        return file.read()


def make(directory: Path, *, link: bool = False) -> None:
    """Create `directory` unless it is there, with mode 0700; parents that are missing get the mode of the umask.

    Raises:
        ConfigurationError: it is there, and `check` refuses it.
    """
    if check(directory, link=link):
        return
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigurationError(f"{directory} is a link to a directory that is not there; create it") from None
    durable.sync(directory.parent)
    check(directory, link=link)  # another process may have created it


def opener(path: str, flags: int) -> int:
    """For `open`: a file that is created gets mode 0600, and a link is not followed."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


_RULE = "trainjob runs only jobs that no other user can have written"


def _status(directory: Path, link: bool) -> os.stat_result | None:
    """Of the directory, or of a link that is not followed; None if there is nothing."""
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
            "Remove it, or set TRAINJOB_HOME to a directory of your own"
        )
    if status.st_mode & _WRITE:
        return (
            f"{path} can be written by other users{_of(status)}; {_RULE}. Remove what you do not know in it, then run: "
            f"chmod -R go-rwx {shlex.quote(str(path))}; or set TRAINJOB_HOME to a directory of your own"
        )
    return ""


def _link(path: Path, status: os.stat_result) -> str:
    return f"{path} is a link{_of(status)}; {_RULE}. Remove the link"


def _of(status: os.stat_result) -> str:
    return f" (uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; this process has uid {os.geteuid()})"
