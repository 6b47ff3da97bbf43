"""A job of this machine that nobody waits for is ended by its own supervisor."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import JobRef, Phase
from trainjob.backends.local.backend import LocalBackend
from trainjob.lifecycle import launch
from trainjob.spec import TrainJobSpec
from trainjob.status import CANCELLED, observe
from trainjob.unattended import AFTER
from trainjob.waiting import wait

SLEEP = "echo on; sleep 60"


def launched(jobs: Jobs, unattended: str = "suspend") -> JobRef:
    """A job that counts as unattended after a second, which no author may ask for."""
    ref = jobs.launch(SLEEP, unattended=unattended)
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"metadata": {"annotations": {AFTER: "1"}}}))
    jobs.starts(ref)
    return ref


def phase(jobs: Jobs, ref: JobRef) -> Phase:
    return observe(jobs.client.get(ref)).phase


def test_it_is_suspended_and_resumed_by_who_waits_again(jobs: Jobs) -> None:
    ref = launched(jobs)
    eventually(lambda: phase(jobs, ref) is Phase.SUSPENDED)
    job = jobs.client.get(ref)
    assert job is not None
    assert job["metadata"]["annotations"][CANCELLED] == "unattended"
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    eventually(lambda: phase(jobs, ref) is Phase.RUNNING)
    waiting.cancel()
    eventually(lambda: phase(jobs, ref) is Phase.SUSPENDED)


def test_it_ends_where_its_deletion_is_asked(jobs: Jobs) -> None:
    ref = launched(jobs, "delete")
    eventually(lambda: phase(jobs, ref) is Phase.CANCELLED)
    assert jobs.lines(ref) == ["on"]


def test_while_somebody_waits_it_runs(jobs: Jobs) -> None:
    ref = launched(jobs)
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    time.sleep(3)  # there is no event for what does not happen
    assert phase(jobs, ref) is Phase.RUNNING
    waiting.cancel()


def test_what_a_person_paused_is_left(jobs: Jobs) -> None:
    ref = launched(jobs)
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"spec": {"suspend": True}}))
    eventually(lambda: phase(jobs, ref) is Phase.SUSPENDED)
    time.sleep(2)  # there is no event for what does not happen
    job = jobs.client.get(ref)
    assert job is not None
    assert CANCELLED not in job["metadata"]["annotations"]


@pytest.mark.anyio
async def test_waiting_for_one_that_is_gone(home: Path) -> None:
    backend = LocalBackend(home)
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"], "unattended": "suspend"})
    ref = await launch(backend, spec, "a", namespace="default")
    with anyio.fail_after(20):
        await wait(backend, ref)
    await backend.delete(ref)
    backend.attend(ref)
    backend.leave(ref, ended=True)
    await backend.aclose()
