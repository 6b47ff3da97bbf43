"""Backends under the contract. A new one needs a `Harness` here; no test changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.contract.memory import MemoryBackend

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.base import Backend, TrainJob
from trainjob._backends.local.backend import LocalBackend
from trainjob._manifest.render import render


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

    @asynccontextmanager
    async def gate(self) -> AsyncIterator[tuple[str, asyncio.Event]]:
        """A shell command that ends once the event is set."""
        if not self.host:
            pytest.skip("ranks of this cluster cannot reach this machine")
        opened = asyncio.Event()

        async def hold(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await opened.wait()
            writer.close()

        async with await asyncio.start_server(hold, self.host, 0) as server:
            address = (self.host, server.sockets[0].getsockname()[1])
            yield f'python3 -c "import socket; socket.create_connection({address}).recv(1)"', opened


def _local(tmp_path: Path) -> Harness:
    exit_file = tmp_path / "end"

    async def end(_: JobRef, code: int) -> None:
        exit_file.with_suffix(".new").write_text(str(code))
        exit_file.with_suffix(".new").rename(exit_file)

    script = f"while ! [ -e {exit_file} ]; do sleep 0.02; done; exit $(cat {exit_file})"
    return Harness(LocalBackend(), end, {"command": ["sh", "-c", script]}, shell=True, forgets=False)


def _memory(_: Path) -> Harness:
    backend = MemoryBackend()

    async def end(ref: JobRef, code: int) -> None:
        backend.end(ref, code)

    return Harness(backend, end, {"command": ["sleep"]}, shell=False, requests=backend.requests)


HARNESSES = {"local": _local, "memory": _memory}


async def _given(harness: Harness) -> AsyncIterator[Harness]:
    yield harness
    for namespace in ("default", "other"):
        for job in await harness.backend.find(namespace, {}):
            await harness.backend.delete(JobRef.of(job))
    await harness.backend.aclose()


@pytest.fixture(params=["local", "memory"])
async def harness(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> AsyncIterator[Harness]:
    async for harness in _given(HARNESSES[request.param](tmp_path)):
        yield harness


@pytest.fixture(params=["local"])
async def shell(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> AsyncIterator[Harness]:
    """A harness of a backend whose ranks run real shell scripts and write logs."""
    async for harness in _given(HARNESSES[request.param](tmp_path)):
        yield harness
