"""Select the files of a source, before any is read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainjob.data import file_manifest
from trainjob.data.file_manifest import ContentManifest
from trainjob.data.locations import public
from trainjob.data.stores.base import Entry, ReadableStore, read_small
from trainjob.errors import CorruptData, SourceNotFound, UnsafePath


@dataclass(frozen=True)
class Selection:
    """Selected files of a source.

    Attributes:
        entries: In path order.
        promised: The part of the source's manifest for these files; None without a manifest.
        origin: Fingerprint of the source, see `ContentManifest.origin`.
        single: The source is one file; its path in the store is ``""``.
    """

    entries: tuple[Entry, ...]
    promised: ContentManifest | None
    origin: str
    single: bool = False

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.entries)

    def key(self, entry: Entry) -> str:
        """Path of the file in the store."""
        return "" if self.single else entry.path


def select(store: ReadableStore, include: Sequence[str], exclude: Sequence[str]) -> Selection:
    """Select the files of ``store`` that match the patterns.

    Raises:
        SourceNotFound: The source is empty, or no file matches.
        CorruptData: The source is incomplete, or does not match its manifest.
        UnsafePath: A file has a name that cannot be written to every target, or is none, as a link to nothing.
    """
    where, include, exclude = store.location, as_patterns(include), as_patterns(exclude)
    single = _single(store)
    if single is not None:
        if not wanted(single.path, include, exclude):
            raise SourceNotFound(
                f"{public(where)} is a single file that does not match include={list(include)} exclude={list(exclude)}"
            )
        return Selection((single,), None, _origin(store, [single]), single=True)
    entries = {entry.path: entry for entry in store.list()}
    working = [path for path in entries if path.split("/")[0] == file_manifest.WORK]
    promised = None
    if file_manifest.NAME in entries and file_manifest.NAME not in exclude:
        _check_readable([entries[file_manifest.NAME]])
        if entries[file_manifest.NAME].size > file_manifest.longest(entries):  # reading it could fill the memory
            raise CorruptData(
                f"{where} has a {file_manifest.NAME} of {entries[file_manifest.NAME].size} bytes for {len(entries)} "
                f"files, too many for a manifest of trainjob; if it belongs to the data, exclude {file_manifest.NAME!r}"
            )
        promised = manifest_of(store)
    elif working:
        raise CorruptData(f"{where} is incomplete: the step that writes it has not finished; run that step again")
    for path in (*working, file_manifest.NAME):
        entries.pop(path, None)
    if promised is not None:
        named = {file.path for file in promised.files}
        for path in set(file_manifest.SIDECARS) - named:
            entries.pop(path, None)
        _compare(store, promised, entries)
    if not entries:
        raise SourceNotFound(f"{where} does not exist or is empty")
    chosen = sorted(
        (entry for path, entry in entries.items() if wanted(path, include, exclude)),
        key=lambda entry: file_manifest.in_order(entry.path),
    )
    if not chosen:
        raise SourceNotFound(
            f"none of the {len(entries)} files at {where} matches include={list(include)} exclude={list(exclude)}"
        )
    _check_readable(chosen)
    file_manifest.check_paths(entry.path for entry in chosen)
    if promised is not None:
        names = {entry.path for entry in chosen}
        promised = file_manifest.build(file for file in promised.files if file.path in names)
    return Selection(tuple(chosen), promised, _origin(store, chosen))


def _check_readable(entries: Iterable[Entry]) -> None:
    for entry in entries:
        if entry.refused:
            raise UnsafePath(entry.refused)


def manifest_of(store: ReadableStore) -> ContentManifest | None:
    """Read the manifest at the root of ``store``; None without one. Raises CorruptData if it is not from trainjob."""
    try:
        data = read_small(store, file_manifest.NAME)
    except SourceNotFound:
        return None
    except UnsafePath:
        return None  # a component of the path is a file
    return file_manifest.parse(data, store.location.child(file_manifest.NAME).uri)


def _single(store: ReadableStore) -> Entry | None:
    location = store.location
    web = location.scheme in ("http", "https")
    if location.directory and not web:
        return None
    if not location.path and not web:
        return None
    try:
        entry = store.stat("")
    except SourceNotFound:
        if web:
            raise
        return None
    if not location.name:
        raise SourceNotFound(
            f"{location} is not a file; from web servers only single files can be read, so write the URL of one"
        )
    file_manifest.check_paths([location.name])
    return Entry(location.name, entry.size, entry.etag)


def _compare(store: ReadableStore, promised: ContentManifest, entries: dict[str, Entry]) -> None:
    listed = {file.path: file for file in promised.files}
    for path in sorted(listed.keys() | entries.keys()):
        if path not in entries:
            raise CorruptData(f"{store.location} lacks {path!r}, which its {file_manifest.NAME} lists; write it again")
        if path not in listed:
            raise CorruptData(
                f"{store.location} has {path!r}, which its {file_manifest.NAME} does not list; remove that file, or "
                f"exclude {file_manifest.NAME!r} to copy all files without verification"
            )
        if listed[path].size != entries[path].size and not entries[path].refused:
            raise CorruptData(
                f"{store.location}: {path!r} has {entries[path].size} bytes, but its {file_manifest.NAME} states"
                f" {listed[path].size}; write it again"
            )


def as_patterns(given: Sequence[str]) -> tuple[str, ...]:
    """The patterns as a tuple; a plain text is one pattern, instead of one per character."""
    return tuple(given) if not isinstance(given, str) else (given,) if given else ()


def wanted(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a file matches the patterns, as defined by `trainjob.data.transfer.copy`."""
    return (not include or _any(path, include)) and not _any(path, exclude)


def _any(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(
        fnmatchcase(path, pattern) or ("/" not in pattern and fnmatchcase(name, pattern)) for pattern in patterns
    )


def _origin(store: ReadableStore, entries: Sequence[Entry]) -> str:
    if not all(entry.etag for entry in entries):
        return ""
    lines = [store.location.uri.rstrip("/"), *(f"{entry.path}\0{entry.size}\0{entry.etag}" for entry in entries)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
