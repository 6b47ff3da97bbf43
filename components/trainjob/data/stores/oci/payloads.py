"""Content of uploads: bytes that can be read again from any position, since a connection may be cut at any."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from trainjob.data.stores.base import CHUNK, Rereadable
from trainjob.errors import CorruptData, StoreUnavailable


class Payload(Protocol):
    """Bytes to upload."""

    @property
    def size(self) -> int:
        """Number of bytes."""
        ...

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        ...


class Data:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        piece = memoryview(self._data)[start : start + length]
        for at in range(0, len(piece), CHUNK):
            yield bytes(piece[at : at + CHUNK])


class Joined:
    """Several payloads, concatenated."""

    def __init__(self, parts: Sequence[Payload]) -> None:
        self._parts = parts
        self.size = sum(part.size for part in parts)

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        for part in self._parts:
            if length <= 0:
                return
            if start < part.size:
                count = min(length, part.size - start)
                yield from part.open(start, count)
                length -= count
            start = max(0, start - part.size)


class Again:
    """A file that was read and verified before."""

    def __init__(self, file: Rereadable, size: int) -> None:
        self._file = file
        self.size = size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        yield from limited(self._file.reread(start), length)


class Once:
    """A file that is verified while it is sent. Bytes that must be sent twice are read twice, if the source allows it.

    Args:
        chunks: Its bytes.
        size: Their expected number.
        where: Name for errors.
    """

    def __init__(self, chunks: Iterable[bytes], size: int, where: str) -> None:
        self._chunks, self._iterator, self._where = chunks, iter(chunks), where
        self._rest = b""
        self._at = 0
        self.size = size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        if start < self._at:
            if not isinstance(self._chunks, Rereadable):
                raise StoreUnavailable(
                    f"{self._where}: the registry lost the uploaded bytes, and the source cannot be reread"
                )
            count = min(self._at - start, length)
            yield from limited(self._chunks.reread(start), count)
            start, length = start + count, length - count
        while length > 0:
            chunk = self._rest or next(self._iterator, b"")
            if not chunk:
                raise CorruptData(f"{self._where} has {self._at} bytes instead of {self.size}")
            piece, self._rest = chunk[:length], chunk[length:]
            self._at += len(piece)
            length -= len(piece)
            yield piece

    def finish(self) -> None:
        """Let the source verify its bytes.

        Raises:
            CorruptData: The source has more bytes than it reported.
        """
        if self._rest or any(self._iterator):
            raise CorruptData(f"{self._where} has more than the expected {self.size} bytes")


class Hashing:
    """Computes the digest of a payload while it is read for the first time, from its beginning on."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._hash, self._at = hashlib.sha256(), 0
        self.size = payload.size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Read ``length`` bytes from ``start`` on."""
        for chunk in self._payload.open(start, length):
            if start + len(chunk) > self._at:
                self._hash.update(chunk[max(0, self._at - start) :])
                self._at = start + len(chunk)
            start += len(chunk)
            yield chunk

    @property
    def digest(self) -> str:
        """``sha256:<hex>``; available after the last byte."""
        return f"sha256:{self._hash.hexdigest()}"


def digest_of(chunks: Iterable[bytes]) -> str:
    """``sha256:<hex>`` of all of ``chunks``."""
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def limited(chunks: Iterator[bytes], length: int) -> Iterator[bytes]:
    """The first ``length`` bytes, or all if there are fewer."""
    while length > 0 and (chunk := next(chunks, b"")):
        piece = chunk[:length]
        length -= len(piece)
        yield piece
