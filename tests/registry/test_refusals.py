"""An export detects what the registry refuses before it uploads anything."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from tests.fakes.model_registry import FakeRegistry, Fault
from tests.registry.conftest import on
from tests.trees import files, model

from trainjob.data import export
from trainjob.data.options import Export
from trainjob.data.provenance import public
from trainjob.errors import ConfigurationError, RegistryConflict, RegistryUnavailable, TrainJobError
from trainjob.registry import Registry, connect
from trainjob.registry.provenance import LONGEST, tags

NOWHERE = "s3://no-such-bucket/models"
"""No server and no credentials are set for it: a request to it would fail with another error."""

BY_MLFLOW: list[tuple[dict[str, Any], str]] = [
    ({"provenance": {"learning rate (max)": 1}}, r"trainjob\.provenance\.learning rate \(max\)"),
    ({"provenance": {"a//b": 1}}, r"a//b"),
    ({"provenance": {"x" * 240: 1}}, r"is not a valid name of a tag"),
]
BY_ALL: list[tuple[dict[str, Any], str]] = [
    ({"name": "..x"}, r"is not a valid model name"),
    ({"name": "m\ud800"}, r"is not a valid model name"),
    ({"metrics": {"a//b": 1}}, r"is not a valid name of a metric"),
    ({"metrics": {"a/": 1}}, r"is not a valid name of a metric"),
    ({"alias": "v1"}, r"is not a valid alias"),
    ({"metric": "acc"}, r"requires an alias"),
    ({"alias": "champion", "metric": "acc"}, r"the metrics given are"),
    ({"alias": "champion", "mode": "best"}, r"mode"),
    ({"alias": "champion", "min_improvement": 0.1}, r"requires a metric"),
    ({"alias": "champion", "metric": "acc", "metrics": {"acc": 1}, "min_improvement": -0.1}, r"at least 0"),
    ({"provenance": {"x": object()}}, r"provenance"),
    ({"export_id": ""}, r"export_id"),
    ({"export_id": "a\0b"}, r"NUL"),
    ({"export_id": "a\ud800b"}, r"a lone surrogate"),
]


def refused(source: str, registry: str, message: str, error: type[TrainJobError], **options: Any) -> bool:
    """Whether an export fails with this error and message."""
    with pytest.raises(error, match=message):
        export(source, **({"target": NOWHERE, "name": "refused", "export_id": "a", "registry": registry} | options))
    return True


def content(registry_uri: str, request: pytest.FixtureRequest) -> Any:
    """What the registry holds: all tables of a file, otherwise the models."""
    if "sqlite" in registry_uri:
        with sqlite3.connect(registry_uri.partition("///")[2]) as connection:
            return [*connection.iterdump()]
    if "kubeflow" in registry_uri:
        return request.getfixturevalue("fake").call("GET", "registered_models")
    server = registry_uri.removeprefix("mlflow+")
    return {model.name for model in MlflowClient(server, server).search_registered_models()}


@on("mlflow-file", "mlflow-server", "kubeflow")
def test_an_invalid_export_changes_nothing(registry_uri: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source, before = model(tmp_path / "out"), content(registry_uri, request)
    for options, message in [*BY_ALL, *(BY_MLFLOW if "mlflow" in registry_uri else BY_MLFLOW[2:])]:
        assert refused(source, registry_uri, message, ConfigurationError, **options)
    assert content(registry_uri, request) == before


@on("mlflow-file", "mlflow-server")
def test_limits_of_mlflow_that_the_checks_do_not_repeat(registry_uri: str, request: pytest.FixtureRequest) -> None:
    before = content(registry_uri, request)
    with pytest.raises(ConfigurationError, match="exceeds the maximum length of 100000"):
        connect(registry_uri).check("m", NOWHERE, export_id="a", tags={"x": "y" * 100_001})
    assert connect(registry_uri).check("m", NOWHERE, export_id="a", tags={"x": "y"}) is None
    assert content(registry_uri, request) == before


def test_a_server_refuses_long_and_local_targets(mlflow_url: str, tmp_path: Path) -> None:
    source, local = model(tmp_path / "out"), tmp_path / "models"
    assert refused(source, mlflow_url, "stores at most 500", ConfigurationError, target=f"{NOWHERE}/{'x' * 500}")
    assert refused(source, mlflow_url, r"no local files.*mlflow\+sqlite", ConfigurationError, target=str(local))
    assert not local.exists()


@pytest.mark.parametrize(
    ("status", "error"), [(401, ConfigurationError), (403, ConfigurationError), (503, RegistryUnavailable)]
)
def test_a_kubeflow_registry_that_answers_with_an_error(
    fake: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, error: type[TrainJobError]
) -> None:
    monkeypatch.setattr("trainjob.registry.rest.sleep", lambda _: None)
    fake.fault = lambda _: Fault(status)
    assert refused(model(tmp_path / "out"), f"kubeflow+{fake.url}", str(status), error)


@on("mlflow-file", "kubeflow")
def test_other_content_or_target_of_a_registered_export_is_refused(
    registry_uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = model(tmp_path / "out"), tmp_path / "models"
    first = export(source, str(target), name="refused", export_id="a", registry=registry_uri)
    assert refused(source, registry_uri, f"was exported to {first.uri} as version 1", RegistryConflict)
    other, before = model(tmp_path / "other", 1), files(target)
    assert refused(other, registry_uri, "use a new export_id", RegistryConflict, target=str(target))
    assert files(target) == before
    shutil.rmtree(target)
    assert refused(other, registry_uri, "use a new export_id", RegistryConflict, target=str(target))
    assert not target.exists()
    assert export(source, str(target), name="refused", export_id="a", registry=registry_uri) == first
    assert [version.version for version in connect(registry_uri).list("refused")] == ["1"]
    assert capfd.readouterr().err == ""


@on("mlflow-file", "mlflow-server", "kubeflow")
def test_too_long_values_are_shortened(registry_uri: str, tmp_path: Path) -> None:
    """The registry has the digest of the complete value, which is beside the model."""
    datasets = [{"uri": f"s3://ä/{number}"} for number in range(9000)]
    provenance = {"datasets": datasets, "note": "NUL \0, half a pair \ud800", "plain": "x"}
    made = tags(public(provenance))
    # Without an upload: an MLflow server refuses local files.
    kept = connect(registry_uri).register("long", NOWHERE, export_id="a", digest="sha256:" + "0" * 64, tags=made).tags
    text = json.dumps(datasets, sort_keys=True)
    shortened = kept["trainjob.provenance.datasets"]
    assert len(shortened.encode()) <= LONGEST
    assert text.startswith(shortened.partition("…")[0])
    assert f"sha256:{hashlib.sha256(text.encode()).hexdigest()}; complete in provenance.json" in shortened
    assert kept["trainjob.provenance.note"] == "NUL \ufffd, half a pair \ufffd"
    assert kept["trainjob.provenance.plain"] == "x"


def test_the_value_that_is_shortened_in_the_registry_is_complete_beside_the_model(
    file_registry: Registry, tmp_path: Path
) -> None:
    provenance = {"datasets": [{"uri": f"s3://ä/{number}"} for number in range(9000)], "note": "NUL \0"}
    done = export(model(tmp_path / "out"), str(tmp_path), name="long", export_id="a", provenance=provenance)
    statement = json.loads(Path(done.uri.removeprefix("file://"), "provenance.json").read_text())
    assert len(statement["predicate"]["buildDefinition"]["resolvedDependencies"]) == 9000
    held = file_registry.resolve("long", "1").tags
    assert len(held["trainjob.provenance.datasets"].encode()) <= LONGEST
    assert held["trainjob.provenance.note"] == "NUL \ufffd"


def test_the_launcher_of_a_step_checks_provenance_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"name": "m", "provenance": {"a+b": 1}}
    for mlflow in ({"registry": "mlflow+https://host"}, {}):
        monkeypatch.setenv("TRAINJOB_REGISTRY", "https://host")
        with pytest.raises(ConfigurationError, match=r"a\+b"):
            Export.known(options | mlflow).check()
    Export.known(options | {"registry": "kubeflow+https://host"}).check()
    monkeypatch.delenv("TRAINJOB_REGISTRY")
    Export.known(options).check()
