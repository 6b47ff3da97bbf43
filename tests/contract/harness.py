"""A backend under the contract, and how tests control its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import httpx
import pytest

from trainjob import JobRef, LogLine, TrainJobSpec
from trainjob._backends.base import Backend, TrainJob
from trainjob._backends.credentials import Access
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Request
from trainjob._manifest.render import render
from trainjob.status import Observation, observe


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    """Wait for at most four minutes."""
    with anyio.fail_after(240):
        while not await happened():
            await anyio.sleep(0.02)


@dataclass
class Harness:
    """A backend, and how tests control its jobs.

    Attributes:
        backend: The backend.
        end: Makes a job of `fields` end with an exit code.
        until_ended: Fields of a spec whose one node runs until `end` is called.
        shell: Whether ranks run real shell scripts and write logs.
        refused: Fields of a spec that the backend rejects.
        host: Address of this machine for ranks that run shell scripts; empty if they cannot reach it.
        namespace: Where jobs are created.
        other: Another namespace.
        requests: Requests of the backend so far; stays empty on a backend without any.
        forgets: Whether the name of a deleted job can be used again, as on a cluster.
    """

    backend: Backend
    end: Callable[[JobRef, int], Awaitable[None]]
    until_ended: dict[str, Any]
    shell: bool
    refused: dict[str, Any] = field(default_factory=lambda: {"command": []})
    host: str = "127.0.0.1"
    namespace: str = "default"
    other: str = "other"
    requests: Sequence[str] = ()
    forgets: bool = True

    def manifest(self, key: str = "key", attempt: int = 1, **fields: Any) -> TrainJob:
        spec = TrainJobSpec.parse({"runtime": "trainjob-step", **self.until_ended, **fields})
        return render(spec, key, attempt, self.namespace)

    async def create(self, key: str = "key", attempt: int = 1, **fields: Any) -> JobRef:
        return JobRef.of(await self.backend.create(self.manifest(key, attempt, **fields)))

    async def run(self, script: str, **fields: Any) -> JobRef:
        """Start `script` in a shell on every node."""
        return await self.create(command=["sh", "-c", script], **fields)

    async def job(self, ref: JobRef) -> TrainJob:
        """The present state of a job that exists."""
        found = await self.backend.get(ref.namespace, ref.name)
        assert found is not None
        return found

    async def observed(self, ref: JobRef) -> Observation:
        return observe(await self.backend.get(ref.namespace, ref.name))

    async def ended(self, ref: JobRef) -> TrainJob | None:
        """The job's last state."""
        with anyio.fail_after(240):
            async with aclosing(self.backend.watch(ref)) as snapshots:
                async for snapshot in snapshots:
                    if observe(snapshot.trainjob).phase.terminal:
                        return snapshot.trainjob
        raise AssertionError("the watch ended before the job did")

    async def is_gone(self, ref: JobRef) -> None:
        """Wait until the job does not exist."""

        async def gone() -> bool:
            return await self.backend.get(ref.namespace, ref.name) is None

        await until(gone)

    async def stops(self, ref: JobRef) -> None:
        """Wait until no rank of the job runs."""
        await until(lambda: self.backend.stopped(ref))

    async def lines(self, ref: JobRef, **options: Any) -> list[LogLine]:
        """The log of a job."""
        with anyio.fail_after(240):
            return [line async for line in self.backend.logs(ref, **options)]

    async def texts(self, ref: JobRef, **options: Any) -> list[str]:
        return [line.text for line in await self.lines(ref, **options)]

    @asynccontextmanager
    async def gate(self) -> AsyncIterator[tuple[str, asyncio.Event]]:
        """A shell command that ends once the event is set."""
        if not self.host:
            # Only on a cluster that somebody names by its kubeconfig; `make test-all` fails by a skip.
            pytest.skip("ranks of this cluster cannot reach this machine")
        opened = asyncio.Event()

        async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await opened.wait()
            writer.close()

        async with await asyncio.start_server(hold, self.host, 0) as server:
            address = (self.host, server.sockets[0].getsockname()[1])
            yield f'python3 -c "import socket; socket.create_connection({address}).recv(1)"', opened


def sent_by(backend: KubernetesBackend) -> list[str]:
    """The requests of a backend from now on, in the order in which it sends them."""
    sent: list[str] = []
    client = backend._client
    send = client._open

    async def open_(request: Request, refused: Access | None = None) -> tuple[httpx.Response, Access]:
        sent.append(f"{request.method} {request.path}")
        return await send(request, refused)

    client._open = open_  # type: ignore[method-assign]  # it counts what the real one sends
    return sent
