"""Programs that launch TrainJobs on the cluster: an Airflow, a pipeline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def launcher_environment() -> dict[str, str]:
    """This process's, without what leads to a backend, to storage or to another test's Airflow."""
    foreign = ("TRAINJOB_", "AWS_", "AIRFLOW", "KUBE", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**inherited, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def run(environment: dict[str, str], directory: Path, *command: str, code: int = 0, timeout: float = 200) -> str:
    """What a program says, which ends with `code` after at most `timeout` seconds."""
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == code, done.stdout[-8000:] + done.stderr[-3000:]
    return done.stdout + done.stderr
