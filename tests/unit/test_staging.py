"""`trainjob exec` with inputs and outputs that need no staging; `tests/stores` tests staging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = [str(Path(sys.executable).parent / "trainjob"), "exec", "--"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *command], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60, check=False
    )


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", code, *arguments]


def test_local_locations_are_not_staged_and_the_command_replaces_the_process(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getppid(), sys.argv[1], os.environ['TRAINJOB_INPUT_DATA'])"
    uri = tmp_path.as_uri()
    done = run(*python(code, f"--data={uri}"), TRAINJOB_INPUT_DATA=uri, TRAINJOB_INPUT_MODEL="")
    assert done.stdout.split() == [str(os.getpid()), f"--data={uri}", uri]


def test_commands_that_cannot_start_have_exit_codes() -> None:
    done = run("nosuch-program")
    assert (done.returncode, "nosuch-program" in done.stderr) == (127, True)
    assert run().returncode == 2
