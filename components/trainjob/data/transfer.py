"""Copy a dataset or a model from one location to another, so that a copy which looks finished is finished.

Order of events at the target: write a mark that lists the files to come; remove an older manifest; write the files,
each of which appears whole; write ``MANIFEST.json``; remove the mark. A target is whole exactly if it has a manifest.
Killed at any instant, the same call again finishes the work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Lock

from trainjob.data import content
from trainjob.data.content import ContentManifest, File
from trainjob.data.gzips import GzipCheck
from trainjob.data.locations import Location, parse_store
from trainjob.data.selection import Selection, manifest_of, select
from trainjob.data.stores import Entry, Store, open_store
from trainjob.errors import (
    ChecksumMismatch,
    ConfigurationError,
    CorruptData,
    SourceNotFound,
    StoreUnavailable,
    UnsafePath,
)

Notify = Callable[[str], None]
"""Takes one line for people."""
Sidecars = Callable[[ContentManifest], Mapping[str, bytes]]
"""Small files to write beside the content, before the manifest; no part of the digest."""

_AT_A_TIME = 4  # files; with the buffers of an upload (4 parts of 5 MiB each) about 80 MiB at most


def copy(
    source: str,
    target: str,
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    digest: str | None = None,
    progress: Notify | None = None,
    sidecars: Sidecars | None = None,
) -> ContentManifest:
    """Copy ``source``, a file or a directory, into the directory ``target``.

    Every byte is hashed as it passes; memory stays constant. A source that has a manifest is verified against it. A
    target that already holds this content is left as it is; of a half-written one, files that are right already are
    not sent again if a manifest tells so. Files of ``target`` that no manifest names are left alone.

    Args:
        source: ``file``, ``s3`` or ``http(s)`` location (the last: one file).
        target: ``file`` or ``s3`` location of a directory; created if it is not there.
        include: Shell patterns; only paths that match one are copied. Matched against the path relative to ``source``
            and, for patterns without a slash, against the file name.
        exclude: Likewise; wins over ``include``. ``MANIFEST.json`` in it takes the source as it is, unverified.
        digest: What the content has to be: SHA-256 in hexadecimal of the one file, or ``sha256:<root digest>``.
        progress: Called with lines for people, one per tenth of the bytes.
        sidecars: See `Sidecars`; not called if the target is already whole.

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
    wanted = check_digest(digest)
    store, into = open_store(parse_store(source)), open_store(parse_store(target))
    _refuse_overlap(store.location, into.location)
    selection = select(store, include, exclude)
    if wanted and selection.promised is not None and not matches(selection.promised, wanted):
        raise ChecksumMismatch(f"{store.location} has digest {selection.promised.digest}, not {wanted}")
    whole = _already_whole(into, selection, wanted, tidy=True)
    if whole is None:
        with into.begin(notify):
            # Again: another process may have written it while this one waited for its turn.
            whole = _already_whole(into, selection, wanted, tidy=False)
            if whole is None:
                whole = _write(store, into, selection, wanted, _Meter("copied", selection, notify), sidecars)
            into.finish()
    notify(f"{into.location} is whole: {len(whole.files)} files, {whole.size} bytes, {whole.digest}")
    return whole


def scan(source: str, *, progress: Notify | None = None) -> ContentManifest:
    """Read all of ``source`` and say what it is, writing nothing. Raises what `copy` raises of its source."""
    store = open_store(parse_store(source))
    selection = select(store, (), ())
    meter = _Meter("read", selection, progress or _silent)
    return _each(selection, meter, lambda entry: _drain(_Stream(store, selection, entry, "", meter)))


def read_manifest(location: str) -> ContentManifest | None:
    """The manifest of a dataset or model; None if it has none, so that it is not known to be whole.

    Raises:
        CorruptData: What is there is no manifest.
    """
    return manifest_of(open_store(parse_store(location)))


def check_digest(digest: str | None) -> str | None:
    """``digest`` in lower case; None for none.

    Raises:
        ConfigurationError: It is neither 64 hexadecimal digits nor ``sha256:`` and 64 of them.
    """
    if not digest:
        return None
    text = digest.strip().lower()
    hexadecimal = text.removeprefix("sha256:")
    if len(hexadecimal) != 64 or set(hexadecimal) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"{digest!a} is not a digest: give the SHA-256 of the one file as 64 hexadecimal digits,"
            " or sha256:<root digest> of a directory"
        )
    return text


def matches(manifest: ContentManifest, digest: str) -> bool:
    """Whether the content has this digest: its root digest or, for a single file, that of the file."""
    hexadecimal = digest.removeprefix("sha256:")
    single = manifest.files[0].sha256 if len(manifest.files) == 1 else ""
    return hexadecimal in (manifest.digest.removeprefix("sha256:"), single)


def _silent(line: str) -> None:
    del line


def _refuse_overlap(source: Location, target: Location) -> None:
    if (source.scheme, source.authority) != (target.scheme, target.authority):
        return
    inside = f"{target.path}/".startswith(f"{source.path}/" if source.path else "")
    if inside or (source.path.rpartition("/")[0] == target.path and not source.directory):
        raise ConfigurationError(f"the target {target} overlaps the source {source}; choose a directory outside it")


def _already_whole(into: Store, selection: Selection, wanted: str | None, *, tidy: bool) -> ContentManifest | None:
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


def _write(  # noqa: PLR0917 - the six things that `copy` has found out
    store: Store, into: Store, selection: Selection, wanted: str | None, meter: _Meter, sidecars: Sidecars | None
) -> ContentManifest:
    previous = manifest_of(into)
    right = _right_already(into, selection, previous)
    stale = _announce(into, selection, previous)
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
        stream = _Stream(store, selection, entry, expected.get(entry.path, ""), meter)
        into.write(entry.path, stream, entry.size)
        return stream.file

    manifest = _each(selection, meter, one)
    if wanted and not matches(manifest, wanted):
        for file in manifest.files:
            into.delete(file.path)
        raise ChecksumMismatch(f"{store.location} has digest {_shown(manifest)}, not {wanted}; nothing of it is kept")
    for path in stale:
        into.delete(path)
    for path, data in (sidecars(manifest) if sidecars else {}).items():
        into.write_small(path, data)
    into.write_small(content.NAME, manifest.to_json())
    return manifest


def _announce(into: Store, selection: Selection, previous: ContentManifest | None) -> set[str]:
    """Write down which files will be written, and return those of earlier tries that will not be needed any more.

    Without the list, files of a try that was killed would stay for good when the next one has files of other names.
    """
    coming = {entry.path for entry in selection.entries}
    earlier = {file.path for file in previous.files} if previous else set()
    try:
        listed = json.loads(b"".join(into.read(content.MARK)))
        content.check_paths(listed)
        earlier |= set(listed)
    except (SourceNotFound, UnsafePath, ValueError, TypeError, AttributeError):
        pass  # none, or not written by us: then nothing is removed because of it
    into.write_small(content.MARK, json.dumps(sorted(coming | earlier)).encode())
    return earlier - coming


def _right_already(into: Store, selection: Selection, previous: ContentManifest | None) -> dict[str, File]:
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
        if known.get(file.path) == file or (into.location.scheme == "file" and _sha256(into, file.path) == file.sha256):
            right[file.path] = file
    return right


def _sha256(store: Store, path: str) -> str:
    total = hashlib.sha256()
    for chunk in store.read(path):
        total.update(chunk)
    return total.hexdigest()


def _shown(manifest: ContentManifest) -> str:
    return manifest.files[0].sha256 if len(manifest.files) == 1 else manifest.digest


class _Meter:
    """Counts bytes, tells of each tenth, and ends the other streams when one has failed."""

    def __init__(self, verb: str, selection: Selection, notify: Notify) -> None:
        self._verb, self._notify = verb, notify
        self._total = sum(entry.size for entry in selection.entries)
        self._done = self._told = 0
        self._lock = Lock()
        self._stopped = False

    def stop(self) -> None:
        """Let every further `add` fail."""
        self._stopped = True

    def add(self, count: int) -> None:
        if self._stopped:
            raise StoreUnavailable("the transfer was stopped, since another file of it failed")
        with self._lock:
            self._done += count
            tenth = 10 * self._done // self._total if self._total else 10
            if tenth <= self._told:
                return
            self._told = tenth
            self._notify(f"{self._verb} {10 * tenth} %: {self._done} of {self._total} bytes")


class _Stream:
    """The bytes of one file, checked as they pass. Ends with an error, never silently, if they are not right."""

    def __init__(self, store: Store, selection: Selection, entry: Entry, expected: str, meter: _Meter) -> None:
        self._chunks = store.read(selection.key(entry), etag=entry.etag)
        self._where = store.location.uri if selection.single else store.location.child(entry.path).uri
        self._entry, self._expected, self._meter = entry, expected, meter
        self._sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[bytes]:
        gzip = GzipCheck(self._where) if self._entry.path.endswith((".gz", ".tgz")) else None
        size = 0
        for chunk in self._chunks:
            size += len(chunk)
            self._sha256.update(chunk)
            if gzip is not None:
                gzip.feed(chunk)
            self._meter.add(len(chunk))
            yield chunk
        if size != self._entry.size:
            raise CorruptData(
                f"{self._where} gave {size} of {self._entry.size} bytes: cut, or changed while being read"
            )
        if gzip is not None:
            gzip.finish()
        if self._expected and not matches(content.build([self.file]), self._expected):
            raise ChecksumMismatch(f"{self._where} has SHA-256 {self._sha256.hexdigest()}, not {self._expected}")

    @property
    def file(self) -> File:
        """What passed; only after the last byte."""
        return File(self._entry.path, self._entry.size, self._sha256.hexdigest())


def _drain(stream: _Stream) -> File:
    for _ in stream:
        pass
    return stream.file


def _each(selection: Selection, meter: _Meter, one: Callable[[Entry], File]) -> ContentManifest:
    """Do ``one`` for each file, several at a time; the first error ends the rest."""
    with ThreadPoolExecutor(_AT_A_TIME, thread_name_prefix="trainjob-copy") as pool:
        futures = [pool.submit(one, entry) for entry in selection.entries]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            return content.build((future.result() for future in done), selection.origin)
        except BaseException:
            meter.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
