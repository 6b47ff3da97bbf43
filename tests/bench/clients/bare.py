"""A trigger that does nothing but wait: what it costs is Airflow's own part of any trigger that calls its API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from trainjob_airflow.identity import states_of

_LOOK = 0.05  # seconds between two looks at the file, which all triggers of a process share

_waiting: dict[int, asyncio.Future[None]] = {}
_looking: list[asyncio.Task[None]] = []


class BareTrigger(BaseTrigger):
    """Waits until the number in a file is greater than its own, logs one line, and yields a small event.

    Args:
        path: The file.
        number: Its own number.
    """

    def __init__(self, *, path: str, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # BaseTrigger's has no types
        self.path = path
        self.number = number

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        return "tests.bench.clients.bare.BareTrigger", {"path": self.path, "number": self.number}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and yield one event."""
        self.log.info("waiting for %d", self.number)
        if self.number == 0:  # as a trigger does that can be killed: the first call starts Airflow's API
            await sync_to_async(states_of)(self.task_instance)
        ended = _waiting[self.number] = asyncio.get_running_loop().create_future()
        if not _looking:
            _looking.append(asyncio.create_task(_look(Path(self.path))))
        await ended
        yield TriggerEvent({"number": self.number})


def _number_in(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


async def _look(path: Path) -> None:
    while True:
        reached = await asyncio.to_thread(_number_in, path)
        for number in [each for each in _waiting if each < reached]:
            _waiting.pop(number).set_result(None)
        await asyncio.sleep(_LOOK)
