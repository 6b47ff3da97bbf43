"""Copies that cannot be complete: what they report, and that they write no wrong file."""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from tests.trees import files, tree
from tests.unit.copied import FILES, LEFT

from trainjob.data import copy, read_manifest
from trainjob.errors import ChecksumMismatch, ConfigurationError, CorruptData, DataError, SourceNotFound, UnsafePath

WHOLE = gzip.compress(os.urandom(300_000)) + gzip.compress(bytes(5_000_000)) + bytes(512)
CUT = {"end": WHOLE[:-520], "middle": WHOLE[:200_000], "nothing": b"", "text": b"no gzip at all", "more": WHOLE + b"x"}
WRONG: dict[str, Any] = {"digest": "sha256:" + "0" * 64}
FILE = {"source": "{}/source/a.txt"}
SAME = "a file and a directory have the same name"

Tree = dict[str, bytes | str | None]
"""Path -> content of a file, target of a link, or None for a folder."""
REFUSED: dict[str, tuple[Tree, dict[str, Any], type[Exception], str]] = {
    # sources
    "missing": ({}, {"source": "{}/none"}, SourceNotFound, "does not exist or is empty"),
    "empty": ({"none": None}, {"source": "{}/none"}, SourceNotFound, "does not exist or is empty"),
    "only folders": ({"none/x/y": None}, {"source": "{}/none"}, SourceNotFound, "does not exist or is empty"),
    "incomplete": ({"source/.trainjob/lock": b""}, {}, CorruptData, "is incomplete"),
    "link out": ({"source/outside": "/etc/passwd"}, {}, UnsafePath, "outside"),
    "loop": ({"source/loop": "../source"}, {}, UnsafePath, "loop"),
    "backslash": ({"source/a\\b": b"x"}, {}, UnsafePath, "backslash"),
    "newline": ({"source/a\nb": b"x"}, {}, UnsafePath, "control character"),
    "no UTF-8": ({os.fsdecode(b"source/\xff"): b"x"}, {}, UnsafePath, "UTF-8"),
    **{f"gzip, {cut}": ({"source/x.csv.gz": data}, {}, CorruptData, "gzip") for cut, data in CUT.items()},
    # patterns and digests
    "no match": ({}, {"include": ["*.parquet"]}, SourceNotFound, r"none of the 4 files .*\*\.parquet"),
    "file not included": ({}, FILE | {"include": ["*.parquet"]}, SourceNotFound, r"a\.txt is a single file"),
    "file excluded": ({}, FILE | {"exclude": ["a.*"]}, SourceNotFound, "does not match include=.*exclude="),
    **{
        f"digest {text}": ({}, {"digest": text}, ConfigurationError, "is not a digest")
        for text in ("md5:abc", "sha256:", "xyz", "0" * 63, "g" * 64, "sha512:" + "0" * 128)
    },
    "wrong digest": ({}, WRONG, ChecksumMismatch, "has digest .*, not sha256:0000"),
    "wrong digest of a file": ({}, FILE | WRONG, ChecksumMismatch, "0000"),
    "wrong SHA-256 of a file": ({}, FILE | {"digest": "0" * 64}, ChecksumMismatch, "0000"),
    # targets
    "inside the source": ({}, {"target": "{}/source/sub/x"}, ConfigurationError, "overlaps"),
    "the source": ({}, {"target": "{}/source"}, ConfigurationError, "overlaps"),
    "folder of the source": ({}, FILE | {"target": "{}/source"}, ConfigurationError, "overlaps"),
    "file": ({"target": b""}, {}, ConfigurationError, "must be a directory"),
    "file for a folder": ({"target/sub": b"a file"}, {}, DataError, SAME),
    "file for the work folder": ({"target/.trainjob": b""}, {}, UnsafePath, SAME),
    "dangling link": ({"target/.trainjob": "nowhere"}, {}, UnsafePath, "is a link"),
    "link out of the target": ({"elsewhere": None, "target/sub": "../elsewhere"}, {}, UnsafePath, "leads out"),
    "manifest of another tool": (
        {"target/MANIFEST.json": b'{"name": "a browser extension"}'},
        {},
        CorruptData,
        "not a manifest that trainjob wrote",
    ),
    "in /proc": ({}, {"target": "/proc/no/target"}, ConfigurationError, "/proc/no/target cannot be created: No such f"),
}


def made(root: Path, content: Tree) -> None:
    for path, data in content.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            (root / path).mkdir(parents=True)
        elif isinstance(data, str):
            (root / path).symlink_to(data)
        else:
            (root / path).write_bytes(data)


def written(folder: Path) -> dict[Path, tuple[int, int]]:
    """Path -> inode, and when the file was written."""
    found = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {path: (status.st_ino, status.st_mtime_ns) for path, status in found.items()}


@pytest.mark.parametrize(("content", "options", "error", "words"), REFUSED.values(), ids=REFUSED)
@pytest.mark.usefixtures("source")
def test_a_copy_that_cannot_be_complete_is_refused(
    target: Path, tmp_path: Path, content: Tree, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    made(tmp_path, content)
    given = {"source": "{}/source", "target": "{}/target"} | options
    given |= {name: given[name].format(tmp_path) for name in ("source", "target")}
    before = written(tmp_path)
    with pytest.raises(error, match=words):
        copy(**given)
    after = written(tmp_path)
    expected = LEFT if "digest" in options else LEFT | FILES.keys()  # a wrong digest leaves none of the files
    assert {path for path in after if before.get(path) != after[path]} <= {target / each for each in expected}
    assert before.keys() <= after.keys()


def test_a_pipe_is_rejected_and_a_whole_gzip_is_not(source: Path, target: Path) -> None:
    copy(str(tree(source, {"x.csv.gz": WHOLE})), str(target))
    os.mkfifo(source / "pipe")
    with pytest.raises(UnsafePath, match="pipe"):
        copy(str(source), str(target))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"a.txt": b"eno"}, ChecksumMismatch, r"a\.txt"),
        ({"a.txt": b"longer"}, CorruptData, "has 6 bytes"),
        ({"a.txt": None}, CorruptData, "lacks"),
        ({"new": b"1"}, CorruptData, "does not list"),
    ],
)
def test_sources_are_checked_against_their_manifest(
    first: Path, target: Path, change: dict[str, bytes | None], error: type[Exception], words: str
) -> None:
    manifest = read_manifest(str(first))
    assert manifest is not None
    assert copy(str(first), str(target / "good"), digest=manifest.digest).digest == manifest.digest
    with pytest.raises(ChecksumMismatch, match=f"has digest {manifest.digest}, not sha256:0000"):
        copy(str(first), str(target), **WRONG)
    tree(first, {name: data or b"" for name, data in change.items()})
    for name in (name for name, data in change.items() if data is None):
        (first / name).unlink()
    with pytest.raises(error, match=words):
        copy(str(first), str(target))
    assert read_manifest(str(target)) is None
    copy(str(first), str(target / "unchecked"), exclude=["MANIFEST.json"])
    assert files(target / "unchecked") == files(first)


def test_a_file_with_a_wrong_digest_never_gets_its_name(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process that waits for the file must not read it."""
    named: list[str] = []
    replace = os.replace

    def note(old: str, new: str, **places: int) -> None:
        named.append(Path(new).name)
        replace(old, new, **places)

    monkeypatch.setattr(os, "replace", note)
    with pytest.raises(ChecksumMismatch):
        copy(str(source / "a.txt"), str(target), **WRONG)
    assert "a.txt" not in named
    copy(str(source / "a.txt"), str(target))
    assert "a.txt" in named
    with pytest.raises(ChecksumMismatch, match=f"has digest {hashlib.sha256(b'one').hexdigest()}, not 0000"):
        copy(str(source / "a.txt"), str(target), digest="0" * 64)  # of a complete target


def test_a_source_that_changes_during_the_copy_is_rejected(tmp_path: Path, target: Path) -> None:
    source = tree(tmp_path / "source", {"big": bytes(8_000_000)})

    def grow(line: str) -> None:
        with (source / "big").open("ab") as file:
            file.write(b"more")

    with pytest.raises(CorruptData, match="chang"):
        copy(str(source), str(target), progress=grow)
    assert read_manifest(str(target)) is None
    copy(str(source), str(target))
