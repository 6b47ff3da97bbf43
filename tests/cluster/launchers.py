"""Programs that launch TrainJobs on the cluster: an Airflow, a pipeline."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
from tests.processes import Component, free_port, wait_until


def launcher_environment() -> dict[str, str]:
    """The environment of this process without variables of backends, storage and other tests' Airflow."""
    foreign = ("TRAINJOB_", "AWS_", "AIRFLOW", "KUBE", "PYTHONDONTWRITEBYTECODE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return {**inherited, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def airflow_environment(home: Path, dags: Path, **connections: Mapping[str, object]) -> dict[str, str]:
    """Settings of an Airflow with these DAGs, and with connections of type ``trainjob`` by their names."""
    settings = {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
        "NO_COLOR": "1",
    }
    for name, extra in connections.items():
        settings[f"AIRFLOW_CONN_{name.upper()}"] = json.dumps({"conn_type": "trainjob", "extra": extra})
    return settings


def run(environment: dict[str, str], directory: Path, *command: str, code: int = 0, timeout: float = 400) -> str:
    """Run a program that must exit with `code` within `timeout` seconds; return its output."""
    # KFP's command, for example, does not delete the program that it writes to a `mktemp` directory.
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    environment = {"TMPDIR": str(temporary), **environment}
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == code, done.stdout[-8000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@contextmanager
def execution_api(environment: dict[str, str], directory: Path) -> Iterator[dict[str, str]]:
    """Context manager: ``airflow dags test --use-executor`` runs tasks in parallel; without it, one after the other.

    Args:
        environment: Environment of Airflow.
        directory: Directory of the server's log.

    Yields:
        Additional variables for Airflow.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}/execution/"
    settings = {
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": url,
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
    }
    command = ["airflow", "api-server", "--apps", "execution", "--host", "127.0.0.1", "--port", str(port)]
    server = Component("airflow-api-server", command, directory, {**environment, **settings})
    server.start()
    try:
        answers = lambda: httpx.get(f"{url}health").is_success  # noqa: E731
        wait_until("Airflow's API answers", answers, 150, among=[server], ignore=httpx.TransportError, poll=0.2)
        yield settings
    finally:
        server.kill()
