"""Read ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue
from threading import Event, Thread


@contextmanager
def fed(chunks: Iterable[bytes]) -> Iterator[Iterator[bytes]]:
    """Iterate over ``chunks`` in a separate thread, a few chunks ahead. The iterator raises their error."""
    queue: Queue[bytes | BaseException | None] = Queue(maxsize=4)
    ended = Event()

    def put(item: bytes | BaseException | None) -> bool:
        while not ended.is_set():
            with suppress(Full):
                queue.put(item, timeout=0.2)
                return True
        return False

    def feed() -> None:
        try:
            for chunk in chunks:
                if not put(chunk):
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - the consumer raises it again
            put(error)

    def take() -> Iterator[bytes]:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    thread = Thread(target=feed, name="trainjob-feed")
    thread.start()
    try:
        yield take()
    finally:
        ended.set()
        thread.join()
