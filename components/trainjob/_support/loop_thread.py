"""An event loop in a thread that does not keep the process running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from threading import Thread, get_ident
from typing import TypeVar

import anyio

T = TypeVar("T")


class LoopThread:
    """An event loop in a daemon thread: the process ends with its last line, whatever still runs on the loop.

    What is cancelled, by `Future.cancel` or by `stop`, is cancelled as in an `anyio.CancelScope`: it cannot wait on.
    """

    def __init__(self) -> None:
        self._scopes: dict[asyncio.Task[object] | None, anyio.CancelScope] = {}  # of what runs; used on the loop only
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="trainjob", daemon=True)
        self._thread.start()

    def start(self, function: Callable[[], Awaitable[T]]) -> Future[T]:
        """Run an async function without arguments, in the context of the caller. From any thread or signal handler."""
        own: list[anyio.CancelScope] = []

        async def run() -> T:
            task = asyncio.current_task()
            with anyio.CancelScope() as scope:
                own.append(scope)
                self._scopes[task] = scope
                try:
                    return await function()
                finally:
                    del self._scopes[task]
            raise asyncio.CancelledError

        def end() -> None:
            for scope in own:
                scope.cancel()

        def ended(future: Future[T]) -> None:
            if future.cancelled() and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(end)

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        future.add_done_callback(ended)
        return future

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
        self.call(self._cancel_others)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_others(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        for each, scope in self._scopes.items():
            if each in others:
                scope.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
