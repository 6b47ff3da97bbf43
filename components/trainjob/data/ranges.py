"""Read one large file by several ranges at once, in order and in bounded memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from trainjob._support import retrying
from trainjob.data.feeding import fed
from trainjob.data.stores.base import Entry, ReadableStore
from trainjob.errors import CorruptData, StoreUnavailable

PART = 8 * 1024 * 1024
"""Bytes of a range: large compared with the cost of a request, small compared with memory."""
AT_ONCE = 6
"""Ranges in flight or waiting for their turn, of all files together: 48 MiB."""
TRIAL, FAST = 1.0, 100_000_000
"""Seconds of waiting for one connection, and the bytes per second that it must deliver by then to be used alone: one
connection needs less CPU on both machines than several. A connection to AWS S3 delivers less."""


def use_ranges(store: ReadableStore, path: str, entry: Entry) -> bool:
    """Whether to read the file at ``path`` by several ranges."""
    return entry.size >= 3 * PART and store.supports_ranges(path, entry)


def read_ahead(
    store: ReadableStore, path: str, start: int, entry: Entry, ahead: int, pool: ThreadPoolExecutor, stopped: Event
) -> Iterator[bytes]:
    """Read from ``start`` to the end over one connection, or if that is slow by ``ahead`` ranges at once.

    Bytes are returned in order. The first error ends the read. All ranges must have the same entity tag.
    """
    start = yield from _alone(store, path, start, entry, stopped)
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


def _alone(store: ReadableStore, path: str, start: int, entry: Entry, stopped: Event) -> Generator[bytes, None, int]:
    """Read over one connection, to the end or until it proves slow; returns the position reached."""
    at, waited = start, 0.0
    with fed(resumed(store, path, start, entry.size, entry.etag, stopped)) as chunks:
        asked = time.monotonic()
        for chunk in chunks:
            waited += time.monotonic() - asked if at > start else 0  # the first byte is slow everywhere
            at += len(chunk)
            yield chunk
            if waited > max(TRIAL, (at - start) / FAST):
                break
            asked = time.monotonic()
    return at


def _fetch(store: ReadableStore, path: str, start: int, end: int, etag: str, ends: tuple[Event, Event]) -> list[bytes]:
    chunks: list[bytes] = []
    backoff, at = retrying.TRANSFER(), start
    while at < end:
        try:
            for chunk in store.read(path, start=at, length=end - at, etag=etag):
                if any(event.is_set() for event in ends):
                    return chunks  # the result is not used any more
                chunks.append(chunk)
                at += len(chunk)
                backoff.success()
            if at != end:
                raise CorruptData(f"{store.location} returned {at - start} of {end - start} bytes of a range")
        except StoreUnavailable as error:
            if backoff.failure() or ends[1].wait(backoff.pause(error.retry_after)):
                raise
    return chunks


def resumed(
    store: ReadableStore, path: str, start: int, end: int, etag: str, stopped: Event | None = None
) -> Iterator[bytes]:
    """`ReadableStore.read` up to ``end``, resumed after a cut, a stall or a reply such as 429 or 503.

    Without an entity tag it is not resumed: the rest could belong to another state of the file.

    Args:
        store: The store.
        path: The file.
        start: Offset of the first byte.
        end: Offset behind the last byte.
        etag: Entity tag that every part must have.
        stopped: Ends the current pause, and no further attempt is made.
    """
    backoff, at, stopped = retrying.TRANSFER(), start, stopped or Event()
    while True:
        # The first read has no length, so that a file which has grown is noticed.
        length = end - at if at > start else None
        try:
            for chunk in store.read(path, start=at, length=length, etag=etag):
                at += len(chunk)
                backoff.success()
                yield chunk
                backoff.success()  # the time of who takes it does not count
            return
        except StoreUnavailable as error:
            if at >= end:
                return
            if at > start and not etag:
                raise
            if backoff.failure() or stopped.wait(backoff.pause(error.retry_after)):
                raise
