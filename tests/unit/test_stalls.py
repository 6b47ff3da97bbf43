"""A waiter that watches for progress: what counts, what costs requests, and when a job hangs."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import anyio
import pytest
from tests.contract.memory import MemoryBackend, now

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

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

TIMEOUT = 1.0  # the shortest of a spec; pauses of a loaded machine must stay below


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> MemoryBackend:
    monkeypatch.setattr("trainjob._jobs.stalls._limit", _Limit())  # not what other tests have used
    return MemoryBackend()


async def running(backend: MemoryBackend, **fields: Any) -> JobRef:
    fields = {"runtime": "r", "command": ["x"], "num_nodes": 2, "stall_timeout": TIMEOUT, **fields}
    ref = await launch(backend, TrainJobSpec.parse(fields), "key", namespace="default")
    backend.running(ref)
    return ref


def marker(backend: MemoryBackend, rank: int, **content: Any) -> None:
    text = f"trainjob.rank {json.dumps({'rank': rank, 'world': 2, **content})}"
    backend.lines.append(LogLine(now(), f"node-{rank}", text))


def stalls(backend: MemoryBackend, *ranks: int, step: int = 3) -> None:
    for rank in ranks:
        marker(backend, rank, count=step, step=step, stalled_seconds=TIMEOUT / 2)
        stack = 'File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce'
        for text in ("Main thread (most recent call first):", f"  {stack}"):
            backend.lines.append(LogLine(now(), f"node-{rank}", f"trainjob.stack {rank}| {text}"))


def tails(backend: MemoryBackend) -> int:
    return backend.requests.count("tails")


def pod(rank: int, node: str) -> dict[str, Any]:
    index = {"batch.kubernetes.io/job-completion-index": str(rank)}
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "node", **index}
    return {"metadata": {"name": f"x-node-0-{rank}-abcde", "labels": labels}, "spec": {"nodeName": node}}


class Waiter:
    """`wait` in the background, with something that happens in the job at intervals."""

    def __init__(self, backend: MemoryBackend, ref: JobRef) -> None:
        self.backend, self.ref = backend, ref
        self.notices: list[str] = []
        self.result: TrainJobResult | None = None
        self.hung: JobHung | None = None

    async def run(self) -> None:
        def change(_: object, notice: str) -> None:
            self.notices += [notice] if notice else []

        try:
            self.result = await wait(self.backend, self.ref, on_change=change)
        except JobHung as error:
            self.hung = error

    async def while_(self, happens: Callable[[int], None], seconds: float = math.inf) -> None:
        """Call `happens` each eighth of the timeout, and end the job after `seconds`; without them, until it hangs."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.run)
            end, number = time.monotonic() + seconds, 0
            while time.monotonic() < end and self.hung is None:
                happens(number)
                number += 1
                await anyio.sleep(TIMEOUT / 8)
            if self.hung is None:
                self.backend.end(self.ref)


async def test_ranks_that_make_no_step_hang_and_the_silent_one_is_named(backend: MemoryBackend) -> None:
    ref = await running(backend)
    marker(backend, 1, count=3, step=3)
    stalls(backend, 0)
    waiter = Waiter(backend, ref)
    began = time.monotonic()
    with anyio.fail_after(60):
        await waiter.run()
    assert time.monotonic() - began > TIMEOUT
    assert waiter.hung is not None
    diagnosis = waiter.hung.diagnosis
    assert (diagnosis.category, diagnosis.rank, diagnosis.job) == (Category.HANG, "node-1", str(ref))
    assert "no rank has made progress for 1s: node-1 does not respond any more at step 3" in str(waiter.hung)
    assert any("all_reduce" in line for line in diagnosis.log)
    assert waiter.notices == ["stall_timeout 1 s: measured by the steps that the ranks count"]
    assert tails(backend) == 3, "a rank that does not report its stall has the whole timeout"


async def test_a_rank_that_does_not_respond_is_noticed_within_twice_the_timeout(backend: MemoryBackend) -> None:
    """Its steps and the stall of the other rank are read at once: the silent rank has not changed since before."""
    ref = await running(backend)
    for rank in (0, 1):
        marker(backend, rank, count=2, step=2)
    waiter = Waiter(backend, ref)

    def hangs(_: int) -> None:
        if tails(backend) == 1:
            backend.lines.clear()
            marker(backend, 1, count=2, step=2)
            stalls(backend, 0)

    with anyio.fail_after(60):
        await waiter.while_(hangs)
    assert waiter.hung is not None
    assert waiter.hung.diagnosis.rank == "node-1"
    assert tails(backend) == 3, "the last one is half of the timeout after the one that showed the stall"


async def test_a_job_that_reports_progress_costs_one_read_of_each_log_per_timeout(backend: MemoryBackend) -> None:
    """To compare the ranks; and fewer if the ranks do not count steps."""
    ref = await running(backend)
    stalls(backend, 0, 1)

    def report(number: int) -> None:
        metrics = [{"name": "trainjob.step", "value": str(number)}]
        backend.status(ref, trainerStatus={"metrics": metrics, "lastUpdatedTime": now()})

    waiter = Waiter(backend, ref)
    await waiter.while_(report, 3.5 * TIMEOUT)
    assert waiter.result is not None
    assert 1 <= tails(backend) <= 3
    assert waiter.notices == ["stall_timeout 1 s: measured by the progress that the job reports"]


async def test_steps_of_any_rank_are_progress_at_one_read_per_timeout(backend: MemoryBackend) -> None:
    ref = await running(backend)
    stalls(backend, 0)
    waiter = Waiter(backend, ref)
    await waiter.while_(lambda number: marker(backend, 1, count=number + 1, step=number), 4 * TIMEOUT)
    assert waiter.result is not None
    assert tails(backend) <= 9, "half of the timeout apart while a rank reports a stall"


async def test_before_the_first_step_log_lines_are_progress(backend: MemoryBackend) -> None:
    ref = await running(backend)
    marker(backend, 0)
    waiter = Waiter(backend, ref)
    lines = (LogLine(now(), "node-0", f"compiling {number}") for number in range(1000))
    await waiter.while_(lambda _: backend.lines.append(next(lines)), 4 * TIMEOUT)
    assert waiter.result is not None
    assert tails(backend) <= 6
    assert "measured by log lines, since no rank counts steps" in waiter.notices[0]


async def test_a_job_without_any_step_has_twice_the_time(backend: MemoryBackend) -> None:
    ref = await running(backend)
    backend.lines.append(LogLine(now(), "node-0", "begin"))
    waiter = Waiter(backend, ref)
    began = time.monotonic()
    with anyio.fail_after(60):
        await waiter.run()
    assert time.monotonic() - began >= 2 * TIMEOUT
    assert waiter.hung is not None
    assert waiter.hung.diagnosis.rank == ""
    assert "it is unknown which rank hangs" in str(waiter.hung)
    assert "trainjob.progress.step()" in waiter.hung.diagnosis.advice


async def test_after_the_first_step_log_lines_are_no_progress(backend: MemoryBackend) -> None:
    ref = await running(backend)
    stalls(backend, 0, 1)
    waiter = Waiter(backend, ref)
    await waiter.while_(lambda number: backend.lines.append(LogLine(now(), "node-0", f"waiting {number}")))
    assert waiter.hung is not None


@pytest.mark.full
async def test_markers_that_other_lines_have_displaced_do_not_make_a_hang(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainjob._jobs.stalls._TAIL_LINES", 5)
    ref = await running(backend)
    marker(backend, 0, count=3, step=3)
    marker(backend, 1, count=3, step=3)

    waiter = Waiter(backend, ref)

    def chatter(number: int) -> None:
        if waiter.notices:  # after the first reading
            backend.lines += [LogLine(now(), f"node-{rank}", f"{number}") for rank in (0, 1) for _ in range(5)]

    await waiter.while_(chatter, 5 * TIMEOUT)
    assert waiter.result is not None


class Starting(MemoryBackend):
    """A job whose node-1 waits for its image."""

    waits = True

    async def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        async with aclosing(super().tails(ref, count)) as tails:
            async for tail in tails:
                yield tail
        if self.waits:
            yield {**pod(1, "machine-1"), "status": {"phase": "Pending"}}, []


@pytest.mark.full
async def test_ranks_that_wait_for_a_pod_that_has_not_started_do_not_hang() -> None:
    backend = Starting()
    ref = await running(backend)
    marker(backend, 0, stalled_seconds=TIMEOUT)
    waiter = Waiter(backend, ref)

    def start(number: int) -> None:
        backend.waits = number < 4 * 8

    with anyio.fail_after(60):
        began = time.monotonic()
        await waiter.while_(start)
    assert waiter.hung is not None
    assert time.monotonic() - began > 6 * TIMEOUT, "twice the timeout after all pods have started"


async def test_a_job_whose_ranks_have_ended_does_not_hang(backend: MemoryBackend) -> None:
    """Its outputs are uploaded, or its kubelet is late."""
    ref = await running(backend)
    for rank in (0, 1):
        marker(backend, rank, count=3, step=3, ended=True)
    waiter = Waiter(backend, ref)
    await waiter.while_(lambda _: None, 4 * TIMEOUT)
    assert waiter.result is not None


async def test_a_job_without_any_line_is_not_judged(backend: MemoryBackend) -> None:
    """As for an account that may not read logs."""
    waiter = Waiter(backend, await running(backend))
    await waiter.while_(lambda _: None, 4.5 * TIMEOUT)
    assert waiter.result is not None
    assert waiter.notices[-1].startswith("stall_timeout cannot be checked: no rank has written a line")


async def test_a_job_that_does_not_run_cannot_hang(backend: MemoryBackend) -> None:
    ref = await running(backend)
    stalls(backend, 0, 1)
    backend.condition(ref, "Suspended", "Suspended")
    backend.job(ref)["spec"]["suspend"] = True
    waiter = Waiter(backend, ref)
    await waiter.while_(lambda _: None, 3 * TIMEOUT)
    assert waiter.hung is None
    assert tails(backend) == 0


async def test_a_restart_begins_a_new_start(backend: MemoryBackend) -> None:
    """Counters go backwards, and the first step may take twice as long again."""
    ref = await running(backend)
    stalls(backend, 0, 1, step=9)

    def restart(number: int) -> None:
        if number == 6:
            backend.lines.clear()
            marker(backend, 0)
            marker(backend, 1)

    waiter = Waiter(backend, ref)
    await waiter.while_(restart, 2.6 * TIMEOUT)
    assert waiter.hung is None


async def test_a_job_without_the_timeout_costs_nothing(backend: MemoryBackend) -> None:
    ref = await running(backend, stall_timeout=None)
    stalls(backend, 0, 1)
    waiter = Waiter(backend, ref)
    await waiter.while_(lambda _: None, 2 * TIMEOUT)
    assert (waiter.hung, tails(backend), waiter.notices) == (None, 0, [])


async def test_the_next_attempt_of_a_job_that_hangs_avoids_its_node(backend: MemoryBackend) -> None:
    fields = {"stall_timeout": TIMEOUT, "on_retry": {"hang": {"max_excluded_nodes": 1}}}
    ref = await running(backend, **fields)
    backend.terminated[ref.uid] = [pod(rank, f"machine-{rank}") for rank in range(2)]
    marker(backend, 1, count=3, step=3)
    stalls(backend, 0)
    waiter = Waiter(backend, ref)
    await waiter.run()
    assert waiter.hung is not None
    assert waiter.hung.diagnosis.node == "machine-1"
    assert waiter.hung.diagnosis.change == "excluded_nodes (none) -> that of the failed rank"


async def test_a_job_that_hangs_is_ended_with_its_diagnosis_kept(backend: MemoryBackend) -> None:
    ref = await running(backend)
    stalls(backend, 0, 1)
    waiter = Waiter(backend, ref)
    await waiter.run()
    assert waiter.hung is not None
    assert await give_up(backend, ref, waiter.hung.diagnosis, "suspend") == f"{ref} was suspended"
    assert observe(backend.job(ref)).phase is Phase.SUSPENDED
    assert '"category": "hang"' in backend.job(ref)["metadata"]["annotations"]["trainjob.dev/given-up"]


@pytest.mark.full
async def test_an_outage_of_all_logs_is_no_hang(backend: MemoryBackend) -> None:
    ref = await running(backend)
    marker(backend, 0, count=3, step=3)
    marker(backend, 1, count=3, step=3)
    waiter = Waiter(backend, ref)
    await waiter.while_(lambda _: backend.lines.clear() if waiter.notices else None, 5 * TIMEOUT)
    assert waiter.hung is None
    assert waiter.notices[-1] == "stall_timeout cannot be checked: the logs of 2 pods cannot be read any more"


async def test_a_rank_whose_log_is_lost_with_its_node_is_named(backend: MemoryBackend) -> None:
    ref = await running(backend)
    marker(backend, 0, count=3, step=3)
    marker(backend, 1, count=3, step=3)

    waiter = Waiter(backend, ref)

    def lose(_: int) -> None:
        if waiter.notices and any(line.rank == "node-1" for line in backend.lines):  # after the first reading
            backend.lines = [line for line in backend.lines if line.rank == "node-0"]
            stalls(backend, 0)

    await waiter.while_(lose)
    assert waiter.hung is not None
    assert "node-1 does not respond any more at step 3: its log cannot be read any more" in str(waiter.hung)


@pytest.mark.full
async def test_steps_of_one_rank_count_although_another_one_reports_a_stall(backend: MemoryBackend) -> None:
    """The first reading shows the stall of rank 0, and rank 1 steps just before each reading."""
    ref = await running(backend)
    stalls(backend, 0)
    marker(backend, 1, count=1, step=1)
    waiter = Waiter(backend, ref)
    await waiter.while_(
        lambda number: marker(backend, 1, count=number + 2, step=number) if number % 7 == 6 else None, 5 * TIMEOUT
    )
    assert waiter.hung is None


# ---------------------------------------------------------------- stragglers


def works(backend: MemoryBackend, *own: float) -> Callable[[int], None]:
    """Steps of ranks that work for so many seconds in each, in which all wait for the slowest."""

    def step(number: int) -> None:
        done = 10 * (number + 1)
        for rank, seconds in enumerate(own):
            spent = {"all": done * max(own), "waiting": done * (max(own) - seconds)}
            marker(backend, rank, count=done, step=done, spent=spent)

    return step


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainjob._jobs.stalls._COMPARED_PER_SECOND", 1000.0)


SLOW = "node-1 is slower than the other ranks: 2 s of work per step, the median is 1 s."


@pytest.mark.full
@pytest.mark.usefixtures("quick")
async def test_a_straggler_is_named_once_and_recorded(backend: MemoryBackend) -> None:
    ref = await running(backend, num_nodes=3)
    waiter = Waiter(backend, ref)
    await waiter.while_(works(backend, 1.0, 2.0, 1.0), 7 * TIMEOUT)
    assert waiter.result is not None
    assert [notice for notice in waiter.notices if "slower" in notice] == [
        f"{SLOW} Ranks that wait for it lose 50% of each step."
    ]
    (found,) = waiter.result.stragglers
    assert (found["rank"], found["number"], found["seconds"], found["median"]) == ("node-1", 1, 2.0, 1.0)
    assert waiter.result.as_dict()["stragglers"] == [found]
    assert found["summary"].startswith(SLOW)


@pytest.mark.full
@pytest.mark.usefixtures("quick")
async def test_a_straggler_that_another_waiter_has_found_stays(backend: MemoryBackend) -> None:
    ref = await running(backend, num_nodes=3)
    other = Straggler("node-2", 2, "node-2", "gpu-2", 3.0, 1.0, 3.0)
    await backend.patch(ref, {"metadata": {"annotations": annotation([], [other])}})
    waiter = Waiter(backend, ref)
    await waiter.while_(works(backend, 1.0, 2.0, 1.0), 6 * TIMEOUT)
    assert waiter.result is not None
    assert [each["rank"] for each in waiter.result.stragglers] == ["node-2", "node-1"]


@pytest.mark.full
@pytest.mark.usefixtures("quick")
async def test_without_the_permission_to_record_them_stragglers_are_named(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await running(backend, num_nodes=3)

    async def refuse(*_: object) -> None:
        raise Rejected("no permission to patch it")

    monkeypatch.setattr(backend, "patch", refuse)
    waiter = Waiter(backend, ref)
    await waiter.while_(works(backend, 1.0, 2.0, 1.0), 6 * TIMEOUT)
    assert waiter.result is not None
    assert any(SLOW in notice for notice in waiter.notices)
    assert waiter.result.stragglers == []


@pytest.mark.full
@pytest.mark.usefixtures("quick")
async def test_of_many_stragglers_a_few_are_reported(backend: MemoryBackend) -> None:
    ref = await running(backend, num_nodes=12)
    waiter = Waiter(backend, ref)
    await waiter.while_(works(backend, *[2.0] * 5, *[1.0] * 7), 6 * TIMEOUT)
    slow = [notice for notice in waiter.notices if "slower" in notice or "stragglers" in notice]
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


async def test_many_waits_cost_nothing_while_their_jobs_make_progress(backend: MemoryBackend) -> None:
    """One reports progress, one has no timeout, one is queued: none is read, and only the first one has a timer."""
    jobs = {}
    kinds: dict[str, dict[str, Any]] = {
        "reports": {},
        "without": {"stall_timeout": None},
        "queued": {"suspend": True, "labels": {QUEUE_LABEL: "q"}},
    }
    for name, fields in kinds.items():
        spec = TrainJobSpec.parse({"runtime": "r", "command": ["x"], "stall_timeout": TIMEOUT, **fields})
        jobs[name] = await launch(backend, spec, name, namespace="default")
    for name in ("reports", "without"):
        backend.running(jobs[name])
    tasks: set[str] = set()

    async def follow_one(ref: JobRef) -> None:
        async with aclosing(until_hung(backend, ref, follow(backend, ref), lambda *_: None)) as changes:
            async for _ in changes:
                pass

    with anyio.move_on_after(3 * TIMEOUT):
        async with anyio.create_task_group() as group:
            for ref in jobs.values():
                group.start_soon(follow_one, ref)
            for number in range(1000):
                metrics = [{"name": "trainjob.step", "value": str(number)}]
                backend.status(jobs["reports"], trainerStatus={"metrics": metrics, "lastUpdatedTime": now()})
                await anyio.sleep(TIMEOUT / 8)
                tasks |= {task.get_name() for task in asyncio.all_tasks() if "StallWatch.run" in repr(task)}
    assert tails(backend) == 0
    assert len(tasks) == 1


async def test_many_jobs_that_hang_are_read_a_few_at_a_time(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker(backend, 0, count=3, step=3)
    reading = peak = 0
    read = backend.tails

    async def slowly(ref: JobRef, count: int) -> AsyncGenerator[Any]:
        nonlocal reading, peak
        reading += 1
        peak = max(peak, reading)
        try:
            await anyio.sleep(0.01)
            async with aclosing(read(ref, count)) as found:
                async for each in found:
                    yield each
        finally:
            reading -= 1

    monkeypatch.setattr(backend, "tails", slowly)
    hung = []

    async def follow_one(ref: JobRef) -> None:
        try:
            async with aclosing(until_hung(backend, ref, follow(backend, ref), lambda *_: None)) as changes:
                async for _ in changes:
                    pass
        except JobHung as error:
            hung.append(error.diagnosis.job)

    refs = []
    for number in range(60):
        spec = TrainJobSpec.parse({"runtime": "r", "command": ["x"], "stall_timeout": TIMEOUT})
        refs.append(await launch(backend, spec, f"k{number}", namespace="default"))
        backend.running(refs[-1])
    with anyio.fail_after(100):
        async with anyio.create_task_group() as group:
            for ref in refs:
                group.start_soon(follow_one, ref)
    assert sorted(hung) == sorted(map(str, refs))
    assert 1 < peak <= 16
