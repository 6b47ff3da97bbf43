"""An event loop in a thread that does not keep the process running."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TypeVar

import anyio
from anyio.from_thread import BlockingPortal

T = TypeVar("T")

_END_SECONDS = 5.0  # that calls have to clean up when the process ends

_open: set[LoopThread] = set()
_ending = threading.Event()


class LoopThread:
    """A `BlockingPortal` in a daemon thread. When the process ends, what still runs is cancelled, and cleans up."""

    def __init__(self) -> None:
        started: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]] = Future()
        self._thread = threading.Thread(target=_run, args=(started,), name="trainjob", daemon=True)
        self._thread.start()
        self._portal, self._loop = started.result()
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
        try:
            return self._portal.call(function)
        except CancelledError:
            if _ending.is_set():  # in a daemon thread, whose traceback would be the last line of the program
                threading.Event().wait()
            raise

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        self.cancel()
        self.join()

    def cancel(self) -> None:
        """Cancel what still runs; the thread ends soon, unless a call blocks the loop."""
        _open.discard(self)
        if self._process == os.getpid():  # a fork copies no threads
            with suppress(RuntimeError):  # it has been stopped already
                # Not by the portal, which waits until the loop has taken the call.
                self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        self._stopping = asyncio.ensure_future(self._portal.stop(cancel_remaining=True))

    def join(self, seconds: float | None = None) -> None:
        """Wait for the end of the thread, at most so long."""
        if self._process == os.getpid():
            self._thread.join(seconds)


def _run(started: Future[tuple[BlockingPortal, asyncio.AbstractEventLoop]]) -> None:
    async def run() -> None:
        async with BlockingPortal() as portal:
            started.set_result((portal, asyncio.get_running_loop()))
            await portal.sleep_until_stopped()

    try:
        anyio.run(run)
    except BaseException as error:  # noqa: BLE001 - a SystemExit of a call ends the loop, and that call raises it
        if not started.done():
            started.set_exception(error)


@atexit.register
def _stop_all() -> None:
    """Let what still runs clean up: Python ends daemon threads in the middle of a call."""
    _ending.set()
    loops, deadline = [*_open], time.monotonic() + _END_SECONDS
    for loop in loops:
        loop.cancel()
    for loop in loops:
        loop.join(max(0.0, deadline - time.monotonic()))
