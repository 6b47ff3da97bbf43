"""The log of a trigger, whose lines are written in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainjob_airflow.tasklog import Log

_BACKGROUND: set[asyncio.Task[None]] = set()  # an event loop holds its tasks weakly


class Lines:
    """A log for use in an event loop.

    Airflow (3.3.2) sends each line of a trigger through a socket to the process that supervises the triggers, which
    reads none while it works for the database: a line that waits there would block all triggers, for up to 2 s.

    Args:
        log: The log of the trigger.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lines: list[tuple[Callable[..., Any], str, tuple[Any, ...]]] = []
        self._writing: asyncio.Task[None] | None = None

    def info(self, event: str, /, *args: Any) -> None:
        """Log an event."""
        self._add(self._log.info, event, args)

    def warning(self, event: str, /, *args: Any) -> None:
        """Log a warning."""
        self._add(self._log.warning, event, args)

    async def written(self) -> None:
        """Wait until all lines are written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def _add(self, write: Callable[..., Any], event: str, args: tuple[Any, ...]) -> None:
        self._lines.append((write, event, args))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
            _BACKGROUND.add(self._writing)
            self._writing.add_done_callback(_BACKGROUND.discard)

    async def _write(self) -> None:
        from trainjob._support.threads import LOGGING

        while self._lines:
            lines, self._lines = self._lines, []
            with suppress(Exception):  # of Airflow's log: the trigger keeps waiting for the job without it
                await LOGGING.call(_write, lines)


def _write(lines: list[tuple[Callable[..., Any], str, tuple[Any, ...]]]) -> None:
    for write, event, args in lines:
        write(event, *args)
