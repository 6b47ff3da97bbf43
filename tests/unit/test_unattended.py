"""Policy for unattended jobs, unattended time, and records of waiters."""

from __future__ import annotations

from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests import objects
from tests.fakes.kube.direct import DirectBackend
from tests.unit.launches import annotations_of, launch

from trainjob import InvalidSpec, JobRef, TrainJobSpec, WaitOptions
from trainjob._jobs.following import follow
from trainjob._jobs.waiting import wait
from trainjob._manifest.render import render
from trainjob._manifest.unattended import (
    AFTER,
    LABEL,
    MARK,
    SUSPEND,
    Policy,
    marked,
    policy_of,
    resuming,
    runs,
    unattended_for,
)
from trainjob.errors import StartTimeout
from trainjob.job import spec_hash
from trainjob.status import CANCELLED, observe

pytestmark = pytest.mark.timeout(60)

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC)


def job(*conditions: objects.Object, **fields: Any) -> objects.Object:
    """A job that was created at noon."""
    metadata = {"creationTimestamp": "2026-11-25T12:00:00Z", **fields.pop("metadata", {})}
    return objects.trainjob(*conditions, metadata=metadata, **fields)


def rendered(origin: dict[str, str] | None = None, **asked: Any) -> dict[str, Any]:
    return render(TrainJobSpec.parse({"runtime": "torch-distributed", **asked}), "a", 1, "ns", origin=origin)


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("origin", "asked", "policy"),
    [
        ({}, {}, None),
        ({}, {"unattended": "keep"}, None),
        ({}, {"unattended": "cancel"}, Policy("cancel", timedelta(hours=1))),
        ({}, {"unattended": "suspend", "unattended_after": "PT2H"}, Policy("suspend", timedelta(hours=2))),
        ({}, {"unattended": "suspend", "unattended_after": 90}, Policy("suspend", timedelta(seconds=90))),
        (dict(SUSPEND), {}, Policy("suspend", timedelta(hours=1))),
        (dict(SUSPEND), {"unattended_after": 600}, Policy("suspend", timedelta(minutes=10))),
        (dict(SUSPEND), {"unattended": "keep"}, None),
        (dict(SUSPEND), {"unattended": "cancel"}, Policy("cancel", timedelta(hours=1))),
    ],
)
def test_jobs_are_kept_and_those_of_workflows_suspended_by_default(
    origin: dict[str, str], asked: dict[str, Any], policy: Policy | None
) -> None:
    assert policy_of(rendered(origin, **asked)) == policy


def test_a_complete_manifest_can_have_a_policy() -> None:
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {"runtimeRef": {"name": "x"}},
    }
    spec = TrainJobSpec.parse({"manifest": manifest, "unattended": "cancel", "unattended_after": 120})
    assert policy_of(render(spec, "a", 1, "ns")) == Policy("cancel", timedelta(minutes=2))


@pytest.mark.parametrize(
    ("asked", "path"),
    [
        ({"unattended": "stop"}, "unattended"),
        ({"unattended": "suspend", "unattended_after": 59}, "unattended_after"),
        ({"unattended": "suspend", "unattended_after": 8 * 24 * 3600}, "unattended_after"),
        ({"unattended": "keep", "unattended_after": 3600}, "unattended_after"),
    ],
)
def test_invalid_policies_are_rejected(asked: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        TrainJobSpec.parse({"runtime": "torch-distributed", **asked})
    assert [problem.path for problem in refused.value.problems] == [path]


def test_policy_does_not_change_the_spec_hash() -> None:
    assert spec_hash(rendered()) == spec_hash(rendered(unattended="cancel", unattended_after=600))


@pytest.mark.parametrize("after", ["", "soon", "1e999", None])
def test_an_invalid_annotation_gives_the_default(after: object) -> None:
    changed = job(labels={LABEL: "suspend"}, annotations={AFTER: after})
    assert policy_of(changed) == Policy("suspend", timedelta(hours=1))


# ---------------------------------------------------------------- unattended time


def test_unattended_time_starts_at_the_last_wait_creation_or_resume() -> None:
    assert unattended_for(job(), None, NOON + timedelta(minutes=5)) == timedelta(minutes=5)
    later = NOON + timedelta(hours=1)
    assert unattended_for(job(), later, later + timedelta(minutes=2)) == timedelta(minutes=2)
    assert unattended_for(job(), NOON - timedelta(hours=1), later) == timedelta(hours=1)
    resumed = objects.condition("Suspended", value="False", time="2026-11-25T12:30:00Z")
    assert unattended_for(job(resumed), NOON, later) == timedelta(minutes=30)
    assert unattended_for({"metadata": {}}, None, NOON) == timedelta(0), "a job without times is not ended"


def test_suspended_and_finished_jobs_do_not_run() -> None:
    assert runs(job())
    assert not runs(job(spec={"suspend": True}))
    assert not runs(job(metadata={"deletionTimestamp": "2026-11-25T12:00:00Z"}))
    assert not runs(job(objects.COMPLETE))
    assert not runs(job(objects.FAILED))


@pytest.mark.parametrize(
    ("annotations", "ours", "message"),
    [
        ({CANCELLED: MARK}, True, "nobody waited for it"),
        ({CANCELLED: "true"}, False, "cancelled with trainjob"),
        ({}, False, "suspended"),
    ],
)
def test_suspensions_by_a_person_are_distinguished(annotations: dict[str, str], ours: bool, message: str) -> None:
    suspended = job(annotations=annotations, spec={"suspend": True})
    assert marked(suspended) is ours
    assert message in observe(suspended).message


def test_a_job_that_is_resumed_has_no_mark() -> None:
    patch = {"metadata": {"annotations": {CANCELLED: None}}}
    by_hand, suspended = (job(annotations={CANCELLED: MARK}, spec={"suspend": each}) for each in (False, True))
    assert resuming(by_hand) == patch, "the job is running already"
    assert resuming(suspended) == {**patch, "spec": {"suspend": False}}


# ---------------------------------------------------------------- waiters


@pytest.fixture
def records(backend: DirectBackend, monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobRef, bool | None]]:
    """The jobs that this process begins to wait for (None), and those that it stops to wait for: whether they ended."""
    found: list[tuple[JobRef, bool | None]] = []
    monkeypatch.setattr(backend, "attend", lambda ref: found.append((ref, None)))
    monkeypatch.setattr(backend, "leave", lambda ref, *, ended: found.append((ref, ended)))
    return found


@pytest.mark.anyio
async def test_waiters_are_recorded_during_their_wait(
    backend: DirectBackend, records: list[tuple[JobRef, bool | None]]
) -> None:
    ref = await launch(backend, fields={"unattended": "suspend"})
    async with aclosing(follow(backend, ref)) as changes:
        await anext(changes)
        assert records == [(ref, None)]
    assert records == [(ref, None), (ref, False)]
    with pytest.raises(StartTimeout):
        await wait(backend, ref, WaitOptions(start_timeout=timedelta(0)))
    assert records[2:] == [(ref, None), (ref, False)]
    backend.end(ref)
    await wait(backend, ref)
    assert records[4:] == [(ref, None), (ref, True)]


@pytest.mark.anyio
async def test_no_waiter_is_recorded_for_a_kept_job(
    backend: DirectBackend, records: list[tuple[JobRef, bool | None]]
) -> None:
    ref = await launch(backend)
    backend.end(ref)
    await wait(backend, ref)
    assert records == []


@pytest.mark.anyio
async def test_a_waiter_removes_the_mark_of_a_manually_resumed_job(backend: DirectBackend) -> None:
    """Otherwise a later suspension by a person would count as the reaper's and be resumed."""
    ref = await launch(backend, fields={"unattended": "suspend"})
    await backend.patch(ref, {"metadata": {"annotations": {CANCELLED: MARK}}})
    async with aclosing(follow(backend, ref)) as changes:
        _, notice = await anext(changes)
    assert notice == ""
    assert CANCELLED not in annotations_of(backend, ref)
