"""Stop a job or all attempts of a key: the order of the requests, and the record that is left."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from tests.contract.memory import MemoryCluster
from tests.unit.interleaving import once

from trainjob import InvalidSpec, JobRef, Phase, TrainJobSpec
from trainjob._jobs import launching as flow
from trainjob._jobs.cancellation import cancel, cancel_key, give_up, request_cancel
from trainjob._manifest.attempts import LAUNCHED, Cancel, given_up, is_stale
from trainjob._manifest.render import render
from trainjob.errors import BackendUnavailable, NotFound, Rejected
from trainjob.job import key_hash
from trainjob.status import CANCELLED, QUEUE_LABEL, observe
from trainjob.verdicts import Category, Diagnosis, RetryVerdict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

WHY = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "node-0 exited with code 3")
WORK = key_hash("key")


class Cluster(MemoryCluster):
    """Records what is stopped, and how."""

    def __init__(self) -> None:
        super().__init__()
        self.stops: list[str] = []

    async def delete(self, ref: JobRef, version: str = "") -> None:
        self.stops.append(f"delete {ref.attempt}" + (" by version" if version else ""))
        await super().delete(ref, version)

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        if patch.get("spec", {}).get("suspend"):
            self.stops.append(f"suspend {ref.attempt}")
        await super().patch(ref, patch)

    async def announce_cancel(self, namespace: str, work: str, cancel: Cancel) -> Cancel | None:
        made = await super().announce_cancel(namespace, work, cancel)
        self.stops.append("record")
        return made


@pytest.fixture
def backend() -> Cluster:
    return Cluster()


async def launch(backend: MemoryCluster, key: str = "key", **fields: Any) -> JobRef:
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"], **fields})
    return await flow.launch(backend, spec, key, namespace="ns")


async def attempts(backend: Cluster, *states: str) -> list[JobRef]:
    """Attempts of one key in those states, as if several launchers had created them."""
    made: list[JobRef] = []
    for number, state in enumerate(states, 1):
        ref = await launch(backend, f"other {number}", labels={QUEUE_LABEL: "main"} if state == "queued" else {})
        job = backend.jobs.pop(("ns", ref.name))
        first = await launch(backend, "template") if not made else None
        labels = backend.job(first)["metadata"]["labels"] if first else backend.job(made[0])["metadata"]["labels"]
        if first:
            del backend.jobs["ns", first.name]
        kept = {name: value for name, value in job["metadata"]["labels"].items() if name == QUEUE_LABEL}
        named = {**labels, "trainjob.dev/key": WORK, "trainjob.dev/attempt": str(number), **kept}
        job["metadata"] |= {"name": f"key-{WORK}-{number}", "labels": named}
        backend.jobs["ns", job["metadata"]["name"]] = job
        ref = JobRef.of(job)
        made.append(ref)
        if state == "given up":
            await give_up(backend, ref, WHY)
        elif state == "failed":
            backend.end(ref, 3)
        elif state == "complete":
            backend.end(ref)
        elif state == "deleting":
            job["metadata"]["deletionTimestamp"] = "2026-11-25T12:00:00Z"
        elif state == "suspended":
            await backend.patch(ref, {"spec": {"suspend": True}})
    backend.stops.clear()
    backend.requests.clear()
    return made


async def stop(backend: Cluster, action: Any = "cancel", **options: Any) -> list[int]:
    done = await cancel_key(backend, "key", namespace="ns", action=action, **{"timeout_seconds": 0, **options})
    return sorted(ref.attempt for ref in done.jobs)


# ---------------------------------------------------------------- all attempts of a key


async def test_a_deletion_is_not_preceded_by_a_mark(backend: Cluster) -> None:
    """A webhook that hangs fails each PATCH, but no DELETE."""
    await attempts(backend, "running", "running")

    def hang(request: str) -> None:
        if request == "patch":
            raise BackendUnavailable("a webhook hangs")

    backend.before = hang
    assert await stop(backend) == [1, 2]
    assert backend.requests[:4] == ["find", "delete", "delete", "announce_cancel"]
    assert backend.jobs == {}


async def test_active_attempts_are_stopped_before_given_up_ones(backend: Cluster) -> None:
    await attempts(backend, "given up", "running", "given up", "suspended", "queued")
    assert await stop(backend) == [1, 2, 3, 4, 5]
    assert set(backend.stops[:4]) == {"delete 2", "delete 4", "delete 5", "record"}
    assert set(backend.stops[4:]) == {"delete 1", "delete 3"}
    assert backend.jobs == {}


async def test_failed_attempts_are_suspended(backend: Cluster) -> None:
    """Trainer up to 2.3 can take Failed back and train again."""
    refs = await attempts(backend, "failed", "complete", "running")
    assert await stop(backend) == [3]
    assert (backend.stops[0], backend.stops[-1]) == ("delete 3", "suspend 1")
    left = {ref.attempt: backend.job(ref) for ref in refs[:2]}
    assert [observe(job).phase for job in left.values()] == [Phase.FAILED, Phase.COMPLETE]
    assert (left[1]["spec"].get("suspend"), left[2]["spec"].get("suspend")) == (True, None)
    backend.status(refs[0], conditions=[])
    assert observe(backend.job(refs[0])).phase is Phase.SUSPENDED


async def test_a_failed_attempt_that_refuses_changes_does_not_fail_the_cancel(backend: Cluster) -> None:
    await attempts(backend, "failed", "running")

    def refuse(request: str) -> None:
        if request == "patch":
            raise Rejected("its runtime is gone")

    backend.before = refuse
    assert await stop(backend) == [2]


async def test_a_suspension_has_the_version_of_the_record_as_its_mark(backend: Cluster) -> None:
    refs = await attempts(backend, "running", "queued", "given up", "suspended")
    assert await stop(backend, "suspend") == [1, 2]
    assert set(backend.stops[:2]) == {"delete 2", "record"}, "Kueue would resume a job in a queue"
    assert backend.stops[2:] == ["suspend 1"]
    (record,) = backend.records.values()
    assert backend.job(refs[0])["metadata"]["annotations"][CANCELLED] == str(record.version)
    assert given_up(backend.job(refs[2])) is not None, "a job that was given up is suspended already"
    by_a_person = backend.job(refs[3])["metadata"]["annotations"]
    assert CANCELLED not in by_a_person, "a launch would resume a job with a mark"


async def test_the_mark_of_a_kill_names_its_try(backend: Cluster) -> None:
    (ref,) = await attempts(backend, "running")
    await stop(backend, "suspend", tried=3)
    (record,) = backend.records.values()
    assert backend.job(ref)["metadata"]["annotations"][CANCELLED] == record.mark
    assert (record.tried, record.uid, record.action) == (3, "", "suspend")


async def test_a_cancel_without_a_job_leaves_its_record(backend: Cluster) -> None:
    assert await stop(backend) == []
    (((namespace, work, _), record),) = backend.records.items()
    assert (namespace, work) == ("ns", WORK)
    assert (record.tried, record.uid, record.action) == (None, "", "cancel")


async def test_what_is_created_before_the_record_is_stopped(backend: Cluster) -> None:
    """The second look comes after the record: who creates a job from then on reads the record."""
    refs: list[JobRef] = []

    async def created() -> None:
        refs.append(await launch(backend))

    once(backend, "announce_cancel", created)
    assert await stop(backend) == [1]
    assert backend.jobs == {}


async def test_each_attempt_is_stopped_once(backend: Cluster) -> None:
    await attempts(backend, "running")
    await stop(backend, "suspend", look_seconds=0.2)
    assert backend.stops == ["record", "suspend 1"]


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_it_looks_until_a_launch_on_its_way_is_known(backend: Cluster, action: Any) -> None:
    """The process is killed during its own launch: the create arrives later."""

    async def created() -> None:
        made = render(TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]}), "key", 1, "ns")
        made["metadata"]["annotations"][LAUNCHED] = "0"
        await backend.create(made)

    once(backend, "find", created, skip=4)
    assert await stop(backend, action, look_seconds=30) == [1]
    assert [JobRef.of(job) for job in backend.jobs.values() if not job["spec"].get("suspend")] == []


async def test_it_looks_no_longer_than_it_may(backend: Cluster) -> None:
    began = asyncio.get_running_loop().time()
    assert await stop(backend, look_seconds=0.3) == []
    assert 0.3 <= asyncio.get_running_loop().time() - began < 10
    assert backend.requests.count("find") > 3


async def test_it_stops_looking_when_only_given_up_attempts_are_left_after_the_time(backend: Cluster) -> None:
    """A given-up attempt is not the launch on its way."""
    await attempts(backend, "given up")
    began = asyncio.get_running_loop().time()
    assert await stop(backend, look_seconds=0.3) == [1]
    assert asyncio.get_running_loop().time() - began >= 0.3


async def test_attempts_that_end_or_are_deleted_are_left_alone(backend: Cluster) -> None:
    await attempts(backend, "complete", "deleting")
    assert await stop(backend) == []
    assert backend.stops == ["record"]


async def test_other_keys_and_namespaces_are_left_alone(backend: Cluster) -> None:
    other = await launch(backend, "another key")
    await attempts(backend, "running")
    await stop(backend)
    assert [JobRef.of(job) for job in backend.jobs.values()] == [other]
    assert all((where, work) == ("ns", WORK) for where, work, _ in backend.records)


async def test_a_blank_key_is_refused(backend: Cluster) -> None:
    with pytest.raises(InvalidSpec):
        await cancel_key(backend, " ", namespace="ns")
    assert backend.records == {}


@pytest.mark.parametrize("lasts", [True, False])
async def test_it_says_whether_the_ranks_have_ended(backend: Cluster, lasts: bool) -> None:
    (ref,) = await attempts(backend, "running")
    if lasts:
        backend.lingering.add(ref.uid)
    done = await cancel_key(backend, "key", namespace="ns", timeout_seconds=0.1)
    assert (done.jobs, done.ended) == ((ref,), not lasts)


@pytest.mark.parametrize("error", [Rejected("a policy refused the Lease"), BackendUnavailable("Leases hang")])
@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_a_job_is_stopped_although_the_record_is_refused(backend: Cluster, action: Any, error: Exception) -> None:
    refs = await attempts(backend, "running", "given up")

    def refuse(request: str) -> None:
        if request == "announce_cancel":
            raise error

    backend.before = refuse
    with pytest.raises(type(error)):
        await stop(backend, action)
    if action == "cancel":
        assert backend.jobs == {}
    else:
        assert backend.job(refs[0])["spec"]["suspend"]
        assert backend.job(refs[0])["metadata"]["annotations"][CANCELLED].startswith("unknown:")


async def test_one_job_that_cannot_be_stopped_does_not_keep_the_others(backend: Cluster) -> None:
    refs = await attempts(backend, "running", "running", "given up")
    delete = backend.delete

    async def failing(ref: JobRef, version: str = "") -> None:
        if ref == refs[0]:
            raise BackendUnavailable("no reply")
        await delete(ref, version)

    backend.delete = failing  # type: ignore[method-assign]
    with pytest.raises(BackendUnavailable):
        await stop(backend)
    assert [JobRef.of(job) for job in backend.jobs.values()] == refs[:1]


async def test_without_permission_for_leases_jobs_are_stopped(backend: Cluster) -> None:
    (ref,) = await attempts(backend, "running")

    async def forbidden(*_: object) -> Cancel | None:
        return None

    backend.announce_cancel = forbidden  # type: ignore[assignment, method-assign]
    assert await stop(backend, "suspend") == [1]
    assert backend.job(ref)["metadata"]["annotations"][CANCELLED].startswith("unknown:"), "of unknown order"


# ---------------------------------------------------------------- one job


async def test_a_cancel_of_one_job_leaves_a_record_with_its_uid(backend: Cluster) -> None:
    ref = await launch(backend)
    backend.stops.clear()
    assert await cancel(backend, ref, tried=2)
    assert backend.stops == ["delete 1", "record"]
    (record,) = backend.records.values()
    assert (record.uid, record.tried) == (ref.uid, 2)


async def test_a_cancel_of_one_job_leaves_other_attempts(backend: Cluster) -> None:
    first, second = await attempts(backend, "running", "running")
    assert await cancel(backend, first)
    assert [JobRef.of(job) for job in backend.jobs.values()] == [second]


async def test_a_job_that_trainjob_did_not_launch_leaves_no_record(backend: Cluster) -> None:
    ref = await launch(backend)
    backend.job(ref)["metadata"]["labels"] = {}
    assert await cancel(backend, ref)
    assert (backend.jobs, backend.records) == ({}, {})


async def test_a_job_of_another_uid_is_left_alone(backend: Cluster) -> None:
    ref = await launch(backend)
    assert await cancel(backend, JobRef("ns", ref.name, "another"))
    assert (len(backend.jobs), backend.records) == (1, {})


@pytest.mark.parametrize("action", ["cancel", "suspend"])
@pytest.mark.parametrize("of_key", [True, False])
async def test_the_end_of_a_try_comes_too_late_for_a_job_that_a_later_try_has_adopted(
    backend: Cluster, action: Any, of_key: bool
) -> None:
    """A task was cleared: the kill of try 1 arrives after try 2 has adopted the job."""
    ref = await launch(backend)
    spec = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})
    assert await flow.launch(backend, spec, "key", namespace="ns", tried=2) == ref
    backend.stops.clear()
    if of_key:
        assert await stop(backend, action, tried=1) == []
    else:
        assert await cancel(backend, ref, action, tried=1), "nothing to wait for"
    assert backend.stops == ["record"], "a launch of try 1 on its way obeys it"
    assert not backend.job(ref)["spec"].get("suspend")
    assert await stop(backend, action, tried=2) == [1]


async def test_what_was_launched_after_the_cancel_is_left_alone(backend: Cluster) -> None:
    """A retry begins while the cancel still looks for its own launch that was on its way."""
    later: list[JobRef] = []

    async def retried() -> None:
        later.append(await launch(backend))

    once(backend, "find", retried, skip=3)
    assert await stop(backend, "suspend", look_seconds=0.3) == []
    assert [JobRef.of(job) for job in backend.jobs.values()] == later
    assert not backend.job(later[0])["spec"].get("suspend")


async def test_the_mark_of_a_later_cancel_stays(backend: Cluster) -> None:
    """Otherwise a waiter would resume a job that the later cancel has suspended."""
    ref = await launch(backend)

    async def cancelled_again() -> None:
        await cancel_key(backend, "key", namespace="ns", action="suspend", timeout_seconds=0)

    once(backend, "find", cancelled_again, skip=1)
    await stop(backend, "suspend")
    newest = max(record.version for record in backend.records.values())
    mark = backend.job(ref)["metadata"]["annotations"][CANCELLED]
    assert backend.job(ref)["spec"]["suspend"]
    assert int(mark) in {record.version for record in backend.records.values()}
    assert newest >= int(mark)
    assert not is_stale(backend.job(ref)), "no waiter resumes it"


# ---------------------------------------------------------------- single requests


async def test_a_job_that_vanishes_is_stopped(backend: Cluster) -> None:
    ref = await launch(backend)
    job = backend.jobs.pop(("ns", ref.name))
    await request_cancel(backend, job, "suspend")
    assert backend.stops == ["suspend 1"]
    with pytest.raises(NotFound):
        backend.job(ref)
