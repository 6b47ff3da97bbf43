"""Calls that would keep an event loop waiting, with all its tasks, in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """Calls functions in threads, in each event loop one after the other.

    Python runs one thread at a time, and each that computes keeps the loop waiting for up to 5 ms
    (`sys.getswitchinterval`).

    Args:
        name: A name that no other object of this class has.
    """

    def __init__(self, name: str) -> None:
        self._turn: RunVar[anyio.CapacityLimiter] = RunVar(f"trainjob.{name}")

    async def call(self, function: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call a function when it is its turn."""
        turn = self._turn.get(None)
        if turn is None:
            turn = anyio.CapacityLimiter(1)
            self._turn.set(turn)
        return await anyio.to_thread.run_sync(lambda: function(*arguments, **named), limiter=turn)


JUDGING = Turns("judging")
"""For diagnoses and pages: each takes milliseconds of a core."""

LOGGING = Turns("logging")
"""For lines of a log whose reader may be busy."""
