"""What many jobs cost that end or wait together: connections, requests, and turns of the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from tests import objects
from tests.fakes.scripted import Answer, Asked, ScriptedServer, as_json
from tests.serving import serving

from trainjob import JobRef
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.blockers import RelatedObjects
from trainjob._backends.kubernetes.client import ApiClient
from trainjob._backends.kubernetes.pods import tails_of
from trainjob._support.threads import Turns

pytestmark = [pytest.mark.timeout(60), pytest.mark.anyio]

JOBS = 60


class Cluster(ScriptedServer):
    """A cluster without Kueue. Counts the requests that it answers at the same time."""

    def __init__(self) -> None:
        super().__init__(self.reply)
        self.most = self._now = 0
        self._counting = threading.Lock()

    def reply(self, asked: Asked) -> Answer:
        with self._counting:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.005)  # as long as an API server takes
        with self._counting:
            self._now -= 1
        if "kueue" in asked.path:
            return as_json({"reason": "NotFound"}, 404)
        if "/trainjobs/" in asked.path:
            return as_json(objects.trainjob(objects.COMPLETE))
        if "/log?" in asked.path:
            return Answer(body=b"2026-11-21T10:00:00Z one\n")
        return as_json({"metadata": {}, "items": []})

    def paths(self, part: str) -> list[str]:
        return [asked.path for asked in self.asked if part in asked.path]

    @property
    def connections(self) -> int:
        return len({asked.client for asked in self.asked})


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with serving(Cluster()) as server:
        yield server


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[ApiClient]:
    made = ApiClient(Credentials(host=cluster.url))
    yield made
    await made.aclose()


async def test_jobs_that_end_together_share_few_connections(cluster: Cluster) -> None:
    backend = KubernetesBackend(Credentials(host=cluster.url), shared=True)
    found = await asyncio.gather(*(backend.evidence(JobRef("ns", "x", "uid-x")) for _ in range(JOBS)))
    await backend.aclose()
    assert all(each.trainjob for each in found)
    assert max(cluster.connections, cluster.most) <= 8


async def test_logs_of_many_jobs_are_read_a_few_at_a_time(cluster: Cluster, client: ApiClient) -> None:
    async def lines() -> int:
        pods = [objects.pod(rank) for rank in range(4)]
        return sum([len(tail) async for _, tail in tails_of(client, pods, 5)])

    assert sum(await asyncio.gather(*(lines() for _ in range(JOBS // 4)))) == JOBS
    assert cluster.most <= 16


async def test_an_absent_kueue_is_asked_for_once(cluster: Cluster) -> None:
    backend = KubernetesBackend(Credentials(host=cluster.url), shared=True)
    for _ in range(3):
        await backend.evidence(JobRef("ns", "x", "uid-x"))
    await backend.aclose()
    assert len(cluster.paths("kueue")) == 2, "in each of its two versions"
    assert len(cluster.paths("/events")) == 3


async def test_waiting_jobs_of_a_runtime_share_the_request_for_it(cluster: Cluster, client: ApiClient) -> None:
    waiting = {JobRef("ns", f"x{n}", f"uid-x{n}"): objects.trainjob(name=f"x{n}") for n in range(JOBS)}
    await RelatedObjects(client, "ns").blockers(waiting)
    assert len(cluster.paths("clustertrainingruntimes")) == 1


async def test_calls_in_threads_take_turns_and_keep_the_loop_free() -> None:
    turns, now, most = Turns("test"), 0, 0
    ended = threading.Event()

    def work() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        ended.wait(30)
        now -= 1

    calls = [asyncio.create_task(turns.call(work)) for _ in range(8)]
    for _ in range(50):  # turns of the event loop
        await asyncio.sleep(0)
    assert now <= 1
    ended.set()
    await asyncio.gather(*calls)
    assert most == 1
