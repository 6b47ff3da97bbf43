"""The trigger of a deferred task that launches again after a pause."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent


class PauseTrigger(BaseTrigger):
    """Waits for some seconds. Unlike Airflow's `TimeDeltaTrigger`, it logs nothing and returns the caller's event.

    Args:
        seconds: How long to wait.
        event: Payload of the only event. ``dag.test()`` (Airflow 3.3.2) drops other arguments of the next method.
    """

    def __init__(self, *, seconds: float, event: dict[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # BaseTrigger's has no types
        self.seconds = seconds
        self.event = event

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {"seconds": self.seconds, "event": self.event}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and yield the event."""
        await asyncio.sleep(self.seconds)
        yield TriggerEvent(self.event)
