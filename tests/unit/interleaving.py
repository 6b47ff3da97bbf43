"""Runs processes that use one `DirectBackend` in a chosen order of their requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from inspect import isawaitable
from itertools import combinations
from typing import Any

from tests.fakes.kube.direct import DirectBackend

_PROCESS: ContextVar[int] = ContextVar("process")
_SPINS = 25  # passes of the event loop within which a process that got a reply sends its next request
_LONGEST = 400  # requests of a schedule; one that needs more does not settle

Process = Callable[[], Awaitable[Any]]


@dataclass
class Schedule:
    """One order of the requests of some processes.

    Attributes:
        switches: Numbers of the requests before which another process continues. A process that has ended is followed
            by the next one.
        log: Process and name of each request, in their order.
    """

    switches: Sequence[int]
    log: list[tuple[int, str]] = field(default_factory=list)

    async def run(self, backend: DirectBackend, *processes: Process) -> list[Any]:
        """The result or the error of each process."""
        waiting: list[tuple[int, str, asyncio.Event]] = []

        async def turn(name: str) -> None:
            released = asyncio.Event()
            waiting.append((_PROCESS.get(), name, released))
            await released.wait()

        async def started(number: int, process: Process) -> Any:
            _PROCESS.set(number)
            return await process()

        backend.turn = turn
        tasks = [asyncio.create_task(started(number, each)) for number, each in enumerate(processes)]
        current = 0
        try:
            while True:
                for _ in range(_SPINS):
                    await asyncio.sleep(0)
                if all(task.done() for task in tasks):
                    return await asyncio.gather(*tasks, return_exceptions=True)
                if not waiting:
                    await asyncio.sleep(0.001)
                    continue
                if len(self.log) in self.switches:
                    current = (current + 1) % len(tasks)
                while current not in (present := {process for process, *_ in waiting}):
                    if not tasks[current].done() and len(present) < len(tasks):
                        break
                    current = (current + 1) % len(tasks)
                chosen = next((each for each in waiting if each[0] == current), waiting[0])
                waiting.remove(chosen)
                self.log.append(chosen[:2])
                assert len(self.log) < _LONGEST, f"the processes do not end: {self.log}"
                chosen[2].set()
        finally:
            backend.turn = None
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def orders(requests: int, switches: int) -> Iterator[Schedule]:
    """All orders of two processes that send so many requests together, with at most so many switches."""
    for count in range(switches + 1):
        for chosen in combinations(range(1, requests), count):
            yield Schedule(chosen)


def once(backend: DirectBackend, request: str | int, action: Callable[[], object], *, skip: int = 0) -> None:
    """Run `action` before a request of that name, or of that number from 0, is served: its process is frozen meanwhile.

    Args:
        backend: The backend.
        request: Name or number of the request.
        action: What other processes do meanwhile, with requests or by a change of objects.
        skip: How many requests of that name are served before.
    """
    seen, awaited = -1, request if isinstance(request, int) else skip

    async def turn(name: str) -> None:
        nonlocal seen
        counts = isinstance(request, int) or name == request
        seen += counts
        if counts and seen == awaited:
            backend.turn = None
            done = action()
            if isawaitable(done):
                await done

    backend.turn = turn
