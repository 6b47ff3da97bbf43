"""A new attempt waits for the ranks of earlier ones, and gets a name of which nothing is left."""

from __future__ import annotations

import logging

import anyio
import pytest
from tests.fakes.kube.direct import LOST, DirectBackend
from tests.unit.launches import Clock, attempt, launch

from trainjob import JobRef
from trainjob._jobs import fencing
from trainjob.errors import RanksRemain, RetryVerdict
from trainjob.job import MAX_NAME, job_name

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "_POLL", 0)


@pytest.fixture
async def first(backend: DirectBackend) -> JobRef:
    """An attempt that was deleted."""
    ref = await launch(backend)
    await backend.delete(ref)
    return ref


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown"])
async def test_a_launch_waits_for_the_ranks_of_the_attempt_before(
    backend: DirectBackend, first: JobRef, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainjob")
    for rank in range(6):
        backend.pod(first, rank, phase=phase, node=f"node-{rank}")
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
