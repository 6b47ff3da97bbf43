"""What a waiter does when its job is gone, was given up, or was suspended before its latest launch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import annotations_of, attempt, deleted, launch, once, refuse

from trainjob import JobRef, Observation, Phase, TrainJobFailed, TrainJobResult, WaitOptions
from trainjob._jobs import following, waiting
from trainjob._jobs.cancellation import cancel, cancel_key
from trainjob._manifest.attempts import LAUNCHED
from trainjob._manifest.unattended import MARK
from trainjob.errors import Category, Diagnosis, QueueTimeout
from trainjob.job import TRY
from trainjob.status import CANCELLED

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

BRIEFLY = WaitOptions(queue_timeout=timedelta(seconds=0.2))


class Waiter:
    """A wait for a job, and what it reports."""

    def __init__(self, backend: DirectBackend, ref: JobRef, options: WaitOptions | None) -> None:
        self.phases: list[Phase] = []
        self.notices: list[str] = []
        self.followed: list[JobRef] = []
        wait = waiting.wait(backend, ref, options, on_change=self._change, on_follow=self.followed.append)
        self._task = asyncio.create_task(wait)

    def _change(self, observation: Observation, notice: str) -> None:
        self.phases.append(observation.phase)
        self.notices += [notice] if notice else []

    async def until(self, happened: Callable[[], object]) -> None:
        with anyio.fail_after(40):
            while not happened():
                await asyncio.sleep(0.002)

    async def result(self) -> TrainJobResult:
        return await self._task

    async def diagnosis(self) -> Diagnosis:
        with pytest.raises(TrainJobFailed) as caught:
            await self._task
        return caught.value.diagnosis


async def waiter(backend: DirectBackend, ref: JobRef, options: WaitOptions | None = None) -> Waiter:
    """A wait that has seen its job."""
    made = Waiter(backend, ref, options)
    await made.until(lambda: made.phases)
    return made


# ---------------------------------------------------------------- another attempt counts


async def test_a_waiter_follows_the_attempt_that_counts_several_times(backend: DirectBackend) -> None:
    """Other launchers have ended its attempts by the rule of two."""
    first, second, third = [attempt(backend, number) for number in (1, 2, 3)]
    waits = await waiter(backend, first)
    await backend.delete(first)
    await waits.until(lambda: waits.followed == [second])
    await backend.delete(second)
    await waits.until(lambda: waits.followed == [second, third])
    backend.end(third)
    result = await waits.result()
    assert (result.uid, result.attempt) == (third.uid, 3)
    assert [name for name, _ in deleted(backend)] == [first.name, second.name], "waiters end nothing"
    assert Phase.DELETED not in waits.phases


async def test_options_hold_for_the_attempt_that_is_followed(backend: DirectBackend) -> None:
    first, second = attempt(backend), attempt(backend, 2)
    await backend.patch(second, {"spec": {"suspend": True}})
    waits = await waiter(backend, first, BRIEFLY)
    await backend.delete(first)
    with pytest.raises(QueueTimeout, match=second.name):
        await waits.result()


async def test_a_job_without_another_attempt_was_deleted(backend: DirectBackend) -> None:
    ref = attempt(backend)
    attempt(backend, 1, "another key")
    backend.end(attempt(backend, 2), 3)
    waits = await waiter(backend, ref)
    await backend.delete(ref)
    found = await waits.diagnosis()
    assert (found.category, found.job, waits.followed) == (Category.DELETED, f"ns/{ref.name}", [])


@pytest.mark.parametrize("is_foreign", [False, True])
async def test_one_look_for_another_attempt_and_none_for_that_of_a_foreign_job(
    backend: DirectBackend, is_foreign: bool
) -> None:
    ref = attempt(backend)
    await backend.delete(ref)
    backend.store.log.clear()
    with pytest.raises(TrainJobFailed):
        await waiting.wait(backend, JobRef("ns", "digits", ref.uid) if is_foreign else ref)
    looks = [each for each in backend.store.log if each.plural == "trainjobs" and each.selector]
    assert len(looks) == (not is_foreign)


async def test_a_waiter_that_may_not_list_jobs_reports_that_its_job_was_deleted(backend: DirectBackend) -> None:
    ref = attempt(backend)
    waits = await waiter(backend, ref)
    refuse(backend, "LIST trainjobs")
    await backend.delete(ref)
    assert (await waits.diagnosis()).category is Category.DELETED


async def _cancels_key(backend: DirectBackend, ref: JobRef) -> None:
    await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)


async def _cancels_job(backend: DirectBackend, ref: JobRef) -> None:
    await cancel(backend, ref, timeout_seconds=0)


async def _kills_try_2(backend: DirectBackend, ref: JobRef) -> None:
    await cancel_key(backend, "key", namespace="ns", tried=2, timeout_seconds=0)
    await backend.delete(ref)


async def _deletes(backend: DirectBackend, ref: JobRef) -> None:
    await cancel_key(backend, "other", namespace="ns", timeout_seconds=0)
    await backend.delete(ref)


Stop = Callable[[DirectBackend, JobRef], Awaitable[None]]


@pytest.mark.parametrize(
    ("tried", "stop", "is_cancelled"),
    [
        (1, _cancels_key, True),
        (2, _kills_try_2, True),
        (3, _kills_try_2, False),
        # launched by a version that did not write its begin, or with an account that may not read Leases
        (None, _cancels_job, True),
        (None, _deletes, False),
    ],
)
async def test_whether_a_deleted_job_was_cancelled(
    backend: DirectBackend, tried: int | None, stop: Stop, is_cancelled: bool
) -> None:
    """A deletion carries no mark: the record of the cancel tells. A cancel before the launch has not deleted it."""
    await _cancels_job(backend, await launch(backend))
    await _cancels_key(backend, JobRef("ns", "", ""))
    backend.store.ahead = timedelta(seconds=10)
    ref = attempt(backend) if tried is None else await launch(backend, tried=tried)
    waits = await waiter(backend, ref)
    await stop(backend, ref)
    found = await waits.diagnosis()
    assert ("the job was cancelled with trainjob, by its task" in found.summary) is is_cancelled
    assert ("launch it again" in found.advice) is is_cancelled
    assert found.category is Category.DELETED


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_an_end_that_was_seen_is_kept(backend: DirectBackend, is_deleted: bool) -> None:
    """A job that has ended and is gone is not followed by another attempt of its key."""
    ref, _ = attempt(backend), attempt(backend, 2)
    waits = await waiter(backend, ref)
    backend.end(ref)
    if is_deleted:
        await backend.delete(ref)
    assert ((await waits.result()).uid, waits.followed) == (ref.uid, [])


# ---------------------------------------------------------------- suspended before the latest launch


async def suspend(backend: DirectBackend, ref: JobRef, **annotations: str) -> None:
    named = {{"mark": CANCELLED, "launched": LAUNCHED, "tried": TRY}[name]: text for name, text in annotations.items()}
    await backend.patch(ref, {"metadata": {"annotations": named}, "spec": {"suspend": True}})


BY_CANCEL = "it was suspended by a cancel before its latest launch"


@pytest.mark.parametrize(
    ("annotations", "notice"),
    [
        ({"mark": MARK}, "it was suspended because nobody waited for it; it is resumed"),
        ({"mark": "5", "launched": "5"}, f"{BY_CANCEL}; it is resumed"),
        ({"mark": "try:1", "tried": "2"}, f"{BY_CANCEL}; it is resumed"),
    ],
)
async def test_a_stale_suspension_is_healed(backend: DirectBackend, annotations: dict[str, str], notice: str) -> None:
    ref = attempt(backend)
    waits = await waiter(backend, ref)
    await suspend(backend, ref, **annotations)
    await waits.until(lambda: notice in waits.notices)
    assert (backend.job(ref)["spec"]["suspend"], CANCELLED in annotations_of(backend, ref)) == (False, False)
    backend.end(ref)
    await waits.result()


@pytest.mark.parametrize("annotations", [{}, {"mark": "6", "launched": "5"}, {"mark": "try:1"}], ids=str)
async def test_a_suspension_by_a_person_or_a_newer_cancel_is_kept(
    backend: DirectBackend, annotations: dict[str, str]
) -> None:
    ref = attempt(backend)
    waits = await waiter(backend, ref, BRIEFLY)
    await suspend(backend, ref, **annotations)
    with pytest.raises(QueueTimeout, match="is Suspended"):
        await waits.result()
    assert backend.job(ref)["spec"]["suspend"]
    assert not any("it is resumed" in notice for notice in waits.notices)


@pytest.mark.parametrize(("moment", "mark"), [("PATCH trainjobs", "true"), ("GET trainjobs", None)])
async def test_a_resume_looks_right_before_and_carries_the_version(
    backend: DirectBackend, moment: str, mark: str | None
) -> None:
    """A newer cancel is not undone, nor is the suspension of a person who has taken the mark away."""
    ref = attempt(backend)
    await suspend(backend, ref, mark="try:1", tried="2")
    once(backend, moment, lambda: backend.change(ref, {"metadata": {"annotations": {CANCELLED: mark}}}))
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, ref, BRIEFLY)
    assert backend.job(ref)["spec"]["suspend"]


async def test_a_resume_that_is_refused_is_reported_once(backend: DirectBackend) -> None:
    ref = attempt(backend)
    waits = await waiter(backend, ref)
    await suspend(backend, ref, mark="try:1", tried="2")
    refuse(backend, "PATCH trainjobs")
    for percent in range(3):
        tried = backend.requests.count("PATCH trainjobs")
        backend.status(ref, trainerStatus={"progressPercentage": percent})
        await waits.until(partial(lambda before: backend.requests.count("PATCH trainjobs") > before, tried))
    backend.end(ref)
    await waits.result()
    assert waits.notices == [
        f"{BY_CANCEL}, and cannot be resumed: TrainJob {ref} could not be changed: its runtime is gone"
    ]


async def test_a_wait_ends_when_a_deletion_has_lasted_for_its_grace_period_and_a_minute(
    backend: DirectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node does not answer: the finalizer stays, and so does the object."""
    ref = attempt(backend)
    waits = await waiter(backend, ref)
    backend.change(ref, {"metadata": {"deletionTimestamp": backend.ago(60)}})
    backend.running(ref)
    await waits.until(lambda: Phase.RUNNING in waits.phases)
    assert Phase.DELETED not in waits.phases, "it may still end"
    backend.change(ref, {"metadata": {"deletionTimestamp": backend.ago(100)}})
    assert (await waits.diagnosis()).category is Category.DELETED
    assert f"TrainJob {ref} is still being deleted: a node may not answer, and may still write" in waits.notices
    assert following._DELETION_SECONDS == 90
