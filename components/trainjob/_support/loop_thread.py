"""An event loop in a thread that does not keep the process running."""

from __future__ import annotations

import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

T = TypeVar("T")

_open: set[BlockingPortal] = set()
_watched: set[int] = set()  # the processes whose end is watched; a fork copies no threads


class LoopThread:
    """A `BlockingPortal` in a daemon thread, which is stopped when the main thread ends, whatever still runs on it."""

    def __init__(self) -> None:
        started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=_run, args=(started,), name="trainjob", daemon=True)
        self._thread.start()
        self._portal = started.result()
        _watch()
        _open.add(self._portal)

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function without arguments in the background. From any thread or signal handler."""
        return self._portal.start_task_soon(function)

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function without arguments, and return its result.

        Raises:
            RuntimeError: Called on the loop itself, which would wait for ever, or after `stop`.
        """
        return self._portal.call(function)

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        _open.discard(self._portal)
        self._portal.call(self._portal.stop, True)
        self._thread.join()


def _run(started: Future[BlockingPortal]) -> None:
    async def run() -> None:
        async with BlockingPortal() as portal:
            started.set_result(portal)
            await portal.sleep_until_stopped()

    try:
        anyio.run(run)
    except BaseException as error:  # noqa: BLE001 - a SystemExit of a call ends the loop, and that call raises it
        if not started.done():
            started.set_exception(error)


def _watch() -> None:
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        _open.clear()  # after a fork, those of the parent, whose threads are not here
        threading.Thread(target=_stop_with_main, name="trainjob-end", daemon=True).start()


def _stop_with_main() -> None:
    """Stop what is still open: anyio's worker threads are no daemons, and end with the loop that uses them."""
    threading.main_thread().join()
    for portal in [*_open]:
        with suppress(RuntimeError):  # it has been stopped meanwhile
            portal.call(portal.stop, True)
