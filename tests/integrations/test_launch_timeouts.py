"""A creation that hangs ends within the timeouts of its launch, through each integration; never are there two jobs."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.fakes.kube.direct import Store
from tests.integrations.integration import Integration
from tests.kfp.step_backend import StepBackend

from trainjob import JobRef
from trainjob._backends.base import TrainJob
from trainjob._backends.kubernetes import backend
from trainjob._jobs import creation

pytestmark = pytest.mark.parametrize("integration", ["cli", "worker", "deferred", "kfp"], indirect=True)
SPEC: dict[str, Any] = {"runtime": "trainjob-step", "command": ["train"]}


class Cluster(Store):
    """The jobs, and what becomes of their creation.

    Attributes:
        creation: ``answered``; or not: the job is ``stored`` all the same, or ``lost``.
    """

    creation = "answered"


class Backend(StepBackend):
    """A job completes once something waits for it."""

    store: Cluster

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        stored = None if self.store.creation == "lost" else await super().create(trainjob, dry_run=dry_run)
        if stored is None or self.store.creation == "stored":
            await asyncio.sleep(600)
        return stored or {}

    def complete(self, request: str) -> None:
        for job in self.jobs.values() if request == "WATCH trainjobs" else ():
            self.end(JobRef.of(job))


@pytest.fixture(autouse=True)
def local_backend() -> None:
    """Replaces the fixture of the other tests: no job runs on this machine."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()

    def connected(*_: object, **__: object) -> Backend:
        found = Backend()
        found.store, found.before = made, found.complete
        return found

    monkeypatch.setattr(backend, "KubernetesBackend", connected)
    monkeypatch.setattr(creation, "_LEAST", timedelta(0))
    monkeypatch.setattr(creation, "_PAUSE", 0.05)
    return made


@pytest.mark.parametrize(
    ("cancels", "end"), [(True, "; its creation was cancelled"), (False, "")], ids=["cancel", "keep"]
)
def test_a_creation_that_hangs_fails_with_start_timeout(
    integration: Integration, cluster: Cluster, cancels: bool, end: str
) -> None:
    cluster.creation = "lost"
    ended = integration.train(SPEC, start_timeout=1, cancel_on_timeout=cancels)
    assert ended.outcome == integration.outcome(4), ended
    assert "could not be created within start_timeout of 1s, and it does not exist" in ended.message
    if integration.name in ("worker", "deferred"):
        assert ended.message.endswith(f"then launch the same key again{end}")
    assert not cluster.items("trainjobs")
    cluster.creation = "answered"
    assert integration.train(SPEC, start_timeout=1).result["attempt"] == 1
    assert len(cluster.items("trainjobs")) == 1


def test_a_job_that_was_stored_after_all_is_waited_for(integration: Integration, cluster: Cluster) -> None:
    cluster.creation = "stored"
    assert integration.train(SPEC, start_timeout=1).result["attempt"] == 1
    assert len(cluster.items("trainjobs")) == 1
