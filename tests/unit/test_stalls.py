"""A waiter that watches for progress, in virtual time: what counts, what costs requests, and when a job hangs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
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
from trainjob._jobs.cancellation import give_up
from trainjob._jobs.following import follow
from trainjob._jobs.launching import launch
from trainjob._jobs.stalls import _Limit
from trainjob._jobs.waiting import until_hung, wait
from trainjob._spec import TrainJobSpec
from trainjob._support.log_lines import LogLine
from trainjob.errors import Rejected
from trainjob.status import QUEUE_LABEL, Phase, observe
from trainjob.verdicts import Category

TIMEOUT = 1.0
STACK = (
    "Main thread (most recent call first):",
    '  File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce',
)


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

    def stalls(self, *ranks: int, step: int = 3) -> None:
        for rank in ranks:
            self.marker(rank, count=step, step=step, stalled_seconds=TIMEOUT / 2)
            self.write(rank, *(f"trainjob.stack {rank}| {line}" for line in STACK))

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
    job = await started(backend)
    job.marker(1, count=3, step=3)
    job.stalls(0)
    await job.wait()
    assert job.hung is not None
    diagnosis = job.hung.diagnosis
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


@virtually
async def test_a_job_without_any_step_has_twice_the_time(backend: Cluster) -> None:
    job = await started(backend)
    job.write(0, "begin")
    await job.wait()
    assert job.hung is not None
    assert job.seconds >= 2 * TIMEOUT
    assert job.hung.diagnosis.rank == ""
    assert "it is unknown which rank hangs" in str(job.hung)
    assert "trainjob.progress.step()" in job.hung.diagnosis.advice


@virtually
async def test_after_the_first_step_log_lines_are_no_progress(backend: Cluster) -> None:
    job = await started(backend)
    job.stalls(0, 1)
    await job.wait(happens=lambda number: job.write(0, f"waiting {number}"))
    assert job.hung is not None


@virtually
async def test_ranks_that_wait_for_a_pod_that_has_not_started_do_not_hang(backend: Cluster) -> None:
    job = await started(backend)
    backend.pod(job.ref, 1, state=objects.waiting("ContainerCreating"), phase="Pending")
    job.marker(0, stalled_seconds=TIMEOUT)
    await job.wait(happens=lambda number: backend.pod(job.ref, 1) if number == 4 * 8 else None)
    assert job.hung is not None
    assert job.seconds > 6 * TIMEOUT, "twice the timeout after all pods have started"


@virtually
async def test_a_rank_whose_log_is_lost_with_its_node_is_named(backend: Cluster) -> None:
    job = await started(backend)
    job.marker(0, count=3, step=3)
    job.marker(1, count=3, step=3)

    def lose(_: int) -> None:
        if job.notices:  # after the first reading
            job.lose(1)
            job.stalls(0)

    await job.wait(happens=lose)
    assert job.hung is not None
    assert "node-1 does not respond any more at step 3: its log cannot be read any more" in str(job.hung)


@virtually
async def test_the_next_attempt_of_a_job_that_hangs_avoids_its_node(backend: Cluster) -> None:
    job = await started(backend, on_retry={"hang": {"max_excluded_nodes": 1}})
    job.marker(1, count=3, step=3)
    job.stalls(0)
    await job.wait()
    assert job.hung is not None
    assert job.hung.diagnosis.node == "machine-1"
    assert job.hung.diagnosis.change == "excluded_nodes (none) -> that of the failed rank"


@virtually
async def test_a_job_that_hangs_is_ended_with_its_diagnosis_kept(backend: Cluster) -> None:
    job = await started(backend)
    job.stalls(0, 1)
    await job.wait()
    assert job.hung is not None
    assert await give_up(backend, job.ref, job.hung.diagnosis, "suspend") == f"{job.ref} was suspended"
    assert observe(backend.job(job.ref)).phase is Phase.SUSPENDED
    assert '"category": "hang"' in backend.job(job.ref)["metadata"]["annotations"]["trainjob.dev/given-up"]


# ---------------------------------------------------------------- what counts as progress, and what it costs


@virtually
async def test_a_job_that_reports_progress_costs_one_read_of_each_log_per_timeout(backend: Cluster) -> None:
    """To compare the ranks; and fewer if the ranks do not count steps."""
    job = await started(backend)
    job.stalls(0, 1)

    def report(number: int) -> None:
        backend.status(job.ref, trainerStatus={"metrics": [{"name": "trainjob.step", "value": str(number)}]})

    await job.wait(3.5, report)
    assert job.result is not None
    assert backend.reads == 3
    assert job.notices == ["stall_timeout 1 s: measured by the progress that the job reports"]


@virtually
async def test_steps_of_any_rank_are_progress_at_one_read_per_timeout(backend: Cluster) -> None:
    job = await started(backend)
    job.stalls(0)
    await job.wait(4, lambda number: job.marker(1, count=number + 1, step=number))
    assert job.result is not None
    assert backend.reads <= 9, "half of the timeout apart while a rank reports a stall"


@virtually
async def test_before_the_first_step_log_lines_are_progress(backend: Cluster) -> None:
    job = await started(backend)
    job.marker(0)
    await job.wait(4, lambda number: job.write(0, f"compiling {number}"))
    assert job.result is not None
    assert backend.reads <= 6
    assert "measured by log lines, since no rank counts steps" in job.notices[0]


@virtually
async def test_steps_of_one_rank_count_although_another_one_reports_a_stall(backend: Cluster) -> None:
    """The first reading shows the stall of rank 0, and rank 1 steps just before each reading."""
    job = await started(backend)
    job.stalls(0)
    job.marker(1, count=1, step=1)
    await job.wait(5, lambda number: job.marker(1, count=number + 2, step=number) if number % 7 == 6 else None)
    assert job.hung is None


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


@virtually
async def test_a_restart_begins_a_new_start(backend: Cluster) -> None:
    """Counters go backwards, and the first step may take twice as long again."""
    job = await started(backend)
    job.stalls(0, 1, step=9)

    def restart(number: int) -> None:
        for rank in (0, 1) if number == 6 else ():
            job.lose(rank)
            job.marker(rank)

    await job.wait(2.6, restart)
    assert job.hung is None


@virtually
async def test_an_outage_of_all_logs_is_no_hang(backend: Cluster) -> None:
    job = await started(backend)
    for rank in (0, 1):
        job.marker(rank, count=3, step=3)
    await job.wait(5, lambda _: backend.store.pod_logs.clear() if job.notices else None)
    assert job.hung is None
    assert job.notices[-1] == "stall_timeout cannot be checked: the logs of 2 pods cannot be read any more"


async def ended(job: Training) -> None:
    """Its outputs are uploaded, or its kubelet is late."""
    for rank in (0, 1):
        job.marker(rank, count=3, step=3, ended=True)


async def without_logs(job: Training) -> None:
    """As for an account that may not read them."""

    def refuse(request: str) -> None:
        if request == "GET log":
            raise Refused(403, "Forbidden", "pods/log is forbidden")

    job.stalls(0, 1)
    job.backend.before = refuse


async def suspended(job: Training) -> None:
    job.stalls(0, 1)
    await job.backend.patch(job.ref, {"spec": {"suspend": True}})


async def without_timeout(job: Training) -> None:
    job.stalls(0, 1)


NO_LINE = "stall_timeout cannot be checked: no rank has written a line, reported progress or counted a step"


@pytest.mark.parametrize(
    ("prepare", "fields", "read", "notices"),
    [
        (ended, {}, True, []),
        (without_logs, {}, True, [NO_LINE]),
        (suspended, {}, False, []),
        (without_timeout, {"stall_timeout": None}, False, []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@virtually
async def test_a_job_that_is_not_judged_does_not_hang(
    backend: Cluster,
    prepare: Callable[[Training], Awaitable[None]],
    fields: dict[str, Any],
    read: bool,
    notices: list[str],
) -> None:
    job = await started(backend, **fields)
    await prepare(job)
    await job.wait(4.5)
    assert job.hung is None
    assert bool(backend.reads) is read
    assert job.notices[-1:] == notices


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
async def test_a_straggler_is_named_once_and_recorded(backend: Cluster) -> None:
    job = await started(backend, ranks=3)
    await job.wait(7, works(job, 1.0, 2.0, 1.0))
    assert job.result is not None
    assert [notice for notice in job.notices if "slower" in notice] == [
        f"{SLOW} Ranks that wait for it lose 50% of each step."
    ]
    (found,) = job.result.stragglers
    assert (found["rank"], found["number"], found["seconds"], found["median"]) == ("node-1", 1, 2.0, 1.0)
    assert job.result.as_dict()["stragglers"] == [found]
    assert found["summary"].startswith(SLOW)


@pytest.mark.usefixtures("quick")
@virtually
async def test_a_straggler_that_another_waiter_has_found_stays(backend: Cluster) -> None:
    job = await started(backend, ranks=3)
    other = Straggler("node-2", 2, "node-2", "gpu-2", 3.0, 1.0, 3.0)
    await backend.patch(job.ref, {"metadata": {"annotations": annotation([], [other])}})
    await job.wait(6, works(job, 1.0, 2.0, 1.0))
    assert job.result is not None
    assert [each["rank"] for each in job.result.stragglers] == ["node-2", "node-1"]


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
        async with aclosing(until_hung(job.backend, job.ref, follow(job.backend, job.ref), lambda *_: None)) as changes:
            async for _ in changes:
                pass
    except JobHung as error:
        job.hung = error


@virtually
async def test_many_waits_cost_nothing_while_their_jobs_make_progress(backend: Cluster) -> None:
    """One reports progress, one has no timeout, one is queued: none is read, and only the first one has a timer."""
    reports = await started(backend, "reports")
    jobs = [
        reports,
        await started(backend, "without", stall_timeout=None),
        await started(backend, "queued", suspend=True, labels={QUEUE_LABEL: "q"}),
    ]
    tasks: set[str] = set()
    with anyio.move_on_after(3 * TIMEOUT):
        async with anyio.create_task_group() as group:
            for job in jobs:
                group.start_soon(followed, job)
            for number in range(1000):
                metrics = [{"name": "trainjob.step", "value": str(number)}]
                backend.status(reports.ref, trainerStatus={"metrics": metrics})
                await anyio.sleep(TIMEOUT / 8)
                tasks |= {task.get_name() for task in asyncio.all_tasks() if "StallWatch.run" in repr(task)}
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
