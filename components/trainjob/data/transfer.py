"""Copy a dataset or a model from one location to another, so that a copy which looks finished is finished.

Order of events at the target: write a mark that lists the files to come; remove an older manifest; write the files,
each of which appears whole; write ``MANIFEST.json``; remove the mark. A target is whole exactly if it has a manifest.
Killed at any instant, the same call again finishes the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

from trainjob.data import content
from trainjob.data.content import ContentManifest, File, matches
from trainjob.data.locations import Location, parse_store, parse_target
from trainjob.data.meter import Meter, Moved, Notify
from trainjob.data.parallel import for_each
from trainjob.data.selection import Selection, manifest_of, select
from trainjob.data.stores.base import Entry, ReadableStore, WritableStore
from trainjob.data.stores.opening import opened, opened_writable
from trainjob.data.streams import AT_A_TIME, Source, Stream
from trainjob.errors import ChecksumMismatch, ConfigurationError, SourceNotFound, UnsafePath

Sidecars = Callable[[ContentManifest], Mapping[str, bytes]]
"""Small files to write beside the content, before the manifest, unless it has files of these names; no part of the
digest."""
Check = Callable[[ContentManifest], None]
"""Raises ChecksumMismatch if the content is not to be taken."""

_HELD, _AT_MOST = 64 * 1024 * 1024, 32  # bytes of files at a time; small ones wait for answers most of the time
_RESUMED = 32 * 1024 * 1024  # smaller files are sent again sooner than their parts are looked for


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

    Every byte is hashed as it passes; memory stays constant, also where large files are read by several ranges at once.
    What is cut, stalls or is turned away for the moment is tried again, and goes on where it was. A large file that a
    killed copy has half written to a ``file`` target is not sent from its beginning again.

    A source that has a manifest is verified against it. A target that already holds this content is left as it is; of
    a half-written one, files that are right already are not sent again if a manifest tells so. Files of ``target`` that
    no manifest names are left alone.

    Args:
        source: Location in any store (``http(s)``: of one file).
        target: Location of a directory in any store but ``http(s)``, created if it is not there; of ``oci`` with a tag.
        include: Shell patterns; only paths that match one are copied. Matched against the path relative to ``source``
            (of a single file, its name) and, for patterns without a slash, against the file name. A text is one
            pattern.
        exclude: Likewise; wins over ``include``. ``MANIFEST.json`` in it takes the source as it is, unverified.
        digest: What the content has to be: SHA-256 in hexadecimal of the one file, or ``sha256:<root digest>``.
        progress: Called with lines for people, one per tenth of the bytes and at least two a minute.
        moved: See `trainjob.data.meter.Moved`.
        sidecars: See `Sidecars`; not called if the target is already whole.
        check: See `Check`; called before anything is copied, where the source's manifest tells what it is, and with
            what was copied, before the target is marked as whole.

    Returns:
        What the target holds.

    Raises:
        SourceNotFound: Nothing is there, or nothing matches.
        ChecksumMismatch: The bytes are not those of ``digest`` or of the source's manifest.
        CorruptData: Half-written or changing source, truncated gzip.
        UnsafePath: A name would leave the target.
        OutOfSpace: The target is full.
        StoreUnavailable: A store failed for longer than its retries.
        ConfigurationError: A location, a credential or an extra is wrong or missing.
    """
    notify = progress or _silent
    wanted = content.check_digest(digest)
    location, at = parse_store(source), parse_target(target)
    with opened(location) as store, opened_writable(at) as into:
        _refuse_overlap(store.location, into.location)
        selection = select(store, include, exclude)
        if wanted and selection.promised is not None and not matches(selection.promised, wanted):
            raise ChecksumMismatch(f"{store.location} has digest {selection.promised.digest}, not {wanted}")
        if check is not None and selection.promised is not None:
            check(selection.promised)
        whole = _already_whole(into, selection, wanted, tidy=True)
        if whole is None:
            with into.begin(notify):
                # Again: another process may have written it while this one waited for its turn.
                whole = _already_whole(into, selection, wanted, tidy=False)
                if whole is None:
                    meter = Meter("copied", selection.size, notify, moved)
                    whole = _write(store, into, selection, wanted, meter, sidecars, check)
                    check = None
                into.finish()
        if check is not None:
            check(whole)
        notify(f"{into.location} is whole: {len(whole.files)} files, {whole.size} bytes, {whole.digest}")
        return whole


def scan(source: str, *, progress: Notify | None = None) -> ContentManifest:
    """Read all of ``source`` and say what it is, writing nothing. Raises what `copy` raises of its source."""
    with opened(parse_store(source)) as store:
        selection = select(store, (), ())
        meter = Meter("read", selection.size, progress or _silent)
        with Source(store, selection, meter) as source_:
            return _each(selection, meter, lambda entry: _drain(source_.stream(entry, "")))


def read_manifest(location: str) -> ContentManifest | None:
    """The manifest of a dataset or model; None if it has none, so that it is not known to be whole.

    Raises:
        CorruptData: What is there is no manifest.
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


def _already_whole(
    into: ReadableStore, selection: Selection, wanted: str | None, *, tidy: bool
) -> ContentManifest | None:
    """What the target holds, if it holds what is meant; with ``tidy``, and nothing that a killed writer left."""
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
    if tidy and any(path.startswith(f"{content.WORK}/") for path in sizes):
        return None
    return held if all(sizes.get(file.path) == file.size for file in held.files) else None


def _write(  # noqa: PLR0917 - the things that `copy` has found out
    store: ReadableStore,
    into: WritableStore,
    selection: Selection,
    wanted: str | None,
    meter: Meter,
    sidecars: Sidecars | None,
    check: Check | None,
) -> ContentManifest:
    previous = manifest_of(into)
    right = _right_already(into, selection, previous)
    stale, again = _announce(into, selection, previous)
    if previous is not None:
        into.delete(content.NAME)
    expected = {file.path: file.sha256 for file in selection.promised.files} if selection.promised else {}
    if wanted and len(selection.entries) == 1:
        # Known before the file appears, so a wrong one never does.
        expected.setdefault(selection.entries[0].path, wanted)

    def one(entry: Entry) -> File:
        if (file := right.get(entry.path)) is not None:
            meter.add(entry.size)
            return file
        promised = expected.get(entry.path) or entry.sha256
        stream = source.stream(entry, promised)
        # What a store checks only as a whole is read as a whole, unless something else says what it has to be.
        vouched = promised or not store.resumes_reads
        if entry.size >= _RESUMED and entry.etag and vouched:
            into.resume_write(entry.path, stream, entry.size, f"{store.location}\0{entry}")
        else:
            into.write(entry.path, stream, entry.size)
        if rest := entry.size - stream.counted:  # what was there already, or was sent twice
            meter.add(rest)
        return stream.file

    with Source(store, selection, meter) as source:
        manifest = _each(selection, meter, one)
    try:
        if wanted and not matches(manifest, wanted):
            raise ChecksumMismatch(
                f"{store.location} has digest {_shown(manifest)}, not {wanted}; nothing of it is kept"
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
    into.write_small(content.NAME, manifest.to_json())
    return manifest


def _write_sidecars(
    into: WritableStore, manifest: ContentManifest, files: Mapping[str, bytes], *, replaced: bool
) -> None:
    """Write them; those of other content that was there before would tell the wrong things of this one."""
    own = {file.path for file in manifest.files}
    for path in content.SIDECARS:
        if replaced and path not in own and path not in files:
            into.delete(path)
    for path, data in files.items():
        if path not in own:
            into.write_small(path, data)


def _announce(into: WritableStore, selection: Selection, previous: ContentManifest | None) -> tuple[set[str], bool]:
    """Write down which files will be written.

    Returns those of earlier tries that will not be needed any more, and whether a try was killed before.

    Without the list, files of a try that was killed would stay for good when the next one has files of other names.
    """
    coming = {entry.path for entry in selection.entries}
    earlier = {file.path for file in previous.files} if previous else set()
    again = False
    try:
        listed = json.loads(b"".join(into.read(content.MARK)))
        again = True
        content.check_paths(listed)
        earlier |= set(listed)
    except (SourceNotFound, UnsafePath, ValueError, TypeError, AttributeError):
        pass  # none, or not written by us: then nothing is removed because of it
    into.write_small(content.MARK, json.dumps(sorted(coming | earlier)).encode())
    return earlier - coming, again


def _right_already(into: ReadableStore, selection: Selection, previous: ContentManifest | None) -> dict[str, File]:
    """Files of the target that need not be sent again."""
    if selection.promised is None:
        return {}
    sizes = {entry.path: entry.size for entry in into.list()}
    known = {file.path: file for file in previous.files} if previous else {}
    right = {}
    for file in selection.promised.files:
        if sizes.get(file.path) != file.size:
            continue
        # Reading back is worth its time only where it costs less than sending.
        if known.get(file.path) == file or (into.location.on_disk and _sha256(into, file.path) == file.sha256):
            right[file.path] = file
    return right


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
    """Do ``one`` for each file, several at a time; the first error ends the rest."""
    largest = max((entry.size for entry in selection.entries), default=0)
    files: list[File] = []
    at_once = min(_AT_MOST, max(AT_A_TIME, _HELD // max(1, largest)))
    for_each(lambda entry: files.append(one(entry)), selection.entries, at_once, meter.stop)
    return content.build(files, selection.origin)
