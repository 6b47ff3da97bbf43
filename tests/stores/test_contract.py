"""The contract of every store, on real servers where they are available (`tests.stores.conftest`).

Google's store and the Hub are fakes; Azure's is a fake and, in `make test-all`, Azurite.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests import campaigns
from tests.stores.conftest import MakeStore
from tests.stores.kinds import MANIFEST, Store
from tests.trees import files, tree

from trainjob.data import copy, file_manifest, read_manifest, transfer
from trainjob.data.ranges import PART
from trainjob.data.stores.base import CHUNK
from trainjob.errors import ChecksumMismatch, CorruptData, SourceNotFound, UnsafePath

AZURITE: Any = pytest.param("azurite", marks=pytest.mark.full)
WRITTEN = ["file", "s3", "oci", "oci-password", "gs", "az", AZURITE, "hf"]
FILES = ["file", "s3", "gs", "az", AZURITE, "hf", "http", "https"]
"""Stores in which a location can name a single file."""
SHOWS_PARTS = ["file", "s3", "gs", "az", AZURITE]
"""Stores in which an incomplete upload is visible; the others show all files or none."""

# huggingface-hub warns while it uploads files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

every = pytest.mark.parametrize


def only_marks(found: Iterable[str]) -> bool:
    """Whether none of the content is there."""
    return all(path.startswith(f"{file_manifest.WORK}/") for path in found)


def moved(store: Store) -> int:
    """Return the bytes of bodies in both directions since the last call."""
    assert store.proxy is not None
    total = sum(each.sent + each.received for each in store.proxy.requests)
    store.proxy.requests.clear()
    return total


@every("store", WRITTEN, indirect=True)
def test_upload_and_download(store: Store, name: str, given: dict[str, bytes], tmp_path: Path) -> None:
    source = tree(tmp_path / "source", given)
    there = copy(str(source), store.uri(name))
    assert {file.path: (file.size, file.sha256) for file in there.files} == {
        path: (len(data), hashlib.sha256(data).hexdigest()) for path, data in given.items()
    }
    held = store.held(name)
    assert file_manifest.parse(held.pop(MANIFEST), name).files == there.files
    assert held == given
    found = read_manifest(store.uri(name))
    assert found is not None
    assert found.digest == there.digest == transfer.scan(store.uri(name)).digest
    back = copy(store.uri(name), str(tmp_path / "back"), digest=there.digest)
    assert back.files == there.files
    assert files(tmp_path / "back") == given


@every("store", WRITTEN, indirect=True)
def test_a_repeated_upload_transfers_nothing(store: Store, name: str, given: dict[str, bytes], tmp_path: Path) -> None:
    source, uri, sizes, lines = str(tree(tmp_path / "source", given)), store.uri(name), list[int](), list[str]()
    copy(source, uri, moved=lambda *sent: sizes.append(sent[0]))
    assert sizes, "the first copy is counted"
    before = store.held(name)
    if store.proxy is not None:
        # The Hub returns a URL for large files, which bypasses the proxy.
        assert moved(store) > (70_000 if uri.startswith("hf:") else sum(map(len, given.values())))
    sizes.clear()
    copy(source, uri, moved=lambda *sent: sizes.append(sent[0]), progress=lines.append)
    if not uri.startswith("oci:"):  # an image does not record its source, so the source is read and hashed
        assert (sizes, len(lines)) == ([], 1), "one line: everything is there"
    if store.proxy is not None:
        assert {each.method for each in store.proxy.requests} <= {"GET", "HEAD"}, "nothing is written"
        assert moved(store) < 30_000, "the manifest and a listing"
    assert store.held(name) == before


@every("store", [*WRITTEN, "http"], indirect=True)
def test_a_repeated_download_transfers_nothing(
    store: Store, name: str, given: dict[str, bytes], tmp_path: Path
) -> None:
    uri, target = store.uri(name), tmp_path / "back"
    if uri.startswith("http:"):
        store.put(name, {"a.bin": random.Random(1).randbytes(500_000)})
        uri = store.file(name, "a.bin")
    else:
        copy(str(tree(tmp_path / "source", given)), uri)
    copy(uri, str(target))
    written = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    if store.proxy is not None:
        moved(store)
    copy(uri, str(target))
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == written
    assert store.proxy is None or moved(store) < 30_000


@every("store", WRITTEN, indirect=True)
def test_include_and_exclude_of_a_download(store: Store, name: str, tmp_path: Path) -> None:
    given = {"a.txt": b"1", "b.bin": b"2", "sub/a.txt": b"3", "sub/c.txt": b"4", "sub/deep/d.txt": b"5"}
    uri = store.put(name, given)
    for number, (include, exclude, expected) in enumerate([
        (["*.txt"], [], {"a.txt", "sub/a.txt", "sub/c.txt", "sub/deep/d.txt"}),
        (["sub/*"], ["c.*"], {"sub/a.txt", "sub/deep/d.txt"}),
        ([], ["sub/*", "MANIFEST.json"], {"a.txt", "b.bin"}),
    ]):  # fmt: skip
        target = tmp_path / str(number)
        copied = copy(uri, str(target), include=include, exclude=exclude)
        assert {file.path for file in copied.files} == expected
        assert files(target) == {path: given[path] for path in expected}
    with pytest.raises(SourceNotFound, match=r"none of the 5 files .*parquet"):
        copy(uri, str(tmp_path / "none"), include=["*.parquet"])
    assert not (tmp_path / "none").exists()


@every("store", WRITTEN, indirect=True)
def test_include_and_exclude_of_an_upload(store: Store, name: str, tmp_path: Path) -> None:
    given = {"a.txt": b"1", "b.bin": b"2", "sub/a.txt": b"3"}
    copy(str(tree(tmp_path / "source", given)), store.uri(name), include=["*.txt"], exclude=["sub/*"])
    assert store.held(name).keys() == {"a.txt", MANIFEST}


@every("path", ["one.bin", "sub/ünï cödé/sp ace & %20 #?.bin"])
@every("store", FILES, indirect=True)
def test_a_single_file(store: Store, name: str, path: str, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(70_000)
    store.put(name, {path: data, "other": b"x"})
    quoted = store.file(name, path)
    if quoted.startswith(("http", "file")):
        from urllib.parse import quote

        quoted = store.file(name, quote(path))
    digest = hashlib.sha256(data).hexdigest()
    manifest = copy(quoted, str(tmp_path / "t"), digest=digest)
    last = path.rpartition("/")[2]
    assert [(file.path, file.sha256) for file in manifest.files] == [(last, digest)]
    assert files(tmp_path / "t") == {last: data}
    with pytest.raises(ChecksumMismatch, match="0000"):
        copy(quoted, str(tmp_path / "wrong"), digest="0" * 64)
    assert only_marks(files(tmp_path / "wrong"))


@every("store", FILES, indirect=True)
def test_an_empty_file(store: Store, name: str, tmp_path: Path) -> None:
    store.put(name, {"empty": b"", "other": b"x"})
    assert copy(store.file(name, "empty"), str(tmp_path / "t")).size == 0
    assert files(tmp_path / "t") == {"empty": b""}


@every("store", [*WRITTEN, "http", "https"], indirect=True)
def test_a_missing_source(store: Store, name: str, tmp_path: Path) -> None:
    uri = store.uri(name)
    with pytest.raises(SourceNotFound):
        copy(uri, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()


@every("store", SHOWS_PARTS, indirect=True)
def test_an_incomplete_upload_is_not_read(store: Store, name: str, tmp_path: Path) -> None:
    cut = gzip.compress(os.urandom(100_000))[:-20]
    source = tree(tmp_path / "source", {"a.txt": b"1", "x.csv.gz": cut})
    with pytest.raises(CorruptData, match="gzip"):
        copy(str(source), store.uri(name))
    assert only_marks(store.held(name).keys() - {"a.txt"})
    with pytest.raises(CorruptData, match="is incomplete"):
        copy(store.uri(name), str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
    tree(source, {"x.csv.gz": gzip.compress(b"1,2")})
    complete = copy(str(source), store.uri(name))
    assert store.held(name).keys() == {"a.txt", "x.csv.gz", MANIFEST}
    assert copy(store.uri(name), str(tmp_path / "t")).digest == complete.digest


@every("store", [each for each in WRITTEN if each not in SHOWS_PARTS], indirect=True)
def test_an_incomplete_upload_is_not_visible(store: Store, name: str, tmp_path: Path) -> None:
    before = tree(tmp_path / "before", {"a.txt": b"before"})
    copy(str(before), store.uri(name))
    held = store.held(name)
    cut = gzip.compress(os.urandom(2_000_000))[:-20]
    with pytest.raises(CorruptData, match="gzip"):
        copy(str(tree(tmp_path / "source", {"a.txt": b"1", "x.csv.gz": cut})), store.uri(name))
    assert store.held(name) == held


@every("store", WRITTEN, indirect=True)
def test_a_wrong_digest_is_refused(store: Store, name: str, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a.txt": b"1", "b.txt": b"2"})
    with pytest.raises(ChecksumMismatch, match="0000"):
        copy(str(source), store.uri(name), digest="sha256:" + "0" * 64)
    if store.uri(name).startswith("oci:"):
        with pytest.raises(SourceNotFound):
            transfer.scan(store.uri(name))
    else:
        assert only_marks(store.held(name))
    right = copy(str(source), str(tmp_path / "right")).digest
    assert copy(str(source), store.uri(name), digest=right).digest == right
    with pytest.raises(ChecksumMismatch, match="1111"):
        copy(store.uri(name), str(tmp_path / "t"), digest="sha256:" + "1" * 64)
    assert not (tmp_path / "t").exists()


@every("store", [*SHOWS_PARTS, "hf"], indirect=True)
def test_a_change_after_the_manifest_is_detected(store: Store, name: str, tmp_path: Path) -> None:
    copy(str(tree(tmp_path / "source", {"a.txt": b"one", "b.txt": b"two"})), store.uri(name))
    store.put(name, store.held(name) | {"a.txt": b"eno"})
    with pytest.raises(ChecksumMismatch, match=r"a\.txt"):
        copy(store.uri(name), str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None
    store.put(name, store.held(name) | {"c.txt": b"new"})
    with pytest.raises(CorruptData, match=r"c\.txt.* does not list"):
        copy(store.uri(name), str(tmp_path / "t2"))


@every("bad", ["back\\slash", "line\nfeed", b"\xff no unicode"])
@every("store", WRITTEN, indirect=True)
def test_refused_names_reach_no_store(store: Store, name: str, bad: str | bytes, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a.txt": b"1"})
    (source / os.fsdecode(bad)).write_bytes(b"x")
    with pytest.raises(UnsafePath):
        copy(str(source), store.uri(name))
    assert store.proxy is None or not [each for each in store.proxy.requests if each.method not in ("GET", "HEAD")]


@pytest.mark.usefixtures("by_ranges")
@every("store", ["file", "s3", "oci", "gs", "az", AZURITE, "hf", "http", "https"], indirect=True)
def test_a_large_file(store: Store, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, part = store.uri(name), PART
    if not uri.startswith(("file:", "s3:", "oci:")):  # the others are slow
        part = CHUNK
        monkeypatch.setattr("trainjob.data.ranges.PART", part)
    data = random.Random(3).randbytes(part) * 4 + b"end"
    store.put(name, {"large.bin": data})
    copy(store.file(name, "large.bin") if uri.startswith("http") else uri, str(tmp_path / "t"))
    assert (tmp_path / "t/large.bin").read_bytes() == data
    if store.proxy is not None:
        spans = {each.headers.get("range", "bytes=0-0") for each in store.proxy.requests} - {"bytes=0-0"}
        if not uri.startswith("oci:"):  # layers are read completely
            assert len(spans) == 5


@pytest.mark.full
@every("store", ["s3"], indirect=True)
def test_thousands_of_small_files(store: Store, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than S3 lists in one reply, which is 1000. `tests/local/test_memory.py` has 10 000 in directories, too."""
    source, count = tmp_path / "source", 10_000 if campaigns.FULL else 2_500
    for number in range(count):
        folder = source / str(number % 101)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_bytes(b"%d" % number)
    if store.proxy is not None:
        monkeypatch.setenv(
            "AWS_ENDPOINT_URL", f"http://{store.proxy.upstream}"
        )  # the proxy would take most of the time
    there = copy(str(source), store.uri(name))
    there_and_back = copy(store.uri(name), str(tmp_path / "back"), digest=there.digest)
    assert len(there_and_back.files) == count
    assert files(tmp_path / "back") == files(source)


@pytest.mark.full
def test_from_each_store_to_the_next(make_store: MakeStore, name: str, given: dict[str, bytes], tmp_path: Path) -> None:
    """The content is the same after all copies."""
    chain = [make_store(kind).uri(name) for kind in ("s3", "oci", "gs", "az", "hf", "file")]
    digest = copy(str(tree(tmp_path / "source", given)), chain[0]).digest
    for source, target in pairwise(chain):
        assert copy(source, target, digest=digest).digest == digest
    assert copy(chain[-1], chain[0]).digest == digest
    assert copy(chain[-1], str(tmp_path / "back")).digest == digest
    assert files(tmp_path / "back") == given
