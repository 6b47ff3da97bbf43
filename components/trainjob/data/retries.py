"""Going on after a cut, a stall or an answer such as 429 or 503: bounded, with back-off and jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import TypeVar

from trainjob.data.stores.base import Store
from trainjob.errors import StoreUnavailable

Result = TypeVar("Result")

TRIES = 6
"""Failures in a row, without a byte between them."""
SECONDS = 60.0
"""For which nothing may move; a server that asks for a longer pause gets it once."""
_FIRST, _LONGEST = 0.5, 20.0  # seconds of a pause
_ASKED = 3600.0  # that a server may ask for; more is no answer to a transfer


class Patience:
    """How long one read is tried again. Anything that moves makes it new.

    Args:
        stopped: Ends every pause, and then the trying.
    """

    def __init__(self, stopped: Event | None = None) -> None:
        self._stopped = stopped or Event()
        self._failures, self._since = 0, time.monotonic()

    def moved(self) -> None:
        """Something came."""
        self._failures, self._since = 0, time.monotonic()

    def wait(self, error: StoreUnavailable) -> None:
        """Pause before the next try, or raise ``error`` if there is to be none."""
        self._failures += 1
        left = self._since + SECONDS - time.monotonic()
        if self._failures >= TRIES or left <= 0 or self._stopped.is_set():
            raise error
        # The whole of the span is random, so that many clients do not come back together.
        pause = random.uniform(0, min(_LONGEST, _FIRST * 2**self._failures))  # noqa: S311 - no secret
        if error.retry_after is not None:
            pause = min(error.retry_after, _ASKED) + random.uniform(0, 1)  # noqa: S311 - no secret
            self._since = max(self._since, time.monotonic() + pause - SECONDS / 2)
        if self._stopped.wait(pause):
            raise error


def call(action: Callable[[], Result]) -> Result:
    """What ``action`` returns, tried again while a store is unavailable."""
    patience = Patience()
    while True:
        try:
            return action()
        except StoreUnavailable as error:
            patience.wait(error)


def read(  # noqa: PLR0917 - those of `Store.read`
    store: Store, path: str, start: int, end: int, etag: str, stopped: Event | None = None
) -> Iterator[bytes]:
    """`Store.read` up to ``end``, which goes on where it was cut.

    Without an entity tag it does not: the rest could be that of another state.
    """
    patience, at = Patience(stopped), start
    while True:
        # To its end a file is read without a length, so that one which has grown is seen.
        length = end - at if at > start else None
        try:
            for chunk in store.read(path, start=at, length=length, etag=etag):
                at += len(chunk)
                patience.moved()
                yield chunk
            return
        except StoreUnavailable as error:
            if at >= end:
                return
            if at > start and not etag:
                raise
            patience.wait(error)
