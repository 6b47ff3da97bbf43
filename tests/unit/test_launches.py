"""What a launch makes of the attempts of its key, its requests, and what it writes on the job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.objects import Object
from tests.unit.launches import (
    FIRST,
    LIMITED,
    LOOK,
    annotations_of,
    attempt,
    bring,
    deleted,
    finish,
    launch,
    patches,
    refuse,
    running,
    without_launch,
)

from trainjob import JobRef, TrainJobFailed
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.records import mark_delivered
from trainjob._manifest.attempts import LAUNCHED, REPLACES
from trainjob.errors import Rejected
from trainjob.job import DELIVERED, TRY, job_name
from trainjob.status import GIVEN_UP, QUEUE_LABEL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


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
    ("state", "number", "runs"),
    [
        ("nothing", 1, True),
        ("deleted, with pods on a lost node", 2, True),
        ("a JobSet is left", 2, True),
        ("failed", 2, True),
        ("given up", 2, True),
        ("delivered", 2, True),
        ("runs", 1, True),
        ("suspended by a cancel", 1, True),
        ("undelivered", 1, False),
        ("two run", 1, True),
        ("came back", 2, True),
    ],
)
async def test_the_attempt_of_a_launch(backend: DirectBackend, state: str, number: int, runs: bool) -> None:
    await bring(backend, state)
    ref = await launch(backend)
    assert (ref.namespace, ref.name, ref.attempt) == ("ns", job_name("key", number), number)
    assert running(backend) == ([ref] if runs else [])
    assert await launch(backend) == ref
    assert await launch(backend, "another") != ref


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
        ("verdict", 143, "Error", ""),
        ("verdict", 137, "OOMKilled", ""),
        ("verdict", 128, "StartError", "configuration"),
        ("infrastructure", 3, "Error", "unknown"),
        ("infrastructure", 143, "Error", ""),
        ("infrastructure", 137, "OOMKilled", "unknown"),
        ("infrastructure", 128, "StartError", "configuration"),
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


async def test_a_suspended_job_that_refuses_changes_is_not_adopted(backend: DirectBackend) -> None:
    await cancel(backend, await launch(backend), "suspend")
    refuse(backend, PATCH)
    with pytest.raises(Rejected):
        await launch(backend)


async def test_a_failed_attempt_that_cannot_be_suspended_is_deleted(backend: DirectBackend) -> None:
    first = await launch(backend)
    backend.end(first, 3)
    version = backend.job(first)["metadata"]["resourceVersion"]
    refuse(backend, PATCH)
    assert (await launch(backend)).attempt == 2
    assert deleted(backend) == [(first.name, version)]
