"""A worker whose clock is wrong, in both directions: what it decides about jobs depends on the server's clock only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import launch
from tests.unit.simulated_trials import World

from trainjob import JobRef, WaitOptions
from trainjob._jobs.reaper import reap
from trainjob._jobs.report import diagnose, seconds_of
from trainjob._jobs.results import spent_so_far
from trainjob._jobs.waiting import wait
from trainjob._pages.live import LiveReader
from trainjob.errors import QueueTimeout, RunTimeout, StartTimeout, TimedOut
from trainjob.status import QUEUE_LABEL, Observation, observe

pytestmark = pytest.mark.timeout(60)  # of a clock that is behind, a timeout never expires

DAY = 24 * 3600
AHEAD = st.integers(-2 * DAY, 2 * DAY) | st.sampled_from([-600, 600])
"""Seconds by which the server's clock is ahead of this worker's; negative: behind."""
AGE, NEAR = 300.0, 60.0
"""Age of a job in seconds, and how much longer or shorter a limit is: more than a test takes."""
LIMITS = st.sampled_from([AGE - NEAR, AGE + NEAR])


def skewed(ahead: int) -> DirectBackend:
    """A backend whose server has another clock than this worker."""
    backend = DirectBackend()
    backend.store.ahead = timedelta(seconds=ahead)
    return backend


async def aged(backend: DirectBackend, **fields: Any) -> JobRef:
    """A job that was created `AGE` seconds ago, and suspended then if it is suspended."""
    ref = await launch(backend, fields=fields)
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(AGE)}, "status": {"conditions": []}})
    if fields.get("suspend"):
        backend.condition(ref, "Suspended", "Suspended", time=backend.ago(AGE))
    return ref


@dataclass(frozen=True)
class Wait:
    """A kind of wait: the option that limits it, the error, and the job."""

    option: str
    error: type[TimedOut]
    fields: dict[str, Any]
    runs: bool = False


WAITS = {
    "queued": Wait("queue_timeout", QueueTimeout, {"suspend": True, "labels": {QUEUE_LABEL: "q"}}),
    "starting": Wait("start_timeout", StartTimeout, {}),
    "running": Wait("run_timeout", RunTimeout, {}, runs=True),
}


@pytest.mark.parametrize("kind", [*WAITS])
@settings(max_examples=15, deadline=None)
@given(ahead=AHEAD, limit=LIMITS)
def test_a_timeout_expires_by_the_servers_clock(kind: str, ahead: int, limit: float) -> None:
    async def scenario(waits: Wait) -> None:
        backend = skewed(ahead)
        ref = await aged(backend, **waits.fields)
        if waits.runs:
            backend.running(ref)

        def seen(observation: Observation, _: str) -> None:
            if not observation.phase.terminal:
                backend.condition(ref, "Complete", "AllJobsCompleted")  # without a rank that has run

        options = WaitOptions.parse({waits.option: limit})
        if limit < AGE:
            with pytest.raises(waits.error):
                await wait(backend, ref, options)
        else:
            assert (await wait(backend, ref, options, on_change=seen)).uid == ref.uid

    asyncio.run(scenario(WAITS[kind]))


@settings(max_examples=15, deadline=None)
@given(ahead=AHEAD, limit=LIMITS, waited=st.booleans())
def test_the_reaper_ends_an_unattended_job_by_the_servers_clock(ahead: int, limit: float, waited: bool) -> None:
    async def scenario() -> None:
        backend = skewed(ahead)
        ref = await aged(backend, unattended="suspend", unattended_after=limit)
        if waited:
            backend.waits(ref, age=NEAR / 2)
        assert len(await reap(backend, "ns", grace=0, interval=0)) == (limit < AGE and not waited)

    asyncio.run(scenario())


@settings(max_examples=15, deadline=None)
@given(ahead=AHEAD)
def test_a_lease_has_the_servers_time(ahead: int) -> None:
    async def scenario() -> None:
        backend = skewed(ahead)
        ref = await aged(backend)
        backend.attend(ref)
        while not backend.store.items("leases"):
            await asyncio.sleep(0)
        (waiter,) = await DirectBackend(backend.store).waiters("ns")
        late = backend.store.now - waiter.renewed.timestamp()
        assert -0.01 <= late < NEAR
        assert waiter.jobs == {ref.uid: waiter.renewed}
        await backend.aclose()

    asyncio.run(scenario())


@settings(max_examples=15, deadline=None)
@given(ahead=AHEAD)
def test_a_waiter_dates_what_it_observes_by_the_servers_clock(ahead: int) -> None:
    async def scenario() -> None:
        backend = skewed(ahead)
        ref = await aged(backend)
        losses = iter(["0.5", "0.25"])

        def seen(observation: Observation, _: str) -> None:
            if (loss := next(losses, None)) is not None:
                backend.status(ref, trainerStatus={"metrics": [{"name": "loss", "value": loss}]})
            elif not observation.phase.terminal:
                backend.end(ref)

        points = (await wait(backend, ref, on_change=seen)).history["loss"]
        assert [value for _, _, value in points] == [0.5, 0.25]
        assert all(abs(backend.store.now - at) < NEAR for _, at, _ in points)

    asyncio.run(scenario())


async def _goodput(backend: DirectBackend, ref: JobRef) -> float:
    return (await spent_so_far(backend, ref)).wall_seconds


async def _report(backend: DirectBackend, ref: JobRef) -> float:
    found = await diagnose(backend, ref.namespace, ref.name)
    return seconds_of(found.observation, found.taken)["active"]


async def _page(backend: DirectBackend, ref: JobRef) -> float:
    found = await LiveReader(backend).document(ref.namespace, ref.name)
    return (datetime.fromisoformat(found["taken"]) - datetime.fromisoformat(found["created"])).total_seconds()


async def _list(backend: DirectBackend, ref: JobRef) -> float:
    found = await LiveReader(backend).listed(ref.namespace)
    (job,) = found["jobs"]
    return (datetime.fromisoformat(found["taken"]) - datetime.fromisoformat(job["created"])).total_seconds()


@pytest.mark.parametrize("read", [_goodput, _report, _page, _list])
@settings(max_examples=10, deadline=None)
@given(ahead=AHEAD)
def test_the_age_of_a_job_is_by_the_servers_clock(
    read: Callable[[DirectBackend, JobRef], Coroutine[Any, Any, float]], ahead: int
) -> None:
    async def scenario() -> None:
        backend = skewed(ahead)
        assert await read(backend, await aged(backend)) == pytest.approx(AGE, abs=NEAR)

    asyncio.run(scenario())


@pytest.mark.parametrize("ahead", [-600, 600])
def test_the_time_of_a_study_is_by_the_servers_clock(ahead: int) -> None:
    """A second launcher continues the study after 70 s."""

    async def scenario() -> None:
        world = World(skewed(ahead))
        await world.interrupted(lambda: len(world.backend.jobs) > 0, max_trials=1, max_seconds=60)
        assert abs(world.backend.store.now - json.loads(world.files["study"])["began"]) < NEAR
        world.backend.store.ahead += timedelta(seconds=70)
        async with world.trainings.training():
            assert len((await world.tune(max_trials=2, max_seconds=60)).trials) == 1

    asyncio.run(scenario())


@given(written=st.datetimes(), seen=st.datetimes())
def test_the_time_of_a_rank_in_its_report_shows_no_progress(written: datetime, seen: datetime) -> None:
    """Progress is a change of what is reported: the clocks of ranks, server and waiter are not compared for it."""

    def reported(at: datetime) -> Observation:
        status = {"progressPercentage": 5, "lastUpdatedTime": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
        return observe({"metadata": {"creationTimestamp": "2026-11-30T10:00:00Z"}, "status": {"trainerStatus": status}})

    assert reported(written) == reported(seen)
