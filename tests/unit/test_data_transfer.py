from __future__ import annotations

import gzip
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trees import files, tree
from tests.unit.measured import COPY, peak

from trainjob.data import copy, file_manifest, read_manifest, transfer
from trainjob.data.stores.files import FileStore
from trainjob.data.transfer import scan
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    DataError,
    OutOfSpace,
    SourceNotFound,
    UnsafePath,
)

LEFT = {".trainjob/lock", file_manifest.MARK}
FILES = {"a.txt": b"one", "sub/b.bin": bytes(range(256)) * 9000, "sub/deep/c": b"", "ünï cödé %20": b"x"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tree(tmp_path / "source", FILES)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


def test_copy_of_a_directory_has_all_files_and_a_manifest(source: Path, target: Path) -> None:
    lines: list[str] = []
    manifest = copy(str(source), target.as_uri(), progress=lines.append)
    assert files(target) == FILES
    assert read_manifest(str(target)) == manifest
    assert {file.path: file.sha256 for file in manifest.files} == {
        name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()
    }
    assert manifest.size == sum(map(len, FILES.values()))
    assert any("100 %" in line for line in lines)
    assert scan(str(source)).digest == manifest.digest


def test_copy_of_a_single_file_verifies_its_digest(source: Path, target: Path) -> None:
    manifest = copy(str(source / "a.txt"), str(target), digest=hashlib.sha256(b"one").hexdigest())
    assert files(target) == {"a.txt": b"one"}
    assert copy(str(source / "a.txt"), str(target), digest=manifest.digest) == manifest


def test_the_manifest_is_written_after_the_files_are_on_the_disk(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest marks a complete copy, also after a power failure."""
    synced: list[str] = []
    fsync = os.fsync

    def note(file: int) -> None:
        synced.append(Path(f"/proc/self/fd/{file}").readlink().name)
        fsync(file)

    replaced: list[int] = []
    replace = os.replace

    def note_replace(old: str, new: str, **places: int) -> None:
        if Path(new).name == file_manifest.NAME:
            replaced.append(len(synced))
        replace(old, new, **places)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "replace", note_replace)
    copy(str(source), str(target))
    (before,) = replaced
    assert {Path(name).name for name in FILES} <= set(synced[:before])


def test_a_copy_in_replacement_is_incomplete(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the old nor the new content is complete: the old manifest is removed first."""
    copy(str(source), str(target))
    (source / "a.txt").write_bytes(b"two")

    def full(*_: object) -> None:
        raise OutOfSpace("full")

    monkeypatch.setattr("trainjob.data.stores.files.FileStore.write", full)
    with pytest.raises(OutOfSpace):
        copy(str(source), str(target))
    assert read_manifest(str(target)) is None


def test_sidecars_are_removed_with_their_content(source: Path, target: Path) -> None:
    transfer.copy(str(source), str(target), sidecars=lambda _: {file_manifest.CARD: b"about one"})
    assert (target / file_manifest.CARD).read_bytes() == b"about one"
    (source / "a.txt").write_bytes(b"two")
    copy(str(source), str(target))
    assert not (target / file_manifest.CARD).exists()


def test_a_source_file_with_the_name_of_a_sidecar_is_content(source: Path, target: Path) -> None:
    (source / file_manifest.CARD).write_bytes(b"of the author")
    copy(str(source), str(target))
    assert (target / file_manifest.CARD).read_bytes() == b"of the author"


def test_reported_bytes_add_up_to_the_size(source: Path, target: Path) -> None:
    seen: list[tuple[int, int]] = []
    transfer.copy(str(source), str(target), moved=lambda done, total: seen.append((done, total)))
    size = sum(map(len, FILES.values()))
    assert seen[-1] == (size, size)
    assert all(done <= total == size for done, total in seen)


def test_copy_writes_only_missing_files(source: Path, target: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    copy(str(source), str(first))
    copy(str(first), str(target))
    kept = {name: (target / name).stat().st_ino for name in (*FILES, file_manifest.NAME)}
    copy(str(first), str(target))
    assert {name: (target / name).stat().st_ino for name in kept} == kept, "the target is complete"
    (target / "a.txt").write_bytes(b"longer")  # the first file
    (target / file_manifest.NAME).unlink()
    copy(str(first), str(target))
    assert files(target) == FILES
    del kept["a.txt"], kept[file_manifest.NAME]
    assert {name: (target / name).stat().st_ino for name in kept} == kept, "the other files are correct"


def test_manifest_of_the_source_is_checked_before_writing(source: Path, target: Path, tmp_path: Path) -> None:
    copy(str(source), str(tmp_path / "first"))

    def refuse(manifest: file_manifest.ContentManifest) -> None:
        raise ChecksumMismatch(f"{len(manifest.files)} files are not signed")

    with pytest.raises(ChecksumMismatch, match="4 files are not signed"):
        transfer.copy(str(tmp_path / "first"), str(target), check=refuse)
    assert not [path for path in target.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_complete_copy_is_checked_again(source: Path, target: Path) -> None:
    """The check may have become stricter since the copy was written."""
    first = copy(str(source), str(target))
    checked: list[str] = []
    assert transfer.copy(str(source), str(target), check=lambda manifest: checked.append(manifest.digest)) == first
    assert checked == [first.digest]

    def refuse(_: file_manifest.ContentManifest) -> None:
        raise ChecksumMismatch("not signed")

    with pytest.raises(ChecksumMismatch, match="not signed"):
        transfer.copy(str(source), str(target), check=refuse)
    assert files(target) == FILES, "another step may use the files"


def test_copy_detects_changed_content_of_equal_size(source: Path, target: Path, tmp_path: Path) -> None:
    copy(str(source), str(tmp_path / "first"))
    copy(str(tmp_path / "first"), str(target))
    (source / "a.txt").write_bytes(b"two")
    copy(str(source), str(tmp_path / "first"))
    copy(str(tmp_path / "first"), str(target))
    assert files(target) == FILES | {"a.txt": b"two"}


def test_the_second_copy_transfers_nothing(source: Path, target: Path) -> None:
    first = copy(str(source), str(target))
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    lines: list[str] = []
    assert copy(str(source), str(target), progress=lines.append) == first
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    assert not any("copied" in line for line in lines)


def test_changed_sources_replace_the_copy(source: Path, target: Path) -> None:
    copy(str(source), str(target))
    (source / "a.txt").write_bytes(b"two")
    (source / "sub/b.bin").unlink()
    (target / "notes.txt").write_bytes(b"not ours")
    copy(str(source), str(target))
    expected = {name: data for name, data in FILES.items() if name != "sub/b.bin"} | {"a.txt": b"two"}
    assert files(target) == expected | {"notes.txt": b"not ours"}


def test_a_copy_that_lost_a_file_is_repaired(source: Path, target: Path) -> None:
    copy(str(source), str(target))
    (target / "a.txt").unlink()
    copy(str(source), str(target))
    assert files(target) == FILES


def test_an_incomplete_target_is_completed_and_its_valid_files_are_kept(
    source: Path, target: Path, tmp_path: Path
) -> None:
    copy(str(source), str(tmp_path / "complete"))
    tree(target, {".trainjob/lock": b"", ".trainjob/0.part": b"on", "sub/b.bin": FILES["sub/b.bin"], "a.txt": b"OOO"})
    before = (target / "sub/b.bin").stat()
    copy(str(tmp_path / "complete"), str(target))
    assert files(target) == FILES
    after = (target / "sub/b.bin").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_unneeded_files_of_a_killed_copy_are_removed(source: Path, target: Path, tmp_path: Path) -> None:
    (source / "old.gz").write_bytes(b"the copy fails at this one")
    with pytest.raises(CorruptData):
        copy(str(source), str(target))
    tree(target, {"old/1": b"of an even older try", "notes.txt": b"not ours"})
    mark = target / file_manifest.MARK
    written = json.loads(mark.read_text())
    mark.write_text(json.dumps({**written, "files": [*written["files"], "old/1"]}))
    other = tree(tmp_path / "other", {"a.txt": b"other"})
    copy(str(other), str(target))
    assert files(target) == {"a.txt": b"other", "notes.txt": b"not ours"}


UNSAFE = (b"[1]", b'["../outside"]', b'["/etc/passwd"]', b'["MANIFEST.json"]', b"null", b"3")


@pytest.mark.parametrize(
    "listed", [b"", b"{", b"[1]", b"{}", *(b'{"format": 1, "files": %s}' % each for each in UNSAFE), b"null"]
)
def test_unsafe_entries_of_a_mark_are_ignored(source: Path, target: Path, tmp_path: Path, listed: bytes) -> None:
    tree(tmp_path, {"outside": b"x", f"target/{file_manifest.MARK}": listed})
    copy(str(source), str(target))
    assert (tmp_path / "outside").exists()
    assert files(target) == FILES


def test_work_files_of_a_writer_killed_at_the_end_are_removed(source: Path, target: Path) -> None:
    manifest = copy(str(source), str(target))
    tree(target, {file_manifest.MARK: b"[]", ".trainjob/lock": b""})
    assert copy(str(source), str(target)) == manifest
    assert not (target / file_manifest.WORK).exists()


def test_patterns_select_files(source: Path, target: Path) -> None:
    copy(str(source), str(target), include=["sub/*", "*.txt"], exclude=["c"])
    assert set(files(target)) == {"a.txt", "sub/b.bin"}
    copy(
        str(source), str(target / "text"), include="*.txt", exclude=""
    )  # a string is one pattern, not one per character
    assert set(files(target / "text")) == {"a.txt"}
    with pytest.raises(SourceNotFound, match=r"none of the 4 files .*\*\.parquet"):
        copy(str(source), str(target / "2"), include=["*.parquet"])


@pytest.mark.parametrize("patterns", [{"include": ["*.parquet"]}, {"exclude": ["a.*"]}])
def test_a_single_file_must_match_the_patterns(patterns: dict[str, Any], source: Path, target: Path) -> None:
    with pytest.raises(SourceNotFound, match=r"a\.txt is a single file that does not match include=.*exclude="):
        copy(str(source / "a.txt"), str(target), **patterns)
    assert not target.exists()
    copy(str(source / "a.txt"), str(target), include=["*.txt"])
    assert files(target) == {"a.txt": b"one"}


@pytest.mark.parametrize(
    "make", [lambda path: None, lambda path: path.mkdir(), lambda path: (path / "x/y").mkdir(parents=True)]
)
def test_missing_and_empty_sources_are_reported(make: Callable[[Path], None], tmp_path: Path, target: Path) -> None:
    make(tmp_path / "none")
    with pytest.raises(SourceNotFound):
        copy(str(tmp_path / "none"), str(target))
    assert not target.exists()


def test_a_file_with_a_wrong_digest_is_not_written(source: Path, target: Path) -> None:
    for wrong in ("0" * 64, "sha256:" + "0" * 64):
        with pytest.raises(ChecksumMismatch, match="0000"):
            copy(str(source / "a.txt"), str(target), digest=wrong)
        assert files(target).keys() <= LEFT
    copy(str(source / "a.txt"), str(target))
    with pytest.raises(ChecksumMismatch, match=f"has digest {hashlib.sha256(b'one').hexdigest()}, not 0000"):
        copy(str(source / "a.txt"), str(target), digest="0" * 64)


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
        copy(str(source / "a.txt"), str(target), digest="0" * 64)
    assert "a.txt" not in named
    copy(str(source / "a.txt"), str(target))
    assert "a.txt" in named


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


def test_a_wrong_digest_of_a_directory_leaves_no_files(source: Path, target: Path) -> None:
    with pytest.raises(ChecksumMismatch, match=f"has digest {scan(str(source)).digest}, not sha256:0000"):
        copy(str(source), str(target), digest="sha256:" + "0" * 64)
    assert files(target).keys() <= LEFT
    copy(str(source), str(target))
    assert files(target) == FILES


@pytest.mark.parametrize("digest", ["md5:abc", "sha256:", "xyz", "0" * 63])
def test_invalid_digests_are_rejected(source: Path, target: Path, digest: str) -> None:
    with pytest.raises(ConfigurationError, match="is not a digest"):
        copy(str(source), str(target), digest=digest)


def test_sources_are_checked_against_their_manifest(source: Path, target: Path, tmp_path: Path) -> None:
    whole = tmp_path / "complete"
    digest = copy(str(source), str(whole)).digest
    assert copy(str(whole), str(target), digest=digest).digest == digest
    with pytest.raises(ChecksumMismatch):
        copy(str(whole), str(tmp_path / "t2"), digest="sha256:" + "1" * 64)
    (whole / "a.txt").write_bytes(b"eno")
    with pytest.raises(ChecksumMismatch, match=r"a\.txt"):
        copy(str(whole), str(tmp_path / "t3"))
    assert read_manifest(str(tmp_path / "t3")) is None
    (whole / "a.txt").write_bytes(b"longer")
    with pytest.raises(CorruptData, match="has 6 bytes"):
        copy(str(whole), str(tmp_path / "t4"))
    (whole / "a.txt").unlink()
    with pytest.raises(CorruptData, match="lacks"):
        copy(str(whole), str(tmp_path / "t5"))
    tree(whole, {"a.txt": b"one", "new": b"1"})
    with pytest.raises(CorruptData, match="does not list"):
        copy(str(whole), str(tmp_path / "t6"))
    copy(str(whole), str(tmp_path / "t7"), exclude=["MANIFEST.json"])
    assert files(tmp_path / "t7") == FILES | {"new": b"1"}


def test_copy_selects_files_of_a_source_with_a_manifest(source: Path, target: Path, tmp_path: Path) -> None:
    copy(str(source), str(tmp_path / "complete"))
    manifest = copy(str(tmp_path / "complete"), str(target), include=["a.txt"])
    assert [file.path for file in manifest.files] == ["a.txt"]


def test_an_incomplete_source_is_rejected(source: Path, target: Path) -> None:
    tree(source, {".trainjob/lock": b""})
    with pytest.raises(CorruptData, match="is incomplete"):
        copy(str(source), str(target))


def test_invalid_gzip_files_are_rejected(tmp_path: Path, target: Path) -> None:
    data = os.urandom(300_000)
    whole = gzip.compress(data) + gzip.compress(bytes(5_000_000)) + bytes(512)
    copy(str(tree(tmp_path / "good", {"x.csv.gz": whole})), str(target))
    for number, cut in enumerate(
        (whole[: len(whole) - 520], whole[:200_000], b"", b"not gzip at all", whole + b"garbage")
    ):
        with pytest.raises(CorruptData, match="gzip"):
            copy(str(tree(tmp_path / f"bad{number}", {"x.csv.gz": cut})), str(tmp_path / f"t{number}"))
        assert files(tmp_path / f"t{number}").keys() <= LEFT


def test_links_out_of_the_source_are_rejected(source: Path, target: Path, tmp_path: Path) -> None:
    (source / "inside").symlink_to("a.txt")
    copy(str(source), str(target))
    assert (target / "inside").read_bytes() == b"one"
    assert not (target / "inside").is_symlink()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s")
    (source / "outside").symlink_to(secret)
    with pytest.raises(UnsafePath, match="outside"):
        copy(str(source), str(tmp_path / "t2"))
    (source / "outside").unlink()
    (source / "loop").symlink_to(source)
    with pytest.raises(UnsafePath, match="loop"):
        copy(str(source), str(tmp_path / "t3"))


def test_links_out_of_the_target_are_rejected(source: Path, target: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target.mkdir()
    (target / "sub").symlink_to(elsewhere)
    with pytest.raises(UnsafePath, match="leads out"):
        copy(str(source), str(target))
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", ["a\\b", "a\nb", b"\xff"])
def test_unsafe_names_are_rejected(source: Path, target: Path, name: str | bytes) -> None:
    (source / os.fsdecode(name)).write_bytes(b"x")
    with pytest.raises(UnsafePath):
        copy(str(source), str(target))


def test_special_files_are_rejected(source: Path, target: Path) -> None:
    os.mkfifo(source / "pipe")
    with pytest.raises(UnsafePath, match="pipe"):
        copy(str(source), str(target))


def test_overlapping_source_and_target_are_rejected(source: Path) -> None:
    for into in (source, source / "sub" / "x"):
        with pytest.raises(ConfigurationError, match="overlaps"):
            copy(str(source), str(into))
    with pytest.raises(ConfigurationError, match="overlaps"):
        copy(str(source / "a.txt"), str(source))


def test_a_file_in_place_of_a_directory_is_rejected(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="must be a directory"):
        copy(str(source), str(tmp_path / "file"))
    tree(tmp_path / "t", {"sub": b"a file"})
    with pytest.raises(DataError, match="a file and a directory have the same name"):
        copy(str(source), str(tmp_path / "t"))


def test_a_manifest_of_another_tool_is_not_overwritten(source: Path, target: Path) -> None:
    tree(target, {"MANIFEST.json": b'{"name": "a browser extension"}'})
    with pytest.raises(CorruptData, match="not a manifest that trainjob wrote"):
        copy(str(source), str(target))
    assert files(target) == {}
    assert (target / "MANIFEST.json").read_bytes() == b'{"name": "a browser extension"}'


def test_a_source_that_changes_during_the_copy_is_rejected(tmp_path: Path, target: Path) -> None:
    source = tree(tmp_path / "source", {"big": bytes(8_000_000)})

    def grow(line: str) -> None:
        with (source / "big").open("ab") as file:
            file.write(b"more")

    with pytest.raises(CorruptData, match="chang"):
        copy(str(source), str(target), progress=grow)
    assert read_manifest(str(target)) is None
    copy(str(source), str(target))


def test_a_full_disk_is_reported_and_leaves_no_partial_files(small_disk: Path, tmp_path: Path) -> None:
    source = tree(tmp_path / "source", {"a": bytes(900_000), "b": os.urandom(900_000)})
    with pytest.raises(OutOfSpace, match=r"no space left for .*/(a|b|MANIFEST)"):
        copy(str(source), str(small_disk / "data"))
    assert read_manifest(str(small_disk / "data")) is None
    assert not list(small_disk.rglob("*.part"))
    (source / "b").unlink()
    for path in (small_disk / "data").glob("[ab]"):
        path.unlink()
    copy(str(source), str(small_disk / "data"))


def test_concurrent_writers_take_turns(source: Path, target: Path) -> None:
    lines: list[str] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            copy(str(source), str(target), progress=lines.append)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
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


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_or_file_in_place_of_the_work_directory_is_rejected(source: Path, target: Path, dangling: bool) -> None:
    target.mkdir()
    work = target / ".trainjob"
    work.symlink_to("nowhere") if dangling else work.write_bytes(b"")
    with pytest.raises(UnsafePath, match="is a link" if dangling else "a file and a directory have the same name"):
        copy(str(source), str(target))


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a file system that creates no directories")
def test_error_of_a_target_that_cannot_be_created_has_the_reason(source: Path) -> None:
    with pytest.raises(ConfigurationError, match="/proc/nosuch/target cannot be created: No such file"):
        copy(str(source), "/proc/nosuch/target")


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


def test_memory_of_a_copy_is_limited(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    with (source / "big").open("wb") as file:
        file.truncate(300_000_000)
    assert peak(COPY, source, target) < 60_000_000
