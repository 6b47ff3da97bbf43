"""What a run of the reaper ends, against objects in memory."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.contract.memory import MemoryCluster
from tests.unit.interleaving import once

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.base import Waiter
from trainjob._jobs import launching as flow
from trainjob._jobs.cancellation import cancel_key, give_up, request_cancel
from trainjob._jobs.reaper import Reaped, reap
from trainjob._manifest.attempts import LAUNCHED, REPLACES, Cancel, given_up, may_run
from trainjob._manifest.render import render
from trainjob._manifest.unattended import MARK
from trainjob.errors import Rejected
from trainjob.job import TRY, key_hash
from trainjob.status import CANCELLED, QUEUE_LABEL
from trainjob.verdicts import Category, Diagnosis, RetryVerdict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SPEC: dict[str, Any] = {"runtime": "torch-distributed", "command": ["train"]}
WHY = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "node-0 exited with code 3")


@pytest.fixture
def backend() -> MemoryCluster:
    return MemoryCluster()


async def attempt(backend: MemoryCluster, number: int = 1, key: str = "key", **fields: Any) -> JobRef:
    annotations = fields.pop("annotations", {})
    made = render(TrainJobSpec.parse({**SPEC, **fields}), key, number, "ns")
    made["metadata"]["annotations"] |= annotations
    return JobRef.of(await backend.create(made))


async def run(backend: MemoryCluster, **options: Any) -> list[str]:
    """What one run reports: number of the attempt and what was done."""
    seen: list[Reaped] = []
    found = await reap(backend.cluster, "ns", **{"grace": 0, "interval": 0, **options}, on_reaped=seen.append)
    assert found == seen
    return [f"{each.done} {each.job.rpartition('-')[2]}: {each.reason}" for each in found]


def left(backend: MemoryCluster) -> list[int]:
    return sorted(JobRef.of(job).attempt for job in backend.jobs.values() if may_run(job))


# ---------------------------------------------------------------- two active attempts of a key


async def test_of_two_active_attempts_one_ends(backend: MemoryCluster) -> None:
    """Their launchers were killed after their creates. Also without a policy for unattended jobs, and at once."""
    first, _ = await attempt(backend), await attempt(backend, 2)
    assert await run(backend, grace=90) == [f"deleted 2: another attempt of its key counts ({first.name})"]
    assert left(backend) == [1]


async def test_a_failed_attempt_that_came_back_ends(backend: MemoryCluster) -> None:
    first = await attempt(backend)
    await attempt(backend, 2, annotations={REPLACES: first.uid})
    (done,) = await run(backend)
    assert done.startswith("deleted 1: ")
    assert left(backend) == [2]


async def test_what_came_back_ends_although_the_one_that_followed_has_ended(backend: MemoryCluster) -> None:
    first = await attempt(backend)
    backend.end(await attempt(backend, 2, annotations={REPLACES: first.uid}), 3)
    assert await run(backend) == ["deleted 1: it ran again after another attempt of its key had followed"]
    assert left(backend) == []


@pytest.mark.parametrize("followed_by", ["ended", "suspended", "running"])
async def test_what_came_back_is_left_while_a_process_waits_for_it(backend: MemoryCluster, followed_by: str) -> None:
    """A person has resumed it. It ends all the same if the one that followed runs."""
    first = await attempt(backend)
    second = await attempt(backend, 2, annotations={REPLACES: first.uid})
    if followed_by == "ended":
        backend.end(second, 3)
    elif followed_by == "suspended":
        await request_cancel(backend, backend.job(second), "suspend", "1")
    backend.waits(first, age=1800)
    await run(backend)
    assert (1 in left(backend)) is (followed_by != "running")
    backend.leases.clear()
    backend.waits(first, age=4000)
    await run(backend)
    assert 1 not in left(backend)


async def test_what_a_person_has_resumed_is_left_for_an_hour(backend: MemoryCluster) -> None:
    """Its waiter may need time to write its Lease."""
    first = await attempt(backend)
    backend.end(await attempt(backend, 2, annotations={REPLACES: first.uid}), 3)
    await request_cancel(backend, backend.job(first), "suspend", "1")
    await backend.patch(first, {"spec": {"suspend": False}})
    await run(backend)
    assert 1 in left(backend)
    backend.time += timedelta(hours=2)
    await run(backend)
    assert 1 not in left(backend)


async def test_an_active_attempt_beside_an_undelivered_result_ends(backend: MemoryCluster) -> None:
    first = await attempt(backend)
    backend.end(first)
    await attempt(backend, 2)
    assert await run(backend) == [f"deleted 2: another attempt of its key counts ({first.name})"]
    assert [JobRef.of(job) for job in backend.jobs.values()] == [first]


async def test_attempts_of_different_keys_and_foreign_jobs_are_kept(backend: MemoryCluster) -> None:
    await attempt(backend)
    await attempt(backend, 2, "another")
    foreign = await attempt(backend, 3)
    backend.job(foreign)["metadata"]["labels"] = {}
    backend.condition(await attempt(backend, 4, "delivered"), "Complete", "AllJobsCompleted")
    assert await run(backend) == []
    assert len(backend.jobs) == 4


async def test_a_job_that_changed_since_the_look_is_kept_and_not_reported(backend: MemoryCluster) -> None:
    """It has completed, or somebody has adopted it."""
    await attempt(backend)
    second = await attempt(backend, 2)

    async def completes() -> None:
        backend.end(second)

    once(backend, "delete", completes)
    assert await run(backend) == []
    assert len(backend.jobs) == 2
    (done,) = await run(backend)
    assert done.startswith("deleted 1: "), "the next run decides again: the complete one counts"


async def test_given_up_attempts_are_kept(backend: MemoryCluster) -> None:
    first, second = await attempt(backend), await attempt(backend, 2)
    await give_up(backend, first, WHY)
    assert await run(backend) == []
    await backend.patch(first, {"spec": {"suspend": False}})  # a person resumes it
    assert given_up(backend.job(first)) is None
    assert len(await run(backend)) == 1
    assert len(left(backend)) == 1
    assert second.attempt == 2


# ---------------------------------------------------------------- cancelled keys


@pytest.mark.parametrize(
    ("action", "fields", "done"),
    [
        ("cancel", {}, "deleted 1: its key was cancelled"),
        ("suspend", {}, "suspended 1: its key was cancelled"),
        (
            "suspend",
            {"labels": {QUEUE_LABEL: "main"}},
            "deleted 1: its key was cancelled; it could not be suspended, because Kueue would resume it",
        ),
        (
            "suspend",
            {"labels": {QUEUE_LABEL: "main"}, "suspend": True},
            "deleted 1: its key was cancelled; it could not be suspended, because Kueue would resume it",
        ),
        ("cancel", {"suspend": True}, "deleted 1: its key was cancelled"),
        ("suspend", {"suspend": True}, ""),
    ],
)
async def test_what_a_dead_launch_left_of_a_cancelled_key_ends(
    backend: MemoryCluster, action: Any, fields: dict[str, Any], done: str
) -> None:
    """The launch began before the cancel, and was killed before it read the record."""
    await cancel_key(backend, "key", namespace="ns", action=action, timeout_seconds=0)
    (record,) = backend.records.values()
    ref = await attempt(backend, annotations={LAUNCHED: str(record.version - 1)}, **fields)
    assert await run(backend, grace=90) == ([done] if done else [])
    if done.startswith("suspended"):
        assert backend.job(ref)["metadata"]["annotations"][CANCELLED] == str(record.version)
        assert await run(backend) == [], "once"


async def test_a_launch_that_began_after_the_cancel_is_kept(backend: MemoryCluster) -> None:
    await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)
    (record,) = backend.records.values()
    await attempt(backend, annotations={LAUNCHED: str(record.version)})
    await attempt(backend, 1, "unknown", annotations={})
    backend.records["ns", key_hash("unknown"), ""] = Cancel(record.version, at=record.at)
    assert await run(backend) == [], "nor is a job of which the begin of the launch is not known"


@pytest.mark.parametrize(("tried", "ends"), [(1, True), (2, True), (3, False)])
async def test_a_kill_ends_its_try_only(backend: MemoryCluster, tried: int, ends: bool) -> None:
    await cancel_key(backend, "key", namespace="ns", tried=2, action="suspend", timeout_seconds=0)
    (record,) = backend.records.values()
    ref = await attempt(backend, annotations={LAUNCHED: "0", TRY: str(tried)})
    assert await run(backend) == (["suspended 1: its key was cancelled"] if ends else [])
    assert backend.job(ref)["spec"].get("suspend", False) is ends
    assert backend.job(ref)["metadata"]["annotations"].get(CANCELLED) == (record.mark if ends else None)


async def test_failed_attempts_of_a_cancelled_key_do_not_run_again(backend: MemoryCluster) -> None:
    """Trainer up to 2.3 takes Failed back after the cancel: the reaper ends it while the record is there."""
    await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)
    ref = await attempt(backend, annotations={LAUNCHED: "0"})
    backend.end(ref, 3)
    await run(backend)
    if not backend.job(ref)["spec"].get("suspend"):
        backend.status(ref, conditions=[])
        assert await run(backend) == ["deleted 1: its key was cancelled"]


async def test_a_suspension_that_was_refused_is_repeated(backend: MemoryCluster) -> None:
    ref = await attempt(backend, annotations={LAUNCHED: "0"})
    refusing = True

    def refuse(request: str) -> None:
        if request == "patch" and refusing:
            raise Rejected("a webhook refuses it")

    def undeletable(request: str) -> None:
        refuse(request)
        if request == "delete" and refusing:
            raise Rejected("a webhook refuses it")

    backend.before = undeletable
    with pytest.raises(Rejected):
        await cancel_key(backend, "key", namespace="ns", action="suspend", timeout_seconds=0)
    refusing = False
    assert await run(backend) == ["suspended 1: its key was cancelled"]
    assert backend.job(ref)["spec"]["suspend"]


async def test_a_job_of_a_cancelled_key_that_was_adopted_meanwhile_is_kept(backend: MemoryCluster) -> None:
    await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)
    await attempt(backend, annotations={LAUNCHED: "0"})
    spec = TrainJobSpec.parse(SPEC)

    async def adopt() -> None:
        await flow.launch(backend, spec, "key", namespace="ns")

    once(backend, "delete", adopt)
    assert await run(backend) == []
    assert left(backend) == [1]
    assert await run(backend) == [], "its latest launch began after the cancel"


# ---------------------------------------------------------------- unattended jobs

UNATTENDED: dict[str, Any] = {"unattended": "suspend", "unattended_after": 60}


async def test_an_unattended_job_ends_by_its_policy(backend: MemoryCluster) -> None:
    ref = await attempt(backend, **UNATTENDED)
    backend.time = datetime.now(UTC) + timedelta(minutes=10)
    (done,) = await reap(backend.cluster, "ns", grace=0, interval=0)
    assert (done.done, done.reason) == ("suspended", "no process had waited for it for 10m00s")
    assert done.unattended is not None
    assert backend.job(ref)["metadata"]["annotations"][CANCELLED] == MARK
    assert json.dumps(done.as_dict())


async def test_the_leases_are_read_again_before_the_request(backend: MemoryCluster) -> None:
    """An adoption whose PATCH was refused goes by the Lease of the waiter."""
    ref = await attempt(backend, **UNATTENDED)
    backend.time = datetime.now(UTC) + timedelta(minutes=10)

    async def waits() -> None:
        backend.waits(ref)

    once(backend, "get", waits)
    assert await run(backend) == []
    assert left(backend) == [1]


async def test_a_job_that_changed_since_it_was_read_is_not_ended(backend: MemoryCluster) -> None:
    ref = await attempt(backend, **UNATTENDED)
    backend.time = datetime.now(UTC) + timedelta(minutes=10)

    async def adopted() -> None:
        await backend.patch(ref, {"metadata": {"annotations": {"trainjob.dev/adopted": "x"}}})
        backend.waits(ref)

    once(backend, "patch", adopted)
    assert await run(backend) == []
    assert not backend.job(ref)["spec"].get("suspend")


async def test_an_adoption_restarts_the_grace_period(backend: MemoryCluster) -> None:
    """The process that has adopted the job writes its Lease within the grace period, not within an instant."""
    spec = TrainJobSpec.parse({**SPEC, **UNATTENDED})
    ref = await flow.launch(backend, spec, "key", namespace="ns")
    backend.time = datetime.now(UTC) + timedelta(minutes=10)
    looks = 0
    adopted_at = 0

    async def adopt() -> None:
        nonlocal adopted_at
        adopted_at = looks
        assert await flow.launch(backend, spec, "key", namespace="ns") == ref

    def look(request: str) -> None:
        nonlocal looks
        looks += request == "waiters"
        if adopted_at and looks == adopted_at + 3 and not backend.leases:
            backend.waits(ref)

    backend.before = look
    once(backend, "waiters", adopt, skip=5)
    assert await run(backend, grace=0.3, interval=0.05) == []
    assert adopted_at
    assert left(backend) == [1]


async def test_a_job_that_cannot_be_suspended_is_deleted(backend: MemoryCluster) -> None:
    await attempt(backend, **UNATTENDED)
    backend.time = datetime.now(UTC) + timedelta(minutes=10)

    def refuse(request: str) -> None:
        if request == "patch":
            raise Rejected("its runtime is gone")

    backend.before = refuse
    (done,) = await run(backend)
    assert done.startswith("deleted 1: no process had waited for it")
    assert done.endswith("it could not be suspended: its runtime is gone")


# ---------------------------------------------------------------- old records


async def test_records_of_cancels_are_removed_after_an_hour(backend: MemoryCluster) -> None:
    begin = datetime.now(UTC)
    for key, age in (("old", 61), ("new", 59)):
        backend.records["ns", key_hash(key), ""] = Cancel(1, at=begin - timedelta(minutes=age))
    backend.records["ns", key_hash("unknown"), ""] = Cancel(1)
    backend.records["elsewhere", key_hash("old"), ""] = Cancel(1, at=begin - timedelta(minutes=61))
    backend.time = begin
    await run(backend)
    assert [*backend.records] == [("ns", key_hash("new"), ""), ("elsewhere", key_hash("old"), "")]


async def test_a_cancel_during_the_run_leaves_its_record(backend: MemoryCluster) -> None:
    backend.records["ns", key_hash("key"), ""] = Cancel(1, at=datetime.now(UTC) - timedelta(hours=2))

    async def again() -> None:
        await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)

    once(backend, "forget_cancel", again)
    await run(backend)
    (record,) = backend.records.values()
    assert record.record != "", "the old one is removed"


async def test_leases_of_processes_that_ended_long_ago_are_removed(backend: MemoryCluster) -> None:
    ref = await attempt(backend, **UNATTENDED)
    done = await attempt(backend, 1, "done", **UNATTENDED)
    backend.end(done)
    now = backend.time
    backend.leases = [
        Waiter("of a job that runs", now - timedelta(days=2), {ref.uid: now}),
        Waiter("of one that has ended", now - timedelta(days=2), {done.uid: now}),
        Waiter("of today", now - timedelta(hours=20), {done.uid: now}),
    ]
    await run(backend)
    assert [waiter.lease for waiter in backend.leases] == ["of a job that runs", "of today"]
