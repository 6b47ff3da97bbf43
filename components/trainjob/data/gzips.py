"""Verify gzip data while it is copied: only the gzip format itself reveals a truncated download."""

from __future__ import annotations

import zlib

from trainjob.errors import CorruptData

_OUTPUT = 256 * 1024  # bytes decompressed at a time, so that a highly compressed file does not fill the memory
_GZIP = 31  # zlib: 15 bits of window, plus 16 for a gzip header and trailer


class GzipCheck:
    """Verifies a ``.gz`` file: `feed` all bytes, then `finish`. A file may have several members (RFC 1952 2.2)."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._member: zlib._Decompress | None = None
        self._members = 0

    def feed(self, data: bytes) -> None:
        """Process the next bytes; raises CorruptData if they are not gzip."""
        try:
            while data:
                if self._member is None:
                    # Zeros after a member are padding (tapes, block devices); `gzip` itself accepts them.
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
        """Raise CorruptData if the data is truncated."""
        if self._member is not None or not self._members:
            raise CorruptData(f"{self._where} is truncated: its gzip data is incomplete; download the file again")
