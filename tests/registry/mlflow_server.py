"""A real MLflow server."""

from __future__ import annotations

import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import Component, free_port, wait_until


@contextmanager
def running(folder: Path, database: str = "", host: str = "127.0.0.1") -> Iterator[str]:
    """Yield the URL of a started server.

    Args:
        folder: Directory for its files.
        database: URL of its database; by default a SQLite file in ``folder``.
        host: Address on which it listens.
    """
    port = free_port()
    url = f"http://{host}:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", database or f"sqlite:///{folder}/mlflow.db"]
    command += ["--default-artifact-root", str(folder / "art")]
    # Its job runners are seven more processes, of a gigabyte, which a registry does not use.
    settings = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    server = Component("mlflow", command, folder, {**os.environ, **settings})

    def healthy() -> bool:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True

    server.start()
    try:
        wait_until("MLflow answers", healthy, 200, among=[server], ignore=OSError, poll=0.2)
        yield url
    finally:
        server.kill(signal.SIGTERM)
