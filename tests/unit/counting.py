"""A cluster that counts what is read of jobs, for tests of pages with many viewers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import anyio
from tests.fakes.kube.direct import DirectBackend

from trainjob import JobRef

_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


class CountingBackend(DirectBackend):
    """`DirectBackend` with a list of reads: ``get``, ``state``, ``evidence``, ``find``.

    Attributes:
        reads: What was read, without what these reads need themselves.
        broken: Raised by each read.
        delay: Seconds that each read takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.broken: Exception | None = None
        self.delay = 0.01

    async def get(self, namespace: str, name: str) -> Any:
        return await self._read("get", lambda: DirectBackend.get(self, namespace, name))

    async def state(self, ref: JobRef) -> Any:
        return await self._read("state", lambda: DirectBackend.state(self, ref))

    async def evidence(self, ref: JobRef) -> Any:
        return await self._read("evidence", lambda: DirectBackend.evidence(self, ref))

    async def find(self, namespace: str, labels: Any) -> Any:
        return await self._read("find", lambda: DirectBackend.find(self, namespace, labels))

    def report(self, ref: JobRef, progress: int, metrics: dict[str, float]) -> None:
        """The training reports progress and metrics."""
        named = [{"name": name, "value": str(value)} for name, value in metrics.items()]
        self.status(ref, trainerStatus={"progressPercentage": progress, "metrics": named})

    async def _read(self, kind: str, read: Callable[[], Awaitable[Any]]) -> Any:
        if _INSIDE.get():
            return await read()
        self.reads.append(kind)
        inside = _INSIDE.set(True)
        try:
            await anyio.sleep(self.delay)
            found = await read()
        finally:
            _INSIDE.reset(inside)
        if self.broken is not None:
            raise self.broken
        return found
