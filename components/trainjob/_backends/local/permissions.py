"""The home of jobs belongs to the user of this process, and no other user can read or write anything in it.

A job on disk is a program: its supervisor runs the command in ``object.json`` and ``start.json``. Other users cannot
reach anything below a directory of mode 0700, so the home alone is checked, at each access to a job.
"""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path

from trainjob._support import durable
from trainjob.errors import ConfigurationError

_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ANY = stat.S_IRWXG | stat.S_IRWXO
_RULE = "trainjob runs only jobs that no other user can have written"


def check(home: Path) -> None:
    """Check the home, which need not exist. Removes the access of other users who can only read it.

    Raises:
        ConfigurationError: It belongs to another user, other users can write to it, or it is not a directory.
    """
    if problem := refusal(home):
        raise ConfigurationError(problem)
    try:
        descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    try:
        status = os.fstat(descriptor)
        if problem := _problem(home, status):  # it was replaced since
            raise ConfigurationError(problem)
        if status.st_mode & _ANY:
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~_ANY)
    finally:
        os.close(descriptor)


def refusal(home: Path) -> str:
    """Why `check` refuses the home; empty if it accepts it. Changes nothing."""
    try:
        status = home.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (os.geteuid(), 0):  # its owner can redirect it
            return f"{home} is a link{_of(status)}; {_RULE}. Remove the link"
        return _problem(home, home.stat())
    except (FileNotFoundError, NotADirectoryError):
        return ""


def make(home: Path) -> None:
    """Create the home with mode 0700 unless it exists; missing parents get the mode of the umask.

    Raises:
        ConfigurationError: `check` refuses it.
    """
    if not home.exists():
        try:
            home.mkdir(mode=0o700, parents=True, exist_ok=True)
        except FileExistsError:
            raise ConfigurationError(f"{home} is a link to a directory that does not exist; create it") from None
        durable.sync(home.parent)
    check(home)


def opener(path: str, flags: int) -> int:
    """Opener for `open`: creates files with mode 0600, follows no link and waits for no reader of a FIFO."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def _problem(home: Path, status: os.stat_result) -> str:
    if not stat.S_ISDIR(status.st_mode):
        return f"{home} is not a directory; remove it, or set TRAINJOB_HOME to another directory"
    if status.st_uid != os.geteuid():
        return (
            f"{home} belongs to another user{_of(status)}; {_RULE}. "
            "Remove it, or set TRAINJOB_HOME to a directory that you own"
        )
    if status.st_mode & _WRITE:
        return (
            f"{home} is writable by other users{_of(status)}; {_RULE}. Remove files that you do not know, then run: "
            f"chmod -R go-rwx {shlex.quote(str(home))}; or set TRAINJOB_HOME to a directory that you own"
        )
    return ""


def _of(status: os.stat_result) -> str:
    return f" (uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}; this process has uid {os.geteuid()})"
