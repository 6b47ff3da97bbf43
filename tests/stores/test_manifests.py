"""Manifests that lie, lead out, or are none, in every kind of store that one can be read from."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from tests.stores.places import MANIFEST, Place
from tests.trees import tree

from trainjob.data import content, copy, read_manifest
from trainjob.data.content import ContentManifest, File
from trainjob.errors import ChecksumMismatch, CorruptData, UnsafePath

PLACES = ["file", "s3", "oci", "hf"]

ONE, TWO = File("a", 3, hashlib.sha256(b"one").hexdigest()), File("sub/b", 3, hashlib.sha256(b"two").hexdigest())
GOOD = json.loads(content.build([ONE, TWO]).to_json())


def _made(*files: File) -> bytes:
    """A manifest that is consistent in itself, whatever it says."""
    return ContentManifest(files).to_json()


def _with(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def _size(text: str, total: str = "") -> bytes:
    """With this for the size of the first file."""
    value = json.loads(json.dumps(GOOD))
    value["files"][0]["size"], value["size"] = "SIZE", "TOTAL" if total else 6
    return json.dumps(value).replace('"SIZE"', text).replace('"TOTAL"', total).encode()


HOSTILE = {
    "leads up": _made(ONE, File("../../sub/b", 3, TWO.sha256)),
    "absolute": _made(ONE, File("/etc/passwd", 3, TWO.sha256)),
    "NUL": _made(ONE, File("a\0b", 3, TWO.sha256)),
    "backslash": _made(ONE, File("..\\b", 3, TWO.sha256)),
    "itself": _made(ONE, File("MANIFEST.json", 3, TWO.sha256)),
    "our work": _made(ONE, File(".trainjob/lock", 3, TWO.sha256)),
    "file and directory": _made(ONE, File("a/b", 3, TWO.sha256)),
    "half a character": json.dumps(
        {**GOOD, "files": [GOOD["files"][0], {**GOOD["files"][1], "path": "\ud800"}]}
    ).encode(),
    "twice the same path": _made(ONE, ONE, TWO),
    "another file": _made(ONE, TWO, File("c", 3, TWO.sha256)),
    "a file less": _made(ONE),
    "another size": _made(File("a", 4, ONE.sha256), TWO),
    "another content": _made(File("a", 3, TWO.sha256), TWO),
    "negative": _size("-3", "0"),
    "minus nothing": _size("-0", "3"),
    "huge": _made(File("a", 10**30, ONE.sha256), TWO),
    "thousands of digits": _size("9" * 5000, "9" * 5000),
    "float": _size("3.0"),
    "exponent": _size("1e400"),
    "NaN": _size("NaN", "NaN"),
    "infinity": _size("Infinity", "Infinity"),
    "text": _size('"3"'),
    "bool": _size("true", "4"),
    "null": _size("null"),
    "a total of something else": _with(size=7),
    "another digest": _with(digest="sha256:" + "0" * 64),
    "a digest that is none": _with(digest=[]),
    "upper case": _made(File("a", 3, ONE.sha256.upper()), TWO),
    "half a digest": _made(File("a", 3, ONE.sha256[:32]), TWO),
    "an object of files": _with(files={"a": GOOD["files"][0]}),
    "no files": _with(files=None),
    "files of numbers": _with(files=[1, 2]),
    "a path that is a list": _with(files=[{**GOOD["files"][0], "path": ["a"]}, GOOD["files"][1]]),
    "another format": _with(format="trainjob.content/v2"),
    "a format that is a list": _with(format=["trainjob.content/v1"]),
    "NaN where nobody looks": _with(more=float("nan")),
    "the same key twice": json.dumps(GOOD).replace('"files":', '"files": [], "files":').encode(),
    "the same key twice in a file": json.dumps(GOOD).replace('"size": 3', '"size": 1, "size": 3', 1).encode(),
    "deep": b"[" * 1_000_000,
    "deep inside": json.dumps(GOOD)[:-1].encode() + b', "more": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "a list": b"[]",
    "nothing": b"",
    "no UTF-8": b"\xff\xfe{}",
    "UTF-16": json.dumps(GOOD).encode("utf-16"),
    "half of it": json.dumps(GOOD).encode()[:-10],
    "two of it": json.dumps(GOOD).encode() * 2,
    "longer than its files": b" " * 3_000_000 + json.dumps(GOOD).encode(),
}


@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_a_manifest_that_is_right(place: Place, name: str, tmp_path: Path) -> None:
    uri = place.put(name, {"a": b"one", "sub/b": b"two", MANIFEST: json.dumps(GOOD, indent=4).encode()})
    assert copy(uri, str(tmp_path / "target")).files == (ONE, TWO)


@pytest.mark.parametrize("manifest", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_hostile_manifests(place: Place, name: str, manifest: bytes, tmp_path: Path) -> None:
    """As a source, and, in a directory, as what is at the target already."""
    uri = place.put(name, {"a": b"one", "sub/b": b"two", MANIFEST: manifest})
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises((CorruptData, UnsafePath, ChecksumMismatch)):
        copy(uri, str(tmp_path / "target"))
    assert read_manifest(str(tmp_path / "target")) is None
    assert {path.name for path in tmp_path.iterdir()} <= before | {"target"}


def test_a_manifest_without_end_is_not_read(tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a": b"one"})
    with (source / MANIFEST).open("wb") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    with pytest.raises(CorruptData, match="1099511627776 bytes for 2 files"):
        copy(str(source), str(tmp_path / "target"))
    assert time.monotonic() - began < 30
