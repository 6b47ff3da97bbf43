"""Which files of a source are meant, and what is known of them before any is read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainjob.data import content
from trainjob.data.content import ContentManifest
from trainjob.data.locations import public
from trainjob.data.stores.base import Entry, ReadableStore
from trainjob.errors import CorruptData, SourceNotFound, UnsafePath


@dataclass(frozen=True)
class Selection:
    """Files of a source.

    Attributes:
        entries: In path order.
        promised: What the source's own manifest says of them; None if it has none.
        origin: See `ContentManifest.origin`.
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
        """Where the store has the file."""
        return "" if self.single else entry.path


def select(store: ReadableStore, include: Sequence[str], exclude: Sequence[str]) -> Selection:
    """Find the files of ``store`` that match.

    Raises:
        SourceNotFound: Nothing is there, or nothing matches.
        CorruptData: The source is half written, or is not what its manifest says.
        UnsafePath: It has files with names that could not be written elsewhere.
    """
    where, include, exclude = store.location, patterns(include), patterns(exclude)
    single = _single(store)
    if single is not None:
        if not wanted(single.path, include, exclude):
            raise SourceNotFound(
                f"{public(where)} is one file, and not one of include={list(include)} exclude={list(exclude)}"
            )
        return Selection((single,), None, _origin(store, [single]), single=True)
    entries = {entry.path: entry for entry in store.list()}
    under_way = [path for path in entries if path.split("/")[0] == content.WORK]
    promised = None
    if content.NAME in entries and content.NAME not in exclude:
        if entries[content.NAME].size > content.longest(entries):  # read as a whole, it could fill the memory
            raise CorruptData(
                f"{where} has a {content.NAME} of {entries[content.NAME].size} bytes for {len(entries)} files: not one"
                f" that trainjob wrote; if it belongs to the data, exclude {content.NAME!r}"
            )
        promised = manifest_of(store)
    elif under_way:
        raise CorruptData(f"{where} is half written: the step that writes it has not finished; run that step again")
    for path in (*under_way, content.NAME):
        entries.pop(path, None)
    if promised is not None:
        named = {file.path for file in promised.files}
        for path in set(content.SIDECARS) - named:
            entries.pop(path, None)
        _compare(store, promised, entries)
    if not entries:
        raise SourceNotFound(f"nothing is at {where}")
    chosen = sorted(
        (entry for path, entry in entries.items() if wanted(path, include, exclude)),
        key=lambda entry: content.in_order(entry.path),
    )
    if not chosen:
        raise SourceNotFound(
            f"none of the {len(entries)} files at {where} matches include={list(include)} exclude={list(exclude)}"
        )
    content.check_paths(entry.path for entry in chosen)
    if promised is not None:
        names = {entry.path for entry in chosen}
        promised = content.build(file for file in promised.files if file.path in names)
    return Selection(tuple(chosen), promised, _origin(store, chosen))


def manifest_of(store: ReadableStore) -> ContentManifest | None:
    """The manifest at the root of ``store``, or None; CorruptData if it is none of ours."""
    try:
        data = b"".join(store.read(content.NAME))
    except SourceNotFound:
        return None
    except UnsafePath:
        return None  # a component of the path is a file: there is nothing
    return content.parse(data, store.location.child(content.NAME).uri)


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
        raise SourceNotFound(f"{location} names no file; a web server holds single files to read, so name one")
    content.check_paths([location.name])
    return Entry(location.name, entry.size, entry.etag)


def _compare(store: ReadableStore, promised: ContentManifest, entries: dict[str, Entry]) -> None:
    listed = {file.path: file for file in promised.files}
    for path in sorted(listed.keys() | entries.keys()):
        if path not in entries:
            raise CorruptData(f"{store.location} lacks {path!r}, which its {content.NAME} names; write it again")
        if path not in listed:
            raise CorruptData(
                f"{store.location} has {path!r}, which its {content.NAME} does not name; remove that file, or exclude"
                f" {content.NAME!r} to copy all that is there unverified"
            )
        if listed[path].size != entries[path].size:
            raise CorruptData(
                f"{store.location}: {path!r} has {entries[path].size} bytes, its {content.NAME} says"
                f" {listed[path].size}; write it again"
            )


def patterns(given: Sequence[str]) -> tuple[str, ...]:
    """``given``; a text by itself is one pattern, where each of its characters would be one otherwise."""
    return tuple(given) if not isinstance(given, str) else (given,) if given else ()


def wanted(path: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether a file is chosen, see `trainjob.data.transfer.copy`."""
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
