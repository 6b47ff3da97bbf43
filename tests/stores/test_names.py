"""Names that one store accepts and another refuses: the error has the name and the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.hub import Hub
from tests.stores.conftest import MakeStore
from tests.stores.kinds import MANIFEST
from tests.trees import files, tree

from trainjob.data import copy, read_manifest
from trainjob.errors import SourceNotFound, UnsafePath

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.parametrize("size", [1, 6_000_000])
def test_a_key_that_is_too_long_for_s3(make_store: MakeStore, name: str, size: int, tmp_path: Path) -> None:
    path = "/".join(["n" * 200] * 6)  # of 1024 bytes at most
    source = tree(tmp_path / "source", {"a.txt": b"1", path: b"2" * size})
    store = make_store("s3")
    with pytest.raises(UnsafePath, match=f"{path} is too long for the store; rename or exclude the file"):
        copy(str(source), store.uri(name))
    assert MANIFEST not in store.held(name)


@pytest.mark.parametrize("kind", ["file", "s3", "oci"])
def test_a_file_and_a_directory_of_the_same_name(make_store: MakeStore, name: str, kind: str, tmp_path: Path) -> None:
    """Only object stores can contain both."""
    uri = make_store("gs").put(name, {"a": b"1", "a/b": b"2"})
    with pytest.raises(UnsafePath, match="'a' is both a file and a directory"):
        copy(uri, make_store(kind).uri(name))
    copy(uri, str(tmp_path / "t"), exclude=["a/*"])


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        *(("hf", bad, r"\.git") for bad in (".gitattributes", ".git/config", "sub/.git/hooks/x")),
        *(
            ("oci", bad, r"\.wh\. remove files of an image; rename or exclude the file")
            for bad in (".wh.a.txt", "sub/.wh..wh..opq", ".wh.sub/x")
        ),
    ],
)
def test_names_that_a_store_reserves_are_refused(
    make_store: MakeStore, name: str, kind: str, bad: str, words: str, tmp_path: Path
) -> None:
    source, uri = tree(tmp_path / "source", {"a.txt": b"1", bad: b"2"}), make_store(kind).uri(name)
    with pytest.raises(UnsafePath, match=words):
        copy(str(source), uri)
    assert read_manifest(uri) is None


@pytest.mark.parametrize("kind", ["", "datasets/", "spaces/"])
def test_branches_and_commits_of_the_hub(hub: Hub, kind: str, tmp_path: Path) -> None:
    repo = hub.repo(f"{kind}org/revisions")
    first = repo.commit({"config.json": b"{}", "w.bin": b"1"})
    repo.commit({"config.json": b"second"})
    repo.commit({"other.txt": b"o"}, branch="v1.0")
    for number, (revision, expected) in enumerate({
        "": {"config.json": b"second"}, "@main": {"config.json": b"second"}, "@v1.0": {"other.txt": b"o"},
        f"@{first}": {"config.json": b"{}", "w.bin": b"1"},
    }.items()):  # fmt: skip
        copy(f"hf://{kind}org/revisions{revision}", str(tmp_path / str(number)))
        assert files(tmp_path / str(number)) == expected
    with pytest.raises(SourceNotFound):
        copy(f"hf://{kind}org/revisions@none", str(tmp_path / "none"))
