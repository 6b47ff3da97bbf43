"""Lists the processes of jobs on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trainjob._backends.local import supervisor

MARKER = "TRAINJOB_LOCAL_UID"
_SUPERVISOR = f"\0{supervisor.__name__}\0".encode()


def marked(uid: str = "", under: Path | None = None) -> dict[int, str]:
    """Processes with the local backend's marker: pid -> command line.

    Args:
        uid: Only processes of this job.
        under: Only processes of jobs launched with a ``TRAINJOB_HOME`` below this directory.
    """
    found = {}
    for process, command, environment in _processes():
        mine = under is None or f"\0TRAINJOB_HOME={under}/".encode() in environment
        if mine and f"\0{MARKER}={uid}".encode() + (b"\0" if uid else b"") in environment:
            found[process] = _shown(command)
    return found


def supervisors(under: Path) -> dict[int, str]:
    """The supervisors of jobs below this directory, and their guards: pid -> command line."""
    return {
        process: _shown(command)
        for process, command, _ in _processes()
        if _SUPERVISOR in command and f"\0{under}/".encode() in command
    }


def _processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Process id, command line and environment; in the latter two, each word is between NULs."""
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else []:
        if entry.name.isdigit():
            with suppress(OSError):
                command, environment = ((entry / each).read_bytes() for each in ("cmdline", "environ"))
                yield int(entry.name), b"\0" + command, b"\0" + environment + b"\0"


def _shown(command: bytes) -> str:
    return command.replace(b"\0", b" ").strip().decode(errors="replace")
