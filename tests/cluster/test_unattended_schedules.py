"""Only unattended jobs are ended: random schedules of waiters, reapers and outages.

A campaign (`tests.campaigns`): schedule n has seed + n, so ``TRAINJOB_RUNS=1`` with that seed repeats a single one.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from functools import partial
from typing import Self

import anyio
import pytest
import yaml
from tests import campaigns
from tests.certificates import Authority
from tests.fakes.faults import FaultProxy
from tests.testcluster.access import RULES, Access
from tests.testcluster.nodes import simulate

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import Timings
from trainjob._jobs.launching import launch
from trainjob._jobs.reaper import Reaped, reap
from trainjob._jobs.waiting import wait
from trainjob._manifest.unattended import AFTER
from trainjob._support.retrying import REQUEST
from trainjob.errors import TrainJobError

RUNS = campaigns.runs(200, 8)
AT_ONCE = 16
TIMINGS = Timings(
    connect=2,
    read=1,
    watch_read=3,
    healthy_after=1,
    poll=(0.2, 0.5),
    renew=0.5,
    watch_backoff=partial(REQUEST, failures=99, seconds=99),
    request_backoff=partial(REQUEST, failures=99, seconds=99),
)
GRACE, LOOK = 12.0, 1.0
"""The grace is longer than a request takes to fail and to be repeated, as `reaper.GRACE` is. A look that takes
longer than a third of it counts as an outage; beside all other tests, looks of 2 s are ordinary."""
CONNECTS, RETURNS = 2.0, 6.0
"""Seconds until a new waiter is registered, and until it has resumed a job that was ended before."""
LATE = 120.0 if not campaigns.FULL else 30.0
"""Seconds after a job's bound and the grace by which it must have ended. Times of the API server are whole seconds, and
the grace restarts if a reaper dies or if a poll takes seconds, as beside all other tests."""

LEASES = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["create", "patch", "delete", "list"]}


class Skewed(datetime):
    """A clock that is wrong by a different time at each call."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        return super().now(tz) + timedelta(seconds=random.uniform(-7200, 7200))


@dataclass(frozen=True)
class Stay:
    """One process that waits for a job: since when, for how long, and how it ends."""

    begin: float
    seconds: float
    killed: bool


@dataclass(frozen=True)
class Schedule:
    """What happens, in seconds from the start.

    Attributes:
        after: Bound of the jobs.
        stays: For each job, the processes that wait for it.
        outage: Begin and end of an outage of the API server.
        reapers: For each of two, how long each of its runs may last until it is killed.
        seconds: Duration of the schedule.
    """

    after: float
    stays: tuple[tuple[Stay, ...], ...]
    outage: tuple[float, float]
    reapers: tuple[float, ...]
    seconds: float

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        dice = random.Random(seed)
        after = dice.uniform(3.0, 5.0)
        stays = []
        for _ in range(dice.choice((1, 2, 3))):
            now, found = dice.uniform(0.0, 1.0), []
            for _ in range(dice.choice((0, 1, 1, 2))):
                stay = Stay(now, dice.uniform(0.5, 12.0), dice.random() < 0.7)
                found.append(stay)
                # The next one comes in time, at the same time, or too late.
                now += stay.seconds + dice.choice((-0.5, 0.5, after / 2, after + GRACE + 20.0))
            stays.append(tuple(found))
        begin = dice.uniform(1.0, 8.0)
        outage = (begin, begin + dice.choice((0.0, 1.0, after, 2 * after)))
        ends = [stay.begin + stay.seconds for each in stays for stay in each]
        seconds = max([*ends, outage[1]]) + after + GRACE + LATE
        return cls(after, tuple(stays), outage, tuple(dice.choice((1.0, 99.0)) for _ in range(2)), seconds)


@dataclass
class Run:
    """One schedule, in a namespace that no other schedule uses at the same time."""

    seed: int
    schedule: Schedule
    namespace: str
    opened: Callable[[], KubernetesBackend]
    proxy: FaultProxy
    refs: list[JobRef] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ended: int = 0
    longest: float = 0.0
    """The longest time from a job's bound until it was ended, in seconds."""
    began: float = 0.0
    waiting: dict[str, list[float]] = field(default_factory=dict)
    """Job -> start times of its current waiters."""
    coming: int = 0
    """Number of waiters that have not ended yet."""
    since: dict[str, float] = field(default_factory=dict)
    """Job -> start of its unattended time; missing while it has a waiter, or after it was ended."""

    async def __call__(self) -> None:
        launcher = self.opened()
        asked = {"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never"), "unattended": "suspend"}
        for number in range(len(self.schedule.stays)):
            ref = await launch(launcher, TrainJobSpec.parse(asked), f"{self.seed}/{number}", namespace=self.namespace)
            await launcher.patch(ref, {"metadata": {"annotations": {AFTER: f"{self.schedule.after}"}}})
            self.refs.append(ref)
            self.waiting[str(ref)] = []
        self.began = time.monotonic()  # of the reapers, too
        self.since = dict.fromkeys(self.waiting, self.began)
        self.coming = sum(map(len, self.schedule.stays))
        async with anyio.create_task_group() as tasks:
            for ref, stays in zip(self.refs, self.schedule.stays, strict=True):
                for stay in stays:
                    tasks.start_soon(self._stay, ref, stay)
            for seconds in self.schedule.reapers:
                tasks.start_soon(self._reaper, launcher, seconds)
            tasks.start_soon(self._outage)
            while time.monotonic() < self.began + self.schedule.seconds and (self.since or self.coming):
                await anyio.sleep(0.25)
                await self._overdue(launcher)
            tasks.cancel_scope.cancel()
        for ref in self.refs:
            await launcher.delete(ref)
        await launcher.aclose()

    async def _stay(self, ref: JobRef, stay: Stay) -> None:
        await anyio.sleep(stay.begin)
        backend = self.opened()
        began = time.monotonic()
        self.waiting[str(ref)].append(began)
        self.since.pop(str(ref), None)
        waiting = asyncio.create_task(wait(backend, ref))
        try:
            await anyio.sleep(stay.seconds)
            if stay.seconds > RETURNS and self._answering(RETURNS):
                latest = await backend.get(ref.namespace, ref.name)
                if latest is not None and latest["spec"].get("suspend"):
                    self.problems.append(f"{ref} is suspended, but has had a waiter for {stay.seconds:.1f} s")
        finally:
            self.coming -= 1
            self.waiting[str(ref)].remove(began)
            if not self.waiting[str(ref)]:
                self.since[str(ref)] = time.monotonic()
            if stay.killed:  # a killed process sends no more requests
                for attendance in backend._attendances.values():
                    attendance.stop()
                await backend._client.aclose()
            waiting.cancel()
            await asyncio.wait({waiting})
            if not stay.killed:
                with anyio.CancelScope(shield=True), anyio.move_on_after(3):
                    await backend.aclose()

    async def _reaper(self, launcher: KubernetesBackend, seconds: float) -> None:
        while True:
            backend = self.opened()
            with anyio.move_on_after(seconds):
                try:
                    await reap(backend, self.namespace, grace=GRACE, interval=LOOK, on_reaped=self._reaped)
                except TrainJobError as error:
                    self.problems.append(f"a reaper gave up: {error}")
            await backend._client.aclose()
            await self._unreported(launcher)
            # A run that is always killed too early would never end a job.
            seconds = 2 * seconds
            await anyio.sleep(0.5)

    async def _unreported(self, backend: KubernetesBackend) -> None:
        """Find the jobs that were ended without a report: the reaper was killed, or the reply was lost."""
        for ref in self.refs:
            since = self.since.get(str(ref))
            if since is None:
                continue
            job = await backend.get(ref.namespace, ref.name)
            if (job is None or job["spec"].get("suspend")) and self.since.get(str(ref)) == since:
                self.ended += 1
                del self.since[str(ref)]

    def _answering(self, seconds: float) -> bool:
        """Whether the API server has answered for so long."""
        begin, end = self.schedule.outage
        now = time.monotonic() - self.began
        return begin == end or now < begin or now - end > seconds

    async def _outage(self) -> None:
        begin, end = self.schedule.outage
        await anyio.sleep(begin)
        if end > begin:
            self.proxy.freeze()
            await anyio.sleep(end - begin)
            self.proxy.thaw()

    def _reaped(self, reaped: Reaped) -> None:
        self.ended += 1
        if reaped.unattended is None:
            self.problems.append(f"{reaped}, which is not because it was unattended")
        else:
            self.longest = max(self.longest, reaped.unattended.total_seconds() - self.schedule.after)
        now = time.monotonic()
        if any(now - began > CONNECTS for began in self.waiting[reaped.job]):
            self.problems.append(f"at {now - self.began:.1f} s {reaped}, but it has a waiter")
        self.since.pop(reaped.job, None)

    async def _overdue(self, backend: KubernetesBackend) -> None:
        begin, end = self.schedule.outage
        for job, since in list(self.since.items()):
            late = time.monotonic() - since - self.schedule.after - GRACE - LATE
            if since - self.began < end:  # no job can be ended while the API server is down
                late -= end - begin
            if late > 0:
                leases = await backend.waiters(self.namespace)
                self.problems.append(
                    f"at {time.monotonic() - self.began:.1f} s {job} still runs, but has had no waiter since "
                    f"{since - self.began:.1f} s; for the server it is {backend.now()}, and its Leases are {leases}"
                )
                del self.since[job]


@pytest.mark.anyio
@pytest.mark.timeout(1500)
# httpcore 1.0 leaves the socket of a cancelled TLS handshake to the garbage collector; waiters are killed here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_only_unattended_jobs_are_ended(
    cluster: Access, authority: Authority, monkeypatch: pytest.MonkeyPatch, record_property: campaigns.Record
) -> None:
    campaigns.begin(record_property, RUNS)
    monkeypatch.setattr("trainjob._backends.kubernetes.client.datetime", Skewed)
    pair = authority.issue("proxy", addresses=["127.0.0.1"])
    kubeconfig = cluster.kubeconfig_for([*RULES, LEASES], cluster_wide=True)
    token = str(yaml.safe_load(kubeconfig.read_text())["users"][0]["user"]["token"])
    seeds = iter(range(campaigns.SEED, campaigns.SEED + RUNS))
    failures: list[str] = []
    ended = 0

    async def lane(number: int, namespace: str) -> None:
        nonlocal ended
        await anyio.sleep(number * 0.5)
        for seed in seeds:
            run = await one(seed, namespace)
            ended += run.ended
            failures.extend(f"TRAINJOB_SEED={seed} TRAINJOB_RUNS=1: {problem}" for problem in run.problems)
            ends = f"{run.ended} ended, at the latest {run.longest:.0f} s after the bound"
            campaigns.done(f"seed {seed}: {len(run.refs)} jobs, {ends}, {len(run.problems)} problems")

    async def one(seed: int, namespace: str) -> Run:
        async with AsyncExitStack() as stack:
            proxy = await stack.enter_async_context(FaultProxy(cluster.api.server, cluster.api.authority, pair))
            credentials = Credentials(host=proxy.url, token=token, ca_file=str(authority.certificate))
            run = Run(
                seed, Schedule.draw(seed), namespace, lambda: KubernetesBackend(credentials, timings=TIMINGS), proxy
            )
            await run()
        return run

    with ExitStack() as namespaces:
        names = [namespaces.enter_context(cluster.namespace("unattended")) for _ in range(min(AT_ONCE, RUNS))]
        async with anyio.create_task_group() as lanes:
            for number, name in enumerate(names):
                lanes.start_soon(lane, number, name)
    gc.collect()  # here, where the warnings about sockets of killed waiters are ignored
    print(f"{RUNS} schedules, {ended} jobs ended")
    assert not failures, "\n".join(failures)
    assert ended > RUNS / 4, "unattended jobs were ended"
