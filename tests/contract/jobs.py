"""Jobs of a backend: creating, finding and watching them."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests.contract.harness import Harness, until

from trainjob import JobRef, Phase, TrainJobFailed
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.waiting import wait
from trainjob.errors import AlreadyExists, NotFound, Rejected, RuntimeNotFound
from trainjob.job import KEY, labels_of, spec_hash
from trainjob.status import observe

NOBODY = "00000000-0000-0000-0000-000000000000"

# ---------------------------------------------------------------- create


async def test_create_returns_what_is_stored(harness: Harness) -> None:
    wanted = harness.manifest("a/b", labels={"team": "x"})
    stored = await harness.backend.create(wanted)
    assert stored["spec"]["trainer"] == wanted["spec"]["trainer"]
    assert stored["metadata"]["labels"].items() >= wanted["metadata"]["labels"].items()
    assert stored["metadata"]["annotations"][KEY] == "a/b"
    assert spec_hash(stored) == spec_hash(wanted)
    created = observe(stored).created
    assert created is not None
    assert abs(created.timestamp() - time.time()) < 10
    ref = JobRef.of(stored)
    assert JobRef.of(await harness.job(ref)) == ref
    assert not observe((await harness.backend.evidence(ref)).trainjob).phase.terminal


async def test_only_one_of_many_creations_succeeds(harness: Harness) -> None:
    results = await asyncio.gather(*(harness.create() for _ in range(8)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["AlreadyExists"] * 7 + ["JobRef"]
    assert (await harness.create(attempt=2)).uid not in {getattr(each, "uid", "") for each in results}


async def test_a_cluster_forgets_the_name_of_a_deleted_job(harness: Harness) -> None:
    """And this machine does not. So `launch` relies on no name, but on what it sees of all attempts of the key."""
    assert await harness.backend.is_free(harness.namespace, harness.manifest()["metadata"]["name"])
    ref = await harness.create()
    await harness.backend.delete(ref)
    await harness.is_gone(ref)
    await until(lambda: harness.backend.is_free(ref.namespace, ref.name))
    if harness.forgets:
        assert (await harness.create()).uid != ref.uid
    else:
        with pytest.raises(AlreadyExists):
            await harness.create()


async def test_of_two_who_create_and_look_one_sees_both(harness: Harness) -> None:
    """By this, `launch` finds a second attempt of its key: its look is never from a cache."""

    async def create_and_look(attempt: int) -> tuple[str, set[str]]:
        ref = await harness.create(attempt=attempt)
        found = await harness.backend.find(ref.namespace, labels_of("key"))
        return ref.uid, {job["metadata"]["uid"] for job in found}

    seen = dict(await asyncio.gather(*map(create_and_look, range(1, 7))))
    for one, others in seen.items():
        assert one in others
        assert all(other in others or one in theirs for other, theirs in seen.items())


async def test_a_rejected_job_is_not_stored(harness: Harness) -> None:
    with pytest.raises(RuntimeNotFound, match="nosuch"):
        await harness.create(runtime="nosuch")
    with pytest.raises(Rejected):
        await harness.create(**harness.refused)
    assert await harness.backend.find(harness.namespace, {}) == []


async def test_dry_run_validates_without_creating(harness: Harness) -> None:
    manifest = harness.manifest("dry")
    stored = await harness.backend.create(manifest, dry_run=True)
    assert stored["metadata"]["name"] == manifest["metadata"]["name"]
    assert stored["metadata"]["uid"]
    assert await harness.backend.get(harness.namespace, manifest["metadata"]["name"]) is None
    with pytest.raises(RuntimeNotFound):
        await harness.backend.create(harness.manifest("dry", runtime="nosuch"), dry_run=True)
    await harness.backend.create(manifest)


async def test_runtimes_are_listed(harness: Harness) -> None:
    assert harness.manifest()["spec"]["runtimeRef"]["name"] in await harness.backend.runtimes()


async def test_a_backend_is_a_cluster_or_a_directory(harness: Harness) -> None:
    """At most one of both is set: callers choose cluster features and local features by it."""
    backend = harness.backend
    assert backend.cluster is None or backend.home is None
    assert backend.cluster in (None, backend)


# ---------------------------------------------------------------- get and find


async def test_missing_jobs_are_not_found(harness: Harness) -> None:
    assert await harness.backend.get(harness.namespace, "nosuch") is None
    assert await harness.backend.find(harness.namespace, {}) == []
    assert await harness.backend.find("nosuch", {}) == []


async def test_refs_finds_jobs_by_name_and_the_hashes_of_all_keys(harness: Harness) -> None:
    keys = ("one", "two", "three")
    first, _, third = [await harness.create(key) for key in keys]
    names, works = {first.name, third.name, "nosuch"}, {labels_of(key)[KEY] for key in keys}
    assert await harness.backend.refs(harness.namespace, names) == ({first.name: first, third.name: third}, works)
    assert await harness.backend.refs(harness.other, names) == ({}, set())


async def test_find_matches_all_labels(harness: Harness) -> None:
    first = await harness.create("one", labels={"team": "x"})
    second = await harness.create("one", 2, labels={"team": "y"})
    third = await harness.create("two")

    async def found(labels: dict[str, str]) -> set[JobRef]:
        return {JobRef.of(job) for job in await harness.backend.find(harness.namespace, labels)}

    assert await found(labels_of("one")) == {first, second}
    assert await found({**labels_of("one"), "team": "y"}) == {second}
    assert await found({"team": "z"}) == set()
    assert await found({}) == {first, second, third}


async def test_namespaces_are_isolated(harness: Harness) -> None:
    ref = await harness.create()
    assert await harness.backend.get(harness.other, ref.name) is None
    assert await harness.backend.find(harness.other, {}) == []
    harness.namespace = harness.other
    assert (await harness.create()).name == ref.name


async def test_a_job_with_another_uid_is_not_found(harness: Harness) -> None:
    ref = replace(await harness.create(), uid=NOBODY)
    async with aclosing(harness.backend.watch(ref)) as snapshots:
        assert [snapshot.trainjob async for snapshot in snapshots] == [None]
    assert (await harness.backend.evidence(ref)).trainjob is None
    assert (await harness.backend.state(ref)).trainjob is None
    assert await harness.backend.stopped(ref)
    with pytest.raises(NotFound):
        await harness.backend.patch(ref, {"spec": {"suspend": True}})
    await harness.backend.delete(ref)
    assert await harness.job(ref)


# ---------------------------------------------------------------- watch


@pytest.mark.parametrize(("code", "phase"), [(0, Phase.COMPLETE), (3, Phase.FAILED)])
async def test_watch_reports_the_final_phase(harness: Harness, code: int, phase: Phase) -> None:
    """A new watch starts with the current state; intermediate states may be skipped."""
    ref = await harness.create()
    phases = []
    async with aclosing(harness.backend.watch(ref)) as snapshots:
        async for snapshot in snapshots:
            assert snapshot.trainjob is not None
            assert snapshot.trainjob["metadata"]["uid"] == ref.uid
            phases.append(observe(snapshot.trainjob).phase)
            if len(phases) == 1:
                await harness.end(ref, code)
            if phases[-1].terminal:
                break
    assert phases[-1] is phase
    async with aclosing(harness.backend.watch(ref)) as snapshots:
        assert observe((await anext(snapshots)).trainjob).phase is phase
    observation = await harness.observed(ref)
    assert observation.created is not None
    assert observation.finished is not None
    assert observation.finished >= observation.created


async def test_watch_reports_the_latest_state(harness: Harness) -> None:
    ref = await harness.create()
    async with aclosing(harness.backend.watch(ref)) as snapshots:
        await anext(snapshots)
        for n in range(20):
            await harness.backend.patch(ref, {"metadata": {"annotations": {"n": str(n)}}})
        await harness.backend.patch(ref, {"spec": {"suspend": True}})
        with anyio.fail_after(10):
            async for snapshot in snapshots:
                if snapshot.trainjob and snapshot.trainjob["spec"].get("suspend"):
                    break


async def test_watch_ends_with_none_when_the_job_is_deleted(harness: Harness) -> None:
    ref = await harness.create()
    seen: list[Any] = []
    with anyio.fail_after(20):
        async with aclosing(harness.backend.watch(ref)) as snapshots:
            async for snapshot in snapshots:
                if not seen:
                    await harness.backend.delete(ref)
                seen.append(snapshot.trainjob)
    assert seen[-1] is None
    assert None not in seen[:-1]


async def test_a_cancel_by_another_client_is_reported_as_a_cancel(harness: Harness) -> None:
    ref = await harness.create()
    async with anyio.create_task_group() as tasks:

        def cancel_it(*_: object) -> None:
            tasks.start_soon(cancel, harness.backend, ref)

        with pytest.raises(TrainJobFailed, match="the job was cancelled with trainjob"):
            await wait(harness.backend, ref, on_change=cancel_it)


async def test_many_watchers_see_the_end_of_one_job(harness: Harness) -> None:
    ref = await harness.create()
    watchers = [asyncio.create_task(harness.ended(ref)) for _ in range(5)]
    await anyio.sleep(0.1)
    await harness.end(ref, 0)
    assert {observe(job).phase for job in await asyncio.gather(*watchers)} == {Phase.COMPLETE}
