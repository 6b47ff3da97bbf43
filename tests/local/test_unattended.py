"""The supervisor of a local job ends it when it is unattended."""

from __future__ import annotations

import time
from pathlib import Path

import anyio
import pytest
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import JobRef, Phase
from trainjob._backends.local.backend import LocalBackend
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.unattended import AFTER
from trainjob._spec import TrainJobSpec
from trainjob.status import CANCELLED, observe

SLEEP = "echo on; sleep 60"


def launched(jobs: Jobs, unattended: str = "suspend") -> JobRef:
    """A job that counts as unattended after a second, which no author may ask for."""
    ref = jobs.launch(SLEEP, unattended=unattended)
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"metadata": {"annotations": {AFTER: "1"}}}))
    jobs.starts(ref)
    return ref


def phase(jobs: Jobs, ref: JobRef) -> Phase:
    return observe(jobs.client.get(ref)).phase


def test_an_unattended_job_is_suspended_and_the_next_waiter_resumes_it(jobs: Jobs) -> None:
    ref = launched(jobs)
    eventually(lambda: phase(jobs, ref) is Phase.SUSPENDED)
    job = jobs.client.get(ref)
    assert job is not None
    assert job["metadata"]["annotations"][CANCELLED] == "unattended"
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    eventually(lambda: phase(jobs, ref) is Phase.RUNNING)
    waiting.cancel()
    eventually(lambda: phase(jobs, ref) is Phase.SUSPENDED)


def test_an_unattended_job_with_action_delete_is_cancelled(jobs: Jobs) -> None:
    ref = launched(jobs, "cancel")
    eventually(lambda: phase(jobs, ref) is Phase.CANCELLED)
    assert jobs.lines(ref) == ["on"]


def test_an_attended_job_keeps_running(jobs: Jobs) -> None:
    ref = launched(jobs)
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    time.sleep(3)  # longer than the job may be unattended
    assert phase(jobs, ref) is Phase.RUNNING
    waiting.cancel()


def test_a_job_suspended_by_a_person_is_kept(jobs: Jobs) -> None:
    ref = launched(jobs)
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"spec": {"suspend": True}}))
    eventually(lambda: phase(jobs, ref) is Phase.SUSPENDED)
    time.sleep(2)  # longer than the job may be unattended
    job = jobs.client.get(ref)
    assert job is not None
    assert CANCELLED not in job["metadata"]["annotations"]


@pytest.mark.anyio
async def test_attending_a_deleted_job_has_no_effect(home: Path) -> None:
    backend = LocalBackend(home)
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"], "unattended": "suspend"})
    ref = await launch(backend, spec, "a", namespace="default")
    with anyio.fail_after(20):
        await wait(backend, ref)
    await backend.delete(ref)
    backend.attend(ref)
    backend.leave(ref, ended=True)
    await backend.aclose()
