"""Two launchers, a cancel or a reaper beside a launcher, ranks that remain: one key, one training."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.contract.memory import MemoryBackend, MemoryCluster, now, remaining_pod
from tests.unit.interleaving import Schedule, before_request, once, orders

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec
from trainjob._jobs import fencing, launching as flow, records
from trainjob._jobs.cancellation import cancel, cancel_key, give_up, request_cancel
from trainjob._jobs.reaper import reap
from trainjob._manifest.attempts import LAUNCHED, REPLACES, given_up, may_run
from trainjob._manifest.render import render
from trainjob.errors import BackendUnavailable, NotFound, RanksRemain, Rejected
from trainjob.job import TRY, job_name, key_hash
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL, observe
from trainjob.verdicts import Category, Diagnosis, RetryVerdict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
LOOK = ["cancels", "find"]
"""A look: two requests side by side."""
FIRST = [*LOOK, "remaining_pods", "is_free"]
"""The first look of a launch whose caller counts no tries, or of a first try: four requests side by side."""
WHY = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "node-0 exited with code 3")


class Recorded(MemoryCluster):
    """Also records by which version jobs were deleted and patched."""

    def __init__(self) -> None:
        super().__init__()
        self.deleted: list[tuple[str, str]] = []
        self.patches: list[tuple[str, Mapping[str, Any]]] = []

    async def delete(self, ref: JobRef, version: str = "") -> None:
        self.deleted.append((ref.name, version))
        await super().delete(ref, version)

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        self.patches.append((ref.name, patch))
        await super().patch(ref, patch)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "_AGAIN", 0)
    monkeypatch.setattr(fencing, "_POLL", 0)


@pytest.fixture
def backend() -> Recorded:
    return Recorded()


async def launch(backend: MemoryCluster, key: str = "key", **options: Any) -> JobRef:
    return await flow.launch(backend, options.pop("spec", SPEC), key, namespace="ns", **options)


def noted(backend: MemoryCluster, ref: JobRef) -> dict[str, str]:
    return dict(backend.job(ref)["metadata"]["annotations"])


def active(backend: MemoryCluster) -> list[JobRef]:
    return [JobRef.of(job) for job in backend.jobs.values() if may_run(job)]


def running(backend: MemoryCluster) -> list[JobRef]:
    return [ref for ref in active(backend) if not backend.job(ref)["spec"].get("suspend")]


async def other_attempt(backend: MemoryCluster, number: int, created: str = "", **annotations: str) -> JobRef:
    """An attempt that another launcher has just created."""
    made = render(SPEC, "key", number, "ns")
    made["metadata"]["annotations"] |= annotations
    turn, backend.turn = backend.turn, None
    ref = JobRef.of(await backend.create(made))
    backend.turn = turn
    if created:
        backend.job(ref)["metadata"]["creationTimestamp"] = created
    return ref


LONG_AGO, LATER = "2020-01-01T00:00:00Z", "2100-01-01T00:00:00Z"


# ---------------------------------------------------------------- requests


async def test_requests_of_a_launch(backend: Recorded) -> None:
    """The documented cost: each look is one round trip."""
    ref = await launch(backend)
    assert backend.requests == [*FIRST, "create", *LOOK]
    assert noted(backend, ref)[TRY] == "1"
    backend.requests.clear()
    assert await launch(backend) == ref
    assert backend.requests == [*FIRST, "patch"]
    backend.requests.clear()
    assert await launch(backend, tried=2) == ref
    assert backend.requests == [*LOOK, "patch"]
    backend.end(ref)
    backend.requests.clear()
    assert await launch(backend, tried=2) == ref
    assert backend.requests == LOOK


@pytest.mark.parametrize(
    ("earlier", "options", "trips"),
    [(0, {}, 3), (0, {"is_new": True}, 2), (1, {}, 2), (1, {"tried": 2}, 2)],
    ids=["unused key", "generated key", "adoption", "adoption by a retry"],
)
async def test_round_trips_of_a_launch(backend: Recorded, earlier: int, options: dict[str, Any], trips: int) -> None:
    for _ in range(earlier):
        await launch(backend)
    assert await round_trips(backend, **options) == trips


async def test_on_this_machine_a_launch_reads_one_after_the_other() -> None:
    """A read of a job without a supervisor ends it; another read of it at that moment would show it as running."""
    assert await round_trips(MemoryBackend()) == 5


async def round_trips(backend: MemoryBackend, **options: Any) -> int:
    """Those of a launch: a request that is sent while no other is on its way begins one."""
    began, in_flight = [0], [0]

    async def turn(_: str) -> None:
        began[0] += not in_flight[0]
        in_flight[0] += 1
        await anyio.sleep(0.01)
        in_flight[0] -= 1

    backend.turn = turn
    await flow.launch(backend, SPEC, "key", namespace="ns", **options)
    return began[0]


@pytest.mark.parametrize("is_new", [False, True])
async def test_an_own_attempt_that_was_deleted_is_not_followed_under_its_name(backend: Recorded, is_new: bool) -> None:
    """What the first look did not find may exist since the create: here the JobSet of the deleted job."""

    async def deleted() -> None:
        backend.jobs.clear()
        backend.taken.add(job_name("key", 1))

    once(backend, "find", deleted, skip=not is_new)
    ref = await launch(backend, is_new=is_new)
    assert ref.name == job_name("key", 2)


async def test_a_key_that_is_new_for_sure_needs_no_look_before(backend: Recorded) -> None:
    ref = await launch(backend, is_new=True)
    assert backend.requests == ["create", *LOOK]
    assert noted(backend, ref)[LAUNCHED] == "0", "each cancel of the key is newer"


async def test_a_new_key_is_looked_for_after_a_create(backend: Recorded) -> None:
    """A lost reply: the create is repeated, and the job of the first one is found."""

    async def cancelled() -> None:
        await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)

    before_request(backend, 1, cancelled)
    with pytest.raises(TrainJobFailed, match="its key was cancelled while it was launched"):
        await launch(backend, is_new=True)
    assert running(backend) == []


async def test_requests_of_a_launch_after_a_failure(backend: Recorded) -> None:
    backend.end(await launch(backend), 3)
    backend.requests.clear()
    await launch(backend)
    before = [*FIRST, "evidence", "patch", "remaining_pods", "is_free"]
    assert backend.requests == [*before, "create", *LOOK]


# ---------------------------------------------------------------- two launchers


async def nothing(_: Recorded) -> None: ...


async def deleted_with_pods(backend: Recorded) -> None:
    ref = await launch(backend)
    await backend.delete(ref)
    backend.remaining = [remaining_pod(ref.name, lost=True)]


async def jobset_left(backend: Recorded) -> None:
    backend.taken.add(job_name("key", 1))


async def failed(backend: Recorded) -> None:
    backend.end(await launch(backend), 3)


async def was_given_up(backend: Recorded) -> None:
    await give_up(backend, await launch(backend), WHY)


async def delivered(backend: Recorded) -> None:
    ref = await launch(backend)
    backend.end(ref)
    await records.mark_delivered(backend, ref)


async def runs(backend: Recorded) -> None:
    backend.running(await launch(backend))


async def suspended_by_a_cancel(backend: Recorded) -> None:
    await cancel_key(backend, "key", namespace="ns", action="suspend") if await launch(backend) else None


async def undelivered(backend: Recorded) -> None:
    backend.end(await launch(backend))


async def two_run(backend: Recorded) -> None:
    """Two launchers were killed after their creates."""
    await other_attempt(backend, 1)
    await other_attempt(backend, 2)


async def came_back(backend: Recorded) -> None:
    """Trainer has taken Failed back, or a person has resumed it."""
    first = await other_attempt(backend, 1, LONG_AGO)
    await other_attempt(backend, 2, **{REPLACES: first.uid})


STATES = (
    nothing,
    deleted_with_pods,
    jobset_left,
    failed,
    was_given_up,
    delivered,
    runs,
    suspended_by_a_cancel,
    undelivered,
    two_run,
    came_back,
)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_two_launchers_agree_in_each_order_of_their_requests(
    state: Callable[[Recorded], Awaitable[None]],
) -> None:
    """Each order with at most two switches between them."""
    tried = 0
    longest = 0
    for schedule in orders(24, 2):
        if longest and max(schedule.switches, default=0) > longest:
            continue
        backend = Recorded()
        await state(backend)
        backend.deleted.clear()
        first, second = await schedule.run(backend, lambda b=backend: launch(b), lambda b=backend: launch(b))  # type: ignore[misc]
        longest = max(longest, len(schedule.log))
        tried += 1
        assert first == second, schedule
        assert isinstance(first, JobRef), schedule
        assert active(backend) == ([] if state is undelivered else [first]), schedule
        if state is came_back:
            assert first.attempt == 2, schedule
        assert all(version for _, version in backend.deleted), "nobody asked for it: by version"
    assert tried > len(range(longest - 1))


@pytest.mark.parametrize("state", [nothing, failed, delivered])
async def test_three_launchers_agree(state: Callable[[Recorded], Awaitable[None]]) -> None:
    for switches in (
        (1, 2),
        (3, 6),
        (4, 5, 8, 9),
        (2, 4, 6, 8, 10, 12),
        range(1, 60),
        range(1, 60, 2),
        range(1, 60, 3),
    ):
        backend = Recorded()
        await state(backend)
        schedule = Schedule(list(switches))
        refs = await schedule.run(backend, *[lambda b=backend: launch(b)] * 3)
        assert len(set(refs)) == 1, (schedule, refs)
        assert active(backend) == [refs[0]], schedule


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(state=st.sampled_from(STATES), switches=st.sets(st.integers(1, 60), max_size=30), count=st.integers(2, 3))
def test_launchers_agree_in_any_order(
    state: Callable[[Recorded], Awaitable[None]], switches: set[int], count: int
) -> None:
    async def main() -> None:
        backend = Recorded()
        await state(backend)
        backend.deleted.clear()
        refs = await Schedule(sorted(switches)).run(backend, *[lambda: launch(backend)] * count)
        assert len(set(refs)) == 1, refs
        assert active(backend) == ([] if state is undelivered else refs[:1])
        assert all(version for _, version in backend.deleted)

    asyncio.run(main())


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
async def test_the_next_launch_repairs_what_a_killed_launcher_left(
    state: Callable[[Recorded], Awaitable[None]],
) -> None:
    """The first launcher is killed before each of its requests, or after its create."""
    for number in [*range(13), None]:
        backend = Recorded()
        await state(backend)
        left = number or 0

        def kill(_: str) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise asyncio.CancelledError

        setattr(backend, "after" if number is None else "before", kill)
        (found,) = await asyncio.gather(launch(backend), return_exceptions=True)
        backend.before = backend.after = lambda _: None
        assert isinstance(found, JobRef | asyncio.CancelledError)
        ref = await launch(backend)
        assert active(backend) == ([] if state is undelivered else [ref]), number
        assert await launch(backend) == ref
        if isinstance(found, JobRef):
            assert found == ref


# ---------------------------------------------------------------- a frozen launcher


async def finishes(backend: Recorded, ref: JobRef) -> None:
    backend.end(ref)
    await records.mark_delivered(backend, ref)


@pytest.mark.parametrize("at", ["remaining_pods", "is_free", "create"])
async def test_a_frozen_launcher_adopts_what_was_delivered_since(backend: Recorded, at: str) -> None:
    """It must not train again: the task that it belongs to has its result."""
    others: list[JobRef] = []

    async def train() -> None:
        others.append(await launch(backend))
        await finishes(backend, others[0])

    once(backend, at, train)
    assert [await launch(backend)] == others
    assert len(backend.jobs) == 1
    assert (await launch(backend)).attempt == 2, "a launch that begins later is new work"


async def test_a_frozen_launcher_adopts_the_attempt_of_its_first_look_although_it_was_delivered(
    backend: Recorded,
) -> None:
    first = await launch(backend)
    once(backend, "patch", lambda: finishes(backend, first))
    assert await launch(backend) == first
    assert len(backend.jobs) == 1


async def test_a_frozen_launcher_does_not_end_what_followed_the_delivery(backend: Recorded) -> None:
    others: list[JobRef] = []

    async def train_twice() -> None:
        others.append(await launch(backend))
        await finishes(backend, others[0])
        others.append(await launch(backend))
        backend.running(others[1])

    once(backend, "create", train_twice)
    assert await launch(backend) == others[1]
    assert active(backend) == [others[1]]
    assert backend.deleted == []


async def test_a_frozen_launcher_whose_name_was_used_and_forgotten_uses_it_again(backend: Recorded) -> None:
    """The bound from look to create: what is created, ends and is deleted between the two is not seen."""

    async def train() -> None:
        await backend.delete(await launch(backend))

    once(backend, "create", train)
    ref = await launch(backend)
    assert active(backend) == [ref]


# ---------------------------------------------------------------- losers


async def test_a_launcher_ends_its_own_attempt_if_another_one_counts(
    backend: Recorded, caplog: pytest.LogCaptureFixture
) -> None:
    others: list[JobRef] = []

    async def another() -> None:
        others.append(await other_attempt(backend, 7, LONG_AGO))

    once(backend, "find", another, skip=1)
    assert [await launch(backend)] == others
    assert active(backend) == others
    (ended,) = backend.deleted
    assert ended == (job_name("key", 1), "1"), "by UID and version"
    assert "is deleted: another attempt of its key counts" in caplog.text


async def test_a_launcher_ends_the_attempt_of_another_one(backend: Recorded) -> None:
    async def another() -> None:
        await other_attempt(backend, 7, LATER)

    once(backend, "find", another, skip=1)
    ref = await launch(backend)
    assert (ref.attempt, active(backend)) == (1, [ref])
    assert [name for name, _ in backend.deleted] == [job_name("key", 7)]


async def test_a_loser_that_has_completed_meanwhile_is_kept(backend: Recorded) -> None:
    """The job has its result: it counts now, and the other one ends."""
    own: list[JobRef] = []

    async def another() -> None:
        await other_attempt(backend, 7, LONG_AGO)

    async def completes() -> None:
        own.extend(ref for ref in active(backend) if ref.attempt == 1)
        backend.end(own[0])

    once(backend, "find", another, skip=1)
    before = backend.delete

    async def delete(ref: JobRef, version: str = "") -> None:
        if not own:
            await completes()
        await before(ref, version)

    backend.delete = delete  # type: ignore[method-assign]
    assert [await launch(backend)] == own
    assert active(backend) == []
    assert [name for name, _ in backend.deleted] == [job_name("key", 1), job_name("key", 7)]


async def test_a_launcher_that_ended_its_attempt_goes_on_above_it(backend: Recorded) -> None:
    """Its name may still be in use: pods end after the object."""

    async def another() -> None:
        ref = await other_attempt(backend, 7, LONG_AGO)
        once(backend, "patch", lambda: gone(ref))

    async def gone(ref: JobRef) -> None:
        await backend.delete(ref)

    once(backend, "find", another, skip=1)
    ref = await launch(backend)
    assert (ref.attempt, active(backend)) == (2, [ref])


# ---------------------------------------------------------------- a cancel beside a launcher


@pytest.mark.parametrize("action", ["cancel", "suspend"])
@pytest.mark.parametrize("state", [nothing, failed, runs, suspended_by_a_cancel, deleted_with_pods, two_run])
@pytest.mark.parametrize("number", range(14))
async def test_a_launch_obeys_a_cancel_at_each_point(
    backend: Recorded, state: Callable[[Recorded], Awaitable[None]], number: int, action: Any
) -> None:
    await state(backend)
    versions: list[int] = []

    async def cancelled() -> None:
        await cancel_key(backend, "key", namespace="ns", action=action, timeout_seconds=0)
        versions.append(max(cancel.version for cancel in backend.records.values()))

    before_request(backend, number, cancelled)
    (found,) = await asyncio.gather(launch(backend), return_exceptions=True)
    if isinstance(found, TrainJobFailed):
        assert found.diagnosis.category is Category.DELETED
        assert "its key was cancelled while it was launched" in str(found)
        assert versions
        assert running(backend) == [], backend.requests
    else:
        assert isinstance(found, JobRef)
        if versions and found in running(backend):
            assert int(noted(backend, found)[LAUNCHED]) >= versions[0], "the launch began after the cancel"
            assert number < len(FIRST)
    assert len(running(backend)) <= 1


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_cancel_beside_a_launch_in_each_order(action: Any) -> None:
    for schedule in orders(20, 2):
        backend = Recorded()
        launched, _ = await schedule.run(
            backend,
            lambda b=backend: launch(b),  # type: ignore[misc]
            lambda b=backend: cancel_key(b, "key", namespace="ns", action=action, timeout_seconds=0),  # type: ignore[misc]
        )
        (record,) = backend.records.values()
        for ref in running(backend):
            assert int(noted(backend, ref)[LAUNCHED]) >= record.version, schedule
            assert launched == ref
        if not isinstance(launched, JobRef):
            assert isinstance(launched, TrainJobFailed), schedule
            assert running(backend) == [], schedule


async def test_a_launch_obeys_by_a_suspension_so_that_its_name_stays_taken(backend: Recorded) -> None:
    """A create without reply may still arrive: under the same name it is refused."""

    async def cancelled() -> None:
        await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)

    once(backend, "create", cancelled)
    with pytest.raises(TrainJobFailed):
        await launch(backend)
    (left,) = backend.jobs.values()
    assert left["spec"]["suspend"]
    (record,) = backend.records.values()
    assert left["metadata"]["annotations"][CANCELLED] == str(record.version)
    again = await launch(backend)
    assert (again, running(backend)) == (JobRef.of(left), [again]), "a launch that begins later resumes it"


async def test_a_complete_job_is_kept_by_a_launch_that_obeys(backend: Recorded) -> None:
    async def cancelled() -> None:
        await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)

    async def completes() -> None:
        backend.end(active(backend)[0])

    once(backend, "create", cancelled)
    backend.after = lambda request: backend.end(active(backend)[0]) if request == "create" else None
    ref = await launch(backend)
    assert observe(backend.job(ref)).phase is Phase.COMPLETE


@pytest.mark.parametrize(
    ("killed", "tried", "obeys"), [(1, 1, True), (1, 2, False), (2, 1, True), (2, 2, True), (2, 3, False)]
)
@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_kill_ends_its_try_and_earlier_ones(
    backend: Recorded, killed: int, tried: int, obeys: bool, action: Any
) -> None:
    async def kill() -> None:
        await cancel_key(backend, "key", namespace="ns", action=action, tried=killed, timeout_seconds=0)

    once(backend, "create", kill)
    if obeys:
        with pytest.raises(TrainJobFailed):
            await launch(backend, tried=tried)
        assert running(backend) == []
        ref = await launch(backend, tried=killed + 1)
    else:
        ref = await launch(backend, tried=tried)
    assert running(backend) == [ref]


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_launch_that_counts_no_tries_is_later_than_each_kill_before_it(backend: Recorded, action: Any) -> None:
    first = await launch(backend, tried=1)
    await cancel_key(backend, "key", namespace="ns", action=action, tried=3, timeout_seconds=0)
    ref = await launch(backend)
    assert running(backend) == [ref]
    assert (ref == first) == (action == "suspend")
    assert noted(backend, ref)[TRY] == "4"


async def test_a_kill_that_was_on_its_way_does_not_end_a_later_try(backend: Recorded) -> None:
    """The request of try 1 suspends the job after try 2 has adopted it: the mark says so, and a waiter resumes it."""
    first = await launch(backend, tried=1)
    assert await launch(backend, tried=2) == first
    await request_cancel(backend, backend.job(first), "suspend", "try:1")
    assert noted(backend, first)[CANCELLED] == "try:1"
    assert await launch(backend, tried=2) == first
    assert running(backend) == [first]


async def test_a_cancel_of_one_job_does_not_concern_the_next_attempt(backend: Recorded) -> None:
    first = await launch(backend)

    async def cancelled() -> None:
        await cancel(backend, first, timeout_seconds=0)

    once(backend, "patch", cancelled)
    second = await launch(backend)
    assert second != first
    assert running(backend) == [second]


async def test_a_launch_does_not_obey_if_it_cannot_read_cancels(backend: Recorded) -> None:
    """An account without permission for Leases."""

    async def forbidden(*_: object) -> tuple[None, list[Any]]:
        return None, []

    backend.cancels = forbidden  # type: ignore[assignment, method-assign]
    ref = await launch(backend)
    assert LAUNCHED not in noted(backend, ref)


async def test_an_adoption_that_resumes_reads_the_cancels_again(backend: Recorded) -> None:
    """A cancel may have seen the suspended job, and left it alone."""
    ref = await launch(backend)
    await cancel(backend, ref, "suspend")

    async def cancelled() -> None:
        await cancel_key(backend, "key", namespace="ns", action="suspend", timeout_seconds=0)

    once(backend, "cancels", cancelled, skip=1)
    with pytest.raises(TrainJobFailed):
        await launch(backend)
    assert running(backend) == []


# ---------------------------------------------------------------- the reaper beside a launcher


async def test_the_reaper_ends_what_a_killed_launcher_left(backend: Recorded) -> None:
    """The launcher is killed at its create, the cancel has looked before."""

    async def cancelled() -> None:
        await cancel_key(backend, "key", namespace="ns", timeout_seconds=0)

    once(backend, "create", cancelled)
    backend.after = killed
    with pytest.raises(BackendUnavailable):
        await launch(backend)
    assert len(running(backend)) == 1
    (done,) = await reap(backend.cluster, "ns", grace=0, interval=0)
    assert (done.done, done.reason) == ("deleted", "its key was cancelled")
    assert backend.jobs == {}


def killed(request: str) -> None:
    if request == "create":
        raise BackendUnavailable("killed")


async def test_an_adoption_beats_the_request_of_the_reaper() -> None:
    """The job has nobody who waits, the reaper has just read it again, and a launch adopts it."""
    spec = TrainJobSpec.parse({"runtime": "r", "command": ["x"], "unattended": "cancel", "unattended_after": 60})
    backend = Recorded()
    first = await launch(backend, spec=spec)
    backend.time = datetime.now(UTC) + timedelta(hours=1)

    async def adopt() -> None:
        assert await launch(backend, spec=spec) == first
        backend.waits(first)

    once(backend, "delete", adopt)
    assert await reap(backend.cluster, "ns", grace=0, interval=0) == []
    assert active(backend) == [first]


# ---------------------------------------------------------------- ranks of earlier attempts


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
async def test_a_launch_waits_for_the_ranks_of_the_attempt_before(
    backend: Recorded, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainjob")
    first = await launch(backend)
    await backend.delete(first)
    backend.remaining = [remaining_pod(first.name, rank, phase=phase, node=f"node-{rank}") for rank in range(6)]
    looks = 0

    def end(request: str) -> None:
        nonlocal looks
        looks += request == "remaining_pods"
        if looks == 4:
            backend.remaining.clear()

    backend.before = end
    second = await launch(backend)
    assert second.attempt == 2
    assert looks >= 4
    assert [job for _, job in backend.jobs] == [second.name]
    (line,) = [record.message for record in caplog.records if "starts when" in record.message]
    shown = ", ".join(f"node-{rank} of {first.name} on node node-{rank}" for rank in range(4))
    assert line == f"{shown} and 2 more have not ended: the next attempt of key starts when they have ended"


async def test_a_launch_that_does_not_wait_names_the_ranks(backend: Recorded) -> None:
    """A deferrable task: the trigger waits."""
    first = await launch(backend)
    await backend.delete(first)
    backend.remaining = [remaining_pod(first.name, node="gpu-7")]
    with pytest.raises(RanksRemain) as caught:
        await launch(backend, wait_for_ranks=False)
    assert str(caught.value) == (
        f"node-0 of {first.name} on node gpu-7 has not ended: the next attempt of key starts when they have ended"
    )
    assert caught.value.retry is RetryVerdict.INFRASTRUCTURE
    assert caught.value.seconds == 60, "its grace period and 30 s"
    assert backend.jobs == {}
    backend.remaining.clear()
    assert (await launch(backend, wait_for_ranks=False)).attempt == 1


@pytest.mark.parametrize("wait", [True, False])
async def test_a_lost_node_is_not_waited_for(backend: Recorded, wait: bool, caplog: pytest.LogCaptureFixture) -> None:
    first = await launch(backend)
    await backend.delete(first)
    backend.remaining = [remaining_pod(first.name, 1, node="gpu-7", lost=True)]
    second = await launch(backend, wait_for_ranks=wait)
    assert second.attempt == 2
    assert (
        f"node-1 of {first.name} on node gpu-7, which does not answer, has not ended, and may still write to the "
        "checkpoints: the next attempt of key starts now"
    ) in caplog.text


async def test_the_wait_for_ranks_ends_after_their_grace_period(
    backend: Recorded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(fencing, "time", clock)
    monkeypatch.setattr(anyio, "sleep", clock.sleep)
    monkeypatch.setattr(fencing, "_POLL", 2.0)
    first = await launch(backend)
    await backend.delete(first)
    backend.remaining = [remaining_pod(first.name, 0, grace=90), remaining_pod(first.name, 1, node="b", lost=True)]
    second = await launch(backend)
    assert second.attempt == 2
    assert 120 <= clock.now <= 124, "90 s of grace and 30 s"
    assert f"node-0 of {first.name} on node a, node-1 of {first.name} on node b, which does not answer" in caplog.text
    assert "have not ended, and may still write to the checkpoints" in caplog.text


class Clock:
    """A clock that only sleeping advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


async def test_ranks_of_another_key_are_not_waited_for(backend: Recorded) -> None:
    other = await launch(backend, "other")
    backend.remaining = [remaining_pod(other.name)]
    assert (await launch(backend, wait_for_ranks=False)).attempt == 1


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("objects", "pods", "taken", "attempt"),
    [
        ((), (), (), 1),
        ((1,), (), (), 2),
        ((1, 4), (), (), 5),
        ((), (3,), (), 4),
        ((2,), (7,), (), 8),
        ((5,), (2,), (), 6),
        ((), (), (1, 2), 3),
        ((1,), (2,), (3, 4), 5),
        ((998,), (), (), 999),
        ((999,), (), (), 1000),
        ((1000,), (1001,), (1002,), 1003),
    ],
)
async def test_a_name_is_above_all_that_objects_and_pods_show(
    backend: Recorded, objects: tuple[int, ...], pods: tuple[int, ...], taken: tuple[int, ...], attempt: int
) -> None:
    for number in objects:
        ref = await other_attempt(backend, number)
        backend.end(ref, 3)
    backend.remaining = [remaining_pod(job_name("key", number), lost=True) for number in pods]
    backend.taken = {job_name("key", number) for number in taken}
    ref = await launch(backend)
    assert (ref.attempt, ref.name) == (attempt, job_name("key", attempt))
    assert len(ref.name) <= 33


async def test_attempts_that_the_pods_show_are_looked_for(backend: Recorded) -> None:
    """Pods of an attempt that the look did not show: it was created since."""
    others: list[JobRef] = []

    async def another() -> None:
        others.append(await other_attempt(backend, 3))
        backend.remaining = [remaining_pod(others[0].name, lost=True)]

    once(backend, "remaining_pods", another)
    assert [await launch(backend)] == others
    assert active(backend) == others


# ---------------------------------------------------------------- failed attempts, annotations


async def test_a_failed_attempt_is_suspended_with_its_diagnosis_by_one_request(backend: Recorded) -> None:
    first = await launch(backend)
    backend.end(first, 3)
    version = backend.job(first)["metadata"]["resourceVersion"]
    backend.patches.clear()
    second = await launch(backend)
    ((name, patch),) = backend.patches
    assert (name, patch["spec"], patch["metadata"]["resourceVersion"]) == (first.name, {"suspend": True}, version)
    assert "node-0 exited with code 3" in patch["metadata"]["annotations"][GIVEN_UP]
    assert backend.job(first)["spec"]["suspend"]
    backend.status(first, conditions=[])  # Trainer takes Failed back
    assert given_up(backend.job(first)) is not None, "it is known as failed, and does not run"
    assert await launch(backend) == second
    assert active(backend) == [second]


async def test_a_failed_attempt_that_cannot_be_suspended_is_deleted(backend: Recorded) -> None:
    first = await launch(backend)
    backend.end(first, 3)

    def refuse(request: str) -> None:
        if request == "patch":
            raise Rejected("its runtime is gone")

    backend.before = refuse
    version = backend.job(first)["metadata"]["resourceVersion"]
    second = await launch(backend)
    assert (second.attempt, backend.deleted) == (2, [(first.name, version)])


async def test_a_failed_attempt_that_was_changed_is_looked_at_again(backend: Recorded) -> None:
    first = await launch(backend)
    backend.end(first, 3)

    async def comes_back() -> None:
        backend.status(first, conditions=[])

    once(backend, "patch", comes_back)
    assert await launch(backend) == first, "it runs again"
    assert active(backend) == [first]


async def test_annotations_of_a_launch(backend: Recorded) -> None:
    first = await launch(backend, tried=2)
    backend.end(first, 3)
    second = await launch(backend, tried=3)
    backend.end(second, 3)
    begin = backend.version
    third = await launch(backend, tried=4)
    found = noted(backend, third)
    assert sorted(found[REPLACES].split(",")) == sorted([first.uid, second.uid])
    assert (found[TRY], int(found[LAUNCHED])) == ("4", begin)
    assert REPLACES not in noted(backend, first)
    await finishes(backend, third)
    fourth = await launch(backend, tried=5)
    assert third.uid not in noted(backend, fourth)[REPLACES], "a complete one is not replaced"


async def test_a_launch_after_very_many_failures_names_the_latest(backend: Recorded) -> None:
    """All annotations of an object have 256 KiB."""
    refs = [await other_attempt(backend, number) for number in range(1, 121)]
    for ref in refs:
        backend.end(ref, 3)
    found = noted(backend, await launch(backend))[REPLACES].split(",")
    assert found == [ref.uid for ref in refs[-len(found) :]]
    assert 50 <= len(found) < 120


async def test_an_adoption_keeps_the_later_launch(backend: Recorded) -> None:
    ref = await launch(backend, tried=3)
    patch = {"metadata": {"annotations": {LAUNCHED: "1000"}}}
    await backend.patch(ref, patch)
    assert await launch(backend, tried=2) == ref
    assert (noted(backend, ref)[TRY], noted(backend, ref)[LAUNCHED]) == ("3", "1000")


async def test_each_adoption_changes_the_version(backend: Recorded) -> None:
    """A request on its way that carries the version before loses."""
    ref = await launch(backend)
    await backend.patch(ref, {"metadata": {"annotations": {LAUNCHED: "1000"}}})  # a later launch, whose record is kept
    for _ in range(3):
        old, before = backend.job(ref)["metadata"]["resourceVersion"], noted(backend, ref)
        assert await launch(backend) == ref
        assert noted(backend, ref) != before
        await backend.delete(ref, old)
        assert active(backend) == [ref]


@pytest.mark.parametrize("error", [Rejected("its runtime is gone"), BackendUnavailable("a webhook hangs")])
async def test_a_job_that_refuses_changes_is_adopted(backend: Recorded, error: Exception) -> None:
    """By the Lease of its waiter, which the reaper reads again."""
    ref = await launch(backend)

    def refuse(request: str) -> None:
        if request == "patch":
            raise error

    backend.before = refuse
    assert await launch(backend) == ref


async def test_a_suspended_job_that_refuses_changes_is_not_adopted(backend: Recorded) -> None:
    ref = await launch(backend)
    await cancel(backend, ref, "suspend")

    def refuse(request: str) -> None:
        if request == "patch":
            raise Rejected("its runtime is gone")

    backend.before = refuse
    with pytest.raises(Rejected):
        await launch(backend)


async def test_an_adopted_job_that_changes_meanwhile_is_looked_at_again(backend: Recorded) -> None:
    ref = await launch(backend)
    once(backend, "patch", lambda: moves(backend, ref))
    backend.requests.clear()
    assert await launch(backend) == ref
    assert backend.requests == [*FIRST, "patch", *LOOK, "patch"]


async def moves(backend: Recorded, ref: JobRef) -> None:
    backend.running(ref)


async def test_the_records_of_cancels_are_those_of_the_key(backend: Recorded) -> None:
    await launch(backend)
    await cancel_key(backend, "other", namespace="ns", timeout_seconds=0)
    assert [(namespace, work) for namespace, work, _ in backend.records] == [("ns", key_hash("other"))]

    async def cancelled() -> None:
        await cancel_key(backend, "other", namespace="ns", timeout_seconds=0)

    once(backend, "create", cancelled)
    assert running(backend) == [await launch(backend)]


async def test_a_job_in_a_queue_is_adopted(backend: Recorded) -> None:
    spec = TrainJobSpec.parse({"runtime": "r", "command": ["x"], "suspend": True, "labels": {QUEUE_LABEL: "main"}})
    ref = await launch(backend, spec=spec)
    assert await launch(backend, spec=spec, tried=2) == ref
    assert backend.job(ref)["spec"]["suspend"]


async def test_a_job_that_vanishes_during_its_adoption_is_created_again(backend: Recorded) -> None:
    first = await launch(backend)

    async def vanish() -> None:
        del backend.jobs["ns", first.name]

    once(backend, "patch", vanish)
    second = await launch(backend)
    assert (second.uid != first.uid, active(backend)) == (True, [second])
    with pytest.raises(NotFound):
        backend.job(first)
    assert now() > backend.job(second)["metadata"]["creationTimestamp"]


@pytest.mark.parametrize("end", ["failed", "complete", "given up"])
async def test_a_job_that_ends_before_the_second_look_is_the_job_of_its_launch(backend: Recorded, end: str) -> None:
    def ended(request: str) -> None:
        (job,) = backend.jobs.values()
        backend.after = lambda _: None
        if end == "given up":
            job["spec"]["suspend"] = True
            job["metadata"]["annotations"][GIVEN_UP] = "{}"
            backend.condition(JobRef.of(job), "Suspended", "Suspended")
        else:
            backend.end(JobRef.of(job), 3 if end == "failed" else 0)

    backend.after = ended
    ref = await launch(backend)
    assert ref.attempt == 1
    assert [JobRef.of(job) for job in backend.jobs.values()] == [ref]
