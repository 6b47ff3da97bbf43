"""What a waiter does when its job is gone, was given up, or was suspended before its latest launch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from tests.contract.memory import MemoryCluster
from tests.unit.interleaving import once

from trainjob import JobRef, Observation, Phase, TrainJobFailed, TrainJobResult, TrainJobSpec, WaitOptions
from trainjob._jobs import following, waiting
from trainjob._jobs.cancellation import cancel, cancel_key, give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.reaper import reap
from trainjob._jobs.successors import check_verdict
from trainjob._manifest.attempts import LAUNCHED
from trainjob._manifest.render import render
from trainjob._manifest.unattended import MARK
from trainjob.errors import NotFound, QueueTimeout, Rejected
from trainjob.job import TRY
from trainjob.status import CANCELLED
from trainjob.verdicts import Category, Diagnosis, RetryVerdict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
WHY = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 3", advice="fix the code")


@pytest.fixture
def backend() -> MemoryCluster:
    return MemoryCluster()


async def attempt(backend: MemoryCluster, number: int = 1, key: str = "key") -> JobRef:
    turn, backend.turn = backend.turn, None
    ref = JobRef.of(await backend.create(render(SPEC, key, number, "ns")))
    backend.turn = turn
    return ref


class Waiter:
    """A wait for a job, and what it reports."""

    def __init__(self, backend: MemoryCluster, ref: JobRef, options: WaitOptions | None = None) -> None:
        self.phases: list[Phase] = []
        self.notices: list[str] = []
        self.followed: list[JobRef] = []
        self.watched: list[JobRef] = []
        self._task = asyncio.create_task(self._wait(backend, ref, options))

    async def _wait(self, backend: MemoryCluster, ref: JobRef, options: WaitOptions | None) -> TrainJobResult:
        return await waiting.wait(
            backend, ref, options, on_change=self._change, on_follow=self.followed.append, on_log=lambda _: None
        )

    def _change(self, observation: Observation, notice: str) -> None:
        self.phases.append(observation.phase)
        self.notices += [notice] if notice else []

    async def until(self, happened: Callable[[], bool]) -> None:
        with anyio.fail_after(20):
            while not happened():
                assert not self._task.done(), self._task
                await asyncio.sleep(0.002)

    async def result(self) -> TrainJobResult:
        with anyio.fail_after(20):
            return await self._task

    async def diagnosis(self) -> Diagnosis:
        with pytest.raises(TrainJobFailed) as caught:
            await self.result()
        return caught.value.diagnosis

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


# ---------------------------------------------------------------- another attempt counts


async def test_a_waiter_follows_the_attempt_that_counts(backend: MemoryCluster) -> None:
    """Another launcher has ended its attempt by the rule of two."""
    first, second = await attempt(backend), await attempt(backend, 2)
    waiter = Waiter(backend, first)
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(first)
    await waiter.until(lambda: bool(waiter.followed))
    assert waiter.followed == [second]
    backend.end(second)
    result = await waiter.result()
    assert (result.uid, result.attempt) == (second.uid, 2)
    assert Phase.DELETED not in waiter.phases


async def test_a_waiter_follows_several_times(backend: MemoryCluster) -> None:
    refs = [await attempt(backend, number) for number in (1, 2, 3)]
    waiter = Waiter(backend, refs[0])
    for ref in refs[:2]:
        await backend.delete(ref)
        await waiter.until(lambda ref=ref: waiter.followed[-1:] == [refs[refs.index(ref) + 1]])  # type: ignore[misc]
    backend.end(refs[2], 3)
    assert (await waiter.diagnosis()).job == f"ns/{refs[2].name}"


async def test_a_waiter_that_starts_after_the_deletion_follows(backend: MemoryCluster) -> None:
    first, second = await attempt(backend), await attempt(backend, 2)
    await backend.delete(first)
    backend.end(second)
    result = await waiting.wait(backend, first)
    assert result.uid == second.uid


async def test_a_waiter_follows_to_a_complete_attempt_that_was_not_delivered(backend: MemoryCluster) -> None:
    first, second = await attempt(backend), await attempt(backend, 2)
    backend.end(first)
    waiter = Waiter(backend, second)
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(second)
    assert (await waiter.result()).uid == first.uid


async def test_a_waiter_ends_nothing(backend: MemoryCluster) -> None:
    """Waiters only follow: launchers and the reaper end what does not count."""
    first, second, third = [await attempt(backend, number) for number in (1, 2, 3)]
    waiter = Waiter(backend, second)
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(second)
    await waiter.until(lambda: waiter.followed == [first])
    assert {JobRef.of(job) for job in backend.jobs.values()} == {first, third}
    await waiter.stop()


async def test_a_job_without_another_attempt_was_deleted(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    await attempt(backend, 1, "another key")
    backend.end(await attempt(backend, 2), 3)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(ref)
    assert (await waiter.diagnosis()).category is Category.DELETED
    assert waiter.followed == []


async def test_one_look_for_another_attempt(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    await backend.delete(ref)
    backend.requests.clear()
    with pytest.raises(TrainJobFailed):
        await waiting.wait(backend, ref)
    assert backend.requests.count("find") == 1


async def test_a_foreign_job_is_not_looked_for(backend: MemoryCluster) -> None:
    made = {**render(SPEC, "key", 1, "ns")}
    made["metadata"] |= {"name": "digits"}
    ref = JobRef.of(await backend.create(made))
    await backend.delete(ref)
    backend.requests.clear()
    with pytest.raises(TrainJobFailed):
        await waiting.wait(backend, ref)
    assert "find" not in backend.requests


@pytest.mark.parametrize("last", [True, False])
async def test_an_end_that_was_seen_is_kept(backend: MemoryCluster, last: bool) -> None:
    """A job that has ended and is gone is not followed by another attempt of its key."""
    ref = await attempt(backend)
    await attempt(backend, 2)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    backend.end(ref)
    if last:
        await backend.delete(ref)
    result = await waiter.result()
    assert (result.uid, waiter.followed) == (ref.uid, [])


# ---------------------------------------------------------------- given up


async def test_who_waits_for_a_job_that_another_waiter_gave_up_gets_its_diagnosis(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await give_up(backend, ref, WHY)
    found = await waiter.diagnosis()
    assert (found.summary, found.retry, found.advice) == (WHY.summary, WHY.retry, WHY.advice)
    assert found.job == f"ns/{ref.name}"
    with pytest.raises(TrainJobFailed, match="node-0 exited with code 3"):
        await waiting.wait(backend, ref)


async def test_who_waits_for_a_given_up_job_follows_the_next_attempt(backend: MemoryCluster) -> None:
    first = await launch(backend, SPEC, "key", namespace="ns")
    await give_up(backend, first, WHY)
    second = await launch(backend, SPEC, "key", namespace="ns")
    waiter = Waiter(backend, first)
    await waiter.until(lambda: waiter.followed == [second])
    backend.end(second)
    assert (await waiter.result()).attempt == 2


async def test_a_given_up_job_that_a_person_resumed_is_waited_for(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    await give_up(backend, ref, WHY)
    await backend.patch(ref, {"spec": {"suspend": False}})
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    backend.end(ref)
    assert (await waiter.result()).uid == ref.uid


# ---------------------------------------------------------------- cancelled


async def test_a_deleted_job_of_a_cancelled_key_was_cancelled(backend: MemoryCluster) -> None:
    """A deletion carries no mark: the record of the cancel tells."""
    ref = await launch(backend, SPEC, "key", namespace="ns")
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)
    assert "the job was cancelled with trainjob" in (await waiter.diagnosis()).summary


@pytest.mark.parametrize(("tried", "cancelled"), [(1, True), (2, True), (3, False)])
async def test_a_job_that_a_kill_of_another_try_concerns_was_not_cancelled(
    backend: MemoryCluster, tried: int, cancelled: bool
) -> None:
    ref = await launch(backend, SPEC, "key", namespace="ns", tried=tried)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await cancel_key(backend, "other", namespace="ns", timeout_seconds=0)
    other, _ = await asyncio.gather(
        cancel_key(backend, "key", namespace="ns", tried=2, timeout_seconds=0), backend.delete(ref)
    )
    found = await waiter.diagnosis()
    assert ("the job was cancelled with trainjob" in found.summary) is cancelled
    assert found.category is Category.DELETED
    assert other.ended in (True, False)


@pytest.mark.parametrize("of_key", [True, False])
async def test_a_job_of_which_the_begin_of_the_launch_is_unknown_was_cancelled(
    backend: MemoryCluster, of_key: bool
) -> None:
    """A version before this one has launched it, or an account that may not read Leases."""
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    if of_key:
        await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)
    else:
        await cancel(backend, ref, timeout_seconds=0)
    assert "the job was cancelled with trainjob" in (await waiter.diagnosis()).summary


async def test_a_cancel_before_a_job_was_created_has_not_deleted_it(backend: MemoryCluster) -> None:
    await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(ref)
    assert "cancelled" not in (await waiter.diagnosis()).summary


async def test_a_job_that_a_person_deleted_was_not_cancelled(backend: MemoryCluster) -> None:
    first = await launch(backend, SPEC, "key", namespace="ns")
    await cancel(backend, first)
    ref = await launch(backend, SPEC, "key", namespace="ns")
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(ref)
    assert "cancelled" not in (await waiter.diagnosis()).summary


# ---------------------------------------------------------------- suspended before the latest launch


async def suspend(backend: MemoryCluster, ref: JobRef, **annotations: str) -> None:
    named = {{"mark": CANCELLED, "launched": LAUNCHED, "tried": TRY}[name]: text for name, text in annotations.items()}
    await backend.patch(ref, {"metadata": {"annotations": named}, "spec": {"suspend": True}})


@pytest.mark.parametrize(
    ("annotations", "notice"),
    [
        ({"mark": MARK}, "it was suspended because nobody waited for it; it is resumed"),
        ({"mark": "5", "launched": "5"}, "it was suspended by a cancel before its latest launch; it is resumed"),
        ({"mark": "5", "launched": "9"}, "it was suspended by a cancel before its latest launch; it is resumed"),
        ({"mark": "try:1", "tried": "2"}, "it was suspended by a cancel before its latest launch; it is resumed"),
    ],
)
async def test_a_stale_suspension_is_healed(backend: MemoryCluster, annotations: dict[str, str], notice: str) -> None:
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await suspend(backend, ref, **annotations)
    await waiter.until(lambda: notice in waiter.notices)
    job = backend.job(ref)
    assert (job["spec"]["suspend"], CANCELLED in job["metadata"]["annotations"]) == (False, False)
    backend.end(ref)
    await waiter.result()


@pytest.mark.parametrize(
    "annotations",
    [
        {},
        {"mark": "true"},
        {"mark": "6", "launched": "5"},
        {"mark": "6"},
        {"mark": "try:2", "tried": "2"},
        {"mark": "try:1"},
        {"mark": "odd"},
    ],
    ids=str,
)
async def test_a_suspension_by_a_person_or_a_newer_cancel_is_kept(
    backend: MemoryCluster, annotations: dict[str, str]
) -> None:
    ref = await attempt(backend)
    waiter = Waiter(backend, ref, WaitOptions(queue_timeout=timedelta(seconds=0.2)))
    await waiter.until(lambda: bool(waiter.phases))
    await suspend(backend, ref, **annotations)
    with pytest.raises(QueueTimeout, match="is Suspended"):
        await waiter.result()
    assert backend.job(ref)["spec"]["suspend"]
    assert not any("resumed" in notice for notice in waiter.notices if "it is resumed" in notice)


async def test_a_resume_carries_the_version(backend: MemoryCluster) -> None:
    """A cancel between the look and the resume is not undone."""
    ref = await attempt(backend)
    await suspend(backend, ref, mark="try:1", tried="2")

    async def cancelled() -> None:
        await suspend(backend, ref, mark="true")

    once(backend, "patch", cancelled)
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, ref, WaitOptions(queue_timeout=timedelta(seconds=0.2)))
    assert backend.job(ref)["spec"]["suspend"]


async def test_a_resume_looks_right_before(backend: MemoryCluster) -> None:
    """The snapshot of a watch may be old."""
    ref = await attempt(backend)
    await suspend(backend, ref, mark="try:1", tried="2")

    async def healed() -> None:
        await backend.patch(ref, {"metadata": {"annotations": {CANCELLED: None}}})

    once(backend, "get", healed)
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, ref, WaitOptions(queue_timeout=timedelta(seconds=0.2)))
    assert backend.job(ref)["spec"]["suspend"], "a person has taken the mark away: it stays suspended"


async def test_a_job_that_vanishes_before_the_resume_is_gone(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    await suspend(backend, ref, mark=MARK)

    async def vanish() -> None:
        await backend.delete(ref)

    once(backend, "patch", vanish)
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref)
    assert caught.value.diagnosis.category is Category.DELETED
    with pytest.raises(NotFound):
        backend.job(ref)


async def test_a_resume_that_is_refused_is_reported_once(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    await suspend(backend, ref, mark="try:1", tried="2")

    def refuse(request: str) -> None:
        if request == "patch":
            raise Rejected("its runtime is gone")

    backend.before = refuse
    await waiter.until(lambda: bool(waiter.notices))
    for _ in range(3):
        backend.status(ref, jobsStatus=[])
        await asyncio.sleep(0.01)
    assert waiter.notices == [
        "it was suspended by a cancel before its latest launch, and cannot be resumed: its runtime is gone"
    ]
    await waiter.stop()


# ---------------------------------------------------------------- a deletion that does not end


@pytest.mark.full
async def test_a_wait_ends_when_a_deletion_has_lasted_for_its_grace_period_and_a_minute(
    backend: MemoryCluster,
) -> None:
    """The node does not answer: the finalizer stays, and so does the object."""
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    backend.job(ref)["metadata"]["deletionTimestamp"] = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    backend.running(ref)
    found = await waiter.diagnosis()
    assert found.category is Category.DELETED
    assert f"TrainJob {ref} is still being deleted: a node may not answer, and may still write" in waiter.notices


@pytest.mark.full
async def test_a_deletion_is_waited_for_while_it_may_end(
    backend: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))
    backend.job(ref)["metadata"]["deletionTimestamp"] = (datetime.now(UTC) - timedelta(seconds=60)).isoformat()
    backend.running(ref)
    await asyncio.sleep(0.2)
    assert Phase.DELETED not in waiter.phases
    monkeypatch.setattr(following, "_DELETION_SECONDS", 60.5)
    backend.status(ref, jobsStatus=[])
    assert (await waiter.diagnosis()).category is Category.DELETED


async def test_a_job_whose_deletion_does_not_end_is_followed_by_the_next_attempt(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    backend.job(ref)["metadata"]["deletionTimestamp"] = (datetime.now(UTC) - timedelta(seconds=100)).isoformat()
    second = await launch(backend, SPEC, "key", namespace="ns")
    backend.end(second)
    assert (await waiting.wait(backend, ref)).uid == second.uid


async def test_a_waiter_that_may_not_list_jobs_says_that_its_job_was_deleted(backend: MemoryCluster) -> None:
    ref = await attempt(backend)
    waiter = Waiter(backend, ref)
    await waiter.until(lambda: bool(waiter.phases))

    def refuse(request: str) -> None:
        if request == "find":
            raise Rejected("TrainJobs in namespace ns cannot be listed")

    backend.before = refuse
    await backend.delete(ref)
    assert (await waiter.diagnosis()).category is Category.DELETED


# ---------------------------------------------------------------- the verdict of another JobSet


@pytest.mark.parametrize("code", [0, 3])
async def test_the_end_of_an_earlier_job_of_the_same_name_is_no_verdict(backend: MemoryCluster, code: int) -> None:
    """Trainer finds a JobSet by its name: the new TrainJob gets the Complete or Failed of the old one."""
    ref = await attempt(backend)
    backend.foreign.add(ref.uid)
    backend.end(ref, code)
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref)
    assert caught.value.retry is RetryVerdict.INFRASTRUCTURE
    assert "was that of the JobSet of an earlier job of the same name" in str(caught.value)
    assert backend.jobs == {}, "it has not run, and blocks its name"


@pytest.mark.parametrize(("own", "is_own"), [(True, True), (None, False), (False, False)])
async def test_the_jobset_tells_whose_end_it_is_and_times_only_without_one(
    backend: MemoryCluster, monkeypatch: pytest.MonkeyPatch, own: bool | None, is_own: bool
) -> None:
    """The times are of two clocks: that of the API server and that of the controller."""

    async def has_own_jobset(_: JobRef) -> bool | None:
        return own

    ref = await attempt(backend)
    monkeypatch.setattr(backend, "has_own_jobset", has_own_jobset)
    created = datetime(2026, 11, 25, 12, 0, 1, tzinfo=UTC)
    ended = Observation(Phase.COMPLETE, created=created, finished=created - timedelta(seconds=1))
    if is_own:
        await check_verdict(backend, ref, ended)
    else:
        with pytest.raises(TrainJobFailed, match="JobSet of an earlier job"):
            await check_verdict(backend, ref, ended)
    assert (await backend.get("ns", ref.name) is not None) is is_own


async def test_the_end_of_a_job_that_trainjob_did_not_launch_is_its_own(backend: MemoryCluster) -> None:
    ref = JobRef("ns", "digits", "uid")
    backend.foreign.add(ref.uid)
    await check_verdict(backend, ref, Observation(Phase.COMPLETE))
    assert "delete" not in backend.requests


async def test_the_reaper_and_a_waiter_agree(backend: MemoryCluster) -> None:
    """The reaper ends the attempt that does not count, and its waiter continues with the other one."""
    first, second = await attempt(backend), await attempt(backend, 2)
    waiter = Waiter(backend, second)
    await waiter.until(lambda: bool(waiter.phases))
    await reap(backend.cluster, "ns", grace=0, interval=0)
    await waiter.until(lambda: waiter.followed == [first])
    backend.end(first)
    assert (await waiter.result()).uid == first.uid
    assert isinstance(waiter.followed[0], JobRef)


async def test_options_hold_for_the_attempt_that_is_followed(backend: MemoryCluster) -> None:
    first, second = await attempt(backend), await attempt(backend, 2)
    await backend.patch(second, {"spec": {"suspend": True}})
    waiter: Any = Waiter(backend, first, WaitOptions(queue_timeout=timedelta(seconds=0.2)))
    await waiter.until(lambda: bool(waiter.phases))
    await backend.delete(first)
    with pytest.raises(QueueTimeout, match=second.name):
        await waiter.result()
