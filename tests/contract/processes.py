"""Which processes of jobs there are on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MARKER = "TRAINJOB_LOCAL_UID"


def marked(uid: str = "", under: Path | None = None) -> dict[int, str]:
    """Processes that carry the local backend's mark: pid -> command line.

    Args:
        uid: Of this job only.
        under: Of jobs launched with a ``TRAINJOB_HOME`` below this folder only.
    """
    found = {}
    for entry in Path("/proc").iterdir() if Path("/proc").is_dir() else []:
        if not entry.name.isdigit():
            continue
        try:
            environment = b"\0" + (entry / "environ").read_bytes() + b"\0"
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        mine = under is None or f"\0TRAINJOB_HOME={under}/".encode() in environment
        if mine and f"\0{MARKER}={uid}".encode() + (b"\0" if uid else b"") in environment:
            found[int(entry.name)] = command
    return found


def eventually(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait until `happened()` is true."""
    patience = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < patience, "it did not happen in time"
        time.sleep(0.02)
