"""An event loop in a thread that does not keep the process running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Thread, get_ident
from typing import TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread: the process ends with its last line, whatever still runs on the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="trainjob", daemon=True)
        self._thread.start()

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function without arguments, in the context of the caller. From any thread or signal handler."""

        async def run() -> T:
            return await function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop)

    def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run an async function without arguments, and return its result.

        Raises:
            RuntimeError: Called on the loop itself, which would wait for ever.
        """
        if self._thread.ident == get_ident():
            raise RuntimeError("this runs on the event loop of the client already: await instead")
        return self.start(function).result()

    def stop(self) -> None:
        """Cancel what still runs, and end the thread."""
        self.call(_cancel_others)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
    await asyncio.get_running_loop().shutdown_default_executor()
