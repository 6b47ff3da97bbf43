"""What holds for every store, on real servers where they can be had (`tests.stores.conftest`).

Google's and Azure's are fakes; the Hub is a fake where it is written to, and olah where it is read.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest
from tests import campaigns
from tests.stores.conftest import Make
from tests.stores.places import MANIFEST, Place
from tests.trees import files, tree

from trainjob.data import content, copy, read_manifest, transfer
from trainjob.data.ranges import PART
from trainjob.data.stores.base import CHUNK
from trainjob.errors import ChecksumMismatch, CorruptData, SourceNotFound, UnsafePath

WRITTEN = ["file", "s3", "oci", "oci-password", "gs", "az", "hf"]
TREES = [*WRITTEN, "olah"]
FILES = ["file", "s3", "gs", "az", "hf", "olah", "http", "https"]
"""Where a single file can be named."""
SHOWS_PARTS = ["file", "s3", "gs", "az"]
"""Where what is half written can be seen; the others show all or nothing."""

# Of the Hub's client, as it sends files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

every = pytest.mark.parametrize


def only_marks(found: Iterable[str]) -> bool:
    """Nothing of the content is there."""
    return all(path.startswith(f"{content.WORK}/") for path in found)


def moved(place: Place) -> int:
    """Bytes of bodies that went either way, and begins to count anew."""
    assert place.proxy is not None
    total = sum(each.sent + each.received for each in place.proxy.requests)
    place.proxy.requests.clear()
    return total


@every("place", WRITTEN, indirect=True)
def test_in_and_out(place: Place, name: str, given: dict[str, bytes], tmp_path: Path) -> None:
    source = tree(tmp_path / "source", given)
    there = copy(str(source), place.uri(name))
    assert {file.path: (file.size, file.sha256) for file in there.files} == {
        path: (len(data), hashlib.sha256(data).hexdigest()) for path, data in given.items()
    }
    held = place.held(name)
    assert content.parse(held.pop(MANIFEST), name).files == there.files
    assert held == given
    found = read_manifest(place.uri(name))
    assert found is not None
    assert found.digest == there.digest == transfer.scan(place.uri(name)).digest
    back = copy(place.uri(name), str(tmp_path / "back"), digest=there.digest)
    assert back.files == there.files
    assert files(tmp_path / "back") == given


@every("place", WRITTEN, indirect=True)
def test_again_moves_nothing(place: Place, name: str, given: dict[str, bytes], tmp_path: Path) -> None:
    source, uri = tree(tmp_path / "source", given), place.uri(name)
    sizes: list[int] = []

    def count(*arguments: int) -> None:
        sizes.append(arguments[0])

    copy(str(source), uri, moved=count)
    assert sizes, "it counts"
    before = place.held(name)
    if place.proxy is not None:
        # The Hub says itself where large files go; that is not by way of the proxy.
        assert moved(place) > (70_000 if uri.startswith("hf:") else sum(map(len, given.values())))
    sizes.clear()
    lines: list[str] = []
    copy(str(source), uri, moved=count, progress=lines.append)
    if not uri.startswith("oci:"):  # an image does not say what it was made of: the source is read, and hashed
        assert not sizes
        assert len(lines) == 1, "it says that all is there, and nothing else"
    if place.proxy is not None:
        methods = {each.method for each in place.proxy.requests}
        assert methods <= {"GET", "HEAD"}, "nothing is written"
        assert moved(place) < 30_000, "the manifest and a listing"
    assert place.held(name) == before
    target = tmp_path / "back"
    copy(uri, str(target))
    written = {path: path.stat() for path in target.rglob("*")}
    if place.proxy is not None:
        moved(place)
    copy(uri, str(target))
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == {
        path: status.st_mtime_ns for path, status in written.items()
    }
    if place.proxy is not None:
        assert moved(place) < 30_000


@every("place", ["olah", "http"], indirect=True)
def test_read_again_moves_nothing(place: Place, name: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(500_000)
    place.put(name, {"a.bin": data})
    for _ in range(2):
        copy(place.file(name, "a.bin"), str(tmp_path / "t"))
        passed = moved(place)
    assert files(tmp_path / "t") == {"a.bin": data}
    assert passed < 10_000


@every("place", TREES, indirect=True)
def test_some_files(place: Place, name: str, tmp_path: Path) -> None:
    given = {"a.txt": b"1", "b.bin": b"2", "sub/a.txt": b"3", "sub/c.txt": b"4", "sub/deep/d.txt": b"5"}
    uri = place.put(name, given)
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


@every("place", WRITTEN, indirect=True)
def test_some_files_are_written(place: Place, name: str, tmp_path: Path) -> None:
    given = {"a.txt": b"1", "b.bin": b"2", "sub/a.txt": b"3"}
    copy(str(tree(tmp_path / "source", given)), place.uri(name), include=["*.txt"], exclude=["sub/*"])
    assert place.held(name).keys() == {"a.txt", MANIFEST}


@every("path", ["one.bin", "sub/ünï cödé/sp ace & %20 #?.bin"])
@every("place", FILES, indirect=True)
def test_a_single_file(place: Place, name: str, path: str, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(70_000)
    place.put(name, {path: data, "other": b"x"})
    quoted = place.file(name, path)
    if quoted.startswith(("http", "file")):
        from urllib.parse import quote

        quoted = place.file(name, quote(path))
    digest = hashlib.sha256(data).hexdigest()
    manifest = copy(quoted, str(tmp_path / "t"), digest=digest)
    last = path.rpartition("/")[2]
    assert [(file.path, file.sha256) for file in manifest.files] == [(last, digest)]
    assert files(tmp_path / "t") == {last: data}
    with pytest.raises(ChecksumMismatch, match="0000"):
        copy(quoted, str(tmp_path / "wrong"), digest="0" * 64)
    assert only_marks(files(tmp_path / "wrong"))


@every("place", FILES, indirect=True)
def test_an_empty_file(place: Place, name: str, tmp_path: Path) -> None:
    place.put(name, {"empty": b"", "other": b"x"})
    assert copy(place.file(name, "empty"), str(tmp_path / "t")).size == 0
    assert files(tmp_path / "t") == {"empty": b""}


@every("place", [*TREES, "http", "https"], indirect=True)
def test_nothing_is_there(place: Place, name: str, tmp_path: Path) -> None:
    uri = place.uri(name)
    with pytest.raises(SourceNotFound):
        copy(uri, str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()


@every("place", SHOWS_PARTS, indirect=True)
def test_what_is_half_written_is_not_read(place: Place, name: str, tmp_path: Path) -> None:
    cut = gzip.compress(os.urandom(100_000))[:-20]
    source = tree(tmp_path / "source", {"a.txt": b"1", "x.csv.gz": cut})
    with pytest.raises(CorruptData, match="gzip"):
        copy(str(source), place.uri(name))
    assert only_marks(place.held(name).keys() - {"a.txt"})
    with pytest.raises(CorruptData, match="is incomplete"):
        copy(place.uri(name), str(tmp_path / "t"))
    assert not (tmp_path / "t").exists()
    tree(source, {"x.csv.gz": gzip.compress(b"1,2")})
    whole = copy(str(source), place.uri(name))
    assert place.held(name).keys() == {"a.txt", "x.csv.gz", MANIFEST}
    assert copy(place.uri(name), str(tmp_path / "t")).digest == whole.digest


@every("place", [each for each in WRITTEN if each not in SHOWS_PARTS], indirect=True)
def test_what_is_half_written_is_not_seen(place: Place, name: str, tmp_path: Path) -> None:
    before = tree(tmp_path / "before", {"a.txt": b"before"})
    copy(str(before), place.uri(name))
    held = place.held(name)
    cut = gzip.compress(os.urandom(2_000_000))[:-20]
    with pytest.raises(CorruptData, match="gzip"):
        copy(str(tree(tmp_path / "source", {"a.txt": b"1", "x.csv.gz": cut})), place.uri(name))
    assert place.held(name) == held


@every("place", WRITTEN, indirect=True)
def test_a_digest_that_is_refused(place: Place, name: str, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a.txt": b"1", "b.txt": b"2"})
    with pytest.raises(ChecksumMismatch, match="0000"):
        copy(str(source), place.uri(name), digest="sha256:" + "0" * 64)
    if place.uri(name).startswith("oci:"):
        with pytest.raises(SourceNotFound):
            transfer.scan(place.uri(name))
    else:
        assert only_marks(place.held(name))
    right = copy(str(source), str(tmp_path / "right")).digest
    assert copy(str(source), place.uri(name), digest=right).digest == right
    with pytest.raises(ChecksumMismatch, match="1111"):
        copy(place.uri(name), str(tmp_path / "t"), digest="sha256:" + "1" * 64)
    assert not (tmp_path / "t").exists()


@every("place", [*SHOWS_PARTS, "hf"], indirect=True)
def test_what_was_changed_behind_the_manifest_is_noticed(place: Place, name: str, tmp_path: Path) -> None:
    copy(str(tree(tmp_path / "source", {"a.txt": b"one", "b.txt": b"two"})), place.uri(name))
    place.put(name, place.held(name) | {"a.txt": b"eno"})
    with pytest.raises(ChecksumMismatch, match=r"a\.txt"):
        copy(place.uri(name), str(tmp_path / "t"))
    assert read_manifest(str(tmp_path / "t")) is None
    place.put(name, place.held(name) | {"c.txt": b"new"})
    with pytest.raises(CorruptData, match=r"c\.txt.* does not list"):
        copy(place.uri(name), str(tmp_path / "t2"))


@every("bad", ["back\\slash", "line\nfeed", b"\xff no unicode"])
@every("place", WRITTEN, indirect=True)
def test_names_that_are_refused_reach_no_store(place: Place, name: str, bad: str | bytes, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a.txt": b"1"})
    (source / os.fsdecode(bad)).write_bytes(b"x")
    with pytest.raises(UnsafePath):
        copy(str(source), place.uri(name))
    assert place.proxy is None or not [each for each in place.proxy.requests if each.method not in ("GET", "HEAD")]


@pytest.mark.usefixtures("by_ranges")
@every("place", ["file", "s3", "oci", "gs", "az", "hf", "olah", "http", "https"], indirect=True)
def test_a_large_file(place: Place, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri, part = place.uri(name), PART
    if not uri.startswith(("file:", "s3:", "oci:")):  # the others are slow
        part = CHUNK
        monkeypatch.setattr("trainjob.data.ranges.PART", part)
    data = random.Random(3).randbytes(part) * 4 + b"end"
    place.put(name, {"large.bin": data})
    copy(place.file(name, "large.bin") if uri.startswith("http") else uri, str(tmp_path / "t"))
    assert (tmp_path / "t/large.bin").read_bytes() == data
    if place.proxy is not None:
        spans = {each.headers.get("range", "bytes=0-0") for each in place.proxy.requests} - {"bytes=0-0"}
        if uri.startswith("hf://datasets"):
            assert not spans, "where there are no ranges"
        elif not uri.startswith("oci:"):  # whose layers are read whole
            assert len(spans) == 5


@every("place", ["s3"], indirect=True)
def test_thousands_of_small_files(place: Place, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than S3 lists in one reply, which is 1000. `tests/local/test_memory.py` has 10 000 in directories, too."""
    source, count = tmp_path / "source", 10_000 if campaigns.FULL else 2_500
    for number in range(count):
        folder = source / str(number % 101)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).write_bytes(b"%d" % number)
    if place.proxy is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{place.proxy.upstream}")  # it would take most of the time
    began = time.monotonic()
    there = copy(str(source), place.uri(name))
    there_and_back = copy(place.uri(name), str(tmp_path / "back"), digest=there.digest)
    print(f"there and back in {time.monotonic() - began:.1f} s")
    assert len(there_and_back.files) == count
    assert files(tmp_path / "back") == files(source)


def test_from_each_store_to_the_next(make: Make, name: str, given: dict[str, bytes], tmp_path: Path) -> None:
    """Through all of them, and what comes out is what went in."""
    chain = [make(kind).uri(name) for kind in ("s3", "oci", "gs", "az", "hf", "file")]
    digest = copy(str(tree(tmp_path / "source", given)), chain[0]).digest
    for source, target in pairwise(chain):
        assert copy(source, target, digest=digest).digest == digest
    assert copy(chain[-1], chain[0]).digest == digest
    assert copy(chain[-1], str(tmp_path / "back")).digest == digest
    assert files(tmp_path / "back") == given
