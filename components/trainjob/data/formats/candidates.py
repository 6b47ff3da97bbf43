"""One file of a store, read by ranges, as far as the check of its format needs."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from trainjob.data import ranges
from trainjob.data.stores.base import Entry, ReadableStore, retry

if TYPE_CHECKING:
    from typing_extensions import Buffer

_BUFFER = 64 * 1024
"""Bytes of a range: enough for the headers of most files and for the end of a zip archive."""

_FARTHEST = 2**62


class Refused(Exception):
    """The content does not have the format of the file's suffix, or has a format that can run code.

    Args:
        reason: Completes a sentence whose subject is the file.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Candidate:
    """A file to check. For one thread only.

    Args:
        store: Store of the file.
        key: Path in the store.
        entry: Name, size and entity tag.
    """

    def __init__(self, store: ReadableStore, key: str, entry: Entry) -> None:
        self._store, self._key, self._entry = store, key, entry
        self.path, self.size = entry.path, entry.size

    def close(self) -> None:
        """Free the buffer."""
        self.__dict__.pop("file", None)

    @cached_property
    def file(self) -> io.BufferedReader:
        """Random access to the bytes."""
        return _File(_Ranges(self._store, self._key, self._entry), _BUFFER)

    def chunks(self) -> Iterator[bytes]:
        """Read all bytes, in order. A small file is read from the store only once."""
        if self.size <= _BUFFER:
            self.file.seek(0)
            yield self.file.read()
        else:
            yield from ranges.resumed(self._store, self._key, 0, self.size, self._entry.etag)

    def head(self, length: int) -> bytes:
        """Read the first bytes."""
        self.file.seek(0)
        return self.file.read(length)

    def tail(self, length: int) -> bytes:
        """Read the last bytes."""
        self.file.seek(max(0, self.size - length))
        return self.file.read(length)


class _File(io.BufferedReader):
    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Refuse offsets that no file has: a header may contain one that `io` does not accept."""
        if offset >= _FARTHEST:
            raise Refused("is truncated")
        return super().seek(offset, whence)


class _Ranges(io.RawIOBase):
    """Requests a range for each read."""

    def __init__(self, store: ReadableStore, key: str, entry: Entry) -> None:
        self._store, self._key, self._entry, self._at = store, key, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._entry.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Buffer, /) -> int:
        view = memoryview(buffer)
        length = min(len(view), self._entry.size - self._at)
        if length <= 0:
            return 0
        start = self._at
        data = retry(lambda: b"".join(self._store.read(self._key, start=start, length=length, etag=self._entry.etag)))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
