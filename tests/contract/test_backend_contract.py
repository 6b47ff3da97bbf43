"""The behavior that `trainjob._jobs.launching` requires of every backend."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import pytest
from tests.contract.conftest import Harness

from trainjob import JobRef, LogLine, Phase, TrainJobFailed
from trainjob._backends.base import TrainJob
from trainjob._jobs import models
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.waiting import wait
from trainjob._manifest.attempts import Cancel
from trainjob._pages.live import take_document
from trainjob._support.kube_objects import rank_of
from trainjob.errors import AlreadyExists, NotFound, Rejected, RuntimeNotFound
from trainjob.job import KEY, MANAGED_BY, labels_of, spec_hash
from trainjob.status import observe

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def ended(harness: Harness, ref: JobRef, seconds: float = 240) -> TrainJob | None:
    """The job's last state."""
    with anyio.fail_after(seconds):
        async with aclosing(harness.backend.watch(ref)) as snapshots:
            async for snapshot in snapshots:
                if observe(snapshot.trainjob).phase.terminal:
                    return snapshot.trainjob
    raise AssertionError("the watch ended before the job did")


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    with anyio.fail_after(240):
        while not await happened():
            await anyio.sleep(0.02)


async def is_gone(harness: Harness, ref: JobRef) -> None:
    async def gone() -> bool:
        return await harness.backend.get(ref.namespace, ref.name) is None

    await until(gone)


async def stops(harness: Harness, ref: JobRef) -> None:
    await until(lambda: harness.backend.stopped(ref))


# ---------------------------------------------------------------- create


async def test_create_returns_what_is_stored(harness: Harness) -> None:
    wanted = harness.manifest("a/b", labels={"team": "x"})
    stored = await harness.backend.create(wanted)
    assert stored["spec"]["trainer"] == wanted["spec"]["trainer"]
    assert stored["metadata"]["labels"].items() >= wanted["metadata"]["labels"].items()
    assert stored["metadata"]["annotations"][KEY] == "a/b"
    assert spec_hash(stored) == spec_hash(wanted)
    observation = observe(stored)
    assert observation.created is not None
    assert abs(observation.created.timestamp() - time.time()) < 10
    found = await harness.backend.get(stored["metadata"]["namespace"], stored["metadata"]["name"])
    assert found is not None
    assert found["metadata"]["uid"] == stored["metadata"]["uid"]


async def test_create_rejects_an_existing_name(harness: Harness) -> None:
    ref = await harness.create()
    with pytest.raises(AlreadyExists):
        await harness.create()
    assert (await harness.create(attempt=2)).uid != ref.uid


async def test_a_cluster_forgets_the_name_of_a_deleted_job(harness: Harness) -> None:
    """And this machine does not. So `launch` relies on no name, but on what it sees of all attempts of the key."""
    ref = await harness.create()
    await harness.backend.delete(ref)
    await is_gone(harness, ref)
    await until(lambda: harness.backend.is_free(ref.namespace, ref.name))
    if harness.forgets:
        assert (await harness.create()).uid != ref.uid
    else:
        with pytest.raises(AlreadyExists):
            await harness.create()


async def test_a_name_that_was_never_used_is_free(harness: Harness) -> None:
    assert await harness.backend.is_free(harness.namespace, harness.manifest("never used")["metadata"]["name"])


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


async def test_only_one_of_many_creations_succeeds(harness: Harness) -> None:
    results = await asyncio.gather(*(harness.create() for _ in range(8)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["AlreadyExists"] * 7 + ["JobRef"]


async def test_create_rejects_an_unknown_runtime(harness: Harness) -> None:
    with pytest.raises(RuntimeNotFound, match="nosuch"):
        await harness.create(runtime="nosuch")
    assert await harness.backend.find(harness.namespace, {}) == []


async def test_runtimes_are_listed(harness: Harness) -> None:
    assert harness.manifest()["spec"]["runtimeRef"]["name"] in await harness.backend.runtimes()


async def test_a_backend_is_a_cluster_or_a_directory(harness: Harness) -> None:
    """At most one of both is set: callers choose cluster features and local features by it."""
    backend = harness.backend
    assert backend.cluster is None or backend.home is None
    assert backend.cluster in (None, backend)


async def test_a_rejected_job_is_not_stored(harness: Harness) -> None:
    with pytest.raises(Rejected):
        await harness.create(**harness.refused)
    assert await harness.backend.find(harness.namespace, {}) == []


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
    await harness.create("two")

    async def found(labels: dict[str, str]) -> set[str]:
        return {job["metadata"]["uid"] for job in await harness.backend.find(harness.namespace, labels)}

    assert await found(labels_of("one")) == {first.uid, second.uid}
    assert await found({**labels_of("one"), "team": "y"}) == {second.uid}
    assert await found({"team": "z"}) == set()
    assert len(await found({})) == 3


async def test_namespaces_are_isolated(harness: Harness) -> None:
    ref = await harness.create()
    assert await harness.backend.get(harness.other, ref.name) is None
    assert await harness.backend.find(harness.other, {}) == []
    harness.namespace = harness.other
    assert (await harness.create()).name == ref.name


# ---------------------------------------------------------------- watch


@pytest.mark.parametrize(("code", "phase"), [(0, Phase.COMPLETE), (3, Phase.FAILED)])
async def test_watch_reports_the_final_phase(harness: Harness, code: int, phase: Phase) -> None:
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
    observation = observe(await harness.backend.get(ref.namespace, ref.name))
    assert observation.created is not None
    assert observation.finished is not None
    assert observation.finished >= observation.created


async def test_watch_is_level_triggered(harness: Harness) -> None:
    """A new watch starts with the current state; intermediate states may be skipped."""
    ref = await harness.create()
    await harness.end(ref, 0)
    await ended(harness, ref)
    async with aclosing(harness.backend.watch(ref)) as snapshots:
        first = await anext(snapshots)
    assert observe(first.trainjob).phase is Phase.COMPLETE


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


async def test_has_run_reports_whether_a_rank_ran(shell: Harness) -> None:
    ref = await shell.run("sleep 60", num_nodes=1)
    await until(lambda: shell.backend.has_run(ref))
    assert not await shell.backend.has_run(replace(ref, name="nosuch", uid="nosuch"))


async def test_a_job_with_another_uid_is_not_found(harness: Harness) -> None:
    ref = replace(await harness.create(), uid="00000000-0000-0000-0000-000000000000")
    async with aclosing(harness.backend.watch(ref)) as snapshots:
        assert [snapshot.trainjob async for snapshot in snapshots] == [None]
    assert (await harness.backend.evidence(ref)).trainjob is None
    assert await harness.backend.stopped(ref)
    with pytest.raises(NotFound):
        await harness.backend.patch(ref, {"spec": {"suspend": True}})
    await harness.backend.delete(ref)
    assert await harness.backend.get(ref.namespace, ref.name) is not None


async def test_many_watchers_see_the_end_of_one_job(harness: Harness) -> None:
    ref = await harness.create()

    async def watcher() -> Phase:
        return observe(await ended(harness, ref)).phase

    watchers = [asyncio.create_task(watcher()) for _ in range(5)]
    await anyio.sleep(0.1)
    await harness.end(ref, 0)
    assert set(await asyncio.gather(*watchers)) == {Phase.COMPLETE}


# ---------------------------------------------------------------- patch, suspend, delete


async def test_patch_merges(harness: Harness) -> None:
    ref = await harness.create(annotations={"a": "1", "b": "2"})
    await harness.backend.patch(ref, {"metadata": {"annotations": {"a": None, "c": "3"}}})
    job = await harness.backend.get(ref.namespace, ref.name)
    assert job is not None
    annotations = job["metadata"]["annotations"]
    assert "a" not in annotations
    assert (annotations["b"], annotations["c"]) == ("2", "3")
    assert job["metadata"]["uid"] == ref.uid


async def test_each_change_changes_the_version(harness: Harness) -> None:
    stored = await harness.backend.create(harness.manifest())
    ref, versions = JobRef.of(stored), [stored["metadata"]["resourceVersion"]]
    for n in range(3):
        await harness.backend.patch(ref, {"metadata": {"annotations": {"n": str(n)}}})
        (job,) = await harness.backend.find(ref.namespace, labels_of("key"))
        versions.append(job["metadata"]["resourceVersion"])
    assert len(set(versions)) == len(versions)


async def test_a_patch_with_an_old_version_is_refused(harness: Harness) -> None:
    """Who was not asked sends the version that it has seen: a launch that has adopted the job since wins."""
    stored = await harness.backend.create(harness.manifest())
    ref, old = JobRef.of(stored), stored["metadata"]["resourceVersion"]
    await harness.backend.patch(ref, {"metadata": {"annotations": {"adopted": "1"}}})
    with pytest.raises(NotFound):
        await harness.backend.patch(ref, {"metadata": {"resourceVersion": old}, "spec": {"suspend": True}})
    job = await harness.backend.get(ref.namespace, ref.name)
    assert job is not None
    assert not job["spec"].get("suspend")


async def test_a_patch_with_the_present_version_is_applied(harness: Harness) -> None:
    ref = await harness.create()

    async def patched() -> bool:  # a controller may change the job between the two requests
        job = await harness.backend.get(ref.namespace, ref.name)
        assert job is not None
        version = {"resourceVersion": job["metadata"]["resourceVersion"]}
        try:
            await harness.backend.patch(ref, {"metadata": version, "spec": {"suspend": True}})
        except NotFound:
            return False
        return True

    await until(patched)
    assert observe(await harness.backend.get(ref.namespace, ref.name)).phase is Phase.SUSPENDED


async def test_a_delete_with_an_old_version_does_nothing(harness: Harness) -> None:
    stored = await harness.backend.create(harness.manifest())
    ref, old = JobRef.of(stored), stored["metadata"]["resourceVersion"]
    await harness.backend.patch(ref, {"metadata": {"annotations": {"adopted": "1"}}})
    await harness.backend.delete(ref, old)
    job = await harness.backend.get(ref.namespace, ref.name)
    assert job is not None
    assert "deletionTimestamp" not in job["metadata"]

    async def deleted() -> bool:
        found = await harness.backend.get(ref.namespace, ref.name)
        if found is not None:
            await harness.backend.delete(ref, found["metadata"]["resourceVersion"])
        return found is None

    await until(deleted)


async def test_nothing_remains_of_a_job_that_has_stopped(harness: Harness) -> None:
    ref = await harness.create()
    if harness.backend.cluster is not None or harness.backend.home is not None:  # real ranks

        async def has_pods() -> bool:
            return bool(await harness.backend.remaining_pods(ref.namespace, ["nosuch", ref.name]))

        await until(has_pods)
    assert await harness.backend.remaining_pods(ref.namespace, ["nosuch"]) == []
    assert await harness.backend.remaining_pods(harness.other, [ref.name]) == []
    await harness.backend.delete(ref)

    async def ended_all() -> bool:
        return not await harness.backend.remaining_pods(ref.namespace, ["nosuch", ref.name])

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


async def test_each_cancel_has_a_record_of_its_own(harness: Harness) -> None:
    asked = [Cancel(0), Cancel(0, tried=3), Cancel(0, tried=2), Cancel(0, uid="a", action="suspend"), Cancel(0, 2, "b")]
    made = [await harness.backend.announce_cancel(harness.namespace, WORK, each) for each in asked]
    assert [(each.tried, each.uid, each.action) for each in made if each is not None] == [
        (each.tried, each.uid, each.action) for each in asked
    ]
    _, found = await harness.backend.cancels(harness.namespace, WORK)
    assert sorted(found, key=lambda each: each.version) == made
    assert len({each.record for each in found}) == len({each.version for each in found}) == len(asked)


async def test_records_of_other_keys_and_namespaces_are_not_read(harness: Harness) -> None:
    await harness.backend.announce_cancel(harness.namespace, WORK, Cancel(0))
    assert (await harness.backend.cancels(harness.namespace, "another012"))[1] == []
    assert (await harness.backend.cancels(harness.other, WORK))[1] == []


async def test_records_are_not_among_the_jobs(harness: Harness) -> None:
    await harness.backend.announce_cancel(harness.namespace, WORK, Cancel(0))
    ref = await harness.create()
    assert [JobRef.of(job) for job in await harness.backend.find(harness.namespace, {})] == [ref]


async def test_records_of_many_cancels_at_once_have_versions_of_their_own(harness: Harness) -> None:
    made = await asyncio.gather(
        *(harness.backend.announce_cancel(harness.namespace, WORK, Cancel(0)) for _ in range(6))
    )
    _, found = await harness.backend.cancels(harness.namespace, WORK)
    assert len({each.version for each in made if each is not None}) == 6
    assert sorted(each.version for each in found) == sorted(each.version for each in made if each is not None)


async def test_suspend_and_resume(harness: Harness) -> None:
    ref = await harness.create()
    assert not await harness.backend.stopped(ref)
    await harness.backend.patch(ref, {"spec": {"suspend": True}})
    assert observe(await harness.backend.get(ref.namespace, ref.name)).phase is Phase.SUSPENDED
    await stops(harness, ref)
    suspended = observe(await harness.backend.get(ref.namespace, ref.name))
    assert suspended.waiting_since is not None
    await harness.backend.patch(ref, {"spec": {"suspend": False}})
    assert not await harness.backend.stopped(ref)
    await harness.end(ref, 0)
    done = observe(await ended(harness, ref))
    assert done.phase is Phase.COMPLETE
    assert done.created is not None
    assert done.admitted is not None
    assert done.admitted >= done.created  # Kubernetes' times are whole seconds


async def test_a_job_created_suspended_can_be_resumed(harness: Harness) -> None:
    ref = await harness.create(suspend=True)
    assert observe(await harness.backend.get(ref.namespace, ref.name)).phase is Phase.SUSPENDED
    await harness.end(ref, 0) if harness.shell else None
    await harness.backend.patch(ref, {"spec": {"suspend": False}})
    if not harness.shell:
        await harness.end(ref, 0)
    assert observe(await ended(harness, ref)).phase is Phase.COMPLETE


async def test_cancel_ends_the_job(harness: Harness) -> None:
    """The job is kept as cancelled, with its name, or deleted."""
    ref = await harness.create()
    for _ in range(2):
        assert await cancel(harness.backend, ref)
    phase = observe(await harness.backend.get(ref.namespace, ref.name)).phase
    assert phase in (Phase.CANCELLED, Phase.DELETED)
    assert observe((await harness.backend.evidence(ref)).trainjob).phase is phase
    if phase is Phase.CANCELLED:
        with pytest.raises(AlreadyExists):
            await harness.create()


async def test_delete_is_idempotent(harness: Harness) -> None:
    ref = await harness.create()
    for _ in range(3):
        await harness.backend.delete(ref)
    await is_gone(harness, ref)
    await harness.backend.delete(ref)
    await stops(harness, ref)
    assert await harness.backend.find(harness.namespace, {}) == []
    with pytest.raises(NotFound):
        await harness.backend.patch(ref, {"spec": {"suspend": True}})


@pytest.mark.parametrize("code", [0, 3])
async def test_delete_removes_a_finished_job(harness: Harness, code: int) -> None:
    """Directly after its end, while its supervisor is exiting."""
    ref = await harness.create()
    await harness.end(ref, code)
    await ended(harness, ref)
    assert await harness.backend.stopped(ref)
    await harness.backend.delete(ref)
    await is_gone(harness, ref)


async def test_delete_removes_a_suspended_job(harness: Harness) -> None:
    ref = await harness.create(suspend=True)
    await harness.backend.delete(ref)
    await is_gone(harness, ref)


# ---------------------------------------------------------------- logs and evidence


async def collected(lines: AsyncIterator[LogLine], seconds: float = 240) -> list[LogLine]:
    with anyio.fail_after(seconds):
        return [line async for line in lines]


async def test_logs_of_all_ranks_are_ordered(shell: Harness) -> None:
    script = 'for i in 1 2 3; do echo "$JOB_COMPLETION_INDEX: $i"; sleep 0.1; done'
    ref = await shell.run(script, num_nodes=2)
    await ended(shell, ref)
    lines = await collected(shell.backend.logs(ref))
    assert [line.time for line in lines] == sorted(line.time for line in lines)
    for rank in ("0", "1"):
        texts = [line.text for line in lines if line.rank == f"node-{rank}"]
        assert texts == [f"{rank}: {i}" for i in (1, 2, 3)]
    only = await collected(shell.backend.logs(ref, ranks=["node-1"]))
    assert {line.rank for line in only} == {"node-1"}
    assert len(only) == 3


@pytest.mark.parametrize(
    ("script", "follow", "texts"),
    [
        ("sleep 0.3; echo one; sleep 0.3; echo two >&2; sleep 0.3; echo three", True, ["one", "two", "three"]),
        (
            r"printf '\377\376ab\n10%%\r20%%\r\n\n\tz\033[1m\nno end'",
            False,
            ["\ufffd\ufffdab", "20%", "", "\tz\x1b[1m", "no end"],
        ),
        (r"head -c 16384 /dev/zero | tr '\0' x", False, ["x" * 16384]),
    ],
    ids=["both streams, followed", "invalid bytes and control characters", "a line without its end"],
)
async def test_logs_have_the_lines_of_a_rank(shell: Harness, script: str, follow: bool, texts: list[str]) -> None:
    ref = await shell.run(script)
    if not follow:
        await ended(shell, ref)
    assert [line.text for line in await collected(shell.backend.logs(ref, follow=follow))] == texts


async def test_follow_streams_while_the_job_runs(shell: Harness) -> None:
    ref = await shell.run("echo one; sleep 60")
    async with aclosing(shell.backend.logs(ref, follow=True)) as lines:
        with anyio.fail_after(240):
            assert (await anext(lines)).text == "one"
    assert not await shell.backend.stopped(ref)


async def test_logs_without_follow_end_at_the_present(shell: Harness) -> None:
    ref = await shell.run("echo one; sleep 60")

    async def read() -> bool:
        return [line.text for line in await collected(shell.backend.logs(ref))] == ["one"]

    await until(read)


async def test_tails_have_each_pod_with_its_last_lines(shell: Harness) -> None:
    ref = await shell.run('for i in 1 2 3; do echo "$JOB_COMPLETION_INDEX: $i"; done; sleep 60', num_nodes=2)
    found: dict[str, list[str]] = {}

    async def read() -> bool:
        async with aclosing(shell.backend.tails(ref, 2)) as tails:
            found.update({rank_of(pod): [line.text for line in lines] async for pod, lines in tails})
        return all(len(found.get(f"node-{rank}", ())) == 2 for rank in (0, 1)) and "3" in found["node-1"][-1]

    await until(read)
    assert found == {"node-0": ["0: 2", "0: 3"], "node-1": ["1: 2", "1: 3"]}


async def test_logs_resume_after_any_line(shell: Harness) -> None:
    ref = await shell.run("seq 200", num_nodes=2)
    await ended(shell, ref)
    lines = await collected(shell.backend.logs(ref))
    assert len(lines) == 400
    for stop in (0, 1, 199, 399):
        assert await collected(shell.backend.logs(ref, since=lines[stop].time)) == lines[stop + 1 :]


async def test_tail_limits_the_lines_of_each_rank(shell: Harness) -> None:
    async with shell.gate() as (waits, opened):
        ref = await shell.run(f"seq 5000; {waits}; echo late", num_nodes=2)

        async def written() -> bool:
            return [line.text for line in await collected(shell.backend.logs(ref, tail=1))] == ["5000", "5000"]

        await until(written)
        lines: list[LogLine] = []
        with anyio.fail_after(240):
            async with aclosing(shell.backend.logs(ref, tail=2, follow=True)) as following:
                async for line in following:
                    lines.append(line)
                    if len(lines) == 4:
                        opened.set()
    for rank in ("node-0", "node-1"):
        assert [line.text for line in lines if line.rank == rank] == ["4999", "5000", "late"]
    assert await collected(shell.backend.logs(ref, tail=0)) == []


async def test_a_long_log_is_read_completely(shell: Harness) -> None:
    ref = await shell.run("seq 100000", num_nodes=2)
    assert len(await collected(shell.backend.logs(ref, follow=True), 240)) == 200_000
    lines = await collected(shell.backend.logs(ref), 240)
    assert [line.text for line in lines if line.rank == "node-1"] == [str(n) for n in range(1, 100_001)]
    assert [line.time for line in lines] == sorted(line.time for line in lines)


async def test_a_progress_bar_without_a_final_newline_becomes_a_line(shell: Harness) -> None:
    ref = await shell.run(r"echo begun; printf '\r10%%'; printf '\r20%%\r30%%'")
    await ended(shell, ref)
    lines = await collected(shell.backend.logs(ref))
    assert [(line.text, line.transient) for line in lines] == [("begun", False), ("30%", False)]
    followed = await collected(shell.backend.logs(ref, follow=True))
    assert [line for line in followed if not line.transient] == lines


async def test_logs_split_a_line_of_a_megabyte(shell: Harness) -> None:
    ref = await shell.run("head -c 1048576 /dev/zero | tr '\\0' x; echo; echo after")
    await ended(shell, ref)
    *parts, after = [line.text for line in await collected(shell.backend.logs(ref))]
    assert "".join(parts) == "x" * 1048576
    assert after == "after"
    assert max(len(part) for part in parts) <= 16 * 1024


async def test_evidence_has_exit_codes_and_logs_of_all_ranks(shell: Harness) -> None:
    ref = await shell.run('echo "rank $JOB_COMPLETION_INDEX"; [ $JOB_COMPLETION_INDEX = 0 ] && sleep 60; exit 3', num_nodes=2)  # fmt: skip  # noqa: E501
    await ended(shell, ref)
    evidence = await shell.backend.evidence(ref)
    assert evidence.trainjob is not None
    assert evidence.trainjob["metadata"]["uid"] == ref.uid
    codes = {
        pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]: status["state"]["terminated"]["exitCode"]
        for pod in evidence.pods
        for status in pod["status"]["containerStatuses"]
    }
    assert codes == {"0": 143, "1": 3}
    assert sorted(line for lines in evidence.logs.values() for line in lines) == ["rank 0", "rank 1"]


async def test_the_model_of_a_finished_job_is_found(shell: Harness) -> None:
    message = (
        '{"trainjob": 1, "metrics": [{"name": "accuracy", "value": "0.97"}], "outputs": {"model": "s3://models/1"}}'
    )
    ref = await shell.run(f"echo '{message}' > ${{TRAINJOB_TERMINATION_LOG:-/dev/termination-log}}")
    await ended(shell, ref)
    found = await models.find(shell.backend, JobRef(ref.namespace, ref.name, ""))
    assert (found.ref, found.source, found.metrics) == (ref, "s3://models/1", {"accuracy": 0.97})
    on_this_machine = shell.backend.home is not None
    assert (bool(found.target), "images" not in found.provenance) == (on_this_machine, on_this_machine)


async def test_state_has_the_job_and_its_pods(harness: Harness) -> None:
    ref = await harness.create()
    await harness.end(ref, 3)
    await ended(harness, ref)
    before = len(harness.requests)
    state = await harness.backend.state(ref)
    assert len(harness.requests) - before <= 2, harness.requests[before:]
    evidence = await harness.backend.evidence(ref)
    assert observe(state.trainjob).phase is Phase.FAILED
    assert state.trainjob is not None
    assert state.trainjob["metadata"]["uid"] == ref.uid
    assert [exit_codes(pod) for pod in state.pods] == [[3]]
    assert state.pods == evidence.pods
    assert (dict(state.logs), list(state.events), list(state.unseen)) == ({}, [], [])
    assert state.pods_visible


async def test_states_are_those_of_all_jobs_with_the_labels(harness: Harness) -> None:
    refs = [await harness.create(attempt=attempt) for attempt in (1, 2)]
    await harness.end(refs[0], 3)
    await ended(harness, refs[0])
    before = len(harness.requests)
    states = await harness.backend.states(refs[0].namespace, {MANAGED_BY: "trainjob"})
    found = {state.trainjob["metadata"]["uid"]: state for state in states if state.trainjob is not None}
    if harness.backend.cluster is not None:
        assert len(harness.requests) - before == 2, harness.requests[before:]
    assert {ref.uid for ref in refs} <= found.keys()
    assert [exit_codes(pod) for pod in found[refs[0].uid].pods] == [[3]]
    assert await harness.backend.states(refs[0].namespace, {MANAGED_BY: "nobody"}) == []


def exit_codes(pod: TrainJob) -> list[int]:
    return [status["state"]["terminated"]["exitCode"] for status in pod["status"]["containerStatuses"]]


async def test_state_of_a_running_job_has_its_running_ranks(shell: Harness) -> None:
    ref = await shell.run("echo one; sleep 60", num_nodes=2)
    ranks: dict[str, str] = {}

    async def running() -> bool:
        state = await shell.backend.state(ref)
        assert (dict(state.logs), list(state.events)) == ({}, [])
        ranks.update({rank_of(pod): pod["status"]["phase"] for pod in state.pods})
        return set(ranks.values()) == {"Running"} and observe(state.trainjob).phase is Phase.RUNNING

    await until(running)
    assert ranks == {"node-0": "Running", "node-1": "Running"}


async def test_state_of_a_deleted_job_has_no_job(harness: Harness) -> None:
    ref = await harness.create()
    assert (await harness.backend.state(replace(ref, uid="00000000-0000-0000-0000-000000000000"))).trainjob is None
    await harness.backend.delete(ref)
    await is_gone(harness, ref)
    assert (await harness.backend.state(ref)).trainjob is None


async def test_a_document_has_what_a_running_training_reported(shell: Harness) -> None:
    """A cluster shows the message of a rank only after the end of the rank."""
    now = int(time.time())
    series = {"loss": [[100, now - 20, 0.9], [200, now - 10, 0.5]], "trainjob.checkpoint": [[200, now - 5, 200]]}
    metrics = [{"name": "loss", "value": "0.5"}, {"name": "trainjob.checkpoint", "value": "200"}]
    message = json.dumps({"trainjob": 1, "metrics": metrics, "history": series})
    path = "${TRAINJOB_TERMINATION_LOG:-/dev/termination-log}"
    async with shell.gate() as (waits, opened):
        ref = await shell.run(f"echo '{message}' > {path}; echo reported; {waits}")
        async with aclosing(shell.backend.logs(ref, follow=True)) as lines:
            with anyio.fail_after(240):
                assert (await anext(lines)).text == "reported"

        async def is_running() -> bool:  # a cluster's status can be later than the lines
            return observe((await shell.backend.state(ref)).trainjob).phase is Phase.RUNNING

        await until(is_running)
        state = await shell.backend.state(ref)
        running = await take_document(shell.backend, ref.namespace, ref.name)
        opened.set()
        await ended(shell, ref)  # within the gate: its rank may not have connected yet
    final = await take_document(shell.backend, ref.namespace, ref.name)
    assert (running["phase"], final["phase"]) == ("Running", "Complete")
    assert running["logs"][-1]["text"] == "reported"
    has_report = [final]
    if shell.backend.home is not None:
        assert json.loads(state.reported) == json.loads(message)
        has_report.append(running)
    else:
        assert state.reported == ""
    for document in has_report:
        assert document["metrics"] == {"loss": 0.5}
        assert document["history"] == {"loss": series["loss"]}
        assert [each["step"] for each in document["attempts"][-1]["checkpoints"]] == [200]


async def test_evidence_of_a_running_job_has_no_final_phase(harness: Harness) -> None:
    ref = await harness.create()
    evidence = await harness.backend.evidence(ref)
    assert evidence.trainjob is not None
    assert observe(evidence.trainjob).phase not in (Phase.COMPLETE, Phase.FAILED)


async def test_logs_of_a_deleted_job_are_empty(harness: Harness) -> None:
    ref = await harness.create()
    await harness.backend.delete(ref)
    await is_gone(harness, ref)
    await stops(harness, ref)  # a pod may outlive its job for a moment, and has a log until then
    assert await collected(harness.backend.logs(ref, follow=True)) == []


async def test_dry_run_validates_without_creating(harness: Harness) -> None:
    manifest = harness.manifest("dry")
    stored = await harness.backend.create(manifest, dry_run=True)
    assert stored["metadata"]["name"] == manifest["metadata"]["name"]
    assert stored["metadata"]["uid"]
    assert await harness.backend.get(harness.namespace, manifest["metadata"]["name"]) is None
    with pytest.raises(RuntimeNotFound):
        await harness.backend.create(harness.manifest("dry", runtime="nosuch"), dry_run=True)
    await harness.backend.create(manifest)
