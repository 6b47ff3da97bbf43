"""What MLflow's errors mean to a workflow: wait, or change something."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryUnavailable
from trainjob.registry.mlflow import _METRIC, MlflowRegistry, _Locked, _version


@pytest.mark.parametrize(
    ("message", "code", "kind"),
    [
        ("no such model", codes.RESOURCE_DOES_NOT_EXIST, ModelNotFound),
        ("Registered model alias champion not found.", codes.INVALID_PARAMETER_VALUE, ModelNotFound),
        ("who are you", codes.UNAUTHENTICATED, ConfigurationError),
        ("no", codes.PERMISSION_DENIED, ConfigurationError),
        ("API request failed with error code 401", codes.INTERNAL_ERROR, ConfigurationError),
        ("API request failed with error code 403", codes.INTERNAL_ERROR, ConfigurationError),
        ("a name with %", codes.INVALID_PARAMETER_VALUE, ConfigurationError),
        ("Detected out-of-date database schema", codes.INTERNAL_ERROR, ConfigurationError),
        ("API request failed with error code 503", codes.INTERNAL_ERROR, RegistryUnavailable),
        ("(sqlite3.OperationalError) database is locked", codes.TEMPORARILY_UNAVAILABLE, _Locked),
        ("(sqlite3.OperationalError) database table is locked", codes.INTERNAL_ERROR, _Locked),
    ],
)
def test_the_code_and_the_message_decide(message: str, code: int, kind: type[Exception], tmp_path: Path) -> None:
    registry = MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db")
    found = registry._translated(MlflowException(message, error_code=code), "read")
    assert type(found) is kind
    server = MlflowRegistry("http://mlflow.example")
    expected = RegistryUnavailable if kind is _Locked else kind
    assert type(server._translated(MlflowException(message, error_code=code), "read")) is expected
    assert "http://mlflow.example" in str(server._translated(MlflowException(message, error_code=code), "read"))


def test_a_metric_that_was_edited_by_hand_hides_no_other() -> None:
    tags = {f"{_METRIC}a": "edited", f"{_METRIC}b": "0.5", "stage": "trial"}
    rest = {"source": "s3://x", "aliases": ["b", "a"], "creation_timestamp": 1000}
    version = _version(SimpleNamespace(name="m", version=1, tags=tags, **rest))
    assert (version.metrics, version.tags, version.aliases) == ({"b": 0.5}, {"stage": "trial"}, ("a", "b"))
