"""One watcher for all waiters of a process: each sees the last change of its job, and the watcher ends with them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainjob import JobRef, TrainJobResult, TrainJobSpec
from trainjob._backends.local import watching
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.conditions import COMPLETE, with_condition, write_status
from trainjob._backends.local.store import JobFiles, OtherFormat, now
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import render
from trainjob.errors import BackendUnavailable

pytestmark = pytest.mark.anyio

SPEC = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})


class Watched:
    """Jobs of which this process is the supervisor."""

    def __init__(self, home: Path) -> None:
        self.home, self.backend = home, LocalBackend(home, {})
        self.files: dict[JobRef, JobFiles] = {}
        self.locks: list[int | None] = []
        self.looks: list[int] = []

    def running(self, count: int) -> list[JobRef]:
        """Jobs that run."""
        for number in range(count):
            job = render(SPEC, f"key {number}", 1, "default")
            job["metadata"] |= {"uid": f"uid-{number}", "creationTimestamp": now()}
            files = JobFiles.create(self.home / "jobs" / "default" / job["metadata"]["name"], job, {})
            self.locks.append(files.supervise())
            self.files[JobRef.of(job)] = files
            self.report(JobRef.of(job), 0)
        return [*self.files]

    def report(self, ref: JobRef, progress: int, **status: Any) -> None:
        jobs = [{"name": "node", "ready": 1, "active": 1}]
        reported = {"jobsStatus": jobs, "trainerStatus": {"progressPercentage": progress}, **status}
        assert write_status(self.files[ref], reported, []) is None

    def end(self, ref: JobRef) -> None:
        self.report(ref, 100, conditions=with_condition({}, COMPLETE))

    def wait(self, *refs: JobRef) -> list[asyncio.Task[TrainJobResult]]:
        return [asyncio.create_task(wait(self.backend, ref)) for ref in refs]

    async def looked(self, times: int = 2) -> None:
        """Wait until the watcher has looked at the files so often."""
        done = len(self.looks) + times
        while len(self.looks) < done:
            await asyncio.sleep(0.01)


@pytest.fixture
def watched(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(home)
    look = watching._looked

    def looked(listeners: list[watching.Listener], check_seconds: float) -> list[watching.Listener]:
        watched.looks.append(len(listeners))
        return look(listeners, check_seconds)

    monkeypatch.setattr(watching, "_looked", looked)
    yield watched
    for lock in watched.locks:
        if lock is not None:
            os.close(lock)


async def test_all_waiters_share_a_watcher_that_ends_with_the_last_one(watched: Watched) -> None:
    before = asyncio.all_tasks()
    waiters = watched.wait(*watched.running(40))
    await watched.looked()
    assert watched.looks[-1] == 40
    assert len(asyncio.all_tasks() - before) == 40 + 1
    for ref in watched.files:
        watched.end(ref)
    assert {each.attempt for each in await asyncio.gather(*waiters)} == {1}
    assert asyncio.all_tasks() - {*waiters} == before


async def test_a_closed_backend_ends_every_waiter_and_can_be_used_again(watched: Watched) -> None:
    first, second, third = watched.running(3)
    ended = watched.wait(first, first, second)
    await watched.looked()
    await watched.backend.aclose()
    assert [type(each) for each in await asyncio.gather(*ended, return_exceptions=True)] == [BackendUnavailable] * 3
    (waiter,) = watched.wait(third)
    await watched.looked()
    watched.end(third)
    assert (await waiter).name == third.name


@pytest.mark.parametrize("seed", range(4))
async def test_each_waiter_sees_the_last_change_of_its_job(watched: Watched, seed: int) -> None:
    chance = random.Random(seed)
    refs = watched.running(8)
    seen: dict[JobRef, float | None] = {}

    async def follow(ref: JobRef) -> None:
        async for snapshot in watched.backend.watch(ref):
            assert snapshot.trainjob is not None
            seen[ref] = snapshot.trainjob["status"]["trainerStatus"]["progressPercentage"]

    tasks = [asyncio.create_task(follow(ref)) for ref in refs]
    latest = dict.fromkeys(refs, 0)
    for step in range(60):
        ref = chance.choice(refs)
        watched.report(ref, step)
        latest[ref] = step
        await asyncio.sleep(chance.choice((0, 0, 0.001, 0.02)))
    await watched.looked(3)
    assert seen == latest
    await watched.backend.aclose()
    await asyncio.gather(*tasks)


async def test_damaged_files_of_one_job_end_only_its_waiter(watched: Watched) -> None:
    good, bad = watched.running(2)
    waiters = watched.wait(good, bad)
    await watched.looked()
    watched.files[bad].status.write_text("{")
    with pytest.raises(OtherFormat):
        await waiters[1]
    watched.end(good)
    assert (await waiters[0]).name == good.name


async def test_a_cancelled_waiter_leaves_the_others(watched: Watched) -> None:
    first, second = watched.running(2)
    cancelled, other, same = watched.wait(first, second, first)
    await watched.looked()
    cancelled.cancel()
    for ref in (first, second):
        watched.end(ref)
    assert [each.name for each in await asyncio.gather(other, same)] == [second.name, first.name]
    assert cancelled.cancelled()
