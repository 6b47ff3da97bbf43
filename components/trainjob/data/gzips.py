"""Check gzip data as it passes. A download that was cut is often valid up to its last byte, and only gzip knows."""

from __future__ import annotations

import zlib

from trainjob.errors import CorruptData

_OUTPUT = 256 * 1024  # bytes unpacked at a time, so that a highly compressed file does not fill the memory
_GZIP = 31  # zlib: 15 bits of window, plus 16 for a gzip header and trailer


class GzipCheck:
    """Feed it all bytes of a ``.gz`` file, then `finish`. Several members in one file are fine (RFC 1952 2.2)."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._member: zlib._Decompress | None = None
        self._members = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes; CorruptData if they cannot be gzip."""
        try:
            while data:
                if self._member is None:
                    # Zeros after a member are padding (tapes, block devices), as `gzip` itself takes them.
                    data = data.lstrip(b"\0") if self._members else data
                    if not data:
                        return
                    self._member = zlib.decompressobj(_GZIP)
                self._member.decompress(data, _OUTPUT)
                data = self._member.unconsumed_tail
                if self._member.eof:
                    data = self._member.unused_data
                    self._member = None
                    self._members += 1
        except zlib.error as error:
            raise CorruptData(f"{self._where} is not valid gzip: {error}") from None

    def finish(self) -> None:
        """CorruptData if the data ended in the middle."""
        if self._member is not None or not self._members:
            raise CorruptData(f"{self._where} is truncated: the gzip data ends in the middle; get the file again")
