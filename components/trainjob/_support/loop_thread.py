"""An event loop in a thread that does not keep the process running."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

T = TypeVar("T")

_END_SECONDS = 5.0  # that calls have to clean up when the process ends

_open: set[LoopThread] = set()


class LoopThread:
    """A `BlockingPortal` in a daemon thread. When the process ends, what still runs is cancelled, and cleans up."""

    def __init__(self) -> None:
        started: Future[BlockingPortal] = Future()
        self._thread = threading.Thread(target=_run, args=(started,), name="trainjob", daemon=True)
        self._thread.start()
        self._portal = started.result()
        self._process = os.getpid()
        _open.add(self)

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function without arguments in the background. From any thread or signal handler."""
        return self._portal.start_task_soon(function)

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function without arguments, and return its result.

        Raises:
            RuntimeError: Called on the loop itself, which would wait for ever, or after `stop`.
        """
        return self._portal.call(function)

    def stop(self, seconds: float | None = None) -> None:
        """Cancel what still runs, and end the thread; wait for that at most so long."""
        _open.discard(self)
        if self._process == os.getpid():  # a fork copies no threads
            self._portal.call(self._portal.stop, True)
            self._thread.join(seconds)


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


@atexit.register
def _stop_all() -> None:
    """Let what still runs clean up: Python ends daemon threads in the middle of a call."""
    for loop in [*_open]:
        with suppress(RuntimeError):  # it has been stopped meanwhile
            loop.stop(_END_SECONDS)
