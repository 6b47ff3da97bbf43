"""An initializer with a digest, given or registered with the model, downloads only content with that digest."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.registry.fake import FakeRegistry

from trainjob.data import copy, export, file_manifest, initialize, read_manifest
from trainjob.errors import ChecksumMismatch, ConfigurationError, CorruptData, TrainJobError
from trainjob.registry import Registry, connect

_WRONG = "sha256:" + "0" * 64


def _tree(folder: Path, word: str = "x") -> Path:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(f'"{word}"')
    (folder / "sub/more.txt").write_text(word)
    return folder


def _digest(folder: Path) -> str:
    files = [folder / "config.json", folder / "sub/more.txt"]
    return (
        "sha256:" + hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    )


def _files(folder: Path) -> set[str]:
    """Files that a training can read."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and file_manifest.WORK not in path.relative_to(folder).parts
    }


@pytest.fixture(params=["plain", "with a manifest"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = _tree(tmp_path / "source")
    if request.param == "plain":
        return folder
    copy(str(folder), str(tmp_path / "kept"))
    return tmp_path / "kept"


def test_digest_of_a_directory_is_verified(source: Path, tmp_path: Path) -> None:
    right, target = _digest(source), tmp_path / "in"
    for wrong in (_WRONG, hashlib.sha256((source / "config.json").read_bytes()).hexdigest()):
        with pytest.raises(ChecksumMismatch):
            initialize(str(source), str(target), digest=wrong)
        assert not target.exists() or not _files(target)
    for given in (right, right.removeprefix("sha256:"), f" {right.upper()} ".replace("SHA256", "sha256")):
        assert initialize(str(source), str(target), digest=given).digest == right
    assert _files(target) == {"MANIFEST.json", "config.json", "sub/more.txt"}
    # A complete target does not replace the check.
    with pytest.raises(ChecksumMismatch):
        initialize(str(source), str(target), digest=_WRONG)
    manifest = read_manifest(str(target))
    assert manifest is not None
    assert manifest.digest == right


def _more(folder: Path) -> None:
    (folder / "extra.txt").write_text("")


def _fewer(folder: Path) -> None:
    (folder / "sub/more.txt").unlink()


def _other(folder: Path) -> None:
    (folder / "sub/more.txt").write_text("y")


def _renamed(folder: Path) -> None:
    (folder / "config.json").rename(folder / "z.json")


@pytest.mark.parametrize("change", [_more, _fewer, _other, _renamed])
def test_changed_directories_do_not_match_the_digest(
    source: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    right, target = _digest(source), tmp_path / "in"
    change(source)
    with pytest.raises((ChecksumMismatch, CorruptData)):
        initialize(str(source), str(target), digest=right)
    assert read_manifest(str(target)) is None
    # An attacker who can change files can also change the manifest.
    (source / file_manifest.NAME).unlink(missing_ok=True)
    copy(str(source), str(tmp_path / "again"))
    with pytest.raises(ChecksumMismatch):
        initialize(str(tmp_path / "again"), str(target), digest=right)
    assert read_manifest(str(target)) is None


def test_digest_of_a_single_file_is_verified(tmp_path: Path) -> None:
    file = _tree(tmp_path / "source") / "config.json"
    own = hashlib.sha256(file.read_bytes())
    root = hashlib.sha256(own.digest()).hexdigest()
    for number, right in enumerate((own.hexdigest(), f"sha256:{own.hexdigest()}", f"sha256:{root}")):
        got = initialize(str(file), str(tmp_path / f"in{number}"), digest=right)
        assert (got.digest, got.files) == (f"sha256:{root}", 1)
    file.write_text('"y"')
    for right in (own.hexdigest(), f"sha256:{root}"):
        with pytest.raises(ChecksumMismatch):
            initialize(str(file), str(tmp_path / "wrong"), digest=right)
        assert not _files(tmp_path / "wrong")
        assert initialize(str(file), str(tmp_path / "in0"), digest=right).digest == f"sha256:{root}", (
            "the target is complete"
        )


def test_digest_of_selected_files_is_verified(source: Path, tmp_path: Path) -> None:
    own = hashlib.sha256((source / "config.json").read_bytes()).hexdigest()
    assert initialize(str(source), str(tmp_path / "in"), include=["*.json"], digest=own).files == 1
    with pytest.raises(ChecksumMismatch):
        initialize(str(source), str(tmp_path / "in2"), include=["*.json"], digest=_digest(source))


@pytest.mark.parametrize("digest", ["sha256:", "md5:" + "0" * 32, "0" * 63, "g" * 64, "sha512:" + "0" * 128])
def test_invalid_digests_are_rejected(tmp_path: Path, digest: str) -> None:
    with pytest.raises(ConfigurationError, match="digest"):
        initialize(str(_tree(tmp_path / "source")), str(tmp_path / "in"), digest=digest)


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
