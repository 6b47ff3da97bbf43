"""A real MLflow server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def running(folder: Path, database: str = "", host: str = "127.0.0.1") -> Iterator[str]:
    """Yield the URL of a started server.

    Args:
        folder: Directory for its files.
        database: URL of its database; by default a SQLite file in ``folder``.
        host: Address on which it listens.
    """
    process, url = _start(folder, database or f"sqlite:///{folder}/mlflow.db", host)
    try:
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def _start(folder: Path, database: str, host: str) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1",
                "--backend-store-uri", database, "--default-artifact-root", str(folder / "art"),
            ],
            stdout=log, stderr=log, start_new_session=True,
            # Its job runners are seven more processes, of a gigabyte, which a registry does not use.
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip
    url = f"http://{host}:{port}"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return process, url
        except OSError:
            time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail(f"no MLflow server: {(folder / 'log').read_text()[-2000:]}")
