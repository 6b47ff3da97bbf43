"""Virtual time: an event loop whose clock moves only when the schedule says so.

The clocks and random numbers of the product are replaced by it.

Nothing here sleeps, opens a socket or starts a thread. Two runs with the same seed do the same.
"""

from __future__ import annotations

import asyncio
import datetime as dates
import random
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import anyio.to_thread

EPOCH = 1_800_000_000.0
"""Unix time at which each world begins."""

MOST_TURNS = 5_000
"""Turns of the event loop without a request or a pause, after which a schedule counts as one that does not settle."""

_PACKAGES = ("trainjob", "trainjob_airflow", "trainjob_kfp")


class Unsettled(Exception):
    """The processes keep running without a request or a pause, or requests follow each other without end."""


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop without I/O, driven from outside by `settle` and `advance`.

    Attributes:
        now: Seconds since the world began.
        tasks: Called with each task that is created, so that a process that is killed can be stopped as a whole.
    """

    if TYPE_CHECKING:  # of asyncio.BaseEventLoop
        _ready: deque[asyncio.Handle]
        _scheduled: list[asyncio.TimerHandle]
        _asyncgen_firstiter_hook: Callable[..., Any]
        _asyncgen_finalizer_hook: Callable[..., Any]

        def _run_once(self) -> None: ...

    def __init__(self, new_task: Callable[[asyncio.Task[Any]], None]) -> None:
        super().__init__()
        self.now = 0.0
        self._selector = _NoEvents()

        def made(loop: Any, coroutine: Any, **given: Any) -> asyncio.Task[Any]:
            task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **given)
            new_task(task)
            return task

        self.set_task_factory(made)

    def time(self) -> float:
        """The virtual clock."""
        return self.now

    def _process_events(self, event_list: list[Any]) -> None:
        """Do nothing: there is no I/O."""

    def _write_to_self(self) -> None:
        """Do nothing: no other thread wakes this loop."""

    def settle(self) -> None:
        """Run everything that can run without a reply, an event or the passing of time.

        Raises:
            Unsettled: that does not end.
        """
        for _ in range(MOST_TURNS):
            due = self.due()
            if not self._ready and (due is None or due > self.now):
                return
            self._run_once()
        raise Unsettled("the processes keep running without a request or a pause")

    def due(self) -> float | None:
        """When the next timer fires; None without timers."""
        while self._scheduled and self._scheduled[0].cancelled():
            self._run_once()  # removes it
        return self._scheduled[0].when() if self._scheduled else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make this the running loop, and the virtual clock that of the product."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._asyncgen_firstiter_hook, finalizer=self._asyncgen_finalizer_hook)
        asyncio._set_running_loop(self)
        replacements = _replacements(len(sys.modules))
        before = {(module, name): vars(module)[name] for module, name, _ in replacements}
        for module, name, replacement in replacements:
            setattr(module, name, replacement)
        _Virtual.loop = self
        try:
            yield
        finally:
            for (module, name), original in before.items():
                setattr(module, name, original)
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)


class _NoEvents:
    """A selector that never has an event."""

    def select(self, timeout: float | None) -> list[Any]:
        return []


class _Virtual:
    """What replaces the modules `time`, `random` and `secrets` in the product."""

    loop: ClassVar[VirtualLoop]
    numbers: ClassVar[random.Random] = random.Random(0)

    @staticmethod
    def monotonic() -> float:
        return 1000.0 + _Virtual.loop.now

    @staticmethod
    def time() -> float:
        return EPOCH + _Virtual.loop.now

    @staticmethod
    def uniform(least: float, most: float) -> float:
        return _Virtual.numbers.uniform(least, most)

    @staticmethod
    def token_hex(count: int) -> str:
        return f"{_Virtual.numbers.getrandbits(8 * count):0{2 * count}x}"


class _Datetime(dates.datetime):
    """Replaces `datetime.datetime` in the product."""

    @classmethod
    def now(cls, tz: dates.tzinfo | None = None) -> Any:
        return dates.datetime.fromtimestamp(_Virtual.time(), tz)


def seed_numbers(seed: int) -> None:
    """Restart the random numbers of the product."""
    _Virtual.numbers = random.Random(seed)


async def inline(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
    """Replaces `anyio.to_thread.run_sync`."""
    return function(*arguments)


@lru_cache(maxsize=1)
def _replacements(loaded: int) -> list[tuple[ModuleType, str, Any]]:
    """The names in the product's modules that are replaced while a world runs, for a number of `loaded` modules."""
    wanted: dict[int, Any] = {id(module): _Virtual for module in (time, random, secrets)}
    wanted |= {id(time.monotonic): _Virtual.monotonic, id(dates.datetime): _Datetime}
    return [
        (module, each, wanted[id(value)])
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in _PACKAGES
        for each, value in vars(module).items()
        if id(value) in wanted
    ] + [(anyio.to_thread, "run_sync", inline)]
