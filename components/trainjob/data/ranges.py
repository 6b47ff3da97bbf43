"""Reading one large file by several ranges at once, in order and in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from trainjob.data.retries import Patience
from trainjob.data.stores import Entry, Ranged, Store
from trainjob.errors import CorruptData, StoreUnavailable

PART = 8 * 1024 * 1024
"""Bytes of a range: large beside the cost of a request, small beside the memory there is."""
AT_ONCE = 6
"""Ranges in flight or waiting for their turn, over all files: 48 MiB."""


def worth_it(store: Store, path: str, entry: Entry) -> bool:
    """Whether the file at ``path`` is read by ranges."""
    return entry.size >= 3 * PART and isinstance(store, Ranged) and store.ranged(path, entry)


def read(  # noqa: PLR0917 - those of `Store.read`, and where from
    store: Store, path: str, start: int, entry: Entry, ahead: int, pool: ThreadPoolExecutor, stopped: Event
) -> Iterator[bytes]:
    """The bytes from ``start`` to the end; ``ahead`` ranges are fetched at once, and handed on in their order.

    The first error ends it. Every range is held to the same entity tag.
    """
    waiting: deque[Future[list[bytes]]] = deque()
    ended = Event()
    offsets = iter(range(start, entry.size, PART))
    try:
        while True:
            while len(waiting) < ahead and (offset := next(offsets, None)) is not None:
                end = min(offset + PART, entry.size)
                waiting.append(pool.submit(_fetch, store, path, offset, end, entry.etag, (ended, stopped)))
            if not waiting:
                return
            chunks = waiting.popleft().result()
            while chunks:
                yield chunks.pop(0)
    finally:
        ended.set()
        for future in waiting:
            future.cancel()


def _fetch(  # noqa: PLR0917 - see `read`
    store: Store, path: str, start: int, end: int, etag: str, ends: tuple[Event, Event]
) -> list[bytes]:
    chunks: list[bytes] = []
    patience, at = Patience(ends[1]), start
    while at < end:
        try:
            for chunk in store.read(path, start=at, length=end - at, etag=etag):
                if any(event.is_set() for event in ends):
                    return chunks  # nobody waits for them any more
                chunks.append(chunk)
                at += len(chunk)
                patience.moved()
            if at != end:
                raise CorruptData(f"{store.location} gave {at - start} of {end - start} bytes of a range")
        except StoreUnavailable as error:
            patience.wait(error)
    return chunks
