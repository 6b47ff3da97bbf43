"""Logs that are followed: of all pods of a job, through restarts and lost nodes, until the job's last line."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing

import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import attempt
from tests.unit.virtually import virtually

from trainjob import JobRef, LogLine
from trainjob._backends.kubernetes.errors import Forbidden

LINES = 1000
"""Lines that are held for a consumer."""


@pytest.fixture(params=[False, True], ids=["one job", "all jobs"])
def backend(request: pytest.FixtureRequest) -> DirectBackend:
    return DirectBackend(shared=request.param)


async def followed(backend: DirectBackend, ref: JobRef) -> list[LogLine]:
    """The lines of a job, until it has ended."""
    async with aclosing(backend.logs(ref, follow=True)) as following:
        return [line async for line in following]


def texts(lines: list[LogLine]) -> dict[str, list[str]]:
    """The text of the lines, by rank."""
    return {rank: [line.text for line in lines if line.rank == rank] for rank in sorted({line.rank for line in lines})}


@virtually
async def test_lines_of_all_pods_are_followed_until_the_job_has_ended(backend: DirectBackend) -> None:
    ref = attempt(backend)
    reading = asyncio.create_task(followed(backend, ref))
    for rank in (0, 1):
        await asyncio.sleep(20)
        backend.write(ref, rank, "begun")
        backend.pod(ref, rank)
    for count in range(3):
        await asyncio.sleep(5)
        backend.write(ref, count % 2, f"{count}")
    backend.write(ref, 0, "last")
    backend.condition(ref, "Complete", "AllJobsCompleted")
    lines = await asyncio.wait_for(reading, 60)
    assert texts(lines) == {"node-0": ["begun", "0", "2", "last"], "node-1": ["begun", "1"]}


@virtually
async def test_the_logs_of_an_ended_job_are_read_once(backend: DirectBackend) -> None:
    ref = attempt(backend)
    backend.write(ref, 0, "one", "two")
    backend.end(ref)
    assert texts(await asyncio.wait_for(followed(backend, ref), 60)) == {"node-0": ["one", "two"]}
    assert backend.requests.count("GET log") == 1


@virtually
async def test_a_deleted_pod_is_not_read_again(backend: DirectBackend) -> None:
    ref = attempt(backend)
    backend.running(ref)
    reading = asyncio.create_task(followed(backend, ref))
    pod = backend.pod(ref)
    await asyncio.sleep(1)
    backend.store.put("pods", pod, "DELETED")
    await asyncio.sleep(60)
    assert Counter(backend.requests)["GET log"] == 1
    reading.cancel()


@virtually
async def test_a_log_without_an_answer_is_reported_after_the_end(backend: DirectBackend) -> None:
    ref = attempt(backend)
    backend.pod(ref, 0)
    backend.write(ref, 1, "read")
    backend.pod(ref, 1)

    async def lost(request: str) -> None:
        if request == "GET log" and backend.requests.count(request) == 0:
            backend.requests.append(request)
            await asyncio.Event().wait()

    backend.turn = lost
    reading = asyncio.create_task(followed(backend, ref))
    await asyncio.sleep(60)
    backend.condition(ref, "Complete", "AllJobsCompleted")
    lines = await asyncio.wait_for(reading, 60)
    assert [(line.rank, line.text) for line in lines] == [
        ("node-1", "read"),
        ("trainjob", "the last lines of node-0 could not be read"),
    ]


@virtually
async def test_a_slow_consumer_gets_every_line_and_holds_few(backend: DirectBackend) -> None:
    ref = attempt(backend)
    count = 5 * LINES
    backend.write(ref, 0, *map(str, range(count)))
    backend.end(ref)
    seen: list[str] = []
    async with aclosing(backend.logs(ref, follow=True)) as following:
        async for line in following:
            seen.append(line.text)
            if len(seen) % LINES == 1:
                await asyncio.sleep(30)
    assert seen == [*map(str, range(count))]


@pytest.mark.parametrize("kind", ["pods", "trainjobs"])
@virtually
async def test_what_may_not_be_listed_ends_the_lines_with_an_error(backend: DirectBackend, kind: str) -> None:
    ref = attempt(backend)
    backend.write(ref, 0, "one")
    backend.pod(ref, 0, state=objects.RUNNING)
    backend.store.forbidden = (frozenset({kind}), frozenset())
    with pytest.raises(Forbidden, match=f"{kind} is forbidden"):
        await asyncio.wait_for(followed(backend, ref), 60)
