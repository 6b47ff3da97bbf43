"""The initializer and export steps with MLflow on SQLite."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.keys import key_pair

from trainjob.data import export, file_manifest, initialize, read_manifest
from trainjob.data.__main__ import TRY_AGAIN, main
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    ModelNotFound,
    RegistryConflict,
    RegistryUnavailable,
)
from trainjob.registry import Registry, connect


def _model(folder: Path, value: int = 0) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes([value] * 4))
    (folder / "config.json").write_text("{}")
    return str(folder)


@pytest.fixture
def registry(database: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setenv("TRAINJOB_REGISTRY", f"mlflow+sqlite:///{database}")
    return connect()


def test_export_twice_gives_one_version(registry: Registry, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "name": "digits",
        "export_id": "dag/run 1/export",
        "metrics": {"accuracy": 0.97},
        "alias": "champion",
        "metric": "accuracy",
        "provenance": {
            "datasets": [{"uri": "s3://d", "digest": {"sha256": "ab"}}],
            "base_model": {"uri": "hf://b"},
            "trainjob": {"name": "train", "uid": "u"},
            "run": "dag/run 1",
        },
    }
    source = _model(tmp_path / "out")
    first = export(source, str(tmp_path / "models"), **options)
    assert (first.name, first.version, first.promoted, first.files, first.parameters) == ("digits", "1", True, 2, 4)
    assert first.uri.startswith((tmp_path / "models/digits").as_uri() + "/")
    manifest = read_manifest(first.uri)
    assert manifest is not None
    assert manifest.digest == first.digest
    version = registry.resolve("digits", "champion")
    assert (version.uri, version.digest, version.metrics) == (first.uri, first.digest, {"accuracy": 0.97})
    assert version.tags["trainjob.provenance.run"] == "dag/run 1"
    folder = Path(first.uri.removeprefix("file://"))
    statement = json.loads((folder / file_manifest.PROVENANCE).read_text())
    assert statement["subject"][0]["digest"]["sha256"] == first.digest.removeprefix("sha256:")
    built = statement["predicate"]["buildDefinition"]
    assert built["resolvedDependencies"] == [
        {"name": "dataset", "uri": "s3://d", "digest": {"sha256": "ab"}},
        {"name": "base model", "uri": "hf://b"},
    ]
    assert built["internalParameters"]["trainjob"]["uid"] == "u"
    assert "# digits" in (folder / file_manifest.CARD).read_text()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    again = export(source, str(tmp_path / "models"), **options)
    assert (again.uri, again.digest, again.version, again.promoted) == (first.uri, first.digest, "1", True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    assert len(registry.list("digits")) == 1


def test_other_content_under_the_same_id_is_a_conflict(registry: Registry, tmp_path: Path) -> None:
    first = export(_model(tmp_path / "out"), str(tmp_path / "models"), name="m", export_id="a")
    with pytest.raises(RegistryConflict, match="new export_id"):
        export(_model(tmp_path / "out", 1), str(tmp_path / "models"), name="m", export_id="a")
    held = read_manifest(first.uri)
    assert held is not None
    assert held.digest == first.digest
    shutil.rmtree(tmp_path / "models")
    with pytest.raises(RegistryConflict):
        export(str(tmp_path / "out"), str(tmp_path / "models"), name="m", export_id="a")
    assert len(registry.list("m")) == 1


def test_only_a_better_version_is_promoted(registry: Registry, tmp_path: Path) -> None:
    def run(number: int, accuracy: float) -> tuple[str, bool]:
        done = export(
            _model(tmp_path / "out", number),
            str(tmp_path / "models"),
            name="m",
            export_id=str(number),
            registry=registry,
            metrics={"acc": accuracy},
            alias="champion",
            metric="acc",
            min_improvement=0.01,
        )
        return done.version, done.promoted

    assert [run(1, 0.9), run(2, 0.905), run(3, 0.95), run(1, 0.9)] == [
        ("1", True),
        ("2", False),
        ("3", True),
        ("1", False),
    ]
    assert registry.resolve("m", "champion").version == "3"


def test_the_champion_is_downloaded_and_verified(registry: Registry, tmp_path: Path) -> None:
    done = export(_model(tmp_path / "out"), str(tmp_path / "models"), name="m", export_id="a", alias="champion")
    for source in ("models:/m@champion", "models:/m/1", "models:/m/latest"):
        got = initialize(source, str(tmp_path / "in"))
        assert (got.digest, got.version, got.fresh, got.source) == (done.digest, "1", False, source)
    assert {path.name for path in (tmp_path / "in").iterdir()} == {"MANIFEST.json", "config.json", "model.safetensors"}
    part = initialize("models:/m/1", str(tmp_path / "part"), include=["*.json"])
    assert (part.files, part.version) == (1, "1")
    with pytest.raises(ChecksumMismatch):
        initialize("models:/m/1", str(tmp_path / "in2"), digest="sha256:" + "0" * 64)
    # Another model replaces it, with a matching manifest.
    folder = Path(done.uri.removeprefix("file://"))
    shutil.rmtree(folder)
    initialize(_model(tmp_path / "other", 7), str(folder))
    with pytest.raises(ChecksumMismatch):
        initialize("models:/m@champion", str(tmp_path / "in3"))
    with pytest.raises(ChecksumMismatch):
        initialize("models:/m@champion", str(tmp_path / "in3"), include=["*.json"])
    assert not (tmp_path / "in3").exists()


def test_a_missing_champion_is_an_error_or_a_fresh_start(registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        initialize("models:/m@champion", str(tmp_path / "in"))
    fresh = initialize("models:/m@champion", str(tmp_path / "in"), if_missing="fresh")
    assert (fresh.fresh, fresh.uri, fresh.version) == (True, "", None)
    assert not (tmp_path / "in").exists()
    with pytest.raises(ConfigurationError, match="registered models"):
        initialize(str(tmp_path), str(tmp_path / "in"), if_missing="fresh")


@pytest.mark.full
def test_an_outage_is_not_a_fresh_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unreachable = "http://127.0.0.1:1"
    with pytest.raises(RegistryUnavailable):
        initialize("models:/m@champion", str(tmp_path), registry=f"mlflow+{unreachable}", if_missing="fresh")
    program = ["initialize-model", "--source", "models:/m/1", "--target", f"{tmp_path}/t", "--registry", unreachable]
    assert main(program) == TRY_AGAIN
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "cannot find" in error
    assert error.count("\n") == 1


def test_export_refuses_invalid_options_before_it_copies(registry: Registry, tmp_path: Path) -> None:
    source, target = _model(tmp_path / "out"), str(tmp_path / "models")
    good: dict[str, Any] = {"name": "m", "export_id": "a"}
    for bad in (
        {"name": "a/b"},
        {"export_id": ""},
        {"alias": "v1"},
        {"metric": "acc"},
        {"alias": "champion", "metric": "acc"},
        {"alias": "champion", "mode": "best"},
        {"alias": "champion", "min_improvement": 0.1},
        {"alias": "champion", "metric": "acc", "metrics": {"acc": 1}, "min_improvement": -0.1},
        {"metrics": {"a\n": 1}},
        {"provenance": {"x": object()}},
        {"registry": "ftp://x"},
    ):
        with pytest.raises(ConfigurationError):
            export(source, target, **(good | bad))
        assert not list(Path(target).rglob("MANIFEST.json"))
    (tmp_path / "out/old.bin").write_bytes(b"\x80")
    with pytest.raises(CorruptData, match="allow-pickle"):
        export(source, target, **good)
    assert export(source, target, **good, allow_pickle=True).files == 3
    (tmp_path / "out/provenance.json").write_bytes(b"{}")
    with pytest.raises(ConfigurationError, match=r"provenance\.json"):
        export(source, target, name="m", export_id="b", allow_pickle=True)
    assert len(registry.list("m")) == 1


def test_a_file_that_changes_after_its_check_is_not_exported(registry: Registry, tmp_path: Path) -> None:
    """Between the check and the copy a pickle replaces a text file."""
    source, target = _model(tmp_path / "out"), str(tmp_path / "models")

    class Changing(dict[str, Any]):
        def items(self) -> Any:
            (tmp_path / "out/notes.txt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
            return super().items()

    (tmp_path / "out/notes.txt").write_text("notes")
    with pytest.raises(CorruptData, match="changed while it was exported"):
        export(source, target, name="m", export_id="a", provenance=Changing(run="r"))
    assert registry.list("m") == []
    assert not list(Path(target).rglob("MANIFEST.json"))
    with pytest.raises(CorruptData, match=r"notes\.txt' is a pickle"):
        export(source, target, name="m", export_id="a")


def test_an_initialized_model_can_be_exported(registry: Registry, tmp_path: Path) -> None:
    export(_model(tmp_path / "out"), str(tmp_path / "models"), name="m", export_id="a", alias="champion")
    got = initialize("models:/m@champion", str(tmp_path / "in"))
    again = export(got.uri, str(tmp_path / "models"), name="m", export_id="b")
    assert (again.digest, again.version) == (got.digest, "2")


def test_the_card_of_an_author_is_part_of_the_model(registry: Registry, tmp_path: Path) -> None:
    source = _model(tmp_path / "out")
    (tmp_path / "out" / file_manifest.CARD).write_text("mine")
    done = export(source, str(tmp_path / "models"), name="m", export_id="a")
    assert (Path(done.uri.removeprefix("file://")) / file_manifest.CARD).read_text() == "mine"
    got = initialize("models:/m/1", str(tmp_path / "in"))
    assert (tmp_path / "in" / file_manifest.CARD).read_text() == "mine"
    assert export(got.uri, str(tmp_path / "models"), name="m", export_id="b").digest == done.digest
    # A model without a card replaces it in the same directory: no file of the former model remains.
    plain = export(_model(tmp_path / "plain", 1), str(tmp_path / "models"), name="m", export_id="c")
    assert initialize("models:/m/3", str(tmp_path / "in")).digest == plain.digest
    assert {path.name for path in (tmp_path / "in").iterdir()} == {"MANIFEST.json", "config.json", "model.safetensors"}


def test_card_and_provenance_are_removed_when_another_model_replaces_theirs(registry: Registry, tmp_path: Path) -> None:
    folder = Path(export(_model(tmp_path / "out"), str(tmp_path), name="m", export_id="a").uri.removeprefix("file://"))
    assert {file_manifest.PROVENANCE, file_manifest.CARD} <= {path.name for path in folder.iterdir()}
    initialize(_model(tmp_path / "other", 1), str(folder))
    assert {path.name for path in folder.iterdir()} == {"MANIFEST.json", "config.json", "model.safetensors"}


def test_an_export_is_signed_once(registry: Registry, tmp_path: Path) -> None:
    source, target, (private, public) = _model(tmp_path / "out"), str(tmp_path / "models"), key_pair(tmp_path)
    first = export(source, target, name="m", export_id="a", sign=private)
    signature = Path(first.uri.removeprefix("file://")) / "model.sig"
    before = signature.read_bytes()
    assert export(source, target, name="m", export_id="a", sign=private) == first
    assert signature.read_bytes() == before
    assert initialize("models:/m/1", str(tmp_path / "in"), verify_key=public).digest == first.digest
    export(source, target, name="m", export_id="b")
    with pytest.raises(RegistryConflict, match="without a signature"):
        export(source, target, name="m", export_id="b", sign=private)
    assert len(registry.list("m")) == 2


def _outputs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())["outputs"]
    return found


def test_the_steps_as_programs(registry: Registry, tmp_path: Path, python: str) -> None:
    """As ``python -m trainjob.data`` runs them."""
    (tmp_path / "script").write_text('import runpy; runpy.run_module("trainjob.data", run_name="__main__")')
    _model(tmp_path / "out")
    (tmp_path / "metrics.json").write_text('{"acc": 0.5}')
    (tmp_path / "history.json").write_text('{"acc": [[1, 1769860800.0, 0.25], [2.0, 1769860801.0, 0.5]]}')

    def run(*arguments: str) -> tuple[int, str, str, dict[str, Any]]:
        import os

        log = tmp_path / "termination"
        log.write_text('{"outputs": {}}')
        done = subprocess.run(
            [python, f"{tmp_path}/script", *arguments],
            capture_output=True, text=True, check=False, cwd=tmp_path,
            env={**os.environ, "TRAINJOB_TERMINATION_LOG": str(log)},
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr, _outputs(log)

    exporting = ("export", "--source", "out", "--target", "models", "--name", "m", "--export-id", "a")
    measured = (
        "--metrics",
        "@metrics.json",
        "--history",
        "@history.json",
        "--provenance",
        '{"trainjob": {"uid": "u"}}',
    )
    code, out, err, outputs = run(*exporting, *measured, "--alias", "champion", "--metric", "acc")
    assert (code, err) == (0, "")
    curve = connect()._client.get_metric_history(registry.resolve("m", "1").run_id, "acc")  # type: ignore[attr-defined]  # MLflow's
    assert [(point.step, point.value) for point in curve] == [(1, 0.25), (2, 0.5)]
    assert "version 1 of 'm'" in out
    assert (outputs["version"], outputs["promoted"], outputs["name"]) == ("1", True, "m")
    code, out, err, outputs = run("initialize-model", "--source", "models:/m@champion", "--target", "in")
    assert (code, err, outputs["fresh"], outputs["version"]) == (0, "", False, "1")
    assert outputs["uri"] == (tmp_path / "in").as_uri()
