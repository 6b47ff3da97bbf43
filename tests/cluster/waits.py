"""Waits for states of a job, and of its queue."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import anyio
from tests.processes import wait_until
from tests.testcluster import access, kueue
from tests.testcluster.access import Access

from trainjob import JobRef, Observation, Phase, WaitOptions
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.waiting import wait
from trainjob._pages.live import LiveReader
from trainjob.status import observe


def wait_for_queue(cluster: Access, namespace: str) -> None:
    """Wait until Kueue has checked the LocalQueue of a namespace."""

    def active() -> object:
        return access.condition(cluster.api.get(kueue.API, "LocalQueue", namespace, kueue.QUEUE), "Active")

    wait_until("Kueue has checked the queue", active, 60)


async def until(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait for a condition that a server or another task changes."""
    with anyio.fail_after(seconds):
        while not condition():
            await anyio.sleep(0.05)


async def until_phase(backend: KubernetesBackend, ref: JobRef, *phases: Phase) -> None:
    """Wait until the job is in one of these phases, for at most four minutes."""
    with anyio.fail_after(240):
        async with aclosing(backend.watch(ref)) as snapshots:
            async for snapshot in snapshots:
                if observe(snapshot.trainjob).phase in phases:
                    return


async def phases_of(
    backend: KubernetesBackend,
    ref: JobRef,
    options: WaitOptions | None = None,
    seconds: float = 240,
    seen: list[Phase] | None = None,
) -> list[Phase]:
    """Wait for the job's result; return the observed phases in the order of their first occurrence.

    Args:
        seen: List that also gets the phases, since nothing is returned for a job that fails.
    """
    phases: list[Phase] = [] if seen is None else seen

    def look(observation: Observation, _: str) -> None:
        if observation.phase not in phases:
            phases.append(observation.phase)

    with anyio.fail_after(seconds):
        await wait(backend, ref, options, on_change=look)
    return phases


async def document_when(
    reader: LiveReader, ref: JobRef, enough: Callable[[dict[str, Any]], object], seconds: float = 240
) -> dict[str, Any]:
    """The first document of the job for which `enough` is true, within so many seconds."""
    document: dict[str, Any] = {}
    with anyio.move_on_after(seconds):
        while not (document and enough(document)):
            document = await reader.document(ref.namespace, ref.name, tail=0)
            await anyio.sleep(0.2)
        return document
    raise AssertionError(f"not seen within {seconds} s: {document}")
