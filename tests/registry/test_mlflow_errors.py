"""Translation of MLflow's errors into those of trainjob, and concurrent promotions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes
from mlflow.store.entities.paged_list import PagedList

from trainjob.errors import ConfigurationError, ModelNotFound, RegistryUnavailable
from trainjob.registry.alias_claims import Claim
from trainjob.registry.base import ModelVersion, Promotion
from trainjob.registry.mlflow import _METRIC, MlflowRegistry, _Locked, _version
from trainjob.registry.mlflow_promotions import CLAIM
from trainjob.registry.moves import MOVED


class Rivals(MlflowRegistry):
    """Two versions that claim an alias at the same instant; the alias is at the first."""

    def __init__(self, accuracies: tuple[float, float], metrics: tuple[str, str] = ("acc", "acc")) -> None:
        self.holds = "1"
        self.claims = [Claim(100 + i, metric) for i, metric in enumerate(metrics)]
        self.accuracies = accuracies
        self.set: list[str] = []
        self.recorded: list[tuple[str, str]] = []

    def list(self, name: str) -> list[ModelVersion]:
        return [
            ModelVersion(
                name, str(i + 1), "u", metrics={"acc": accuracy, "loss": 1.0 + i},
                tags={f"{CLAIM}best": str(self.claims[i])},
                aliases=("best",) if self.holds == str(i + 1) else (),
            )
            for i, accuracy in enumerate(self.accuracies)
        ]  # fmt: skip

    def _set_alias(self, version: ModelVersion, alias: str) -> None:
        self.set.append(version.version)
        self.holds = version.version

    def _tag(self, version: ModelVersion, tag: str, value: str) -> None:
        self.recorded.append((version.version, tag))


@pytest.mark.parametrize(
    ("rivals", "sets", "promoted"),
    [
        (Rivals((0.8, 0.9)), ["2"], False),
        (Rivals((0.9, 0.8)), [], True),
        (Rivals((0.8, 0.9), ("acc", "loss")), [], True),
    ],
    ids=["a better rival gets it", "a worse rival does not", "another metric is not compared"],
)
def test_the_best_of_concurrent_promotions_keeps_the_alias(rivals: Rivals, sets: list[str], promoted: bool) -> None:
    """As the promotion of the first version checks it afterwards."""
    first = rivals.list("m")[0]
    verdict = rivals._settled(first, "best", rivals.claims[0], Promotion(True, "first", None))
    assert (rivals.set, verdict.promoted) == (sets, promoted)
    assert rivals.recorded == [(version, f"{MOVED}best") for version in sets], "a retry of its export finds it"
    assert ("moved to version 2 at the same time" in verdict.reason) is not promoted


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
def test_errors_are_translated_by_code_and_message(
    message: str, code: int, kind: type[Exception], tmp_path: Path
) -> None:
    registry = MlflowRegistry(f"sqlite:///{tmp_path}/mlflow.db")
    found = registry._translated(MlflowException(message, error_code=code), "read")
    assert type(found) is kind
    server = MlflowRegistry("http://mlflow.example")
    expected = RegistryUnavailable if kind is _Locked else kind
    assert type(server._translated(MlflowException(message, error_code=code), "read")) is expected
    assert "http://mlflow.example" in str(server._translated(MlflowException(message, error_code=code), "read"))


def test_an_invalid_metric_does_not_hide_the_others() -> None:
    tags = {f"{_METRIC}a": "edited", f"{_METRIC}b": "0.5", "stage": "trial"}
    rest = {"run_id": None, "source": "s3://x", "aliases": ["b", "a"], "creation_timestamp": 1000}
    version = _version(SimpleNamespace(name="m", version=1, tags=tags, **rest))
    assert (version.metrics, version.tags, version.aliases) == ({"b": 0.5}, {"stage": "trial"}, ("a", "b"))


@pytest.mark.parametrize(
    ("code", "message", "kind", "words"),
    [
        (
            codes.INVALID_PARAMETER_VALUE,
            "Invalid model version source: 'file:///m'",
            ConfigurationError,
            "such as s3://",
        ),
        (codes.INVALID_PARAMETER_VALUE, "a tag is too long", MlflowException, "a tag is too long"),
        (codes.INTERNAL_ERROR, "Invalid model version source: 'file:///m'", MlflowException, "Invalid model version"),
    ],
)
def test_a_server_that_refuses_local_files(code: int, message: str, kind: type[Exception], words: str) -> None:
    registry = MlflowRegistry("http://mlflow.example")

    def refuse(*_: object, **__: object) -> None:
        raise MlflowException(message, error_code=code)

    registry._client = SimpleNamespace(
        create_registered_model=lambda _: None,
        search_model_versions=lambda *_, **__: PagedList([], None),
        create_model_version=refuse,
    )
    with pytest.raises(kind, match=words):
        registry._create("m", "file:///m", "key", {}, None)
