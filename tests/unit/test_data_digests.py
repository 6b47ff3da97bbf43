"""An initializer with a digest, given or registered with the model, downloads only content with that digest."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.registry.fake import FakeRegistry
from tests.trees import tree

from trainjob.data import copy, export, file_manifest, initialize, read_manifest
from trainjob.errors import ChecksumMismatch, CorruptData, TrainJobError
from trainjob.registry import Registry, connect

_WRONG = "sha256:" + "0" * 64


def _tree(folder: Path, word: str = "x") -> Path:
    return tree(folder, {"config.json": f'"{word}"'.encode(), "sub/more.txt": word.encode()})


def _digest(folder: Path) -> str:
    files = (hashlib.sha256((folder / name).read_bytes()).digest() for name in ("config.json", "sub/more.txt"))
    return "sha256:" + hashlib.sha256(b"".join(files)).hexdigest()


@pytest.fixture(params=["plain", "with a manifest"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = _tree(tmp_path / "source")
    if request.param == "plain":
        return folder
    copy(str(folder), str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_a_digest_has_several_spellings_and_a_complete_target_is_checked_again(source: Path, tmp_path: Path) -> None:
    right, target = _digest(source), str(tmp_path / "in")
    for given in (right, right.removeprefix("sha256:"), f" {right.upper()} ".replace("SHA256", "sha256")):
        assert initialize(str(source), target, digest=given).digest == right
    with pytest.raises(ChecksumMismatch):
        initialize(str(source), target, digest=_WRONG)
    manifest = read_manifest(target)
    assert manifest is not None
    assert manifest.digest == right


def test_digest_of_selected_files_is_verified(source: Path, tmp_path: Path) -> None:
    own = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    assert initialize(str(source), str(tmp_path / "in"), include=["*.json"], digest=own).files == 1
    with pytest.raises(ChecksumMismatch):
        initialize(str(source), str(tmp_path / "in2"), include=["*.json"], digest=_digest(source))


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    with FakeRegistry() as fake:
        monkeypatch.setenv("TRAINJOB_REGISTRY", f"kubeflow+{fake.url}")
        yield connect()


def test_digest_of_a_registered_version_is_verified(registry: Registry, tmp_path: Path) -> None:
    done = export(str(_tree(tmp_path / "out")), str(tmp_path / "models"), name="m", export_id="a")
    place = Path(done.uri.removeprefix("file://"))
    assert initialize("models:/m/1", str(tmp_path / "in"), digest=done.digest).digest == done.digest

    def assert_rejected() -> None:
        for more in ({}, {"digest": done.digest}, {"include": ["*.txt"]}):
            with pytest.raises(TrainJobError) as raised:
                initialize("models:/m/1", str(tmp_path / "no"), **more)
            assert isinstance(raised.value, ChecksumMismatch | CorruptData)
            assert read_manifest(str(tmp_path / "no")) is None

    with pytest.raises(ChecksumMismatch):
        initialize("models:/m/1", str(tmp_path / "no"), digest=_WRONG)
    (place / "sub/more.txt").write_text("y")
    assert_rejected()
    (place / file_manifest.NAME).unlink()
    assert_rejected()
    shutil.rmtree(place)
    copy(str(_tree(tmp_path / "other", "y")), str(place))
    assert_rejected()
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "out", place)
    assert initialize("models:/m/1", str(tmp_path / "back")).digest == done.digest, "equal files are the same model"
    with pytest.raises(ChecksumMismatch):  # the registered digest does not cover a part
        initialize("models:/m/1", str(tmp_path / "part"), include=["*.txt"])


def test_digest_of_a_version_without_a_registered_digest_is_verified(registry: Registry, tmp_path: Path) -> None:
    folder = _tree(tmp_path / "source")
    registry.register("m", str(folder.as_uri()), export_id="x", digest="", metrics={}, tags={})
    assert initialize("models:/m/1", str(tmp_path / "in")).digest == _digest(folder)
    with pytest.raises(ChecksumMismatch):
        initialize("models:/m/1", str(tmp_path / "in2"), digest=_WRONG)
