"""A mirror of the Hub, without the internet: models and datasets, revisions, directories, large files of Git LFS."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
from tests.stores.olah import Olah
from tests.trees import files

from trainjob.data import copy
from trainjob.data.locations import parse_store
from trainjob.data.stores.huggingface import HuggingFaceStore
from trainjob.errors import SourceNotFound

FIRST = {"config.json": b"{}", "w.bin": random.Random(1).randbytes(200_000), "sub/ünï cödé/x y.txt": b"u", "empty": b""}


@pytest.fixture(autouse=True)
def mirror(olah: Olah, monkeypatch: pytest.MonkeyPatch) -> Olah:
    monkeypatch.setenv("HF_ENDPOINT", f"http://{olah.host}")
    return olah


@pytest.mark.parametrize("kind", ["", "datasets/", "spaces/"])
def test_branches_and_commits(mirror: Olah, kind: str, tmp_path: Path) -> None:
    repo = f"{kind}org/revisions"
    commit = mirror.commit(repo, FIRST)
    second = {**FIRST, "config.json": b'{"second": true}'}
    mirror.commit(repo, second)
    mirror.commit(repo, {"other.txt": b"o"}, branch="v1.0")
    for number, (revision, expected) in enumerate(
        {"": second, "@main": second, f"@{commit}": FIRST, "@v1.0": {"other.txt": b"o"}}.items()
    ):
        copy(f"hf://{repo}{revision}", str(tmp_path / str(number)))
        assert files(tmp_path / str(number)) == expected
    with pytest.raises(SourceNotFound):
        copy(f"hf://{repo}@none", str(tmp_path / "none"))


def test_a_store_reads_one_commit(mirror: Olah) -> None:
    commit = mirror.commit("org/pinned", FIRST)
    store = HuggingFaceStore(parse_store("hf://org/pinned"))
    assert store.resolved().uri == f"hf://org/pinned@{commit}/"
    mirror.commit("org/pinned", {"other": b"o"})
    assert {entry.path for entry in store.list()} == FIRST.keys()
    assert b"".join(store.read("config.json")) == b"{}"
    store.close()


def test_a_directory_and_a_file(mirror: Olah, tmp_path: Path) -> None:
    mirror.commit("org/parts", FIRST)
    copy("hf://org/parts/sub", str(tmp_path / "directory"))
    assert files(tmp_path / "directory") == {"ünï cödé/x y.txt": b"u"}
    copy("hf://org/parts@main/sub/ünï cödé/x y.txt", str(tmp_path / "file"))
    assert files(tmp_path / "file") == {"x y.txt": b"u"}
    with pytest.raises(SourceNotFound, match="does not exist or is empty"):
        copy("hf://org/parts/none", str(tmp_path / "none"))
    with pytest.raises(SourceNotFound, match="repository hf://org/none"):
        copy("hf://org/none", str(tmp_path / "none"))


def test_a_file_of_git_lfs(mirror: Olah, tmp_path: Path) -> None:
    """It is checked against the hash in its pointer."""
    data = random.Random(2).randbytes(300_000)
    mirror.commit("org/lfs", {"config.json": b"{}", "w.bin": mirror.large("org/lfs", data)})
    manifest = copy("hf://org/lfs", str(tmp_path / "t"))
    assert files(tmp_path / "t") == {"config.json": b"{}", "w.bin": data}
    assert manifest.files[1].sha256 == hashlib.sha256(data).hexdigest()
