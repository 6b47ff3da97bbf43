"""Runs a few lines of Python in a separate process and measures its peak memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

# VmHWM, because ru_maxrss of a new program is at least that of its parent.
_PRINT_STATUS = "print(open('/proc/self/status').read())"


def peak(program: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> int:
    """Peak memory in bytes; the program reads its arguments from ``sys.argv[1:]``."""
    words = [sys.executable, "-c", f"import sys\n{program}\n{_PRINT_STATUS}", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env={**os.environ, **(environment or {})})
    assert done.returncode == 0, done.stderr[-2000:]
    match = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert match is not None
    return 1024 * int(match[1])


COPY = "from trainjob.data import copy; copy(*sys.argv[1:])"
SCAN = "from trainjob.data.transfer import scan; print(scan(sys.argv[1]).size)"
