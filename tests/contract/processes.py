"""Which processes of jobs there are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MARKER = "TRAINJOB_LOCAL_UID"
_SUPERVISOR = b"\0trainjob.backends.local.supervisor\0"


def marked(uid: str = "", under: Path | None = None) -> dict[int, str]:
    """Processes that carry the local backend's mark: pid -> command line.

    Args:
        uid: Of this job only.
        under: Of jobs launched with a ``TRAINJOB_HOME`` below this folder only.
    """
    found = {}
    for process, command, environment in _processes():
        mine = under is None or f"\0TRAINJOB_HOME={under}/".encode() in environment
        if mine and f"\0{MARKER}={uid}".encode() + (b"\0" if uid else b"") in environment:
            found[process] = _shown(command)
    return found


def supervisors(under: Path) -> dict[int, str]:
    """The supervisors, and their guards, of jobs below this folder: pid -> command line."""
    return {
        process: _shown(command)
        for process, command, _ in _processes()
        if _SUPERVISOR in command and f"\0{under}/".encode() in command
    }


def _processes() -> Iterator[tuple[int, bytes, bytes]]:
    """Process id, command line and environment; of the latter two each word is between NULs."""
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else []:
        if entry.name.isdigit():
            with suppress(OSError):
                command, environment = ((entry / each).read_bytes() for each in ("cmdline", "environ"))
                yield int(entry.name), b"\0" + command, b"\0" + environment + b"\0"


def _shown(command: bytes) -> str:
    return command.replace(b"\0", b" ").strip().decode(errors="replace")
