"""A job that `cancel` suspended goes on when its key is launched again; one that a person suspended does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainjob import Phase, TrainJobClient, lifecycle as flow
from trainjob.backends.local.backend import LocalBackend
from trainjob.manifest import JobRef
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


def test_a_cancelled_job_goes_on_when_its_key_is_launched_again(client: TrainJobClient) -> None:
    ref = client.launch(SLEEP, "resume/own")
    assert client.cancel(ref, "suspend")
    assert CANCELLED in annotations_of(client, ref)
    assert phase(client, ref) is Phase.SUSPENDED

    again = client.launch(SLEEP, "resume/own")

    assert again == ref
    assert CANCELLED not in annotations_of(client, ref)
    assert phase(client, ref) is not Phase.SUSPENDED


def test_a_job_that_a_person_suspended_stays_suspended(client: TrainJobClient) -> None:
    ref = client.launch(SLEEP, "resume/person")
    client.call(lambda: client.backend.patch(ref, {"spec": {"suspend": True}}))

    assert client.launch(SLEEP, "resume/person") == ref
    assert phase(client, ref) is Phase.SUSPENDED


def test_the_mark_goes_also_from_a_job_that_was_resumed_by_hand(client: TrainJobClient) -> None:
    ref = client.launch(SLEEP, "resume/by-hand")
    client.cancel(ref, "suspend")
    client.call(lambda: client.backend.patch(ref, {"spec": {"suspend": False}}))

    client.launch(SLEEP, "resume/by-hand")

    assert CANCELLED not in annotations_of(client, ref)


def test_a_job_that_kueue_manages_is_deleted_instead(client: TrainJobClient) -> None:
    ref = client.launch({**SLEEP, "labels": {QUEUE_LABEL: "team"}}, "resume/queue")
    job = client.get(ref)
    assert job is not None

    client.call(lambda: flow.request_cancel(client.backend, job, "suspend"))

    again = client.launch({**SLEEP, "labels": {QUEUE_LABEL: "team"}}, "resume/queue")
    assert again.uid != ref.uid
