"""One watcher for all waiters of a process: it looks at the files of their jobs, and wakes those whose job changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import anyio.to_thread

from trainjob._backends.local import supervision
from trainjob._backends.local.store import JobFiles

_LOOK = 0.05  # seconds between two looks at the files of a job; each look is two stat calls
_CHECK = 0.5  # seconds between two checks whether the supervisor is alive
# More jobs are looked at more rarely, so that any number of waiters takes about 1 % of a core: 300 each 0.3 s.
_LOOK_OF_EACH, _MOST = 0.001, 0.5


class Listener:
    """A waiter for changes of one job.

    Attributes:
        files: The files of the job.
        closed: Whether it gets no changes any more.
        abandoned: What `supervision.abandoned` returned.
    """

    def __init__(self, files: JobFiles) -> None:
        self.files = files
        self.closed = False
        self.abandoned: list[dict[str, Any]] = []
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self._seen: object = None
        self._next_check = 0.0

    async def changed(self, seconds: float | None = None) -> bool:
        """Wait for the first look or a change, for `seconds` at most; whether there was one, or it was closed.

        Raises:
            ConfigurationError: The files of the job cannot be read.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        found = self._changed.is_set()
        self._changed.clear()
        if self._error is not None:
            raise self._error
        return found

    def wake(self) -> None:
        """Report a change."""
        self._changed.set()

    def look(self, check_seconds: float) -> bool:
        """Look at the files, end the job if it lost its supervisor, and return whether something changed."""
        before = self._seen
        try:
            if time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + check_seconds
                if not self.files.supervised():
                    supervision.end_if_lost(self.files)
                    self.abandoned = supervision.abandoned(self.files)
            self._seen = (self.files.stamp(), self.abandoned)
        except Exception as error:  # noqa: BLE001 - of one job: the others go on
            self._error = error
            return True
        return self._seen != before


class Watcher:
    """Looks at the jobs of all listeners in one task, which ends with the last of them."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listen(self, files: JobFiles) -> Iterator[Listener]:
        """Listen to the changes of a job."""
        listener = Listener(files)
        self._listeners.add(listener)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners:
                self.close()

    def close(self) -> None:
        """End all listeners."""
        for listener in self._listeners:
            listener.closed = True
            listener.wake()
        self._listeners.clear()
        if self._task is not None:
            self._task.cancel()
        self._task = None

    async def _run(self) -> None:
        while True:
            pause = min(_MOST, max(_LOOK, _LOOK_OF_EACH * len(self._listeners)))
            for listener in await anyio.to_thread.run_sync(_looked, [*self._listeners], _CHECK * pause / _LOOK):
                listener.wake()
            await asyncio.sleep(pause)


def _looked(listeners: list[Listener], check_seconds: float) -> list[Listener]:
    return [each for each in listeners if each.look(check_seconds)]
