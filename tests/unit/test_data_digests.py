"""Manifests and digests: of a folder, and given or registered with a model that an initializer downloads."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, strategies as st
from tests.fakes.model_registry import FakeRegistry
from tests.trees import tree

from trainjob.data import copy, export, file_manifest, initialize, read_manifest
from trainjob.data.file_manifest import File
from trainjob.errors import ChecksumMismatch, CorruptData, UnsafePath
from trainjob.registry import Registry, connect

_name = st.text("abc.-_ é", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
_path = st.lists(_name, min_size=1, max_size=3).map("/".join)


def _no_conflict(paths: set[str]) -> bool:
    return not any(str(parent) in paths for path in paths for parent in PurePosixPath(path).parents)


def _file(path: str, data: bytes = b"x") -> File:
    return File(path, len(data), hashlib.sha256(data).hexdigest())


_paths = st.sets(_path, max_size=8).filter(_no_conflict)


@given(_paths, st.binary(max_size=4))
def test_manifest_is_canonical_and_can_be_parsed(paths: set[str], data: bytes) -> None:
    one = file_manifest.build([_file(path, data) for path in sorted(paths)], "origin")
    two = file_manifest.build([_file(path, data) for path in sorted(paths, reverse=True)], "origin")
    assert one.to_json() == two.to_json()
    assert file_manifest.parse(one.to_json(), "here") == one
    assert one.size == len(paths) * len(data)


@given(_paths)
def test_digest_equals_that_of_model_signing(paths: set[str]) -> None:
    # model-signing sorts PurePosixPath objects, that is, segment by segment: "a/b" comes before "a.b".
    files = [_file(path, path.encode()) for path in paths]
    total = hashlib.sha256()
    for file in sorted(files, key=lambda each: PurePosixPath(each.path)):
        total.update(bytes.fromhex(file.sha256))
    assert file_manifest.build(files).digest == f"sha256:{total.hexdigest()}"


def test_digest_of_a_recorded_tree() -> None:
    # Subject digest of the statement that model-signing 1.1.1 signs over files a/b = "1" and a.b = "2".
    manifest = file_manifest.build([_file("a.b", b"2"), _file("a/b", b"1")])
    assert [file.path for file in manifest.files] == ["a/b", "a.b"]
    assert manifest.digest == "sha256:4295f72eeb1e3507b8461e240e3b8d18c1e7bd2f1122b11fc9ec40a65894031a"


def test_names_are_reserved_in_the_root_only() -> None:
    file_manifest.check_paths(["a/MANIFEST.json", "a/.trainjob/x"])
    for path in ("MANIFEST.json", ".trainjob/x"):
        with pytest.raises(UnsafePath):
            file_manifest.check_paths([path])


@given(_paths.filter(bool), st.data())
def test_any_change_of_a_manifest_is_detected(paths: set[str], data: st.DataObject) -> None:
    value = json.loads(file_manifest.build([_file(path) for path in paths]).to_json())
    file = data.draw(st.sampled_from(value["files"]))
    change = data.draw(st.sampled_from(["sha256", "size", "drop", "double"]))
    if change == "sha256":
        file["sha256"] = "0" * 64
    elif change == "size":
        file["size"] += 1
    elif change == "drop":
        value["files"].remove(file)
    else:
        value["files"].append(file)
    with pytest.raises(CorruptData):
        file_manifest.parse(json.dumps(value).encode(), "here")


OTHER = (b'{"format":"other","files":[]}', b'{"format":1,"files":{"a":1}}')


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
    for spelled in (right, right.removeprefix("sha256:"), f" {right.upper()} ".replace("SHA256", "sha256")):
        assert initialize(str(source), target, digest=spelled).digest == right
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
    """`tests/registry` replaces the whole model."""
    done = export(str(_tree(tmp_path / "out")), str(tmp_path / "models"), name="m", export_id="a")
    place = Path(done.uri.removeprefix("file://"))
    assert initialize("models:/m/1", str(tmp_path / "in"), digest=done.digest).digest == done.digest
    (place / "sub/more.txt").write_text("y")
    for _ in range(2):
        for more in ({}, {"digest": done.digest}, {"include": ["*.txt"]}):
            with pytest.raises((ChecksumMismatch, CorruptData)):
                initialize("models:/m/1", str(tmp_path / "no"), **more)
            assert read_manifest(str(tmp_path / "no")) is None
        (place / file_manifest.NAME).unlink(missing_ok=True)
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
