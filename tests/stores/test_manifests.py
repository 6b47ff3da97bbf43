"""Wrong, unsafe and malformed manifests, in every kind of store that can contain one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from tests.stores.kinds import MANIFEST, Store
from tests.trees import tree

from trainjob.data import copy, file_manifest, read_manifest
from trainjob.data.file_manifest import ContentManifest, File
from trainjob.errors import ChecksumMismatch, CorruptData, UnsafePath

STORES = ["file", "s3", "oci", "hf"]

ONE, TWO = File("a", 3, hashlib.sha256(b"one").hexdigest()), File("sub/b", 3, hashlib.sha256(b"two").hexdigest())
GOOD = json.loads(file_manifest.build([ONE, TWO]).to_json())


def _made(*files: File) -> bytes:
    """A manifest of these files, consistent in itself."""
    return ContentManifest(files).to_json()


def _with(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def _size(text: str, total: str = "") -> bytes:
    """A manifest with this text as the size of the first file."""
    value = json.loads(json.dumps(GOOD))
    value["files"][0]["size"], value["size"] = "SIZE", "TOTAL" if total else 6
    return json.dumps(value).replace('"SIZE"', text).replace('"TOTAL"', total).encode()


HOSTILE = {
    "parent directory": _made(ONE, File("../../sub/b", 3, TWO.sha256)),
    "absolute": _made(ONE, File("/etc/passwd", 3, TWO.sha256)),
    "NUL": _made(ONE, File("a\0b", 3, TWO.sha256)),
    "backslash": _made(ONE, File("..\\b", 3, TWO.sha256)),
    "the manifest itself": _made(ONE, File("MANIFEST.json", 3, TWO.sha256)),
    "the work directory": _made(ONE, File(".trainjob/lock", 3, TWO.sha256)),
    "file and directory": _made(ONE, File("a/b", 3, TWO.sha256)),
    "a lone surrogate": json.dumps(
        {**GOOD, "files": [GOOD["files"][0], {**GOOD["files"][1], "path": "\ud800"}]}
    ).encode(),
    "twice the same path": _made(ONE, ONE, TWO),
    "an extra file": _made(ONE, TWO, File("c", 3, TWO.sha256)),
    "a missing file": _made(ONE),
    "another size": _made(File("a", 4, ONE.sha256), TWO),
    "another content": _made(File("a", 3, TWO.sha256), TWO),
    "negative": _size("-3", "0"),
    "minus zero": _size("-0", "3"),
    "huge": _made(File("a", 10**30, ONE.sha256), TWO),
    "thousands of digits": _size("9" * 5000, "9" * 5000),
    "float": _size("3.0"),
    "exponent": _size("1e400"),
    "NaN": _size("NaN", "NaN"),
    "infinity": _size("Infinity", "Infinity"),
    "text": _size('"3"'),
    "bool": _size("true", "4"),
    "null": _size("null"),
    "a wrong total": _with(size=7),
    "another digest": _with(digest="sha256:" + "0" * 64),
    "a digest that is a list": _with(digest=[]),
    "upper case": _made(File("a", 3, ONE.sha256.upper()), TWO),
    "half a digest": _made(File("a", 3, ONE.sha256[:32]), TWO),
    "an object of files": _with(files={"a": GOOD["files"][0]}),
    "no files": _with(files=None),
    "files of numbers": _with(files=[1, 2]),
    "a path that is a list": _with(files=[{**GOOD["files"][0], "path": ["a"]}, GOOD["files"][1]]),
    "another format": _with(format="trainjob.content/v2"),
    "a format that is a list": _with(format=["trainjob.content/v1"]),
    "NaN in an unknown field": _with(more=float("nan")),
    "the same key twice": json.dumps(GOOD).replace('"files":', '"files": [], "files":').encode(),
    "the same key twice in a file": json.dumps(GOOD).replace('"size": 3', '"size": 1, "size": 3', 1).encode(),
    "deep": b"[" * 1_000_000,
    "deep inside": json.dumps(GOOD)[:-1].encode() + b', "more": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "a list": b"[]",
    "nothing": b"",
    "no UTF-8": b"\xff\xfe{}",
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "truncated": json.dumps(GOOD).encode()[:-10],
    "repeated": json.dumps(GOOD).encode() * 2,
    "longer than its files": b" " * 3_000_000 + json.dumps(GOOD).encode(),
}


@pytest.mark.parametrize("store", STORES, indirect=True)
def test_a_correct_manifest_is_used(store: Store, name: str, tmp_path: Path) -> None:
    uri = store.put(name, {"a": b"one", "sub/b": b"two", MANIFEST: json.dumps(GOOD, indent=4).encode()})
    assert copy(uri, str(tmp_path / "target")).files == (ONE, TWO)


@pytest.mark.parametrize("manifest", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("store", STORES, indirect=True)
def test_hostile_manifests_are_refused(store: Store, name: str, manifest: bytes, tmp_path: Path) -> None:
    """The copy is refused, and its target has no manifest."""
    uri = store.put(name, {"a": b"one", "sub/b": b"two", MANIFEST: manifest})
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises((CorruptData, UnsafePath, ChecksumMismatch)):
        copy(uri, str(tmp_path / "target"))
    assert read_manifest(str(tmp_path / "target")) is None
    assert {path.name for path in tmp_path.iterdir()} <= before | {"target"}


@pytest.mark.timeout(60)
def test_a_huge_manifest_is_not_read(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a": b"one"})
    with (source / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptData, match="1099511627776 bytes for 2 files"):
        copy(str(source), str(tmp_path / "target"))
