"""Make files and names outlast a power failure. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Write a file, or the names in a directory, to the disk.

    A file's own `sync` does not cover its name: that needs one of its directory.

    Raises:
        OSError: the disk is full, or fails.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
