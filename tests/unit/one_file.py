"""A store with one file, for checks of its content."""

from __future__ import annotations

import threading

from trainjob.data.locations import parse_store
from trainjob.data.stores.base import Entry


class OneFile:
    """Serves ranges of one file, and counts the bytes that were read."""

    def __init__(self, data: bytes, name: str) -> None:
        self.data, self.entries = data, [Entry(name, len(data))]
        self.location = parse_store(f"/{name}")
        self.lock, self.read_bytes = threading.Lock(), 0

    def read(self, path: str, *, start: int = 0, length: int | None = None, etag: str = "") -> list[bytes]:
        part = self.data[start:] if length is None else self.data[start : start + length]
        with self.lock:
            self.read_bytes += len(part)
        return [part]
