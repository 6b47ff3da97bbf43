"""The initializer and export steps with a Kubeflow Model Registry."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import LOST, FakeRegistry, Fault

from trainjob.data import export, initialize
from trainjob.data.__main__ import TRY_AGAIN, main
from trainjob.errors import ChecksumMismatch, ModelNotFound, RegistryUnavailable
from trainjob.registry import connect


def _model(folder: Path, value: int) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value] * 4))
    return str(folder)


def test_export_and_back(fake: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.registry.rest.sleep", lambda _: None)
    registry = f"kubeflow+{fake.url}"
    monkeypatch.setenv("TRAINJOB_REGISTRY", registry)
    target = str(tmp_path / "models")
    options: dict[str, Any] = {"name": "digits", "alias": "champion", "metric": "acc"}
    with pytest.raises(ModelNotFound):
        initialize("model-registry://digits@champion", str(tmp_path / "in"))
    assert initialize("model-registry://digits@champion", str(tmp_path / "in"), if_missing="fresh").fresh
    provenance = {"run": {"kfp": "run-7"}, "datasets": [{"uri": "s3://d", "digest": "sha256:" + "0" * 64}]}
    fake.faults(None, LOST, None, None, LOST, None, LOST, LOST)
    first = export(
        _model(tmp_path / "out", 1), target, export_id="a", metrics={"acc": 0.8}, provenance=provenance, **options
    )
    again = export(_model(tmp_path / "out", 1), target, export_id="a", metrics={"acc": 0.8}, **options)
    assert (first.version, again.version, again.uri, again.promoted) == ("1", "1", first.uri, True)
    worse = export(_model(tmp_path / "out", 2), target, export_id="b", metrics={"acc": 0.7}, **options)
    assert (worse.version, worse.promoted) == ("2", False)
    for source in ("model-registry://digits@champion", "models:/digits/1", "model-registry://digits/1"):
        got = initialize(source, str(tmp_path / "in"))
        assert (got.version, got.digest, got.source) == ("1", first.digest, source)
    version = connect().resolve("digits", "1")
    assert version.tags["trainjob.parameters"] == "4"
    assert json.loads(version.tags["trainjob.provenance.datasets"]) == provenance["datasets"]
    assert fake.call("GET", "model_artifacts/1")["modelSourceId"] == "run-7"
    Path(first.uri.removeprefix("file://"), "model.safetensors").write_bytes(b"x" * 72)
    with pytest.raises(ChecksumMismatch):
        initialize("model-registry://digits/1", str(tmp_path / "in2"))


def test_a_retry_completes_an_export_after_an_outage(
    fake: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainjob.registry.rest.sleep", lambda _: None)
    words = ["export", "--source", _model(tmp_path / "out", 1), "--target", str(tmp_path / "models")]
    words += ["--name", "m", "--export-id", "a", "--registry", f"kubeflow+{fake.url}"]
    fake.fault = lambda request: Fault(503) if request.path.endswith("/artifacts") else None
    assert main(words) == TRY_AGAIN
    assert "error: the model registry http://127.0.0.1" in capsys.readouterr().err
    fake.fault = lambda _: None
    assert connect(words[-1]).list("m") == []
    assert main(words) == 0
    assert [version.version for version in connect(words[-1]).list("m")] == ["1"]


def test_an_outage_is_not_a_missing_model(fake: FakeRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob.registry.rest.sleep", lambda _: None)
    fake.fault = lambda _: Fault(503)
    with pytest.raises(RegistryUnavailable):
        initialize("models:/m@champion", str(tmp_path), registry=f"kubeflow+{fake.url}", if_missing="fresh")
