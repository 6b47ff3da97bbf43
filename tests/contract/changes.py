"""Changes of jobs by a backend: patching, suspending, cancelling and deleting them, and records of cancels."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.contract.harness import Harness, until

from trainjob import JobRef, Phase
from trainjob._jobs.cancellation import cancel
from trainjob._manifest.attempts import Cancel
from trainjob.errors import AlreadyExists, NotFound
from trainjob.status import observe

ADOPTED = {"metadata": {"annotations": {"adopted": "1"}}}

# ---------------------------------------------------------------- patch


async def test_patch_merges(harness: Harness) -> None:
    ref = await harness.create(annotations={"a": "1", "b": "2"})
    versions = [(await harness.job(ref))["metadata"]["resourceVersion"]]
    for change in ({"a": None}, {"c": "3"}, {"c": "4"}):
        await harness.backend.patch(ref, {"metadata": {"annotations": change}})
        metadata = (await harness.job(ref))["metadata"]
        versions.append(metadata["resourceVersion"])
    assert "a" not in metadata["annotations"]
    assert (metadata["annotations"]["b"], metadata["annotations"]["c"]) == ("2", "4")
    assert metadata["uid"] == ref.uid
    assert len(set(versions)) == len(versions), "each change changes the version"


async def test_a_change_with_an_old_version_is_refused(harness: Harness) -> None:
    """Who was not asked sends the version that it has seen: a launch that has adopted the job since wins."""
    stored = await harness.backend.create(harness.manifest())
    ref, old = JobRef.of(stored), stored["metadata"]["resourceVersion"]
    await harness.backend.patch(ref, ADOPTED)
    with pytest.raises(NotFound):
        await harness.backend.patch(ref, {"metadata": {"resourceVersion": old}, "spec": {"suspend": True}})
    await harness.backend.delete(ref, old)
    job = await harness.job(ref)
    assert not job["spec"].get("suspend")
    assert "deletionTimestamp" not in job["metadata"]


async def test_a_change_with_the_present_version_is_applied(harness: Harness) -> None:
    """A controller may change the job between the two requests."""
    ref = await harness.create()

    async def patched() -> bool:
        version = {"resourceVersion": (await harness.job(ref))["metadata"]["resourceVersion"]}
        try:
            await harness.backend.patch(ref, {"metadata": version, "spec": {"suspend": True}})
        except NotFound:
            return False
        return True

    async def deleted() -> bool:
        found = await harness.backend.get(ref.namespace, ref.name)
        if found is not None:
            await harness.backend.delete(ref, found["metadata"]["resourceVersion"])
        return found is None

    await until(patched)
    assert (await harness.observed(ref)).phase is Phase.SUSPENDED
    await until(deleted)


# ---------------------------------------------------------------- suspend, cancel, delete


@pytest.mark.parametrize("created", [False, True], ids=["later", "from its creation"])
async def test_suspend_and_resume(harness: Harness, created: bool) -> None:
    ref = await harness.create(suspend=created)
    if not created:
        assert not await harness.backend.stopped(ref)
        await harness.backend.patch(ref, {"spec": {"suspend": True}})
    assert (await harness.observed(ref)).phase is Phase.SUSPENDED
    await harness.stops(ref)
    assert (await harness.observed(ref)).waiting_since is not None
    await harness.backend.patch(ref, {"spec": {"suspend": False}})
    assert not await harness.backend.stopped(ref)
    await harness.end(ref, 0)
    done = observe(await harness.ended(ref))
    assert done.phase is Phase.COMPLETE
    assert done.created is not None
    assert done.admitted is not None
    assert done.admitted >= done.created  # Kubernetes' times are whole seconds


async def test_cancel_ends_the_job(harness: Harness) -> None:
    """The job is kept as cancelled, with its name, or deleted."""
    ref = await harness.create()
    for _ in range(2):
        assert await cancel(harness.backend, ref)
    phase = (await harness.observed(ref)).phase
    assert phase in (Phase.CANCELLED, Phase.DELETED)
    assert observe((await harness.backend.evidence(ref)).trainjob).phase is phase
    if phase is Phase.CANCELLED:
        with pytest.raises(AlreadyExists):
            await harness.create()


@pytest.mark.parametrize("state", ["running", "suspended", "complete", "failed"])
async def test_delete_is_idempotent(harness: Harness, state: str) -> None:
    """Also directly after the end of a job, while its supervisor is exiting."""
    ref = await harness.create(suspend=state == "suspended")
    if state in ("complete", "failed"):
        await harness.end(ref, 0 if state == "complete" else 3)
        await harness.ended(ref)
        assert await harness.backend.stopped(ref)
    for _ in range(3):
        await harness.backend.delete(ref)
    await harness.is_gone(ref)
    await harness.backend.delete(ref)
    await harness.stops(ref)
    assert await harness.backend.find(harness.namespace, {}) == []
    assert (await harness.backend.state(ref)).trainjob is None
    assert await harness.lines(ref, follow=True) == [], "a pod may outlive its job, and has a log until it has stopped"
    with pytest.raises(NotFound):
        await harness.backend.patch(ref, {"spec": {"suspend": True}})


async def test_nothing_remains_of_a_job_that_has_stopped(harness: Harness) -> None:
    ref = await harness.create()

    async def has_pods() -> bool:
        return bool(await harness.backend.remaining_pods(ref.namespace, ["nosuch", ref.name]))

    async def ended_all() -> bool:
        return not await has_pods()

    if harness.backend.cluster is not None or harness.backend.home is not None:  # real ranks
        await until(has_pods)
    assert await harness.backend.remaining_pods(ref.namespace, ["nosuch"]) == []
    assert await harness.backend.remaining_pods(harness.other, [ref.name]) == []
    await harness.backend.delete(ref)
    await until(ended_all)


# ---------------------------------------------------------------- records of cancels

WORK = "0123456789"


async def test_records_of_cancels_are_ordered_among_launches(harness: Harness) -> None:
    """A launch notes the version at its begin. A cancel since then is newer, one before is not."""
    backend = harness.backend
    begins: list[int | None] = []
    for number in range(1, 4):
        begin, _ = await backend.cancels(harness.namespace, WORK)
        made = await backend.announce_cancel(harness.namespace, WORK, Cancel(0))
        assert begin is not None
        assert made is not None
        assert made.applies(begin, 1)
        assert made.at is not None
        assert abs(made.at.timestamp() - time.time()) < 60
        begin, found = await backend.cancels(harness.namespace, WORK)
        assert made in found
        assert len(found) == number
        assert not any(each.applies(begin, 1) for each in found)
        assert all(made.applies(each, 1) for each in begins)
        begins.append(begin)


async def test_each_cancel_has_a_separate_record(harness: Harness) -> None:
    """Also of several at once."""
    asked = [Cancel(0), Cancel(0, tried=3), Cancel(0, tried=2), Cancel(0, uid="a", action="suspend"), Cancel(0, 2, "b")]
    made = await asyncio.gather(*(harness.backend.announce_cancel(harness.namespace, WORK, each) for each in asked))
    assert [(each.tried, each.uid, each.action) for each in made if each is not None] == [
        (each.tried, each.uid, each.action) for each in asked
    ]
    _, found = await harness.backend.cancels(harness.namespace, WORK)
    assert {(each.record, each.version) for each in found} == {
        (each.record, each.version) for each in made if each is not None
    }
    assert len({each.record for each in found}) == len({each.version for each in found}) == len(asked)


async def test_records_are_those_of_one_key_and_no_jobs(harness: Harness) -> None:
    await harness.backend.announce_cancel(harness.namespace, WORK, Cancel(0))
    ref = await harness.create()
    assert [JobRef.of(job) for job in await harness.backend.find(harness.namespace, {})] == [ref]
    assert (await harness.backend.cancels(harness.namespace, "another012"))[1] == []
    assert (await harness.backend.cancels(harness.other, WORK))[1] == []
