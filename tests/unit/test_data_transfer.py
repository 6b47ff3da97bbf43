"""`trainjob.data.copy` between folders; `tests/stores` copies from and to each kind of store."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.trees import files, tree
from tests.unit.copied import FILES, LEFT, SIZE

from trainjob.data import copy, file_manifest, read_manifest, transfer
from trainjob.data.stores.files import FileStore
from trainjob.data.transfer import scan
from trainjob.errors import ChecksumMismatch, ConfigurationError, CorruptData, DataError, SourceNotFound, UnsafePath

# ---------------------------------------------------------------- what a copy has


def test_progress_of_a_copy_is_reported(source: Path, target: Path) -> None:
    lines: list[str] = []
    moved: list[tuple[int, int]] = []
    manifest = transfer.copy(
        str(source), target.as_uri(), progress=lines.append, moved=lambda done, total: moved.append((done, total))
    )
    assert any("100 %" in line for line in lines)
    assert moved[-1] == (SIZE, SIZE) == (manifest.size, SIZE)
    assert all(done <= total == SIZE for done, total in moved)


def test_patterns_may_be_one_text_and_select_files_of_a_manifest(source: Path, first: Path, target: Path) -> None:
    copy(str(source), str(target / "text"), include="*.txt", exclude="")  # not one pattern per character
    assert set(files(target / "text")) == {"a.txt"}
    manifest = copy(str(first), str(target / "of a manifest"), include=["a.txt"])
    assert [file.path for file in manifest.files] == ["a.txt"]
    copy(str(source / "a.txt"), str(target / "one file"), include=["*.txt"])
    assert files(target / "one file") == {"a.txt": b"one"}


def test_a_link_inside_the_source_is_copied_as_a_file(source: Path, target: Path) -> None:
    (source / "inside").symlink_to("a.txt")
    copy(str(source), str(target))
    assert (target / "inside").read_bytes() == b"one"
    assert not (target / "inside").is_symlink()


def test_only_large_files_are_resumable(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resumable: list[str] = []
    resume_write = FileStore.resume_write

    def note(store: FileStore, path: str, *arguments: Any) -> None:
        resumable.append(path)
        resume_write(store, path, *arguments)

    monkeypatch.setattr(FileStore, "resume_write", note)
    monkeypatch.setattr(transfer, "_RESUMED", len(FILES["sub/b.bin"]))
    copy(str(source), str(target))
    assert resumable == ["sub/b.bin"]
    assert files(target) == FILES


# ---------------------------------------------------------------- targets with files


def written(folder: Path) -> dict[Path, tuple[int, int]]:
    """Path -> inode, and when the file or folder was written."""
    found = {path: path.lstat() for path in folder.rglob("*")}
    return {path: (status.st_ino, status.st_mtime_ns) for path, status in found.items()}


def test_copy_writes_only_missing_and_changed_files(source: Path, first: Path, target: Path) -> None:
    """`tests/stores` shows that a copy to a complete target writes nothing."""
    copy(str(first), str(target))
    kept = written(target)
    (target / "a.txt").unlink()
    copy(str(first), str(target))
    assert files(target) == FILES, "a lost file is repaired"
    (target / "a.txt").write_bytes(b"longer")
    (target / file_manifest.NAME).unlink()
    copy(str(first), str(target))
    assert files(target) == FILES
    (source / "a.txt").write_bytes(b"two")  # of equal size
    copy(str(source), str(first))
    copy(str(first), str(target))
    assert files(target) == FILES | {"a.txt": b"two"}
    others = {target / name for name in FILES.keys() - {"a.txt"}}
    assert {path: written(target)[path] for path in others} == {path: kept[path] for path in others}


class Killed(BaseException):
    """Stands for SIGKILL: no code catches it."""


CHANGES = ("replace", "link", "unlink", "rmdir", "mkdir", "write", "fsync")


def killed_at(number: int, function: Callable[[], object]) -> bool:
    """Call `function`, and end it at the given change of the file system; False if it makes fewer."""
    made, lock = 0, threading.Lock()

    def ending(change: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal made
            with lock:
                made += 1
                if made > number:
                    raise Killed
            return change(*arguments, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, ending(getattr(os, name)))
        try:
            function()
        except Killed:
            return True
    return False


def test_a_copy_that_is_killed_at_any_change_is_completed_by_the_next_one(tmp_path: Path) -> None:
    """A manifest marks complete content, of before or after; only files that no copy has written are kept."""
    old = {"a.txt": b"one", "sub/b": b"2", "gone/c": b"3"}
    new = tree(tmp_path / "new", {"a.txt": b"two", "sub/b": b"2", "new/d": b"4"})
    other = tree(tmp_path / "other", {"a.txt": b"other"})
    before = copy(str(tree(tmp_path / "old", old)), str(tmp_path / "first"))
    seen = set()
    for call in count():
        target = tmp_path / f"target-{call}"
        copy(str(tmp_path / "old"), str(target))
        (target / "notes.txt").write_bytes(b"not ours")
        killed = killed_at(call, lambda target=target: copy(str(new), str(target)))  # type: ignore[misc]  # bound
        manifest = read_manifest(str(target))
        if manifest is not None:
            found = {file.path: (target / file.path).read_bytes() for file in manifest.files}
            assert found == (old if manifest == before else files(new))
        seen.add(manifest and manifest.digest)
        again = other if call % 2 else new
        copy(str(again), str(target))
        assert files(target) == {**files(again), "notes.txt": b"not ours"}
        if not killed:
            break
    assert call > 20
    assert seen == {before.digest, None, scan(str(new)).digest}


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, set[str]]]:
    """Each name that a file got, with the names of all files that were on the disk by then."""
    found: list[tuple[str, set[str]]] = []
    synced: set[str] = set()
    fsync, replace = os.fsync, os.replace

    def note_sync(file: int) -> None:
        synced.add(Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    def note_rename(old: str, new: str, **places: int) -> None:
        found.append((Path(new).name, {*synced}))
        replace(old, new, **places)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    return found


def test_the_manifest_is_written_after_the_files_are_on_the_disk(
    source: Path, target: Path, renames: list[tuple[str, set[str]]]
) -> None:
    """A manifest marks a complete copy, also after a power failure."""
    copy(str(source), str(target))
    (before,) = (synced for name, synced in renames if name == file_manifest.NAME)
    assert {Path(name).name for name in FILES} <= before


def test_valid_files_of_an_incomplete_target_are_kept_and_others_that_it_lists_removed(
    source: Path, first: Path, target: Path
) -> None:
    (source / "old.gz").write_bytes(b"the copy fails at this one")
    with pytest.raises(CorruptData):
        copy(str(source), str(target))
    tree(target, {"old/1": b"of an even older try", "sub/b.bin": FILES["sub/b.bin"], ".trainjob/0.part": b"on"})
    mark = target / file_manifest.MARK
    listed = json.loads(mark.read_text())
    mark.write_text(json.dumps({**listed, "files": [*listed["files"], "old/1"]}))
    before = written(target)[target / "sub/b.bin"]
    copy(str(first), str(target))
    assert files(target) == FILES
    assert written(target)[target / "sub/b.bin"] == before


UNSAFE = (b"[1]", b'["../outside"]', b'["/etc/passwd"]', b'["MANIFEST.json"]', b"null", b"3")


@pytest.mark.parametrize(
    "listed", [b"", b"{", b"[1]", b"{}", *(b'{"format": 1, "files": %s}' % each for each in UNSAFE), b"null"]
)
def test_unsafe_entries_of_a_mark_are_ignored(source: Path, target: Path, tmp_path: Path, listed: bytes) -> None:
    tree(tmp_path, {"outside": b"x", f"target/{file_manifest.MARK}": listed})
    copy(str(source), str(target))
    assert (tmp_path / "outside").exists()
    assert files(target) == FILES


def test_content_is_checked_before_it_is_written_and_if_it_is_complete(source: Path, first: Path, target: Path) -> None:
    """The check may have become stricter since the copy was written."""

    def refuse(manifest: file_manifest.ContentManifest) -> None:
        raise ChecksumMismatch(f"{len(manifest.files)} files are not signed")

    with pytest.raises(ChecksumMismatch, match="4 files are not signed"):
        transfer.copy(str(first), str(target), check=refuse)
    assert not [path for path in target.rglob("*") if path.is_file() and path.name != "lock"]
    made = copy(str(source), str(target))
    checked: list[str] = []
    assert transfer.copy(str(source), str(target), check=lambda manifest: checked.append(manifest.digest)) == made
    assert checked == [made.digest]
    with pytest.raises(ChecksumMismatch, match="4 files are not signed"):
        transfer.copy(str(source), str(target), check=refuse)
    assert files(target) == FILES, "another step may use the files"


# ---------------------------------------------------------------- other writers


def test_concurrent_writers_take_turns(source: Path, target: Path) -> None:
    lines: list[str] = []
    with ThreadPoolExecutor(4) as pool:
        copies = [pool.submit(copy, str(source), str(target), progress=lines.append) for _ in range(4)]
    for each in copies:
        each.result()
    assert files(target) == FILES
    assert sum("copied 100 %" in line for line in lines) == 1


def test_a_writer_starts_while_another_removes_its_work_directory(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir` finds the other writer's directory, which is removed before `mkdir` checks its type."""
    work = target / ".trainjob"
    work.mkdir(parents=True)
    is_dir, left = Path.is_dir, [work]

    def finishing(path: Path) -> bool:
        if path in left:
            left.remove(path)
            work.rmdir()
        return is_dir(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_dir", finishing)
        copy(str(source), str(target))
    assert not left
    assert files(target) == FILES


@pytest.mark.parametrize("link", [".trainjob", ".trainjob/lock", ".trainjob/writing.json", ".trainjob/x.resume", "sub"])
@pytest.mark.parametrize("behind", [True, False])
def test_nothing_is_written_through_a_link(source: Path, target: Path, tmp_path: Path, link: str, behind: bool) -> None:
    """Others can write to the target: a link there leads to files of the user who copies."""
    kept = {"lock": b"mine", "0.part": b"mine", "x.resume": b"mine", "writing.json": b"mine"}
    elsewhere = tree(tmp_path / "elsewhere", kept) if behind else tmp_path / "elsewhere"
    (target / link).parent.mkdir(parents=True)
    (target / link).symlink_to(elsewhere if "/" not in link else elsewhere / Path(link).name)
    with pytest.raises(UnsafePath, match=r"link"):
        copy(str(source), str(target))
    assert (files(elsewhere) if elsewhere.exists() else {}) == (kept if behind else {})
    assert (target / link).is_symlink()


@pytest.mark.parametrize("link", ["gone", "odd", "a.txt/x", "sub", "/etc/passwd", "pipe"])
def test_what_cannot_be_copied_can_be_excluded(source: Path, target: Path, link: str) -> None:
    if link == "pipe":
        os.mkfifo(source / "odd")
    else:
        (source / "odd").symlink_to(link)
    with pytest.raises(UnsafePath, match=r"source/odd is .*exclude it"):
        copy(str(source), str(target))
    copy(str(source), str(target), exclude="odd")
    assert files(target) == FILES


# ---------------------------------------------------------------- copies that cannot be complete
# `tests/stores/test_contract.py` has missing and incomplete sources, unsafe names, patterns without a match, digests.

WHOLE = gzip.compress(os.urandom(300_000)) + gzip.compress(bytes(5_000_000)) + bytes(512)
CUT = {"end": WHOLE[:-520], "middle": WHOLE[:200_000], "nothing": b"", "text": b"no gzip at all", "more": WHOLE + b"x"}
WRONG: dict[str, Any] = {"digest": "sha256:" + "0" * 64}
FILE = {"source": "{}/source/a.txt"}
SAME = "a file and a directory have the same name"

Tree = dict[str, bytes | str | None]
"""Path -> content of a file, target of a link, or None for a folder."""
REFUSED: dict[str, tuple[Tree, dict[str, Any], type[Exception], str]] = {
    # sources
    "empty": ({"none": None}, {"source": "{}/none"}, SourceNotFound, "does not exist or is empty"),
    "only folders": ({"none/x/y": None}, {"source": "{}/none"}, SourceNotFound, "does not exist or is empty"),
    "link out": ({"source/outside": "/etc/passwd"}, {}, UnsafePath, "outside"),
    "loop": ({"source/loop": "../source"}, {}, UnsafePath, "loop"),
    "link to nothing": (
        {"source/b": "gone"},
        {},
        UnsafePath,
        "source/b is a link to gone, which does not exist; exclu",
    ),
    "link to itself": ({"source/b": "b"}, {}, UnsafePath, "source/b is a link to b, which does not exist; exclude it"),
    "link as a manifest": (
        {"source/MANIFEST.json": "/etc/passwd"},
        {},
        UnsafePath,
        "MANIFEST.json is a link that leads",
    ),
    **{f"gzip, {cut}": ({"source/x.csv.gz": data}, {}, CorruptData, "gzip") for cut, data in CUT.items()},
    # patterns and digests
    "file not included": ({}, FILE | {"include": ["*.parquet"]}, SourceNotFound, r"a\.txt is a single file"),
    "file excluded": ({}, FILE | {"exclude": ["a.*"]}, SourceNotFound, "does not match include=.*exclude="),
    **{
        f"digest {text}": ({}, {"digest": text}, ConfigurationError, "is not a digest")
        for text in ("md5:abc", "sha256:", "xyz", "0" * 63, "g" * 64, "sha512:" + "0" * 128)
    },
    "wrong digest": ({}, WRONG, ChecksumMismatch, "has digest .*, not sha256:0000"),
    "wrong digest of a file": ({}, FILE | WRONG, ChecksumMismatch, "0000"),
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
    assert {path for path in after if before.get(path) != after[path] and not path.is_dir()} <= {
        target / each for each in expected
    }
    assert before.keys() <= after.keys()


def test_a_pipe_is_rejected_and_a_whole_gzip_is_not(source: Path, target: Path) -> None:
    copy(str(tree(source, {"x.csv.gz": WHOLE})), str(target))
    os.mkfifo(source / "pipe")
    with pytest.raises(UnsafePath, match="pipe"):
        copy(str(source), str(target))


def test_sources_are_checked_against_their_manifest(first: Path, target: Path) -> None:
    """`tests/stores` also has other content of the same size, and more files."""
    (first / "a.txt").write_bytes(b"longer")
    with pytest.raises(CorruptData, match="has 6 bytes"):
        copy(str(first), str(target))
    (first / "a.txt").unlink()
    with pytest.raises(CorruptData, match="lacks"):
        copy(str(first), str(target))
    assert read_manifest(str(target)) is None


def test_a_file_with_a_wrong_digest_never_gets_its_name(
    source: Path, target: Path, renames: list[tuple[str, set[str]]]
) -> None:
    """Another process that waits for the file must not read it."""
    with pytest.raises(ChecksumMismatch):
        copy(str(source / "a.txt"), str(target), **WRONG)
    assert "a.txt" not in {name for name, _ in renames}
    copy(str(source / "a.txt"), str(target))
    assert "a.txt" in {name for name, _ in renames}
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
