"""Backends under the contract. A new one needs a `Harness` here; no test changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest
from tests.contract.harness import Harness, sent_by
from tests.fakes.kube.http import FakeKube

from trainjob import JobRef
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._backends.local.backend import LocalBackend


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
