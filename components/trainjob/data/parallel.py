"""Do the same work for many items, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Event
from typing import TypeVar

Item = TypeVar("Item")


def for_each(
    work: Callable[[Item], object], items: Collection[Item], at_once: int, stop: Callable[[], None] | None = None
) -> None:
    """Do ``work`` for each of ``items`` in threads. The first error ends the others, and is raised.

    All threads take from one iterator: one future for each of many files takes more memory and time than the files.

    Args:
        work: Called in several threads.
        items: Arguments of ``work``.
        at_once: Maximum number of threads.
        stop: Called after a failure, to end the work of the other threads.
    """
    ended, waiting = Event(), iter(items)

    def take() -> None:
        for item in waiting:
            if ended.is_set():
                return
            work(item)

    threads = max(1, min(at_once, len(items)))
    with ThreadPoolExecutor(threads, thread_name_prefix="trainjob-copy") as pool:
        futures = [pool.submit(take) for _ in range(threads)]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            ended.set()
            if stop is not None:
                stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
