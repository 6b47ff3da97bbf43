"""Progress of a transfer."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock

from trainjob.errors import StoreUnavailable

Notify = Callable[[str], None]
"""Takes one line for people."""
Moved = Callable[[int, int], None]
"""Takes the bytes done and the bytes of all files; called often, from several threads, one call at a time."""

_LONGEST_SILENCE = 30.0  # seconds after which a line is due, also if no tenth is complete


class Meter:
    """Counts bytes, reports each tenth and every half minute, and ends all streams when one has failed."""

    def __init__(self, verb: str, total: int, notify: Notify, moved: Moved | None = None) -> None:
        self._verb, self._total, self._notify, self._moved = verb, total, notify, moved
        self._done = self._reported = 0
        self._began = self._last = time.monotonic()
        self._lock = Lock()
        self.stopped = Event()
        """Set when the other streams must end."""

    def stop(self) -> None:
        """Make every further `add` fail."""
        self.stopped.set()

    def add(self, count: int) -> None:
        """Count ``count`` more bytes as done.

        Raises:
            StoreUnavailable: Another file has failed.
        """
        if self.stopped.is_set():
            raise StoreUnavailable("the transfer was stopped because another of its files failed")
        with self._lock:
            self._done += count
            if self._moved is not None:
                self._moved(self._done, self._total)
            tenth = 10 * self._done // self._total if self._total else 10
            now = time.monotonic()
            if tenth <= self._reported and now - self._last < _LONGEST_SILENCE:
                return
            self._reported, self._last = tenth, now
            share = 100 * self._done // self._total if self._total else 100
            rate = self._done / 1e6 / max(now - self._began, 1e-3)
            self._notify(f"{self._verb} {share} %: {self._done} of {self._total} bytes, {rate:.1f} MB/s")
