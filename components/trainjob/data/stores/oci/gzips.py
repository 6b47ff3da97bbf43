"""Random reads of compressed layers, from checkpoints of the decompressor."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainjob.data.stores.base import CHUNK
from trainjob.errors import CorruptData

_SPACING, _CHECKPOINTS = 4 * CHUNK, 64  # each checkpoint takes about 45 kB, the window of the decompressor
_GZIP = 31  # zlib's window bits for the gzip format


@dataclass(frozen=True)
class _Checkpoint:
    plain: int
    packed: int
    state: Any  # zlib's decompressor, which has no public type; None at the beginning of a stream


class Gunzip:
    """The content of a remote gzip file.

    The first pass stores checkpoints. A later read decompresses from the last checkpoint before its start, not from the
    beginning.

    Args:
        read_from: Returns the bytes of the file from a position on.
        where: Name for errors.
    """

    def __init__(self, read_from: Callable[[int], Iterator[bytes]], where: str) -> None:
        self._read_from, self._where = read_from, where
        self._checkpoints = [_Checkpoint(0, 0, None)]
        self._spacing = _SPACING

    def read(self, start: int, source: Iterator[bytes] | None = None) -> Iterator[bytes]:
        """Read the content from ``start`` on.

        Args:
            start: Position in the content.
            source: The complete file, if the caller reads its bytes too; then reading begins at its start.

        Raises:
            CorruptData: The file is not gzip, or is truncated.
        """
        checkpoint = max((each for each in self._checkpoints if each.plain <= start), key=lambda each: each.plain)
        if source is not None:
            checkpoint = self._checkpoints[0]
        at = checkpoint.plain
        for chunk in self._run(checkpoint, source or self._read_from(checkpoint.packed), remember=source is not None):
            if at + len(chunk) > start:
                yield chunk[max(0, start - at) :]
            at += len(chunk)

    def _run(self, checkpoint: _Checkpoint, source: Iterator[bytes], *, remember: bool) -> Iterator[bytes]:
        inflate = checkpoint.state.copy() if checkpoint.state is not None else zlib.decompressobj(_GZIP)
        plain, packed, begun = checkpoint.plain, checkpoint.packed, checkpoint.state is not None
        for data in source:
            rest = data
            packed += len(data)
            while True:
                if not begun and not (rest := rest.lstrip(b"\0")):
                    break  # zeros that pad the last block of a tape
                begun = True
                try:
                    out = inflate.decompress(rest, CHUNK)
                except zlib.error:
                    raise CorruptData(f"{self._where} contains invalid gzip data") from None
                rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
                plain += len(out)
                if out:
                    yield out
                if inflate.eof:  # another gzip member may follow
                    inflate, begun = zlib.decompressobj(_GZIP), False
                    continue
                if remember and plain - self._checkpoints[-1].plain >= self._spacing:
                    self._remember(_Checkpoint(plain, packed - len(rest), inflate.copy()))
                if not rest and len(out) < CHUNK:
                    break
        if begun:
            raise CorruptData(f"{self._where} is truncated")

    def _remember(self, checkpoint: _Checkpoint) -> None:
        self._checkpoints.append(checkpoint)
        if len(self._checkpoints) > _CHECKPOINTS:
            self._checkpoints = self._checkpoints[::2]
            self._spacing *= 2
