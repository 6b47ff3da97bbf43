"""What is sent to a registry: bytes that can be had again from any position, since a connection may be cut at any."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from trainjob.data.stores.base import CHUNK, Rereadable
from trainjob.errors import CorruptData, StoreUnavailable


class Payload(Protocol):
    """Some bytes."""

    @property
    def size(self) -> int:
        """Their number."""
        ...

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """Some of them."""
        ...


class Data:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """See `Payload.open`."""
        piece = memoryview(self._data)[start : start + length]
        for at in range(0, len(piece), CHUNK):
            yield bytes(piece[at : at + CHUNK])


class Joined:
    """Payloads one after the other."""

    def __init__(self, parts: Sequence[Payload]) -> None:
        self._parts = parts
        self.size = sum(part.size for part in parts)

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """See `Payload.open`."""
        for part in self._parts:
            if length <= 0:
                return
            if start < part.size:
                count = min(length, part.size - start)
                yield from part.open(start, count)
                length -= count
            start = max(0, start - part.size)


class Again:
    """A file whose content has been looked at already."""

    def __init__(self, file: Rereadable, size: int) -> None:
        self._file = file
        self.size = size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """See `Payload.open`."""
        yield from limited(self._file.reread(start), length)


class Once:
    """A file that is looked at while it is sent. What has to be sent twice is read twice, where that can be done.

    Args:
        chunks: Its bytes.
        size: How many there have to be.
        where: For errors.
    """

    def __init__(self, chunks: Iterable[bytes], size: int, where: str) -> None:
        self._chunks, self._iterator, self._where = chunks, iter(chunks), where
        self._rest = b""
        self._at = 0
        self.size = size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """See `Payload.open`."""
        if start < self._at:
            if not isinstance(self._chunks, Rereadable):
                raise StoreUnavailable(
                    f"{self._where}: the registry lost what was sent, and the source cannot be reread"
                )
            count = min(self._at - start, length)
            yield from limited(self._chunks.reread(start), count)
            start, length = start + count, length - count
        while length > 0:
            chunk = self._rest or next(self._iterator, b"")
            if not chunk:
                raise CorruptData(f"{self._where} gave {self._at} of {self.size} bytes")
            piece, self._rest = chunk[:length], chunk[length:]
            self._at += len(piece)
            length -= len(piece)
            yield piece

    def finish(self) -> None:
        """Let the source check what it gave.

        Raises:
            CorruptData: It has more bytes than it said.
        """
        if self._rest or any(self._iterator):
            raise CorruptData(f"{self._where} gave more than {self.size} bytes")


class Hashing:
    """Computes the digest of a payload while it passes for the first time, from its beginning on."""

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._hash, self._at = hashlib.sha256(), 0
        self.size = payload.size

    def open(self, start: int, length: int) -> Iterator[bytes]:
        """See `Payload.open`."""
        for chunk in self._payload.open(start, length):
            if start + len(chunk) > self._at:
                self._hash.update(chunk[max(0, self._at - start) :])
                self._at = start + len(chunk)
            start += len(chunk)
            yield chunk

    @property
    def digest(self) -> str:
        """``sha256:<hex>``; only after the last byte."""
        return f"sha256:{self._hash.hexdigest()}"


def digest_of(chunks: Iterable[bytes]) -> str:
    """``sha256:<hex>`` of all of ``chunks``."""
    total = hashlib.sha256()
    for chunk in chunks:
        total.update(chunk)
    return f"sha256:{total.hexdigest()}"


def limited(chunks: Iterator[bytes], length: int) -> Iterator[bytes]:
    """The first ``length`` bytes; less if there are not so many."""
    while length > 0 and (chunk := next(chunks, b"")):
        piece = chunk[:length]
        length -= len(piece)
        yield piece
