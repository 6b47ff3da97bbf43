"""`on_retry` over launches and waits: why an attempt failed changes the next one, whatever is killed in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.objects import Object
from tests.unit.launches import LIMITED, Killing, active, annotations_of, launch

from trainjob import JobRef, TrainJobFailed, WaitOptions
from trainjob._diagnosis.serialization import pack_diagnosis, unpack_diagnosis
from trainjob._jobs import waiting
from trainjob._jobs.cancellation import give_up
from trainjob._jobs.records import mark_delivered
from trainjob._manifest.attempts import given_up
from trainjob.errors import Category, Diagnosis, QueueTimeout, RankCrashed, RetryVerdict, SpecMismatch
from trainjob.job import FAILURE, FAILURE_OF, MAX_NAME, labels_of
from trainjob.status import QUEUE_LABEL

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60), pytest.mark.usefixtures("no_pauses", "prompt")]

GROWING: dict[str, Any] = {
    "resources_per_node": {"memory": "16Gi"},
    "on_retry": {"out_of_memory": {"max_memory": "30Gi"}, "quota": {"queue": "backfill"}},
}
IN_QUEUE: dict[str, Any] = {**GROWING, "labels": {QUEUE_LABEL: "main"}}
QUEUED: dict[str, Any] = {**IN_QUEUE, "suspend": True}


def memory_of(backend: DirectBackend, ref: JobRef) -> str:
    return str(backend.job(ref)["spec"]["trainer"]["resourcesPerNode"]["limits"]["memory"])


def queue_of(backend: DirectBackend, ref: JobRef) -> str:
    return str(backend.job(ref)["metadata"]["labels"][QUEUE_LABEL])


def fill_memory(backend: DirectBackend, ref: JobRef) -> None:
    backend.end(ref, 137, reason="OOMKilled", spec=LIMITED)


async def fail_for_lack_of_memory(backend: DirectBackend, ref: JobRef, notices: list[str] | None = None) -> Diagnosis:
    """The diagnosis that a waiter gets, after these notices."""
    fill_memory(backend, ref)
    heard = [] if notices is None else notices
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref, on_change=lambda _, notice: heard.append(notice) if notice else None)
    return caught.value.diagnosis


async def time_out_in_queue(backend: DirectBackend, fields: dict[str, Any] = QUEUED) -> JobRef:
    ref = await launch(backend, fields=fields)
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, ref, WaitOptions(queue_timeout=timedelta(0)))
    return ref


async def crash(backend: DirectBackend, ref: JobRef) -> Diagnosis:
    """A rank of the job has too little memory, with `fail_on_first_crash`."""
    backend.running(ref)
    backend.pod(ref, last=objects.ended(137, reason="OOMKilled"), spec=LIMITED)
    with pytest.raises(RankCrashed) as caught:
        await waiting.wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    assert caught.value.retry is RetryVerdict.INFRASTRUCTURE
    return caught.value.diagnosis


def records(backend: DirectBackend) -> list[Object]:
    """The records of failures of deleted jobs."""
    return [job for job in backend.jobs.values() if FAILURE_OF in job["metadata"]["labels"]]


# ---------------------------------------------------------------- memory


async def test_attempts_after_a_lack_of_memory_get_more(backend: DirectBackend) -> None:
    first = await launch(backend, fields=GROWING)
    why = await fail_for_lack_of_memory(backend, first)
    assert (why.retry, why.change) == (RetryVerdict.INFRASTRUCTURE, "memory 16Gi -> 24Gi")
    backend.remove_pods()  # with the pods the evidence is deleted
    second = await launch(backend, fields=GROWING, after_failure="infrastructure")
    assert (second.attempt, memory_of(backend, second)) == (2, "24Gi")
    assert await launch(backend, fields=GROWING) == second, "the changed job is the same work"
    with pytest.raises(SpecMismatch, match=second.name) as caught:
        await launch(backend, fields={**GROWING, "args": ["--other"]})
    assert "resourcesPerNode" not in str(caught.value), "what on_retry changed is no difference of the specs"
    notices: list[str] = []
    assert (await fail_for_lack_of_memory(backend, second, notices)).change == "memory 24Gi -> 30Gi"
    assert notices[0].startswith("on_retry changed this attempt: memory 16Gi -> 24Gi; because of out of memory: node-0")
    third = await launch(backend, fields=GROWING)
    assert memory_of(backend, third) == "30Gi"
    why = await fail_for_lack_of_memory(backend, third)
    assert (why.retry, why.change) == (RetryVerdict.UNKNOWN, ""), "the bound is reached"
    with pytest.raises(TrainJobFailed):
        await launch(backend, fields=GROWING, after_failure="infrastructure")
    assert memory_of(backend, await launch(backend, fields=GROWING)) == "30Gi", "a person may retry"


async def test_a_launcher_reads_the_evidence_if_nobody_waited(backend: DirectBackend) -> None:
    fill_memory(backend, await launch(backend, fields=GROWING))
    second = await launch(backend, fields=GROWING, after_failure="infrastructure")
    assert memory_of(backend, second) == "24Gi"


async def test_new_work_of_a_key_starts_without_changes(backend: DirectBackend) -> None:
    await fail_for_lack_of_memory(backend, await launch(backend, fields=GROWING))
    second = await launch(backend, fields=GROWING)
    backend.end(second)
    await mark_delivered(backend, second)
    assert memory_of(backend, await launch(backend, fields=GROWING)) == "16Gi"


def admit(backend: DirectBackend, ref: JobRef) -> None:
    backend.change(ref, {"spec": {"suspend": False}})
    backend.running(ref)


def nothing(_: DirectBackend, __: JobRef) -> None: ...


@pytest.mark.parametrize(
    ("fields", "times_out", "happens"),
    [
        (QUEUED, True, admit),
        (QUEUED, True, DirectBackend.pod),
        (QUEUED, False, nothing),
        ({**QUEUED, "on_retry": None}, True, nothing),
        ({**GROWING, "suspend": True}, True, nothing),
    ],
    ids=["admitted since", "ran since", "nobody waited for long", "no rule", "suspended by a person"],
)
async def test_a_job_that_does_not_lack_capacity_is_adopted(
    backend: DirectBackend, fields: dict[str, Any], times_out: bool, happens: Callable[..., object]
) -> None:
    first = await (time_out_in_queue(backend, fields) if times_out else launch(backend, fields=fields))
    assert (FAILURE in annotations_of(backend, first)) is (happens is not nothing)
    happens(backend, first)
    assert await launch(backend, fields=fields) == first


# ---------------------------------------------------------------- several launches, and those that are killed


async def lack_memory(backend: DirectBackend) -> None:
    await fail_for_lack_of_memory(backend, await launch(backend, fields=GROWING))


async def lack_capacity(backend: DirectBackend) -> None:
    await time_out_in_queue(backend)


LACKS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., str], str]] = {
    "memory": (lack_memory, GROWING, memory_of, "24Gi"),
    "capacity": (lack_capacity, QUEUED, queue_of, "backfill"),
}


@pytest.mark.parametrize("tried", [1, 2])
@pytest.mark.parametrize("lack", LACKS)
async def test_a_launcher_killed_at_any_request_leaves_one_job_with_the_change(lack: str, tried: int) -> None:
    fail, fields, changed, value = LACKS[lack]
    for number in [None, *range(60)]:
        backend = DirectBackend()
        await fail(backend)
        killing = Killing(backend, number)
        with suppress(asyncio.CancelledError):
            await launch(backend, fields=fields, tried=tried)
        backend.before = backend.after = lambda _: None
        second = await launch(backend, fields=fields, tried=tried)
        assert (second.attempt, changed(backend, second)) == (2, value)
        assert (active(backend), records(backend)) == ([second], [])
        assert await launch(backend, fields=fields, tried=tried) == second
        if not killing.killed:
            break
    assert number in range(8, 59), "it was killed at each of its requests"


@pytest.mark.parametrize("number", [None, 0, 1, 2, 3, 4, 99])
async def test_a_crash_in_a_queue_changes_the_next_attempt_although_its_job_is_deleted(
    backend: DirectBackend, number: int | None
) -> None:
    """`number`: the process that gives the job up is killed before this request, or after it has created the record."""
    first = await launch(backend, fields=IN_QUEUE)
    why = await crash(backend, first)
    Killing(backend, number)
    with suppress(asyncio.CancelledError):
        await give_up(backend, first, why)
    backend.before = backend.after = lambda _: None
    kept = [job for job in backend.jobs.values() if JobRef.of(job) == first]
    for _ in range(2):
        second = await launch(backend, fields=IN_QUEUE)
        assert active(backend) == [second]
        assert second == first if kept else (second.attempt, memory_of(backend, second)) == (2, "24Gi")
        assert records(backend) == []
    assert bool(kept) is (number is None or number < 3), "the job is deleted last"


# ---------------------------------------------------------------- records of failures


async def test_a_record_is_no_attempt_and_fails_if_it_is_resumed(backend: DirectBackend) -> None:
    first = await launch(backend, fields=IN_QUEUE)
    why = await crash(backend, first)
    await give_up(backend, first, why)
    (record,) = backend.jobs.values()
    assert not labels_of("key").items() & record["metadata"]["labels"].items()
    assert QUEUE_LABEL not in record["metadata"]["labels"]
    assert record["spec"]["trainer"]["command"] == ["false"]
    assert len(record["metadata"]["name"]) <= MAX_NAME
    assert given_up(record) == unpack_diagnosis(pack_diagnosis(why))


async def test_a_record_that_a_queue_would_start_is_deleted(
    backend: DirectBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await launch(backend, fields=IN_QUEUE)

    def with_queue(_: str, item: Object) -> Object:
        item["metadata"]["labels"][QUEUE_LABEL] = "default"  # Kueue's LocalQueueDefaulting
        return item

    monkeypatch.setattr(backend.store, "defaulted", with_queue)
    await give_up(backend, first, Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 1"))
    assert backend.jobs == {}
