"""A launcher that is killed, and what others do between its requests: one key, one training.

Random orders of all processes are those of `tests/simulation`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import (
    FIRST,
    LONG_AGO,
    LOOK,
    STATES,
    Killing,
    active,
    annotations_of,
    attempt,
    bring,
    deleted,
    launch,
    once,
    running,
    spec,
    without_launch,
)

from trainjob import InvalidSpec, JobRef, Phase, TrainJobSpec
from trainjob._backends.base import Backend
from trainjob._jobs import launching
from trainjob._jobs.cancellation import cancel, cancel_key
from trainjob._manifest import unattended
from trainjob.errors import RuntimeNotFound, SpecMismatch
from trainjob.job import TRY, job_name
from trainjob.status import CANCELLED, observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300), pytest.mark.usefixtures("no_pauses")]


def cancelling(
    backend: DirectBackend, action: Any = "cancel", tried: int | None = None
) -> Callable[[], Awaitable[object]]:
    """A cancel of the key that waits for no pod."""
    return lambda: cancel_key(backend, "key", namespace="ns", action=action, tried=tried, timeout_seconds=0)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("state", STATES)
async def test_the_next_launch_repairs_what_a_killed_launcher_left(state: str, when: str) -> None:
    """The first launcher is killed before each of its requests, or after it was served."""
    found: Any = None
    number = -1
    while not isinstance(found, JobRef):
        number += 1
        backend = DirectBackend()
        await bring(backend, state)
        Killing(backend, number, when)
        (found,) = await asyncio.gather(launch(backend), return_exceptions=True)
        backend.before = backend.after = lambda _: None
        assert isinstance(found, JobRef | asyncio.CancelledError)
        ref = await launch(backend)
        assert (ref.name, ref.attempt) == (job_name("key", STATES[state]), STATES[state])
        assert active(backend) == running(backend) == ([] if state == "undelivered" else [ref]), number
        assert await launch(backend) == ref
    assert found == ref
    assert number >= len(LOOK)


# ---------------------------------------------------------------- what changes between two looks


def only(backend: DirectBackend) -> JobRef:
    (job,) = backend.jobs.values()
    return JobRef.of(job)


async def delete_own(backend: DirectBackend) -> None:
    """The JobSet is left, which the first look cannot have found."""
    await backend.delete(only(backend))
    backend.jobset(job_name("key", 1), "ns")


async def test_the_own_attempt_of_a_generated_key_is_not_followed_under_its_name(backend: DirectBackend) -> None:
    once(backend, "LIST trainjobs", lambda: delete_own(backend))
    assert (await launch(backend, is_new=True)).attempt == 2


async def test_a_loser_that_has_completed_meanwhile_is_kept(
    backend: DirectBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The job has its result: it counts now, and the other one ends. Both are deleted by UID and version."""

    def completes(request: str) -> None:
        if request == "DELETE trainjobs":
            backend.before = lambda _: None
            backend.end(next(ref for ref in active(backend) if ref.attempt == 1))

    once(backend, "LIST trainjobs", lambda: attempt(backend, 7, created=LONG_AGO), skip=1)
    backend.before = completes
    assert (await launch(backend)).attempt == 1
    assert active(backend) == []
    assert [name for name, version in deleted(backend) if version] == [job_name("key", 1), job_name("key", 7)]
    assert "is deleted: another attempt of its key counts" in caplog.text


async def test_an_adopted_job_that_changes_meanwhile_is_looked_at_again(backend: DirectBackend) -> None:
    ref = await launch(backend)
    once(backend, "PATCH trainjobs", lambda: backend.running(ref))
    backend.requests.clear()
    assert await launch(backend) == ref
    assert backend.requests == [*FIRST, "PATCH trainjobs", *LOOK, "PATCH trainjobs"]


# ---------------------------------------------------------------- a cancel beside a launcher


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_launch_that_counts_no_tries_is_later_than_each_kill_before_it(
    backend: DirectBackend, action: Any
) -> None:
    first = await launch(backend, tried=1)
    await cancelling(backend, action, 3)()
    ref = await launch(backend)
    assert running(backend) == [ref]
    assert (ref == first) == (action == "suspend")
    assert annotations_of(backend, ref)[TRY] == "4"


# ---------------------------------------------------------------- specs


async def test_another_spec_with_the_same_key_is_rejected(backend: DirectBackend) -> None:
    ref = await launch(backend, fields={"args": ["--lr", "0.1"]})
    with pytest.raises(SpecMismatch) as caught:
        await launch(backend, fields={"args": ["--lr", "0.2"], "num_nodes": 2})
    text = str(caught.value)
    assert f"ns/{ref.name}" in text
    assert 'spec.trainer.args[1]: "0.1" -> "0.2"' in text
    assert "spec.trainer.numNodes: (nothing) -> 2" in text
    with pytest.raises(SpecMismatch, match="labels or annotations"):
        await launch(backend, fields={"args": ["--lr", "0.1"], "labels": {"a": "b"}})
    assert len(backend.jobs) == 1


async def test_labels_of_the_origin_do_not_change_the_spec(backend: DirectBackend) -> None:
    fields = {"labels": {"team": "vision", "dag_id": "theirs"}}
    origin = {"dag_id": "digits", "try_number": "1"}
    ref = await launch(backend, fields=fields, origin=origin)
    labels = backend.job(ref)["metadata"]["labels"]
    assert ({"team": "vision"} | origin).items() <= labels.items()
    assert await launch(backend, fields=fields, origin=origin | {"try_number": "2"}) == ref
    assert backend.job(ref)["metadata"]["labels"] == labels, "labels name the task that launched the job"


STOPS: dict[str, Callable[[Backend, JobRef], Awaitable[object]]] = {
    "cancel of the job": lambda backend, ref: cancel(backend, ref, "suspend"),
    "cancel of the key": lambda backend, ref: cancel_key(backend, "key", namespace="ns", action="suspend"),
    "kill": lambda backend, ref: cancel_key(backend, "key", namespace="ns", action="suspend", tried=1),
    "reaper": lambda backend, ref: backend.patch(
        ref, {"metadata": {"annotations": {CANCELLED: unattended.MARK}}, "spec": {"suspend": True}}
    ),
}


@pytest.fixture(params=STOPS)
async def stopped(request: pytest.FixtureRequest, backend: DirectBackend) -> JobRef:
    """A job that waits for a launch that resumes it."""
    ref = await launch(backend, tried=1)
    await STOPS[request.param](backend, ref)
    assert observe(backend.job(ref)).phase is Phase.SUSPENDED
    return ref


async def test_another_spec_replaces_a_job_that_was_stopped(backend: DirectBackend, stopped: JobRef) -> None:
    """ "Fix the spec, run again" must not fail."""
    second = await launch(backend, fields={"num_nodes": 2}, tried=2)
    assert (second.attempt, [name for _, name in backend.jobs]) == (2, [second.name])
    with pytest.raises(SpecMismatch):
        await launch(backend, tried=3)


async def test_the_same_spec_resumes_a_job_that_was_stopped(backend: DirectBackend, stopped: JobRef) -> None:
    assert await launch(backend, tried=2) == stopped
    assert running(backend) == [stopped]
    assert CANCELLED not in annotations_of(backend, stopped)
    with pytest.raises(SpecMismatch):  # it is waited for
        await launch(backend, fields={"num_nodes": 2}, tried=3)


async def test_a_stopped_job_stays_if_the_next_spec_is_refused(backend: DirectBackend, stopped: JobRef) -> None:
    backend.requests.clear()
    with pytest.raises(RuntimeNotFound):
        await launch(backend, fields={"runtime": "nosuch"}, tried=2)
    assert backend.requests.count("POST trainjobs") == 1
    assert await launch(backend, tried=2) == stopped


async def test_a_job_that_a_person_suspended_is_not_replaced_by_another_spec(backend: DirectBackend) -> None:
    await backend.patch(await launch(backend), {"spec": {"suspend": True}})
    with pytest.raises(SpecMismatch):
        await launch(backend, fields={"num_nodes": 2})


@pytest.mark.parametrize(
    ("unparsed", "words"),
    [
        (TrainJobSpec(), "runtime: is missing"),
        (spec().model_copy(update={"func_args": {"lr": 0.1}}), "func_args: needs func"),
    ],
    ids=["empty", "odd"],
)
@pytest.mark.parametrize("send", [launching.launch, launching.dry_run])
async def test_an_unparsed_spec_is_checked_before_any_request(
    backend: DirectBackend, send: Callable[..., Awaitable[object]], unparsed: TrainJobSpec, words: str
) -> None:
    with pytest.raises(InvalidSpec, match=words):
        await send(backend, unparsed, "key", namespace="ns")
    assert backend.requests == []


async def test_a_dry_run_ignores_existing_jobs_and_creates_nothing(backend: DirectBackend) -> None:
    launched = without_launch(backend.job(await launch(backend)))
    stored = dict(await launching.dry_run(backend, spec(), "key", namespace="ns"))
    assert len(backend.jobs) == 1
    assert stored["metadata"].keys() >= {"uid", "creationTimestamp"}, "the server's defaults are shown"
    own = {"uid", "creationTimestamp", "resourceVersion", "annotations"}
    assert {**stored, "metadata": {name: value for name, value in stored["metadata"].items() if name not in own}} == {
        **launched,
        "metadata": {name: value for name, value in launched["metadata"].items() if name not in own},
    }
