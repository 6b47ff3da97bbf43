"""Export of a trained model to a container registry, and its use in the next training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests import trees
from tests.keys import key_pair
from tests.oci.registry import Server
from tests.trees import files

from trainjob.data import export, initialize
from trainjob.data.locations import parse_store
from trainjob.data.stores.oci import attached
from trainjob.errors import ChecksumMismatch, ConfigurationError, RegistryConflict
from trainjob.registry import connect


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(trees.model(tmp_path / "model", size=3_000_000))


def test_export_and_next_training(server: Server, name: str, model: Path, tmp_path: Path) -> None:
    registry = connect(f"mlflow+sqlite:///{tmp_path}/registry.db")
    for _ in range(2):
        exported = export(
            str(model), server.uri(name), name="Digits", export_id="run-1", registry=registry, metrics={"acc": 0.9},
            alias="champion", metric="acc", provenance={"run": "7"},
        )  # fmt: skip
        assert (exported.version, exported.parameters) == ("1", 3_000_000)
        assert exported.uri.startswith(server.uri(f"{name}/digits@sha256:"))
    assert [version.uri for version in registry.list("Digits")] == [exported.uri]
    statement = json.loads(attached(parse_store(exported.uri))["provenance.json"])
    assert statement["subject"][0]["digest"]["sha256"] == exported.digest.removeprefix("sha256:")
    initialized = initialize("models:/Digits@champion", str(tmp_path / "next"), registry=registry)
    assert (initialized.digest, initialized.version) == (exported.digest, "1")
    assert files(tmp_path / "next") == files(model)
    # Export an image as another model: it is checked by ranges, without a copy on disk.
    again = export(initialized.source and exported.uri, server.uri(name), name="copy", export_id="1", registry=registry)
    assert again.digest == exported.digest
    (model / "config.json").write_text("[]")
    with pytest.raises(RegistryConflict, match="was used to export another model"):
        export(str(model), server.uri(name), name="Digits", export_id="run-1", registry=registry)


def test_a_signed_export(server: Server, name: str, model: Path, tmp_path: Path) -> None:
    key, public = key_pair(tmp_path, "mine")
    registry = connect(f"mlflow+sqlite:///{tmp_path}/registry.db")
    for _ in range(2):
        exported = export(str(model), server.uri(name), name="m", export_id="1", registry=registry, sign=key)
        assert exported.version == "1"
    initialize("models:/m/1", str(tmp_path / "next"), registry=registry, verify_key=public)
    assert files(tmp_path / "next") == files(model)
    with pytest.raises(ChecksumMismatch, match="is not valid for the key"):
        initialize(exported.uri, str(tmp_path / "no"), verify_key=key_pair(tmp_path, "other")[1])
    (model / "config.json").write_text("[]")
    plain = export(str(model), server.uri(name), name="m", export_id="2", registry=registry)
    with pytest.raises(ChecksumMismatch, match="is not signed"):
        initialize(plain.uri, str(tmp_path / "no"), verify_key=public)
    with pytest.raises(RegistryConflict, match="without a signature"):
        export(str(model), server.uri(name), name="m", export_id="2", registry=registry, sign=key)


def test_the_same_model_signed_twice(server: Server, name: str, model: Path, tmp_path: Path) -> None:
    """One image with two signatures and two provenances: each signature covers its provenance."""
    key, public = key_pair(tmp_path, "mine")
    registry = connect(f"mlflow+sqlite:///{tmp_path}/registry.db")
    uris = set()
    for number in (1, 2):
        options: dict[str, Any] = {"name": "m", "export_id": f"{number}", "provenance": {"seed": number}}
        uris.add(export(str(model), server.uri(name), registry=registry, sign=key, **options).uri)
    (uri,) = uris
    lines: list[str] = []
    initialize(uri, str(tmp_path / "next"), verify_key=public, progress=lines.append)
    assert "not covered" not in "".join(lines)
    # A signature of the same model by another key neither invalidates the first one nor counts.
    export(
        str(model), server.uri(name), name="m", export_id="3", registry=registry, sign=key_pair(tmp_path, "other")[0]
    )
    initialize(uri, str(tmp_path / "again"), verify_key=public)
    with pytest.raises(ChecksumMismatch, match="is not valid for the key"):
        initialize(uri, str(tmp_path / "no"), verify_key=key_pair(tmp_path, "third")[1])


def test_a_tag_or_digest_is_no_target_of_an_export(server: Server, name: str, model: Path, tmp_path: Path) -> None:
    for target in (server.uri(f"{name}:1"), server.uri(f"{name}@sha256:{'0' * 64}")):
        with pytest.raises(ConfigurationError, match="is not a location in a registry"):
            export(str(model), target, name="m", export_id="1", registry=f"mlflow+sqlite:///{tmp_path}/r.db")
