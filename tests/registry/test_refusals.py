"""An export detects what the registry refuses before it uploads anything."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
import struct
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry, Fault

from trainjob.data import export
from trainjob.data.options import Export
from trainjob.errors import ConfigurationError, RegistryConflict, RegistryUnavailable, TrainJobError
from trainjob.registry import connect
from trainjob.registry.provenance import LONGEST

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
    ({"export_id": "a\0b"}, r"NUL"),
    ({"export_id": "a\ud800b"}, r"a lone surrogate"),
]


def _model(folder: Path, value: int = 0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value] * 4))
    return str(folder)


def _answered(status: int, _: object) -> Fault:
    return Fault(status)


def _refused(source: str, registry: str, message: str, error: type[TrainJobError], **options: Any) -> None:
    with pytest.raises(error, match=message):
        export(source, **({"target": NOWHERE, "name": "refused", "export_id": "a", "registry": registry} | options))


def _dump(database: Path) -> list[str]:
    with sqlite3.connect(database) as connection:
        return [*connection.iterdump()]


def test_mlflow_on_a_file(database: Path, tmp_path: Path) -> None:
    source, registry = _model(tmp_path / "out"), f"mlflow+sqlite:///{database}"
    before = _dump(database)
    for options, message in BY_MLFLOW + BY_ALL:
        _refused(source, registry, message, ConfigurationError, **options)
    # Limits of MLflow that trainjob's checks do not repeat.
    with pytest.raises(ConfigurationError, match="exceeds the maximum length of 100000"):
        connect(registry).check("m", NOWHERE, export_id="a", tags={"x": "y" * 100_001})
    assert connect(registry).check("m", NOWHERE, export_id="a", tags={"x": "y"}) is None
    assert _dump(database) == before


@pytest.mark.timeout(240)
def test_an_mlflow_server(mlflow_url: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    source, registry = _model(tmp_path / "out"), f"mlflow+{mlflow_url}"
    client = MlflowClient(tracking_uri=mlflow_url, registry_uri=mlflow_url)
    before = {model.name for model in client.search_registered_models()}
    for options, message in BY_MLFLOW + BY_ALL:
        _refused(source, registry, message, ConfigurationError, **options)
    _refused(source, registry, "stores at most 500", ConfigurationError, target=f"{NOWHERE}/{'x' * 500}")
    _refused(source, registry, r"no local files.*mlflow\+sqlite", ConfigurationError, target=str(tmp_path / "models"))
    assert not (tmp_path / "models").exists()
    with pytest.raises(ConfigurationError, match="exceeds the maximum length of 100000"):
        connect(registry).check("m", NOWHERE, export_id="a", tags={"x": "y" * 100_001})
    assert {model.name for model in client.search_registered_models()} == before


def test_a_kubeflow_registry(fake: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.registry.rest.sleep", lambda _: None)
    source, registry = _model(tmp_path / "out"), f"kubeflow+{fake.url}"
    for options, message in [*BY_ALL, BY_MLFLOW[2]]:
        _refused(source, registry, message, ConfigurationError, **options)
    for status, error in ((401, ConfigurationError), (403, ConfigurationError), (503, RegistryUnavailable)):
        fake.fault = partial(_answered, status)
        _refused(source, registry, str(status), error)
    fake.fault = lambda _: None
    assert fake.call("GET", "registered_models")["items"] == []


@pytest.mark.parametrize("kind", ["mlflow", "kubeflow"])
def test_other_content_or_target_of_a_registered_export_is_refused(
    kind: str, database: Path, fake: FakeRegistry, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    registry = f"mlflow+sqlite:///{database}" if kind == "mlflow" else f"kubeflow+{fake.url}"
    source, target = _model(tmp_path / "out"), tmp_path / "models"
    first = export(source, str(target), name="refused", export_id="a", registry=registry)
    _refused(source, registry, f"was exported to {first.uri} as version 1", RegistryConflict)
    shutil.rmtree(target)
    _refused(_model(tmp_path / "other", 1), registry, "use a new export_id", RegistryConflict, target=str(target))
    assert not target.exists()
    assert export(source, str(target), name="refused", export_id="a", registry=registry) == first
    assert [version.version for version in connect(registry).list("refused")] == ["1"]
    assert capfd.readouterr().err == ""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kind", ["file", "server", "kubeflow"])
def test_too_long_values_are_shortened(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The registry has the digest of the complete value, which is beside the model."""
    if kind == "file":
        registry = f"mlflow+sqlite:///{request.getfixturevalue('database')}"
    elif kind == "server":
        registry = f"mlflow+{request.getfixturevalue('mlflow_url')}"
    else:
        registry = f"kubeflow+{request.getfixturevalue('fake').url}"
    datasets = [{"uri": f"s3://ä/{number}"} for number in range(9000)]
    provenance = {"datasets": datasets, "note": "NUL \0, half a pair \ud800", "plain": "x"}
    tags: dict[str, str]
    if kind == "server":  # refuses local files, so only its tags are checked
        from trainjob.data.provenance import public
        from trainjob.registry.provenance import tags as made

        made_tags = made(public(provenance))
        tags = dict(
            connect(registry).register("long", NOWHERE, export_id="a", digest="sha256:" + "0" * 64, tags=made_tags).tags
        )
    else:
        done = export(
            _model(tmp_path / "out"), f"{tmp_path}/models", name="long", export_id="a", registry=registry,
            provenance=provenance,
        )  # fmt: skip
        tags = dict(connect(registry).resolve("long", "1").tags)
        statement = json.loads(Path(done.uri.removeprefix("file://"), "provenance.json").read_text())
        assert len(statement["predicate"]["buildDefinition"]["resolvedDependencies"]) == len(datasets)
    text = json.dumps(datasets, sort_keys=True)
    shortened = tags["trainjob.provenance.datasets"]
    assert len(shortened.encode()) <= LONGEST
    assert text.startswith(shortened.partition("…")[0])
    assert f"sha256:{hashlib.sha256(text.encode()).hexdigest()}; complete in provenance.json" in shortened
    assert tags["trainjob.provenance.note"] == "NUL �, half a pair �"
    assert tags["trainjob.provenance.plain"] == "x"


def test_the_launcher_of_a_step_checks_provenance_before_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"name": "m", "provenance": {"a+b": 1}}
    for mlflow in ({"registry": "mlflow+https://host"}, {}):
        monkeypatch.setenv("TRAINJOB_REGISTRY", "https://host")
        with pytest.raises(ConfigurationError, match=r"a\+b"):
            Export.known(options | mlflow).check()
    Export.known(options | {"registry": "kubeflow+https://host"}).check()
    monkeypatch.delenv("TRAINJOB_REGISTRY")
    Export.known(options).check()
