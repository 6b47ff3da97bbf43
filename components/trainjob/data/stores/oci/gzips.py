"""Reading inside of compressed layers, from places that were passed before."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainjob.data.stores.base import CHUNK
from trainjob.errors import CorruptData

_SPACING, _PLACES = 4 * CHUNK, 64  # each place costs about 45 kB, the window of the decompressor
_GZIP = 31  # zlib's window bits for the gzip format


@dataclass(frozen=True)
class _Place:
    plain: int
    packed: int
    state: Any  # zlib's decompressor, which has no public type; None at the beginning of a stream


class Gunzip:
    """The content of a gzip file that is somewhere else.

    The first pass leaves places behind from which later ones begin: what is read again is unpacked from the last place
    before it, not from the beginning.

    Args:
        open: Its bytes from a position on.
        where: For errors.
    """

    def __init__(self, open: Callable[[int], Iterator[bytes]], where: str) -> None:  # noqa: A002 - as the builtin
        self._open, self._where = open, where
        self._places = [_Place(0, 0, None)]
        self._spacing = _SPACING

    def read(self, start: int, source: Iterator[bytes] | None = None) -> Iterator[bytes]:
        """The content from ``start`` on.

        Args:
            start: Position in the content.
            source: The whole file, where the caller wants to see its bytes; only from the beginning on.

        Raises:
            CorruptData: It is no gzip, or is cut.
        """
        place = max((each for each in self._places if each.plain <= start), key=lambda each: each.plain)
        if source is not None:
            place = self._places[0]
        at = place.plain
        for chunk in self._run(place, source or self._open(place.packed), remember=source is not None):
            if at + len(chunk) > start:
                yield chunk[max(0, start - at) :]
            at += len(chunk)

    def _run(self, place: _Place, source: Iterator[bytes], *, remember: bool) -> Iterator[bytes]:
        inflate = place.state.copy() if place.state is not None else zlib.decompressobj(_GZIP)
        plain, packed, begun = place.plain, place.packed, place.state is not None
        for data in source:
            rest = data
            packed += len(data)
            while True:
                if not begun and not (rest := rest.lstrip(b"\0")):
                    break  # zeros fill up the last block of a tape
                begun = True
                try:
                    out = inflate.decompress(rest, CHUNK)
                except zlib.error:
                    raise CorruptData(f"{self._where} is broken inside") from None
                rest = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
                plain += len(out)
                if out:
                    yield out
                if inflate.eof:  # gzip files may follow each other
                    inflate, begun = zlib.decompressobj(_GZIP), False
                    continue
                if remember and plain - self._places[-1].plain >= self._spacing:
                    self._remember(_Place(plain, packed - len(rest), inflate.copy()))
                if not rest and len(out) < CHUNK:
                    break
        if begun:
            raise CorruptData(f"{self._where} ends in the middle")

    def _remember(self, place: _Place) -> None:
        self._places.append(place)
        if len(self._places) > _PLACES:
            self._places = self._places[::2]
            self._spacing *= 2
