"""Prints the path of an installed interpreter of a Python version: ``python tests/interpreter.py 3.13``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def candidates(version: str) -> Iterator[str]:
    """Paths and commands that may be the interpreter, the most likely first."""
    if found := shutil.which(f"python{version}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))
    if uv := shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"):
        environment = {**os.environ, "PATH": ""}  # commands on the path were tried; one that fails would end the search
        asked = subprocess.run(
            [uv, "python", "find", version], env=environment, capture_output=True, text=True, check=False
        )
        if asked.returncode == 0:
            yield asked.stdout.strip()


def main(version: str) -> None:
    """The command line."""
    print_version = "import sys; print('.'.join(map(str, sys.version_info[:2])))"
    for path in candidates(version):
        done = subprocess.run([path, "-c", print_version], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            print(path)
            return
    sys.exit(f"Python {version} is not installed; install it with: uv python install {version}")


if __name__ == "__main__":
    main(*sys.argv[1:])
