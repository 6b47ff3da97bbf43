"""Make files and their names survive a power failure. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Write a file, or the names in a directory, to the disk.

    To sync a file does not sync its name: sync its directory, too.

    Raises:
        OSError: The disk is full or fails.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
