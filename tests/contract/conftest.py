"""Backends under the contract. A new one needs a `Harness` here; no test changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from tests.fakes.kube.http import FakeKube

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.base import Backend, TrainJob
from trainjob._backends.credentials import Access, Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Request, Timings
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


@contextmanager
def local(tmp_path: Path) -> Iterator[Harness]:
    """Processes on this machine."""
    exit_file = tmp_path / "end"

    async def end(_: JobRef, code: int) -> None:
        exit_file.with_suffix(".new").write_text(str(code))
        exit_file.with_suffix(".new").rename(exit_file)

    script = f"while ! [ -e {exit_file} ]; do sleep 0.02; done; exit $(cat {exit_file})"
    yield Harness(LocalBackend(), end, {"command": ["sh", "-c", script]}, shell=True, forgets=False)


@contextmanager
def kubernetes(_: Path, *, shared: bool = False) -> Iterator[Harness]:
    """A fake API server; tests/cluster runs the same tests with a real one."""
    with FakeKube() as kube:
        backend = KubernetesBackend(
            Credentials(host=kube.url, token="fake"), shared=shared, timings=Timings(settle=0.2)
        )

        async def end(ref: JobRef, code: int) -> None:
            with anyio.fail_after(60):
                while not kube.end(ref, code):
                    await anyio.sleep(0.01)

        refused = {"initializer": {"dataset": {"storage_uri": "hf://a/b"}}}  # the runtime has no job for it
        yield Harness(backend, end, {"command": ["sleep"]}, shell=False, refused=refused, requests=sent_by(backend))


HARNESSES: dict[str, Callable[[Path], AbstractContextManager[Harness]]] = {
    "local": local,
    "kubernetes": kubernetes,
    "kubernetes-shared": partial(kubernetes, shared=True),
}


async def _given(name: str, tmp_path: Path) -> AsyncIterator[Harness]:
    with HARNESSES[name](tmp_path) as harness:
        yield harness
        for namespace in ("default", "other"):
            for job in await harness.backend.find(namespace, {}):
                await harness.backend.delete(JobRef.of(job))
        await harness.backend.aclose()


@pytest.fixture(params=HARNESSES)
async def harness(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> AsyncIterator[Harness]:
    async for harness in _given(request.param, tmp_path):
        yield harness


@pytest.fixture(params=["local"])
async def shell(request: pytest.FixtureRequest, tmp_path: Path, home: Path) -> AsyncIterator[Harness]:
    """A harness of a backend whose ranks run real shell scripts and write logs."""
    async for harness in _given(request.param, tmp_path):
        yield harness
