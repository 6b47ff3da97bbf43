"""Read the files of a source: by ranges, resuming after cuts, and verified while they are read."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from trainjob.data import file_manifest, ranges
from trainjob.data.file_manifest import File, matches
from trainjob.data.gzips import GzipCheck
from trainjob.data.locations import public
from trainjob.data.meter import Meter
from trainjob.data.selection import Selection
from trainjob.data.stores.base import Entry, ReadableStore
from trainjob.errors import ChecksumMismatch, CorruptData

AT_A_TIME = 4
"""Files at the same time. Buffers: at most 80 MiB for uploads (4 parts of 5 MiB each) and `ranges.AT_ONCE` ranges."""


class Source:
    """Reads the files of a selection: large ones by several ranges at once, all of them resuming after cuts."""

    def __init__(self, store: ReadableStore, selection: Selection, meter: Meter) -> None:
        self.store, self._selection, self._meter = store, selection, meter
        large = sum(ranges.use_ranges(store, selection.key(entry), entry) for entry in selection.entries)
        self._ahead = max(2, ranges.AT_ONCE // max(1, min(large, AT_A_TIME)))
        self._pool = ThreadPoolExecutor(self._ahead * AT_A_TIME, thread_name_prefix="trainjob-range")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, entry: Entry, start: int) -> Iterator[bytes]:
        """Read a file from ``start`` on."""
        key, stopped = self._selection.key(entry), self._meter.stopped
        if self.store.resumes_reads:
            return self.store.read(key, start=start, etag=entry.etag)
        if ranges.use_ranges(self.store, key, entry):
            return ranges.read_ahead(self.store, key, start, entry, self._ahead, self._pool, stopped)
        return ranges.resumed(self.store, key, start, entry.size, entry.etag, stopped)

    def stream(self, entry: Entry, expected: str) -> Stream:
        """Read and verify a complete file."""
        return Stream(self, entry, expected, self._meter)

    def where(self, entry: Entry) -> str:
        """The location of a file, for messages."""
        location = self.store.location
        return public(location if self._selection.single else location.child(entry.path))


class Stream:
    """The bytes of one file, verified while they are read. Raises an error at the end if they are wrong."""

    def __init__(self, source: Source, entry: Entry, expected: str, meter: Meter) -> None:
        self.source, self._of, self._entry = source.store, source, entry
        self._expected, self._meter = expected, meter
        self.counted = 0

    def __iter__(self) -> Iterator[bytes]:
        return self.after(iter(()))

    def preview(self) -> Iterator[bytes]:
        """Read all bytes, checked, without counting them as transferred."""
        return self._checked(iter(()), lambda _: self._count(0))

    def reread(self, start: int) -> Iterator[bytes]:
        """Read from ``start`` on, without checks."""
        for chunk in self._of.read(self._entry, start):
            self._count(len(chunk))
            yield chunk

    def after(self, held: Iterator[bytes]) -> Iterator[bytes]:
        """The bytes that follow ``held``, which the target has; those are verified too."""
        return self._checked(held, self._count)

    def _count(self, count: int) -> None:
        self.counted += count
        self._meter.add(count)

    def _checked(self, held: Iterator[bytes], count: Callable[[int], None]) -> Iterator[bytes]:
        self._sha256 = hashlib.sha256()
        gzip = GzipCheck(self._where()) if self._entry.path.endswith((".gz", ".tgz")) else None
        size = 0

        def check(chunk: bytes) -> None:
            nonlocal size
            size += len(chunk)
            self._sha256.update(chunk)
            if gzip is not None:
                gzip.feed(chunk)
            count(len(chunk))

        for chunk in held:
            check(chunk)
        for chunk in self._of.read(self._entry, size) if size < self._entry.size or not size else ():
            check(chunk)
            yield chunk
        if size != self._entry.size:
            raise CorruptData(
                f"{self._where()} has {size} bytes instead of {self._entry.size}: it was truncated, or changed while"
                " it was read"
            )
        if gzip is not None:
            gzip.finish()
        if self._expected not in ("", self.digest) and not matches(file_manifest.build([self.file]), self._expected):
            raise ChecksumMismatch(f"{self._where()} has SHA-256 {self.digest}, not {self._expected}")

    def _where(self) -> str:
        return self._of.where(self._entry)

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes so far, including those that the target had."""
        return self._sha256.hexdigest()

    @property
    def file(self) -> File:
        """The file that was read; available after the last byte."""
        return File(self._entry.path, self._entry.size, self.digest)
