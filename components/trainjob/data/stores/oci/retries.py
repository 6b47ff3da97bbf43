"""How long an outage of a registry is put up with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from trainjob.errors import StoreUnavailable

T = TypeVar("T")

# An outage of up to a minute is bridged here, as for object stores; longer ones are for the orchestrator's retry.
TRIES, FIRST, LONGEST = 7, 0.5, 20.0
# Of one blob, however often it gets on in between: each cut can cost what was sent before it.
TOTAL = 30


class Interrupted(Exception):
    """One request failed in a way that another try may not.

    Attributes:
        retry_after: Seconds that the server asked to wait; None if it did not.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class Patience:
    """Counts failures of one piece of work, waits after each, and gives up in the end.

    Args:
        where: What is worked on, for the error.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._failures = self._total = 0
        self._wait = FIRST

    def progress(self) -> None:
        """Something got done: the next failure is a first one again."""
        self._failures, self._wait = 0, FIRST

    def failed(self, error: Interrupted) -> None:
        """Wait before the next try.

        Raises:
            StoreUnavailable: There have been enough.
        """
        self._failures += 1
        self._total += 1
        if self._failures >= TRIES or self._total >= TOTAL:
            raise StoreUnavailable(f"{self._where}: {error} ({self._total} failures)") from None
        # With jitter, so that a thousand pods do not come back at the same time.
        time.sleep(max(min(error.retry_after or 0.0, 60.0), self._wait * random.uniform(0.5, 1)))  # noqa: S311 - no secret
        self._wait = min(2 * self._wait, LONGEST)


def patiently(where: str, attempt: Callable[[], T]) -> T:
    """The result of ``attempt``, tried again while it is `Interrupted`."""
    patience = Patience(where)
    while True:
        try:
            return attempt()
        except Interrupted as error:
            patience.failed(error)
