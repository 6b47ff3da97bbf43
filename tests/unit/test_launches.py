"""What a launch makes of the attempts of its key and their ranks, its requests, and what it writes on the job."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest
from tests.fakes.kube.direct import LOST, DirectBackend
from tests.fakes.kube.objects import Object
from tests.unit.launches import (
    FIRST,
    LIMITED,
    LOOK,
    Clock,
    annotations_of,
    attempt,
    bring,
    deleted,
    finish,
    launch,
    patches,
    refuse,
    without_launch,
)

from trainjob import JobRef, TrainJobFailed
from trainjob._jobs import fencing
from trainjob._jobs.records import mark_delivered
from trainjob._manifest.attempts import LAUNCHED, REPLACES
from trainjob.errors import RanksRemain, RetryVerdict
from trainjob.job import DELIVERED, MAX_NAME, TRY, job_name
from trainjob.status import GIVEN_UP, QUEUE_LABEL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60), pytest.mark.usefixtures("no_pauses")]


# ---------------------------------------------------------------- cost

POST, PATCH = "POST trainjobs", "PATCH trainjobs"
ON_RETRY = {"resources_per_node": {"memory": "16Gi"}, "on_retry": {"out_of_memory": {"max_memory": "30Gi"}}}


@pytest.mark.parametrize(
    ("state", "fields", "options", "requests", "trips"),
    [
        ("nothing", {}, {}, [*FIRST, POST, *LOOK], 3),
        ("nothing", {}, {"is_new": True}, [POST, *LOOK], 2),
        ("nothing", ON_RETRY, {}, [*FIRST, "LIST trainjobs", POST, *LOOK], 3),
        ("runs", {}, {}, [*FIRST, PATCH], 2),
        ("runs", {}, {"tried": 2}, [*LOOK, PATCH], 2),
        ("undelivered", {}, {"tried": 2}, LOOK, 1),
        ("given up", {}, {}, [*FIRST, "LIST pods", "GET jobsets", POST, *LOOK], 5),
    ],
    ids=["unused key", "generated key", "with rules", "adoption", "adoption by a retry", "result", "next attempt"],
)
async def test_the_documented_requests_of_a_launch(
    backend: DirectBackend, state: str, fields: dict[str, Any], options: dict[str, Any], requests: list[str], trips: int
) -> None:
    await bring(backend, state)
    backend.requests.clear()
    assert await round_trips(backend, lambda: launch(backend, fields=fields, **options)) == trips
    assert backend.requests == requests


async def test_a_launch_after_a_failure_reads_the_evidence_and_suspends_the_attempt(backend: DirectBackend) -> None:
    await bring(backend, "failed")
    (first,) = [JobRef.of(job) for job in backend.jobs.values()]
    version = backend.job(first)["metadata"]["resourceVersion"]
    backend.store.log.clear()
    backend.requests.clear()
    await launch(backend)
    assert backend.requests[:4] == FIRST
    assert backend.requests[-6:] == [PATCH, "LIST pods", "GET jobsets", POST, *LOOK]
    assert {request.split()[0] for request in backend.requests[4:-6]} == {"GET", "LIST"}
    ((name, patch),) = patches(backend)
    assert (name, patch["spec"], patch["metadata"]["resourceVersion"]) == (first.name, {"suspend": True}, version)
    assert "node-0 exited with code 3" in patch["metadata"]["annotations"][GIVEN_UP], "one request has its diagnosis"


async def test_on_this_machine_a_launch_reads_one_after_the_other() -> None:
    """A read of a job without a supervisor ends it; another read of it at that moment would show it as running."""

    class ThisMachine(DirectBackend):
        cluster = None  # type: ignore[assignment]  # as of a backend without one

    backend = ThisMachine()
    assert await round_trips(backend, lambda: launch(backend)) == 5


async def round_trips(backend: DirectBackend, process: Callable[[], Awaitable[object]]) -> int:
    """Those of a process: a request that is sent while no other is on its way begins one."""
    began = in_flight = 0

    async def turn(_: str) -> None:
        nonlocal began, in_flight
        began += not in_flight
        in_flight += 1
        for _pass in range(20):
            await asyncio.sleep(0)
        in_flight -= 1

    backend.turn = turn
    await process()
    return began


# ---------------------------------------------------------------- adopted, or followed


@pytest.mark.parametrize(
    ("fields", "patch"),
    [
        ({}, {}),
        ({}, {"spec": {"suspend": True}}),
        ({}, {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}),
        ({"suspend": True, "labels": {QUEUE_LABEL: "main"}}, {}),
    ],
    ids=["fresh", "suspended by a person", "complete", "in a queue"],
)
async def test_an_adoption_changes_the_annotations_of_a_launch_only(
    backend: DirectBackend, fields: dict[str, Any], patch: Object
) -> None:
    ref = await launch(backend, fields=fields)
    backend.change(ref, patch)
    backend.store.changed("trainjobs", backend.job(ref), "trainer")
    before = backend.job(ref)
    assert await launch(backend, fields=fields, tried=2) == ref
    after = backend.job(ref)
    assert without_launch(after) == without_launch(before)
    assert (after == before) == ("status" in patch), "each adoption of an active job changes its version"


async def test_a_delivered_result_is_marked_on_a_job_that_exists(backend: DirectBackend) -> None:
    ref = await launch(backend)
    await mark_delivered(backend, ref)
    assert annotations_of(backend, ref)[DELIVERED] == "true"
    await backend.delete(ref)
    await mark_delivered(backend, ref)
    assert backend.jobs == {}


async def test_of_launches_at_once_one_reports_that_it_has_created_the_job(backend: DirectBackend) -> None:
    adopted: list[JobRef] = []
    refs = await asyncio.gather(*(launch(backend, on_adopt=adopted.append) for _ in range(5)))
    assert adopted == refs[:1] * 4
    again = await launch(backend, on_adopt=adopted.append)
    assert adopted == [again] * 5


@pytest.mark.parametrize(
    ("after", "code", "reason", "final"),
    [
        ("verdict", 3, "Error", ""),
        ("verdict", 137, "OOMKilled", ""),
        ("verdict", 128, "StartError", "configuration"),
        ("infrastructure", 3, "Error", "unknown"),
        ("infrastructure", 143, "Error", ""),
        ("infrastructure", 137, "OOMKilled", "unknown"),
    ],
)
async def test_a_launch_after_a_failure_depends_on_its_verdict(
    backend: DirectBackend, after: str, code: int, reason: str, final: str
) -> None:
    backend.end(await launch(backend), code, reason=reason, spec=LIMITED)
    if not final:
        assert (await launch(backend, after_failure=after)).attempt == 2
    else:
        with pytest.raises(TrainJobFailed) as caught:
            await launch(backend, after_failure=after)
        assert caught.value.retry == final
        assert len(backend.jobs) == 1


# ---------------------------------------------------------------- tries


async def test_a_later_try_adopts_an_unfinished_job(backend: DirectBackend) -> None:
    """Airflow's try_number: it is recorded on the job and is no part of its name."""
    first = await launch(backend, tried=3)
    assert (first.name, annotations_of(backend, first)[TRY]) == (job_name("key", 1), "3")
    assert await launch(backend, tried=4) == first
    backend.change(first, {"metadata": {"annotations": {LAUNCHED: "1000"}}})
    assert await launch(backend, tried=2) == first
    kept = annotations_of(backend, first)
    assert (kept[TRY], kept[LAUNCHED]) == ("4", "1000"), "an earlier one keeps the later one"
    backend.end(first, 3)
    second = await launch(backend, tried=5)
    assert (second.attempt, annotations_of(backend, second)[TRY]) == (2, "5")


@pytest.mark.parametrize("after_failure", ["retry", "verdict", "infrastructure"])
@pytest.mark.parametrize("counts", [True, False])
async def test_no_attempt_follows_a_failure_of_the_last_try(
    backend: DirectBackend, after_failure: str, counts: bool
) -> None:
    """`counts`: whether the caller counts its tries, of which ten came before; if not, each attempt is one more try."""

    async def launched(tried: int, last: int) -> JobRef:
        given: dict[str, Any] = {"tried": tried + 10, "last_try": last + 10} if counts else {"last_try": last}
        return await launch(backend, after_failure=after_failure, **given)

    backend.end(await launched(1, 2), 143)
    second = await launched(2, 2)
    assert second.attempt == 2
    assert await launched(2, 1) == second, "it has not failed"
    backend.end(second, 143)
    with pytest.raises(TrainJobFailed, match="SIGTERM"):
        await launched(2, 2)
    assert (await launched(3, 3)).attempt == 3


# ---------------------------------------------------------------- what a launch writes


async def test_annotations_of_a_launch(backend: DirectBackend) -> None:
    first = await launch(backend, tried=2)
    backend.end(first, 3)
    second = await launch(backend, tried=3)
    backend.end(second, 3)
    begin = backend.store.version
    third = await launch(backend, tried=4)
    found = annotations_of(backend, third)
    assert sorted(found[REPLACES].split(",")) == sorted([first.uid, second.uid])
    assert (found[TRY], int(found[LAUNCHED])) == ("4", begin)
    assert REPLACES not in annotations_of(backend, first)
    await finish(backend, third)
    fourth = await launch(backend, tried=5)
    assert third.uid not in annotations_of(backend, fourth)[REPLACES], "a complete one is not replaced"


async def test_a_launch_that_may_not_read_leases_does_not_know_its_begin(backend: DirectBackend) -> None:
    backend.store.forbidden = (frozenset({"leases"}), frozenset())
    assert LAUNCHED not in annotations_of(backend, await launch(backend))


async def test_a_launch_after_very_many_failures_names_the_latest(backend: DirectBackend) -> None:
    """All annotations of an object have 256 KiB."""
    refs = [attempt(backend, number) for number in range(1, 121)]
    for ref in refs:
        backend.condition(ref, "Failed", "FailedJobs")
    found = annotations_of(backend, await launch(backend))[REPLACES].split(",")
    assert found == [ref.uid for ref in refs[-len(found) :]]
    assert 50 <= len(found) < 120


# ---------------------------------------------------------------- refused changes


async def test_a_failed_attempt_that_cannot_be_suspended_is_deleted(backend: DirectBackend) -> None:
    first = await launch(backend)
    backend.end(first, 3)
    version = backend.job(first)["metadata"]["resourceVersion"]
    refuse(backend, PATCH)
    assert (await launch(backend)).attempt == 2
    assert deleted(backend) == [(first.name, version)]


# ---------------------------------------------------------------- ranks of earlier attempts


@pytest.fixture
async def first(backend: DirectBackend) -> JobRef:
    """An attempt that was deleted."""
    ref = await launch(backend)
    await backend.delete(ref)
    return ref


async def test_a_launch_waits_for_the_ranks_of_the_attempt_before(
    backend: DirectBackend, first: JobRef, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainjob")
    for rank in range(6):
        backend.pod(first, rank, phase=("Pending", "Running", "Unknown")[rank % 3], node=f"node-{rank}")
    backend.requests.clear()
    backend.before = lambda _: backend.remove_pods() if backend.requests.count("LIST pods") == 4 else None
    second = await launch(backend)
    assert second.attempt == 2
    assert backend.requests.count("LIST pods") >= 4
    assert [name for _, name in backend.jobs] == [second.name]
    (line,) = [record.message for record in caplog.records if "starts when" in record.message]
    shown = ", ".join(f"node-{rank} of {first.name} on node node-{rank}" for rank in range(4))
    assert line == f"{shown} and 2 more have not ended: the next attempt of key starts when they have ended"


async def test_ranks_that_have_ended_and_those_of_another_key_are_not_waited_for(
    backend: DirectBackend, first: JobRef
) -> None:
    backend.pod(first, 0, 3)
    backend.pod(first, 1, 0)
    backend.pod(attempt(backend, 1, "other"))
    assert (await launch(backend, wait_for_ranks=False)).attempt == 1


async def test_a_launch_that_does_not_wait_names_the_ranks(backend: DirectBackend, first: JobRef) -> None:
    """A deferrable task: the trigger waits."""
    backend.pod(first, node="gpu-7")
    with pytest.raises(RanksRemain) as caught:
        await launch(backend, wait_for_ranks=False)
    assert str(caught.value) == (
        f"node-0 of {first.name} on node gpu-7 has not ended: the next attempt of key starts when they have ended"
    )
    assert caught.value.retry is RetryVerdict.INFRASTRUCTURE
    assert caught.value.seconds == 60, "its grace period and 30 s"
    assert backend.jobs == {}
    backend.remove_pods()
    assert (await launch(backend, wait_for_ranks=False)).attempt == 1


@pytest.mark.parametrize("wait", [True, False])
async def test_a_lost_node_is_not_waited_for(
    backend: DirectBackend, first: JobRef, wait: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend.pod(first, 1, node="gpu-7", conditions=[LOST])
    second = await launch(backend, wait_for_ranks=wait)
    assert second.attempt == 2
    assert (
        f"node-1 of {first.name} on node gpu-7, which does not answer, has not ended, and may still write to the "
        "checkpoints: the next attempt of key starts now"
    ) in caplog.text


async def test_the_wait_for_ranks_ends_after_their_grace_period(
    backend: DirectBackend, first: JobRef, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monkeypatch.setattr(fencing, "time", clock)
    monkeypatch.setattr(anyio, "sleep", clock.sleep)
    monkeypatch.setattr(fencing, "_POLL", 2.0)
    backend.pod(first, 0, node="a", spec={"terminationGracePeriodSeconds": 90})
    backend.pod(first, 1, node="b", conditions=[LOST])
    second = await launch(backend)
    assert second.attempt == 2
    assert 120 <= clock.now <= 124, "90 s of grace and 30 s"
    assert f"node-0 of {first.name} on node a, node-1 of {first.name} on node b, which does not answer" in caplog.text
    assert "have not ended, and may still write to the checkpoints" in caplog.text


@pytest.mark.parametrize(
    ("objects", "pods", "taken", "attempt_number"),
    [
        ((), (), (), 1),
        ((1, 4), (), (), 5),
        ((), (3,), (), 4),
        ((5,), (2,), (), 6),
        ((), (), (1, 2), 3),
        ((1,), (2,), (3, 4), 5),
        ((999,), (), (), 1000),
    ],
)
async def test_a_name_is_above_all_that_objects_pods_and_jobsets_show(
    backend: DirectBackend, objects: tuple[int, ...], pods: tuple[int, ...], taken: tuple[int, ...], attempt_number: int
) -> None:
    for number in objects:
        backend.condition(attempt(backend, number), "Failed", "FailedJobs")
    for number in pods:
        backend.pod(JobRef("ns", job_name("key", number), "gone"), conditions=[LOST])
    for number in taken:
        backend.jobset(job_name("key", number), "ns")
    ref = await launch(backend)
    assert (ref.attempt, ref.name) == (attempt_number, job_name("key", attempt_number))
    assert len(ref.name) <= MAX_NAME
