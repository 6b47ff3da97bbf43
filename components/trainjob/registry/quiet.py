"""MLflow's client, without what it does to the process that it is in."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from trainjob.errors import missing

# A library does not phone home for those who use it. Read by MLflow at its import.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

# MLflow's own defaults are 7 retries with exponential back-off at 120 s each: minutes until an outage shows. Values of
# the environment win.
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # of a run that ends; stdout is for programs to read
}
_NOISY = ("mlflow", "alembic", "urllib3.connectionpool")
_WARNINGS_LOCK = RLock()


def open_client(uri: str) -> Any:
    """A client, and with SQLite the schema, of a registry."""
    from mlflow.tracking import MlflowClient  # noqa: PLC0415 - an extra

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def without_warnings() -> Iterator[None]:
    """MLflow without its log lines, warnings and long retries; all is put back, since its user may be ours too."""
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import mlflow  # noqa: F401, PLC0415 - an extra; before the loggers, whose levels it sets
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
