"""Launching a key again resumes a job that `cancel` suspended, but not one that a person suspended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainjob import Phase, TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob._jobs.cancellation import request_cancel
from trainjob.job import JobRef
from trainjob.status import CANCELLED, QUEUE_LABEL, observe

SLEEP: dict[str, Any] = {"runtime": "trainjob-step", "command": ["sleep", "60"]}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TrainJobClient]:
    with TrainJobClient(LocalBackend(tmp_path), "default") as client:
        yield client
        for job in client.list():
            client.cancel(JobRef.of(job))


def annotations_of(client: TrainJobClient, ref: JobRef) -> dict[str, str]:
    job = client.get(ref)
    assert job is not None
    return dict(job["metadata"].get("annotations") or {})


def phase(client: TrainJobClient, ref: JobRef) -> Phase:
    return observe(client.get(ref)).phase


def test_launch_resumes_a_job_suspended_by_cancel(client: TrainJobClient) -> None:
    ref = client.launch(SLEEP, "resume/own")
    assert client.cancel(ref, "suspend")
    assert CANCELLED in annotations_of(client, ref)
    assert phase(client, ref) is Phase.SUSPENDED

    again = client.launch(SLEEP, "resume/own")

    assert again == ref
    assert CANCELLED not in annotations_of(client, ref)
    assert phase(client, ref) is not Phase.SUSPENDED


def test_launch_does_not_resume_a_job_suspended_by_a_person(client: TrainJobClient) -> None:
    ref = client.launch(SLEEP, "resume/person")
    client.call(lambda: client.backend.patch(ref, {"spec": {"suspend": True}}))

    assert client.launch(SLEEP, "resume/person") == ref
    assert phase(client, ref) is Phase.SUSPENDED


def test_launch_removes_the_cancel_mark_of_a_resumed_job(client: TrainJobClient) -> None:
    ref = client.launch(SLEEP, "resume/by-hand")
    client.cancel(ref, "suspend")
    client.call(lambda: client.backend.patch(ref, {"spec": {"suspend": False}}))

    client.launch(SLEEP, "resume/by-hand")

    assert CANCELLED not in annotations_of(client, ref)


def test_cancel_deletes_a_job_managed_by_kueue(client: TrainJobClient) -> None:
    ref = client.launch({**SLEEP, "labels": {QUEUE_LABEL: "team"}}, "resume/queue")
    job = client.get(ref)
    assert job is not None

    client.call(lambda: request_cancel(client.backend, job, "suspend"))

    again = client.launch({**SLEEP, "labels": {QUEUE_LABEL: "team"}}, "resume/queue")
    assert again.uid != ref.uid
