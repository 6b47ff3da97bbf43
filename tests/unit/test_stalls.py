"""A waiter that watches for progress, in virtual time: what counts, what costs requests, and when a job hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.server import Refused
from tests.unit.virtually import virtually

from trainjob import JobHung, JobRef, TrainJobResult
from trainjob._diagnosis.stragglers import Straggler, annotation
from trainjob._jobs.following import follow
from trainjob._jobs.launching import launch
from trainjob._jobs.stalls import _Limit
from trainjob._jobs.waiting import wait
from trainjob._spec import TrainJobSpec
from trainjob._support.log_lines import LogLine
from trainjob.errors import Category, Rejected
from trainjob.status import QUEUE_LABEL

TIMEOUT = 1.0
STACK = (
    "Main thread (most recent call first):",
    '  File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce',
)


COMPILER = (STACK[0], '  File "/x/torch/_inductor/codecache.py", line 7 in compile')


class Cluster(DirectBackend):
    """Counts how often the ends of all logs were read, and how many jobs' at once."""

    reads = reading = peak = 0

    async def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        self.reads += 1
        self.reading += 1
        self.peak = max(self.peak, self.reading)
        try:
            async with aclosing(super().tails(ref, count)) as found:
                async for each in found:
                    yield each
        finally:
            self.reading -= 1


class Training:
    """A running job, and a waiter of it.

    Attributes:
        notices: What the waiter was told.
        result: Its result.
        hung: Its error.
        seconds: When it hung.
    """

    def __init__(self, backend: Cluster, ref: JobRef) -> None:
        self.backend, self.ref = backend, ref
        self.notices: list[str] = []
        self.result: TrainJobResult | None = None
        self.hung: JobHung | None = None
        self.seconds = 0.0

    def write(self, rank: int, *lines: str) -> None:
        self.backend.write(self.ref, rank, *lines)

    def marker(self, rank: int, **content: Any) -> None:
        self.write(rank, f"trainjob.rank {json.dumps({'rank': rank, 'world': 2, **content})}")

    def counts(self, *ranks: int) -> None:
        for rank in ranks:
            self.marker(rank, count=3, step=3)

    def stalls(self, *ranks: int, step: int = 3, stack: Sequence[str] = STACK) -> None:
        for rank in ranks:
            self.marker(rank, count=step, step=step, stalled_seconds=TIMEOUT / 2)
            self.write(rank, *(f"trainjob.stack {rank}| {line}" for line in stack))

    def lose(self, rank: int) -> None:
        self.backend.store.pod_logs.pop(f"{self.ref.name}-node-0-{rank}", None)

    async def wait(self, timeouts: float = 30, happens: Callable[[int], object] = lambda _: None) -> None:
        """Wait. Something happens each eighth of the timeout, and after so many timeouts the job completes."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._wait)
            for number in range(round(8 * timeouts)):
                if self.hung is not None:
                    return
                happens(number)
                await anyio.sleep(TIMEOUT / 8)
            self.backend.end(self.ref)

    async def _wait(self) -> None:
        def change(_: object, notice: str) -> None:
            self.notices += [notice] if notice else []

        try:
            self.result = await wait(self.backend, self.ref, on_change=change)
        except JobHung as error:
            self.hung, self.seconds = error, asyncio.get_running_loop().time()


Happens = Callable[[Training, int], object]


def nothing(job: Training, number: int) -> None: ...


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr("trainjob._jobs.stalls._limit", _Limit())  # not what other tests have used
    monkeypatch.setattr("tests.fakes.kube.direct._LOOK_SECONDS", TIMEOUT / 16)
    return Cluster()


async def started(backend: Cluster, key: str = "key", ranks: int = 2, **fields: Any) -> Training:
    fields = {"runtime": "r", "command": ["x"], "num_nodes": ranks, "stall_timeout": TIMEOUT, **fields}
    ref = await launch(backend, TrainJobSpec.parse(fields), key, namespace="default")
    backend.running(ref)
    for rank in range(ranks):
        backend.pod(ref, rank, node=f"machine-{rank}")
    return Training(backend, ref)


# ---------------------------------------------------------------- jobs that hang


@virtually
async def test_ranks_that_make_no_step_hang_and_the_silent_one_is_named(backend: Cluster) -> None:
    job = await started(backend, on_retry={"hang": {"max_excluded_nodes": 1}})
    job.marker(1, count=3, step=3)
    job.stalls(0)
    await job.wait()
    assert job.hung is not None
    diagnosis = job.hung.diagnosis
    assert (diagnosis.node, diagnosis.change) == ("machine-1", "excluded_nodes (none) -> that of the failed rank")
    assert (diagnosis.category, diagnosis.rank, diagnosis.job) == (Category.HANG, "node-1", str(job.ref))
    assert "no rank has made progress for 1s: node-1 does not respond any more at step 3" in str(job.hung)
    assert any("all_reduce" in line for line in diagnosis.log)
    assert job.notices == ["stall_timeout 1 s: measured by the steps that the ranks count"]
    assert backend.reads == 3, "a rank that does not report its stall has the whole timeout"
    assert job.seconds > TIMEOUT


@virtually
async def test_a_rank_that_does_not_respond_is_noticed_within_twice_the_timeout(backend: Cluster) -> None:
    """Its steps and the stall of the other rank are read at once: the silent rank has not changed since before."""
    job = await started(backend)
    for rank in (0, 1):
        job.marker(rank, count=2, step=2)

    def hangs(_: int) -> None:
        if backend.reads == 1:
            job.lose(0)
            job.lose(1)
            job.marker(1, count=2, step=2)
            job.stalls(0)

    await job.wait(happens=hangs)
    assert job.hung is not None
    assert job.hung.diagnosis.rank == "node-1"
    assert backend.reads == 3, "the last one is half of the timeout after the one that showed the stall"


def loses_its_node(job: Training, _: int) -> None:
    """The log of rank 1 is lost after the first reading."""
    if job.notices:
        job.lose(1)
        job.stalls(0)


def starts_late(job: Training, number: int) -> None:
    """The pod of rank 1 starts after four timeouts."""
    if number == 0:
        job.backend.pod(job.ref, 1, state=objects.waiting("ContainerCreating"), phase="Pending")
    elif number == 4 * 8:
        job.backend.pod(job.ref, 1)


UNKNOWN = "it is unknown which rank hangs"
STUCK: dict[str, tuple[Happens, Happens, float, str]] = {
    "no step at all": (lambda job, _: job.write(0, "begin"), nothing, 2, UNKNOWN),
    "log lines after the first step": (
        lambda job, _: job.stalls(0, 1), lambda job, number: job.write(0, f"waiting {number}"), 1, "all_reduce"
    ),
    "a pod that starts late": (lambda job, _: job.marker(0, stalled_seconds=TIMEOUT), starts_late, 6, UNKNOWN),
    "a log that is lost": (
        lambda job, _: job.counts(0, 1), loses_its_node, 1,
        "node-1 does not respond any more at step 3 or later: its log cannot be read any more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STUCK)
@virtually
async def test_a_job_without_progress_hangs(backend: Cluster, name: str) -> None:
    """Not earlier than after so many timeouts: a first step has twice the time, once all pods have started."""
    begins, happens, timeouts, message = STUCK[name]
    job = await started(backend)
    begins(job, 0)
    await job.wait(happens=lambda number: happens(job, number))
    assert job.hung is not None
    assert job.seconds >= timeouts * TIMEOUT
    assert message in str(job.hung)
    assert ("trainjob.progress.step()" in job.hung.diagnosis.advice) is (message == UNKNOWN)


# ---------------------------------------------------------------- what counts as progress, and what it costs


def reports(job: Training, number: int) -> None:
    metrics = [{"name": "trainjob.step", "value": str(number)}]
    job.backend.status(job.ref, trainerStatus={"metrics": metrics})


def restarts(job: Training, number: int) -> None:
    """Counters go backwards, and the first step may take twice as long again."""
    for rank in (0, 1) if number == 6 else ():
        job.lose(rank)
        job.marker(rank)


def loses_all_logs(job: Training, _: int) -> None:
    if job.notices:
        job.backend.store.pod_logs.clear()


def has_ended(job: Training, _: int) -> None:
    """Its outputs are uploaded, or its kubelet is late."""
    for rank in (0, 1):
        job.marker(rank, count=3, step=3, ended=True)


def may_not_be_read(job: Training, _: int) -> None:
    def refuse(request: str) -> None:
        if request == "GET log":
            raise Refused(403, "Forbidden", "pods/log is forbidden")

    job.stalls(0, 1)
    job.backend.before = refuse


def steps_rarely(job: Training, number: int) -> None:
    """Rank 1 steps just before each reading."""
    if number % 7 == 6:
        job.marker(1, count=number + 2, step=number)


def stall(*ranks: int, step: int = 3) -> Happens:
    return lambda job, _: job.stalls(*ranks, step=step)


BY_LINES = (
    "stall_timeout 1 s: measured by log lines, since no rank counts steps (call trainjob.progress.step() on every rank)"
)
BY_STEPS = "stall_timeout 1 s: measured by the steps that the ranks count"
NO_LINE = "stall_timeout cannot be checked: no rank has written a line, reported progress or counted a step"
HEALTHY: dict[str, tuple[Happens, Happens, float, int, list[str]]] = {
    "the job reports progress": (
        stall(0, 1), reports, 3.5, 3, ["stall_timeout 1 s: measured by the progress that the job reports"]
    ),
    "one rank steps rarely": (stall(0), steps_rarely, 5, 9, [BY_STEPS]),
    "log lines before the first step": (
        lambda job, _: job.marker(0), lambda job, number: job.write(0, f"compiling {number}"), 4, 5,
        [BY_LINES],
    ),
    "a restart": (stall(0, 1, step=9), restarts, 2.6, 3, [BY_LINES]),
    "an outage of all logs": (
        lambda job, _: job.counts(0, 1), loses_all_logs, 5, 5,
        [BY_STEPS, "stall_timeout cannot be checked: the logs of 2 pods cannot be read any more"],
    ),
    "the first interval between two steps": (stall(0, 1, step=1), nothing, 1.9, 3, [BY_STEPS]),
    "a compiler": (
        lambda job, _: job.stalls(0, 1, stack=COMPILER), nothing, 9, 17,
        [BY_STEPS, "compiling on node-0, node-1: counts as a hang after 900 s without a step"],
    ),
    "ended ranks": (has_ended, nothing, 4.5, 6, []),
    "logs that may not be read": (may_not_be_read, nothing, 4.5, 18, [BY_LINES, NO_LINE]),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
@virtually
async def test_progress_is_no_hang_and_costs_few_reads(backend: Cluster, name: str) -> None:
    """What its begin is, what happens each eighth of the timeout, for how many timeouts; reads of all logs, notices."""
    begins, happens, timeouts, reads, notices = HEALTHY[name]
    job = await started(backend)
    begins(job, 0)
    await job.wait(timeouts, lambda number: happens(job, number))
    assert job.hung is None
    assert (backend.reads, job.notices) == (reads, notices)


@virtually
async def test_markers_that_other_lines_have_displaced_do_not_make_a_hang(
    backend: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob._jobs.stalls._TAIL_LINES", 5)
    job = await started(backend)
    for rank in (0, 1):
        job.marker(rank, count=3, step=3)

    def chatter(number: int) -> None:
        for rank in (0, 1) if job.notices else ():  # after the first reading
            job.write(rank, *[f"{number}"] * 5)

    await job.wait(5, chatter)
    assert job.result is not None


# ---------------------------------------------------------------- stragglers


def works(job: Training, *own: float) -> Callable[[int], None]:
    """Steps of ranks that work for so many seconds in each, in which all wait for the slowest."""

    def step(number: int) -> None:
        done = 10 * (number + 1)
        for rank, seconds in enumerate(own):
            spent = {"all": done * max(own), "waiting": done * (max(own) - seconds)}
            job.marker(rank, count=done, step=done, spent=spent)

    return step


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob._jobs.stalls._COMPARED_PER_SECOND", 1000.0)


SLOW = "node-1 on machine-1 is slower than the other ranks: 2 s of work per step, the median is 1 s."


@pytest.mark.usefixtures("quick")
@virtually
async def test_a_straggler_is_named_once_and_recorded_beside_those_of_other_waiters(backend: Cluster) -> None:
    job = await started(backend, ranks=3)
    other = Straggler("node-2", 2, "node-2", "gpu-2", 3.0, 1.0, 3.0)
    await backend.patch(job.ref, {"metadata": {"annotations": annotation([], [other])}})
    await job.wait(7, works(job, 1.0, 2.0, 1.0))
    assert job.result is not None
    assert [notice for notice in job.notices if "slower" in notice] == [
        f"{SLOW} Ranks that wait for it lose 50% of each step."
    ]
    first, found = job.result.stragglers
    assert (first["rank"], found["rank"], found["number"], found["seconds"]) == ("node-2", "node-1", 1, 2.0)
    assert job.result.as_dict()["stragglers"] == [first, found]
    assert found["summary"].startswith(SLOW)


@pytest.mark.usefixtures("quick")
@virtually
async def test_without_the_permission_to_record_them_stragglers_are_named(backend: Cluster) -> None:
    def refuse(request: str) -> None:
        if request == "PATCH trainjobs":
            raise Rejected("no permission to patch it")

    job = await started(backend, ranks=3)
    backend.before = refuse
    await job.wait(6, works(job, 1.0, 2.0, 1.0))
    assert job.result is not None
    assert any(SLOW in notice for notice in job.notices)
    assert job.result.stragglers == []


@pytest.mark.usefixtures("quick")
@virtually
async def test_of_many_stragglers_a_few_are_reported(backend: Cluster) -> None:
    job = await started(backend, ranks=12)
    await job.wait(6, works(job, *[2.0] * 5, *[1.0] * 7))
    slow = [notice for notice in job.notices if "slower" in notice or "stragglers" in notice]
    assert len(slow) == 4
    assert slow[-1] == "2 more ranks are stragglers"


def test_all_jobs_of_a_process_share_the_reads_that_compare_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    limit, now = _Limit(), 1000.0
    monkeypatch.setattr("trainjob._jobs.stalls.time.monotonic", lambda: now)
    assert limit.allows(4)
    assert not limit.allows(1)
    now += 1.9
    assert not limit.allows(1), "two logs a second"
    now += 0.2
    assert limit.allows(1)
    assert not limit.allows(1)


# ---------------------------------------------------------------- many jobs in one process


async def followed(job: Training) -> None:
    try:
        async with aclosing(follow(job.backend, job.ref)) as changes:
            async for _ in changes:
                pass
    except JobHung as error:
        job.hung = error


@virtually
async def test_many_waits_cost_nothing_while_their_jobs_make_progress(backend: Cluster) -> None:
    """One reports progress, one has no timeout, one is queued: none is read, and only the first one has a timer."""
    jobs = [
        await started(backend, "reports"),
        await started(backend, "without", stall_timeout=None),
        await started(backend, "queued", suspend=True, labels={QUEUE_LABEL: "q"}),
    ]
    tasks: set[str] = set()
    with anyio.move_on_after(3 * TIMEOUT):
        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(followed, job)
            for number in range(1000):
                reports(jobs[0], number)
                await anyio.sleep(TIMEOUT / 8)
                tasks |= {task.get_name() for task in asyncio.all_tasks() if "StallWatch._run" in repr(task)}
    assert backend.reads == 0
    assert len(tasks) == 1


@virtually
async def test_many_jobs_that_hang_are_read_a_few_at_a_time(backend: Cluster) -> None:
    async def turn(request: str) -> None:
        await anyio.sleep(0.01 if request == "GET log" else 0)

    backend.turn = turn
    jobs = [await started(backend, f"k{number}", ranks=1) for number in range(24)]
    for job in jobs:
        job.marker(0, count=3, step=3)
    async with anyio.create_task_group() as group:
        for job in jobs:
            group.start_soon(followed, job)
    assert [job.hung.diagnosis.job for job in jobs if job.hung is not None] == [str(job.ref) for job in jobs]
    assert 1 < backend.peak <= 16
