"""Random schedules: jobs are launched, waited for and cancelled while faults are injected; the outcomes are checked."""

from __future__ import annotations

import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import anyio
import anyio.abc
import httpx
from tests.cluster import lost_time
from tests.fakes.faults import Fault, FaultProxy, Kind, Seen
from tests.testcluster.access import TRAINER
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.goodput import Activity
from trainjob.job import KEY
from trainjob.status import observe

SECONDS = 240.0
"""Time limit of one schedule. Without faults it takes 5 s, more if many run at once."""

_LIST = f"/apis/{TRAINER}/trainjobs"


@dataclass(frozen=True)
class Work:
    """One piece of work.

    Attributes:
        key: Key of the job.
        end: How its job ends.
        launchers: One; two at once; or one that is killed during the launch, followed by another.
        shared: For each waiter, whether it shares the watch of its process.
        seconds: Seconds until a dying launcher is killed, until the job is cancelled, or until a rank completes.
    """

    key: str
    end: Literal["complete", "failed", "cancelled"]
    launchers: Literal["one", "two", "dying"]
    shared: tuple[bool, ...]
    seconds: float

    @property
    def spec(self) -> TrainJobSpec:
        """The spec of the job."""
        run = f"{self.seconds * 1000:.0f}ms" if self.end == "complete" else "never"
        asked: dict[str, Any] = {"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run=run)}
        return TrainJobSpec.parse(asked | ({"active_deadline_seconds": 2} if self.end == "failed" else {}))


def draw(seed: int) -> tuple[Work, ...]:
    """The work of a schedule."""
    dice = random.Random(seed)
    return tuple(
        Work(
            key=f"faults/{seed}/{number}",
            end=dice.choice(("complete", "complete", "failed", "cancelled")),
            launchers=dice.choice(("one", "two", "dying")),
            shared=dice.choice(((True,), (False,), (True, False), (True, True))),
            seconds=dice.uniform(0.0, 1.5),
        )
        for number in range(dice.choice((1, 2, 2, 3)))
    )


class RandomPlan:
    """Faults of single requests for some seconds, with a total outage in between.

    The fault of the n-th request of a method and a resource depends only on the seed and on n, so a seed repeats the
    same faults for the same requests.
    """

    def __init__(self, seed: int) -> None:
        dice = random.Random(f"{seed}/plan")
        self._seed = seed
        self._rate = dice.uniform(0.1, 0.6)
        self._end = dice.uniform(2.0, 6.0)
        self._outage = sorted(dice.uniform(0.0, self._end) for _ in range(2))
        self._outage_kind = dice.choice(("cut", "stall", "429", "503", None))
        self._begin = 0.0
        self._count: Counter[str] = Counter()

    def __call__(self, seen: Seen) -> Fault | None:
        """The fault for one request."""
        self._begin = self._begin or seen.at
        since = seen.at - self._begin
        what = f"{seen.method} {seen.path.partition('/namespaces/')[2].partition('/')[2]}"
        self._count[what] += 1
        dice = random.Random(f"{self._seed}/{what}/{self._count[what]}")
        if since > self._end:
            return None
        if self._outage_kind and self._outage[0] < since < self._outage[1]:
            return _OUTAGES[self._outage_kind]
        if dice.random() > self._rate:
            return None
        faults = list(_faults(seen, dice, first=self._count[what] == 1))
        return dice.choice(faults)


_OUTAGES = {
    "cut": Fault(Kind.CUT),
    "stall": Fault(Kind.STALL),
    "429": Fault(Kind.ANSWER, 429, retry_after=1),
    "503": Fault(Kind.ANSWER, 503),
}


def _faults(seen: Seen, dice: random.Random, *, first: bool) -> Iterator[Fault]:
    after = dice.choice((0, 1, 100, 2000))
    yield from (Fault(kind) for kind in (Kind.CUT, Kind.DROP, Kind.STALL, Kind.STALL_REPLY))
    yield from (Fault(kind, after=after) for kind in (Kind.BREAK, Kind.SHORTEN, Kind.STALL_BODY))
    yield Fault(Kind.DELAY, seconds=dice.uniform(0.1, 1.5))
    yield from (Fault(Kind.ANSWER, 429, retry_after=1), Fault(Kind.ANSWER, 500), Fault(Kind.ANSWER, 503))
    yield Fault(Kind.ANSWER_AFTER, 502)
    if first:  # test_fault_tokens.py tests a token that is refused again after its renewal
        yield Fault(Kind.ANSWER, 401)
    if seen.method == "WATCH":
        lived = dice.uniform(0.1, 2.0)
        yield from (Fault(kind, seconds=lived) for kind in (Kind.BREAK, Kind.SHORTEN, Kind.STALL_BODY))
        yield from (Fault(Kind.EVENT, 410), Fault(Kind.EVENT, 500))
    if seen.method == "WATCH" or (seen.method == "GET" and seen.path.endswith("s")):
        yield Fault(Kind.ANSWER, 410)


@dataclass
class Life:
    """One TrainJob, as the API server reported it on a direct connection.

    Attributes:
        key: Key of the job.
        name: Name of the job.
        born: Number of the first event about the job.
        end: The first final phase.
        ended: Number of the event with that phase.
    """

    key: str
    name: str
    born: int
    end: Phase | None = None
    ended: int = 0


class Truth:
    """The history of all TrainJobs, read without a proxy.

    Args:
        direct: A client with a direct connection to the API server.
    """

    def __init__(self, direct: httpx.AsyncClient) -> None:
        self._direct = direct
        self.lives: dict[str, Life] = {}

    async def run(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        """Watch until cancelled."""
        version = (await self._direct.get(_LIST, params={"limit": "1"})).json()["metadata"]["resourceVersion"]
        params = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "3600"}
        async with self._direct.stream("GET", _LIST, params=params, timeout=None) as answer:
            task_status.started()
            number = 0
            async for line in answer.aiter_lines():
                number += 1
                event = json.loads(line)
                item = event["object"]
                metadata = item["metadata"]
                key = (metadata.get("annotations") or {}).get(KEY, "")
                life = self.lives.setdefault(metadata["uid"], Life(key, metadata["name"], number))
                phase = observe(item).phase
                if event["type"] == "DELETED" and not phase.terminal:
                    phase = Phase.DELETED
                if phase.terminal and life.end is None:
                    life.end, life.ended = phase, number
        raise RuntimeError("the direct watch has ended")

    def of(self, key: str) -> dict[str, Life]:
        """The jobs of a key, by UID."""
        return {uid: life for uid, life in self.lives.items() if life.key == key}


class Run:
    """One schedule.

    Args:
        seed: Seed of the schedule.
        proxy: A separate proxy.
        backends: The backends of two processes, each with a separate and with a shared watch.
        namespace: Namespace of its jobs.
        truth: The history of all jobs.
    """

    def __init__(
        self,
        seed: int,
        proxy: FaultProxy,
        backends: list[dict[bool, KubernetesBackend]],
        namespace: str,
        truth: Truth,
    ) -> None:
        self.works = draw(seed)
        self.proxy = proxy
        self.seconds = 0.0
        self._backends = backends
        self._namespace = namespace
        self._truth = truth
        self.problems: list[str] = []

    async def __call__(self) -> list[str]:
        """Run the schedule; return the problems."""
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for work in self.works:
                tasks.start_soon(self._guarded, work)
        self.seconds = time.monotonic() - began
        self._no_storm()
        return self.problems

    async def _guarded(self, work: Work) -> None:
        try:
            with anyio.fail_after(SECONDS):
                await self._work(work)
        except TimeoutError:
            self._problem(work, f"not finished within {SECONDS:.0f} s")
        except Exception as error:  # noqa: BLE001 - the outcome of every schedule is reported
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            self._problem(work, f"{type(error).__name__}: {error}")

    async def _work(self, work: Work) -> None:
        began = time.monotonic()
        refs = await self._launch(work)
        latest = max(refs, key=lambda ref: ref.attempt)
        verdicts: list[tuple[JobRef, Phase]] = []
        async with anyio.create_task_group() as tasks:
            for number, shared in enumerate(work.shared):
                tasks.start_soon(self._wait, self._backends[number % 2][shared], latest, verdicts)
            if work.end == "cancelled":
                await anyio.sleep(work.seconds)
                if not await cancel(self._backends[1][False], latest):
                    self._problem(work, "its pods did not end")
        if work.end != "cancelled":
            await self._lost_time(work, began)
        again = await self._again(work, latest)
        await self._check(work, {*refs, *again}, verdicts)

    def _problem(self, work: Work, what: str) -> None:
        self.problems.append(f"{work}: {what}; truth: {self._truth.of(work.key)}")

    async def _launch(self, work: Work) -> list[JobRef]:
        one, other = (each[False] for each in self._backends)
        found: list[JobRef] = []

        async def launched(backend: KubernetesBackend) -> None:
            found.append(await launch(backend, work.spec, work.key, namespace=self._namespace))

        async with anyio.create_task_group() as tasks:
            if work.launchers == "two":
                tasks.start_soon(launched, other)
            if work.launchers == "dying":
                with anyio.move_on_after(work.seconds):
                    await launched(other)
            await launched(one)
        return found

    async def _lost_time(self, work: Work, began: float) -> None:
        """Check the goodput of a job that has ended."""
        spent = await lost_time.measured(self._backends[0][False], self._namespace, work.key)
        longest = time.monotonic() - began
        # A launcher that finds a failed job launches the next attempt, and the time between both is that of a restart.
        without = (Activity.QUEUED, Activity.REPEATED, Activity.STALLED)
        lost_time.lasted(spent, 0, longest, *without, *([Activity.RESTARTING] if spent.attempts == 1 else []))
        trained = work.seconds if work.end == "complete" else 0
        if not trained - lost_time.SECONDS <= spent.seconds[Activity.TRAINING] <= spent.wall_seconds:
            self._problem(work, f"goodput {spent}")

    async def _again(self, work: Work, ref: JobRef) -> list[JobRef]:
        """Launch the same key again: a complete job is adopted, and after a failure the next attempt is launched."""
        if work.end == "cancelled":
            return []
        if work.end == "complete":
            return [await launch(self._backends[1][False], work.spec, work.key, namespace=self._namespace)]
        again = await launch(self._backends[1][False], LONG, work.key, namespace=self._namespace)
        if again.attempt != ref.attempt + 1:
            self._problem(work, f"the launch after {ref} returned {again}")
        await cancel(self._backends[0][False], again)
        return [again]

    async def _wait(self, backend: KubernetesBackend, ref: JobRef, verdicts: list[tuple[JobRef, Phase]]) -> None:
        phases: list[Phase] = []
        try:
            await wait(backend, ref, on_change=lambda observation, _: phases.append(observation.phase))
            verdicts.append((ref, Phase.COMPLETE))
        except TrainJobFailed:
            verdicts.append((ref, phases[-1]))

    async def _check(self, work: Work, refs: set[JobRef], verdicts: list[tuple[JobRef, Phase]]) -> None:
        """Compare with the history of the direct watch, which can be a moment late."""
        uids = {ref.uid for ref in refs}
        with anyio.move_on_after(5):
            while any(uid not in self._truth.lives or self._truth.lives[uid].end is None for uid in uids):
                await anyio.sleep(0.05)
        lives = sorted(self._truth.of(work.key).items(), key=lambda each: int(each[1].name.rpartition("-")[2]))
        if not uids <= dict(lives).keys() or lives[-1][0] not in uids:
            self._problem(work, f"its launchers returned {refs}")
        for number, (uid, life) in enumerate(lives, 1):
            if not life.name.endswith(f"-{number}"):
                self._problem(work, f"{life.name} is the {number}. job")
            if number < len(lives) and not (life.end is Phase.FAILED and life.ended < lives[number][1].born):
                self._problem(work, f"there was another job before {life.name} had failed")
            if wrong := [verdict for ref, verdict in verdicts if ref.uid == uid and verdict is not life.end]:
                self._problem(work, f"the verdicts about {life.name} were {wrong}")
        if lives[0][1].end is not _ENDS[work.end] or len(verdicts) != len(work.shared):
            self._problem(work, f"unexpected verdicts: {verdicts}")

    def _no_storm(self) -> None:
        for (method, path), most in busiest(self.proxy).items():
            if most > MOST_A_SECOND * len(self.works):
                self.problems.append(f"{most} requests {method} {path} within a second")


LONG = TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 1, "env": simulate(run="never")})
_ENDS = {"complete": Phase.COMPLETE, "failed": Phase.FAILED, "cancelled": Phase.DELETED}

MOST_A_SECOND = 12
"""Requests of a kind for one resource and each piece of work, which has up to two launchers and two waiters."""


def busiest(proxy: FaultProxy) -> dict[tuple[str, str], int]:
    """Method and path -> most requests within any one second."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for seen in proxy.requests:
        times[seen.method, seen.path].append(seen.at)
    return {
        what: max(sum(1 for other in each[i:] if other < at + 1) for i, at in enumerate(each))
        for what, each in times.items()
    }
