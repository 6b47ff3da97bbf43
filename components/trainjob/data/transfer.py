"""Copy a dataset or a model from one location to another. A copy is complete exactly if it has a manifest.

Order at the target: write a mark that lists the files to come; remove an older manifest; write the files, each of which
appears complete; write ``MANIFEST.json``; remove the mark. If a copy is killed, the same call completes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from trainjob._support.foreign import LARGE, mapping_of
from trainjob._support.formats import wrong_format
from trainjob.data import file_manifest
from trainjob.data.file_manifest import ContentManifest, File, matches
from trainjob.data.locations import Location, parse_store, parse_target
from trainjob.data.meter import Meter, Moved, Notify
from trainjob.data.parallel import for_each
from trainjob.data.selection import Selection, manifest_of, select
from trainjob.data.stores.base import Entry, ReadableStore, WritableStore, read_small
from trainjob.data.stores.opening import opened, opened_writable
from trainjob.data.streams import AT_A_TIME, Source, Stream
from trainjob.errors import ChecksumMismatch, ConfigurationError, CorruptData, SourceNotFound, UnsafePath

Sidecars = Callable[[ContentManifest], Mapping[str, bytes]]
"""Makes small files to write beside the content, before the manifest, unless the content has files of these names. They
are not part of the digest."""
Check = Callable[[ContentManifest], None]
"""Raises ChecksumMismatch if the content must not be accepted."""

_MARK_FORMAT = 1
_BYTES_AT_A_TIME, _FILES_AT_A_TIME = 64 * 1024 * 1024, 32  # small files mostly wait for responses
_RESUMED = 32 * 1024 * 1024  # smaller files are sent again faster than their parts are found


def copy(
    source: str,
    target: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    digest: str | None = None,
    progress: Notify | None = None,
    moved: Moved | None = None,
    sidecars: Sidecars | None = None,
    check: Check | None = None,
) -> ContentManifest:
    """Copy ``source``, a file or a directory, into the directory ``target``.

    Every byte is hashed while it is copied. Memory is constant, also if large files are read by several ranges at once.
    Requests that are cut, stall or are rejected temporarily are retried, and resume where they ended. If a killed copy
    has written part of a large file to a ``file`` target, the next copy continues that file.

    A source with a manifest is verified against it. A target that already has this content is not changed. In an
    incomplete target, files that a manifest confirms as correct are not sent again. Files of ``target`` that no
    manifest lists are not touched.

    Args:
        source: Location in any store (``http(s)``: of a single file).
        target: Location of a directory in any store except ``http(s)``; created if it does not exist. ``oci`` requires
            a tag.
        include: Shell patterns; only paths that match one are copied. They are matched against the path relative to
            ``source`` (the name of a single file) and, if they have no slash, against the file name. A plain text is
            one pattern.
        exclude: Shell patterns of paths that are not copied; overrides ``include``. With ``MANIFEST.json`` in it, the
            source is not verified.
        digest: Required digest: SHA-256 in hexadecimal of a single file, or ``sha256:<root digest>``.
        progress: Called with lines for people, one per tenth of the bytes and at least two per minute.
        moved: Called with the number of bytes done and in total, see `trainjob.data.meter.Moved`.
        sidecars: Makes the files beside the content, see `Sidecars`; not called if the target is already complete.
        check: Accepts or refuses the content, see `Check`. Called with the source's manifest, if it has one, before the
            copy, and with the copied content before the target is marked as complete.

    Returns:
        The manifest of the target.

    Raises:
        SourceNotFound: The source does not exist, or no file matches.
        ChecksumMismatch: The bytes do not match ``digest`` or the source's manifest.
        CorruptData: The source is incomplete or changes during the copy, or a gzip file is truncated.
        UnsafePath: A name leads out of the target.
        OutOfSpace: The target is full.
        StoreUnavailable: A store failed, and all retries failed.
        ConfigurationError: A location, a credential or an extra is wrong or missing.
    """
    notify = progress or _silent
    wanted = file_manifest.check_digest(digest)
    location, at = parse_store(source), parse_target(target)
    with opened(location) as store, opened_writable(at) as into:
        _refuse_overlap(store.location, into.location)
        selection = select(store, include, exclude)
        if wanted and selection.promised is not None and not matches(selection.promised, wanted):
            raise ChecksumMismatch(f"{store.location} has digest {selection.promised.digest}, not {wanted}")
        if check is not None and selection.promised is not None:
            check(selection.promised)
        manifest = _complete(into, selection, wanted, without_leftovers=True)
        if manifest is None:
            with into.begin(notify):
                # Check again: another process may have written the target while this one waited for the lock.
                manifest = _complete(into, selection, wanted, without_leftovers=False)
                if manifest is None:
                    meter = Meter("copied", selection.size, notify, moved)
                    manifest = _write(store, into, selection, wanted, meter, sidecars, check)
                    check = None
                into.finish()
        if check is not None:
            check(manifest)
        notify(f"{into.location} is complete: {len(manifest.files)} files, {manifest.size} bytes, {manifest.digest}")
        return manifest


def scan(source: str, *, progress: Notify | None = None) -> ContentManifest:
    """Read all files of ``source`` and return their manifest. Raises the same errors about the source as `copy`."""
    with opened(parse_store(source)) as store:
        selection = select(store, (), ())
        meter = Meter("read", selection.size, progress or _silent)
        with Source(store, selection, meter) as source_:
            return _each(selection, meter, lambda entry: _drain(source_.stream(entry, "")))


def read_manifest(location: str) -> ContentManifest | None:
    """Read the manifest of a dataset or model; None without one, which means that it may be incomplete.

    Raises:
        CorruptData: ``MANIFEST.json`` is not a manifest.
    """
    with opened(parse_store(location)) as store:
        return manifest_of(store)


def _silent(line: str) -> None:
    del line


def _refuse_overlap(source: Location, target: Location) -> None:
    if (source.scheme, source.authority) != (target.scheme, target.authority):
        return
    inside = f"{target.path}/".startswith(f"{source.path}/" if source.path else "")
    if inside or (source.path.rpartition("/")[0] == target.path and not source.directory):
        raise ConfigurationError(f"the target {target} overlaps the source {source}; choose a directory outside it")


def _complete(
    into: ReadableStore, selection: Selection, wanted: str | None, *, without_leftovers: bool
) -> ContentManifest | None:
    """The target's manifest, if the target already has the selected content.

    With ``without_leftovers``, None if a killed writer left files.
    """
    held = manifest_of(into)
    if held is None:
        return None
    if selection.promised is not None:
        same = held.digest == selection.promised.digest
    elif wanted:
        same = matches(held, wanted)
        if not same and selection.origin and selection.origin == held.origin:
            raise ChecksumMismatch(f"the source has digest {_shown(held)}, not {wanted}")
    else:
        same = bool(selection.origin) and held.origin == selection.origin
    if not same:
        return None
    sizes = {entry.path: entry.size for entry in into.list()}
    if without_leftovers and any(path.startswith(f"{file_manifest.WORK}/") for path in sizes):
        return None
    return held if all(sizes.get(file.path) == file.size for file in held.files) else None


def _write(
    store: ReadableStore,
    into: WritableStore,
    selection: Selection,
    wanted: str | None,
    meter: Meter,
    sidecars: Sidecars | None,
    check: Check | None,
) -> ContentManifest:
    previous = manifest_of(into)
    correct = _correct_files(into, selection, previous)
    stale, again = _announce(into, selection, previous)
    if previous is not None:
        into.delete(file_manifest.NAME)
    expected = {file.path: file.sha256 for file in selection.promised.files} if selection.promised else {}
    if wanted and len(selection.entries) == 1:
        # Verified before the file appears, so that a wrong file never appears.
        expected.setdefault(selection.entries[0].path, wanted)

    def one(entry: Entry) -> File:
        if (file := correct.get(entry.path)) is not None:
            meter.add(entry.size)
            return file
        promised = expected.get(entry.path) or entry.sha256
        stream = source.stream(entry, promised)
        # A store that resumes reads verifies only complete reads. Its files are resumed only if their digest is known.
        verifiable = promised or not store.resumes_reads
        if entry.size >= _RESUMED and entry.etag and verifiable:
            into.resume_write(entry.path, stream, entry.size, f"{store.location}\0{entry}")
        else:
            into.write(entry.path, stream, entry.size)
        if rest := entry.size - stream.counted:  # bytes that the target had, or that were sent twice
            meter.add(rest)
        return stream.file

    with Source(store, selection, meter) as source:
        manifest = _each(selection, meter, one)
    try:
        if wanted and not matches(manifest, wanted):
            raise ChecksumMismatch(
                f"{store.location} has digest {_shown(manifest)}, not {wanted}; the copied files were removed"
            )
        if check is not None:
            check(manifest)
    except ChecksumMismatch:
        for file in manifest.files:
            into.delete(file.path)
        raise
    for path in stale:
        into.delete(path)
    _write_sidecars(into, manifest, sidecars(manifest) if sidecars else {}, replaced=previous is not None or again)
    into.write_small(file_manifest.NAME, manifest.to_json())
    return manifest


def _write_sidecars(
    into: WritableStore, manifest: ContentManifest, files: Mapping[str, bytes], *, replaced: bool
) -> None:
    """Write the sidecars, and remove older ones, which describe other content."""
    own = {file.path for file in manifest.files}
    for path in file_manifest.SIDECARS:
        if replaced and path not in own and path not in files:
            into.delete(path)
    for path, data in files.items():
        if path not in own:
            into.write_small(path, data)


def _announce(into: WritableStore, selection: Selection, previous: ContentManifest | None) -> tuple[set[str], bool]:
    """Write the mark, which lists the files that will be written.

    Returns files of earlier tries that are not needed any more, and whether an earlier try was killed.

    Without the list, files of a killed try would remain forever if the next try has files with other names.
    """
    coming = {entry.path for entry in selection.entries}
    earlier = {file.path for file in previous.files} if previous else set()
    again = False
    try:
        mark = mapping_of(read_small(into, file_manifest.MARK), file_manifest.MARK, LARGE)
        again = True
        number = mark["format"]
        if isinstance(number, int) and number > _MARK_FORMAT:
            raise CorruptData(wrong_format(f"{into.location}: {file_manifest.MARK}", number, _MARK_FORMAT))
        file_manifest.check_paths(mark["files"])
        earlier |= set(mark["files"])
    except (SourceNotFound, UnsafePath, ValueError, TypeError, AttributeError, KeyError):
        pass  # there is no list, or not one of trainjob: nothing is removed
    mark = {"format": _MARK_FORMAT, "files": sorted(coming | earlier)}
    into.write_small(file_manifest.MARK, json.dumps(mark).encode())
    return earlier - coming, again


def _correct_files(into: ReadableStore, selection: Selection, previous: ContentManifest | None) -> dict[str, File]:
    """Files of the target that are correct and need not be sent again."""
    if selection.promised is None:
        return {}
    sizes = {entry.path: entry.size for entry in into.list()}
    known = {file.path: file for file in previous.files} if previous else {}
    correct = {}
    for file in selection.promised.files:
        if sizes.get(file.path) != file.size:
            continue
        # Files are read back only if that costs less than sending them.
        if known.get(file.path) == file or (into.location.on_disk and _sha256(into, file.path) == file.sha256):
            correct[file.path] = file
    return correct


def _sha256(store: ReadableStore, path: str) -> str:
    total = hashlib.sha256()
    for chunk in store.read(path):
        total.update(chunk)
    return total.hexdigest()


def _shown(manifest: ContentManifest) -> str:
    return manifest.files[0].sha256 if len(manifest.files) == 1 else manifest.digest


def _drain(stream: Stream) -> File:
    for _ in stream:
        pass
    return stream.file


def _each(selection: Selection, meter: Meter, one: Callable[[Entry], File]) -> ContentManifest:
    """Do ``one`` for each file, several at a time; the first error ends the others."""
    largest = max((entry.size for entry in selection.entries), default=0)
    files: list[File] = []
    at_once = min(_FILES_AT_A_TIME, max(AT_A_TIME, _BYTES_AT_A_TIME // max(1, largest)))
    for_each(lambda entry: files.append(one(entry)), selection.entries, at_once, meter.stop)
    return file_manifest.build(files, selection.origin)
