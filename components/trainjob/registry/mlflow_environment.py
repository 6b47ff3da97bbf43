"""MLflow's client without its side effects on the process."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from trainjob.errors import missing

# A library must not send telemetry on behalf of its users. MLflow reads this variable when it is imported.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

# MLflow's defaults are 7 retries with exponential back-off and 120 s each, so that an outage is reported after minutes.
# Variables that the environment sets are kept.
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of a run that ends: programs parse stdout
}
_NOISY = ("mlflow", "alembic", "urllib3.connectionpool")
_WARNINGS_LOCK = RLock()


def open_client(uri: str) -> Any:
    """Make the client of a registry and, for SQLite, its schema."""
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress MLflow's log lines, warnings and long retries; restores all, since the caller may use MLflow too."""
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import mlflow  # noqa: F401 - an extra; imported first, since it sets the levels of the loggers
        except ImportError:
            raise missing("this registry", "MLflow", "mlflow") from None
        loggers = [logging.getLogger(name) for name in _NOISY]
        levels = [logger.level for logger in loggers]
        added = [name for name in _LIMITS if name not in os.environ]
        os.environ.update({name: _LIMITS[name] for name in added})
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
            for name in added:
                os.environ.pop(name, None)
