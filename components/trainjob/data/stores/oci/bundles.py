"""Buffer small files until it is known which of them share a layer."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from trainjob.data.stores.base import CHUNK
from trainjob.data.stores.files import os_errors

_IN_MEMORY = 16 * CHUNK


class Small:
    """Contents of small files: in memory, and beyond 16 MiB in an unnamed temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115 - lives as long as this
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, int]] = {}
        self._lock = Lock()

    def __contains__(self, path: object) -> bool:
        return path in self._places

    def add(self, path: str, data: bytes) -> None:
        """Add a file; it replaces one with the same path."""
        with self._lock, os_errors(Path(tempfile.gettempdir())):
            at = self._file.seek(0, os.SEEK_END)
            self._file.write(data)
            self._places[path] = (at, len(data))

    def remove(self, path: str) -> None:
        """Remove a file, if it exists."""
        with self._lock:
            self._places.pop(path, None)

    def payload(self, path: str) -> _Kept:
        """The content of a file; KeyError if it was not added."""
        return _Kept(self, *self._places[path])

    def read(self, at: int, length: int) -> bytes:
        """Read bytes of the temporary file."""
        with self._lock:
            self._file.seek(at)
            return self._file.read(length)


class _Kept:
    """A `Payload` of one small file."""

    def __init__(self, small: Small, at: int, size: int) -> None:
        self._small, self._at = small, at
        self.size = size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        if start < self.size:
            yield self._small.read(self._at + start, min(length, self.size - start))
