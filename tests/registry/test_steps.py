"""The initializer and export steps: with every registry, and in detail with MLflow on SQLite."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.model_registry import FakeRegistry, Fault
from tests.keys import key_pair
from tests.registry.conftest import on
from tests.seaweedfs import SeaweedFS
from tests.trees import model, tree

from trainjob.data import export, file_manifest, initialize
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

MODEL = {"MANIFEST.json", "config.json", "model.safetensors"}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry requests to a Kubeflow Model Registry without pauses."""
    monkeypatch.setattr("trainjob.registry.rest.sleep", lambda _: None)


@pytest.fixture
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where models go: a directory, or S3 for an MLflow server, which refuses local files."""
    if "mlflow+http" not in request.getfixturevalue("registry_uri"):
        yield str(tmp_path / "models")
        return
    with SeaweedFS() as s3:
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        yield s3.uri("exports")


def local(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---------------------------------------------------------------- every registry


@on("mlflow-file", "mlflow-server", "kubeflow")
def test_export_and_back(registry_uri: str, target: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"name": "digits", "alias": "champion", "metric": "acc", "registry": registry_uri}
    options |= {"min_improvement": 0.01}
    source, into = "models:/digits@champion", str(tmp_path / "in")
    with pytest.raises(ModelNotFound):
        initialize(source, into, registry=registry_uri)
    first = export(model(tmp_path / "out", 1), target, export_id="a", metrics={"acc": 0.8}, **options)
    again = export(model(tmp_path / "out", 1), target, export_id="a", metrics={"acc": 0.8}, **options)
    assert (again.version, again.uri, again.digest, again.promoted) == ("1", first.uri, first.digest, True)
    worse = export(model(tmp_path / "out", 2), target, export_id="b", metrics={"acc": 0.805}, **options)
    assert (worse.version, worse.promoted) == ("2", False)
    got = initialize(source, into, registry=registry_uri)
    assert (got.version, got.digest, got.source) == ("1", first.digest, source)
    with pytest.raises(ChecksumMismatch, match="has digest"):
        initialize(source, into, registry=registry_uri, digest="sha256:" + "0" * 64)
    assert connect(registry_uri).resolve("digits", "1").tags["trainjob.parameters"] == "4"
    assert capfd.readouterr().err == ""


@pytest.mark.full
def test_an_outage_is_not_a_missing_model(
    fake: FakeRegistry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fault = lambda _: Fault(503)
    for registry in ("mlflow+http://127.0.0.1:1", f"kubeflow+{fake.url}"):
        with pytest.raises(RegistryUnavailable):
            initialize("models:/m@champion", str(tmp_path), registry=registry, if_missing="fresh")
    program = ["initialize-model", "--source", "models:/m/1", "--target", f"{tmp_path}/t"]
    assert main([*program, "--registry", "http://127.0.0.1:1"]) == TRY_AGAIN
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert "cannot find" in error
    assert error.count("\n") == 1


# ---------------------------------------------------------------- initialize


def test_another_model_in_place_of_the_registered_one_is_refused(file_registry: Registry, tmp_path: Path) -> None:
    """It has a manifest that matches its files."""
    done = export(model(tmp_path / "out"), str(tmp_path / "models"), name="m", export_id="a", alias="champion")
    shutil.rmtree(local(done.uri))
    initialize(model(tmp_path / "other", 7), str(local(done.uri)))
    for include in ([], ["*.json"]):
        with pytest.raises(ChecksumMismatch):
            initialize("models:/m@champion", str(tmp_path / "in"), include=include)
    assert not (tmp_path / "in").exists()


def test_a_missing_champion_is_an_error_or_a_fresh_start(file_registry: Registry, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound):
        initialize("models:/m@champion", str(tmp_path / "in"))
    fresh = initialize("models:/m@champion", str(tmp_path / "in"), if_missing="fresh")
    assert (fresh.fresh, fresh.uri, fresh.version) == (True, "", None)
    assert not (tmp_path / "in").exists()
    with pytest.raises(ConfigurationError, match="registered models"):
        initialize(str(tmp_path), str(tmp_path / "in"), if_missing="fresh")


# ---------------------------------------------------------------- export


def test_a_pickle_or_a_file_named_as_provenance_is_refused(file_registry: Registry, tmp_path: Path) -> None:
    source, target = model(tmp_path / "out"), str(tmp_path / "models")
    (tmp_path / "out/old.bin").write_bytes(b"\x80")
    with pytest.raises(CorruptData, match="allow-pickle"):
        export(source, target, name="m", export_id="a")
    assert export(source, target, name="m", export_id="a", allow_pickle=True).files == 3
    (tmp_path / "out/provenance.json").write_bytes(b"{}")
    with pytest.raises(ConfigurationError, match=r"provenance\.json"):
        export(source, target, name="m", export_id="b", allow_pickle=True)
    assert len(file_registry.list("m")) == 1


def test_a_file_that_changes_after_its_check_is_not_exported(file_registry: Registry, tmp_path: Path) -> None:
    """Between the check and the copy a pickle replaces a text file."""
    source, target = model(tmp_path / "out"), str(tmp_path / "models")

    class Changing(dict[str, Any]):
        def items(self) -> Any:
            (tmp_path / "out/notes.txt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
            return super().items()

    (tmp_path / "out/notes.txt").write_text("notes")
    with pytest.raises(CorruptData, match="changed while it was exported"):
        export(source, target, name="m", export_id="a", provenance=Changing(run="r"))
    assert file_registry.list("m") == []
    assert not list(Path(target).rglob("MANIFEST.json"))
    with pytest.raises(CorruptData, match=r"notes\.txt' is a pickle"):
        export(source, target, name="m", export_id="a")


def test_the_card_of_an_author_is_part_of_the_model(file_registry: Registry, tmp_path: Path) -> None:
    source, target = model(tmp_path / "out"), str(tmp_path / "models")
    tree(tmp_path / "out", {file_manifest.CARD: b"mine"})
    done = export(source, target, name="m", export_id="a")
    assert (local(done.uri) / file_manifest.CARD).read_text() == "mine"
    got = initialize("models:/m/1", str(tmp_path / "in"))
    assert (tmp_path / "in" / file_manifest.CARD).read_text() == "mine"
    assert export(got.uri, target, name="m", export_id="b").digest == done.digest
    # A model without a card replaces it in the same directory: no file of the former model remains.
    plain = export(model(tmp_path / "plain", 1), target, name="m", export_id="c")
    assert initialize("models:/m/3", str(tmp_path / "in")).digest == plain.digest
    assert names(tmp_path / "in") == MODEL


def test_card_and_provenance_are_removed_when_another_model_replaces_theirs(
    file_registry: Registry, tmp_path: Path
) -> None:
    folder = local(export(model(tmp_path / "out"), str(tmp_path), name="m", export_id="a").uri)
    assert {file_manifest.PROVENANCE, file_manifest.CARD} <= names(folder)
    initialize(model(tmp_path / "other", 1), str(folder))
    assert names(folder) == MODEL


def test_an_export_is_signed_once(file_registry: Registry, tmp_path: Path) -> None:
    source, target, (private, public) = model(tmp_path / "out"), str(tmp_path / "models"), key_pair(tmp_path)
    first = export(source, target, name="m", export_id="a", sign=private)
    before = (local(first.uri) / "model.sig").read_bytes()
    assert export(source, target, name="m", export_id="a", sign=private) == first
    assert (local(first.uri) / "model.sig").read_bytes() == before
    assert initialize("models:/m/1", str(tmp_path / "in"), verify_key=public).digest == first.digest
    export(source, target, name="m", export_id="b")
    with pytest.raises(RegistryConflict, match="without a signature"):
        export(source, target, name="m", export_id="b", sign=private)
    assert len(file_registry.list("m")) == 2


def test_the_steps_as_programs(file_registry: Registry, tmp_path: Path, python: str) -> None:
    """As ``python -m trainjob.data`` runs them."""
    (tmp_path / "script").write_text('import runpy; runpy.run_module("trainjob.data", run_name="__main__")')
    model(tmp_path / "out")
    (tmp_path / "metrics.json").write_text('{"acc": 0.5}')
    (tmp_path / "history.json").write_text('{"acc": [[1, 1769860800.0, 0.25], [2.0, 1769860801.0, 0.5]]}')
    log = tmp_path / "termination"

    def run(words: str, *more: str) -> tuple[int, str, str, dict[str, Any]]:
        log.write_text('{"outputs": {}}')
        environment = {**os.environ, "TRAINJOB_TERMINATION_LOG": str(log)}
        command = [python, f"{tmp_path}/script", *words.split(), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
        return done.returncode, done.stdout, done.stderr, json.loads(log.read_text())["outputs"]

    code, out, err, outputs = run(
        "export --source out --target models --name m --export-id a --alias champion --metric acc "
        "--metrics @metrics.json --history @history.json --provenance",
        '{"trainjob": {"uid": "u"}}',
    )
    assert (code, err) == (0, "")
    curve = file_registry._client.get_metric_history(file_registry.resolve("m", "1").run_id, "acc")  # type: ignore[attr-defined]  # MLflow's
    assert [(point.step, point.value) for point in curve] == [(1, 0.25), (2, 0.5)]
    assert "version 1 of 'm'" in out
    assert (outputs["version"], outputs["promoted"], outputs["name"]) == ("1", True, "m")
    code, out, err, outputs = run("initialize-model --source models:/m@champion --target in")
    assert (code, err, outputs["fresh"], outputs["version"]) == (0, "", False, "1")
    assert outputs["uri"] == (tmp_path / "in").as_uri()
