"""Launch, wait and cancel, against objects in memory."""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.contract.memory import MemoryBackend, MemoryCluster, remaining_pod

from trainjob import (
    InvalidSpec,
    JobRef,
    LogLine,
    Observation,
    Phase,
    TrainJobFailed,
    TrainJobSpec,
    WaitOptions,
)
from trainjob._backends.base import Snapshot, TrainJob
from trainjob._diagnosis.serialization import pack_diagnosis, unpack_diagnosis
from trainjob._jobs import (
    fencing,
    following,
    launching as flow,
    waiting,
)
from trainjob._jobs.cancellation import cancel, cancel_key, give_up
from trainjob._jobs.records import mark_delivered
from trainjob._manifest import unattended
from trainjob._manifest.attempts import ADOPTED, LAUNCHED, given_up
from trainjob.errors import (
    AlreadyExists,
    BackendUnavailable,
    QueueTimeout,
    RankCrashed,
    Rejected,
    RuntimeNotFound,
    RunTimeout,
    SpecMismatch,
    StartTimeout,
    Stuck,
    TimedOut,
)
from trainjob.job import DELIVERED, FAILURE, FAILURE_OF, MAX_NAME, TRY, job_name, labels_of
from trainjob.status import CANCELLED, GIVEN_UP, QUEUE_LABEL, Blocker, observe
from trainjob.verdicts import Category, Diagnosis, Evidence, RetryVerdict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SPEC: dict[str, Any] = {"runtime": "torch-distributed", "command": ["train"]}


@pytest.fixture
def backend() -> MemoryCluster:
    return MemoryCluster()


async def launch(
    backend: MemoryBackend, key: str = "key", options: dict[str, Any] | None = None, **spec: Any
) -> JobRef:
    parsed = TrainJobSpec.parse({**SPEC, **spec})
    return await flow.launch(backend, parsed, key, namespace="ns", **(options or {}))


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---------------------------------------------------------------- launch


async def test_a_fresh_launch_has_the_documented_requests(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    assert backend.requests == ["cancels", "find", "remaining_pods", "is_free", "create", "cancels", "find"]
    assert (ref.name, ref.namespace, ref.attempt) == (job_name("key", 1), "ns", 1)


async def test_labels_of_the_origin_do_not_change_the_spec(backend: MemoryBackend) -> None:
    asked = {"team": "vision", "dag_id": "theirs"}
    origin = {"dag_id": "digits", "try_number": "1"}
    ref = await launch(backend, options={"origin": origin}, labels=asked)
    labels = backend.job(ref)["metadata"]["labels"]
    assert ({"team": "vision"} | origin).items() <= labels.items()
    assert await launch(backend, options={"origin": origin | {"try_number": "2"}}, labels=asked) == ref
    assert backend.job(ref)["metadata"]["labels"] == labels, "labels name the task that launched the job"


def without_launch(job: dict[str, Any]) -> dict[str, Any]:
    """A job without what each launch writes."""
    annotations = {
        name: value for name, value in job["metadata"]["annotations"].items() if name not in (LAUNCHED, TRY, ADOPTED)
    }
    return {**job, "metadata": {**job["metadata"], "annotations": annotations, "resourceVersion": None}}


@pytest.mark.parametrize("state", ["fresh", "running", "suspended", "complete"])
async def test_launch_adopts_an_existing_job(backend: MemoryBackend, state: str) -> None:
    ref = await launch(backend)
    if state == "running":
        backend.running(ref)
    elif state == "suspended":
        await backend.patch(ref, {"spec": {"suspend": True}})
    elif state == "complete":
        backend.end(ref)
    before = copy.deepcopy(backend.job(ref))
    assert await launch(backend) == ref
    assert without_launch(backend.job(ref)) == without_launch(before)
    assert (backend.job(ref) == before) == (state == "complete"), "each adoption of an active job changes its version"
    assert len(backend.jobs) == 1


async def test_another_key_creates_another_job(backend: MemoryBackend) -> None:
    assert await launch(backend, "one") != await launch(backend, "two")


async def test_launch_after_a_delivered_result_creates_a_new_attempt(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.end(ref)
    await mark_delivered(backend, ref)
    again = await launch(backend)
    assert again.attempt == 2
    assert await launch(backend) == again


async def test_mark_delivered_ignores_a_deleted_job(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await backend.delete(ref)
    await mark_delivered(backend, ref)
    assert backend.jobs == {}


async def test_launch_after_a_failure_creates_the_next_attempt(backend: MemoryBackend) -> None:
    first = await launch(backend)
    backend.end(first, 3)
    second = await launch(backend)
    assert (second.attempt, second.name) == (2, job_name("key", 2))
    assert await launch(backend) == second
    assert len(backend.jobs) == 2


@pytest.mark.parametrize(
    ("after", "code", "reason", "final"),
    [
        ("verdict", 3, "Error", ""),
        ("verdict", 143, "Error", ""),
        ("verdict", 137, "OOMKilled", ""),
        ("verdict", 128, "StartError", "configuration"),
        ("infrastructure", 3, "Error", "unknown"),
        ("infrastructure", 143, "Error", ""),
        ("infrastructure", 137, "OOMKilled", "unknown"),
        ("infrastructure", 128, "StartError", "configuration"),
    ],
)
async def test_launch_after_a_failure_depends_on_its_verdict(
    backend: MemoryBackend, after: str, code: int, reason: str, final: str
) -> None:
    backend.end(await launch(backend), code, reason=reason)
    options = {"after_failure": after}
    if not final:
        assert (await launch(backend, options=options)).attempt == 2
    else:
        with pytest.raises(TrainJobFailed) as caught:
            await launch(backend, options=options)
        assert caught.value.retry == final
        assert len(backend.jobs) == 1


@pytest.mark.parametrize("left", ["pod", "lost", "jobset"])
async def test_launch_skips_the_name_of_a_deleted_job_of_which_something_is_left(
    backend: MemoryBackend, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fencing, "_POLL", 0.01)
    monkeypatch.setattr(fencing, "_LATE", 0.02)
    for attempt in (1, 2, 3):
        ref = await launch(backend)
        assert ref.attempt == attempt
        await backend.delete(ref)
        if left == "jobset":
            backend.taken.add(ref.name)
        else:
            backend.remaining = [remaining_pod(ref.name, lost=left == "lost", grace=0.01)]


async def test_launch_uses_the_name_of_a_deleted_job_again_when_nothing_is_left(backend: MemoryBackend) -> None:
    """Like a cluster, the backend has forgotten it."""
    for _ in range(3):
        ref = await launch(backend)
        assert ref.attempt == 1
        await backend.delete(ref)


async def test_launch_counts_failed_attempts(backend: MemoryBackend) -> None:
    backend.end(await launch(backend), 3)
    second = await launch(backend)
    assert second.attempt == 2
    await backend.delete(second)
    assert (await launch(backend)).attempt == 2, "nothing of the second one is left"


async def test_launch_does_not_adopt_a_job_in_deletion(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.job(ref)["metadata"]["deletionTimestamp"] = ago(0)
    assert (await launch(backend)).attempt == 2


async def test_a_later_try_adopts_an_unfinished_job(backend: MemoryBackend) -> None:
    """Airflow's try_number: it is recorded on the job and is no part of its name."""
    first = await launch(backend, options={"tried": 3})
    assert (first.attempt, first.name) == (1, job_name("key", 1))
    assert backend.job(first)["metadata"]["annotations"][TRY] == "3"
    assert await launch(backend, options={"tried": 4}) == first
    assert backend.job(first)["metadata"]["annotations"][TRY] == "4"
    assert await launch(backend, options={"tried": 2}) == first
    assert backend.job(first)["metadata"]["annotations"][TRY] == "4", "an earlier try keeps the later one"
    backend.end(first, 3)
    second = await launch(backend, options={"tried": 5})
    assert (second.attempt, backend.job(second)["metadata"]["annotations"][TRY]) == (2, "5")


@pytest.mark.parametrize("after_failure", ["retry", "verdict", "infrastructure"])
@pytest.mark.parametrize("counts", [True, False])
async def test_no_attempt_follows_a_failure_of_the_last_try(
    backend: MemoryBackend, after_failure: str, counts: bool
) -> None:
    """`counts`: whether the caller counts its tries; if not, each attempt is one more try."""

    def options(tried: int, last: int) -> dict[str, Any]:
        return {"last_try": last, "after_failure": after_failure} | ({"tried": tried} if counts else {})

    first = await launch(backend, options=options(1, 2))
    backend.end(first, 143)
    second = await launch(backend, options=options(2, 2))
    assert second.attempt == 2
    assert await launch(backend, options=options(2, 1)) == second  # it has not failed
    backend.end(second, 143)
    with pytest.raises(TrainJobFailed, match="SIGTERM"):
        await launch(backend, options=options(2, 2))
    assert (await launch(backend, options=options(3, 3))).attempt == 3


async def test_the_last_try_is_that_of_the_caller_not_the_number_in_the_name(backend: MemoryBackend) -> None:
    """The eighth try of a task adopts the first attempt: its failure is that of the last of eight tries."""
    first = await launch(backend, options={"tried": 1, "last_try": 8})
    assert await launch(backend, options={"tried": 8, "last_try": 8}) == first
    backend.end(first, 143)
    with pytest.raises(TrainJobFailed):
        await launch(backend, options={"tried": 8, "last_try": 8})
    assert len(backend.jobs) == 1


async def test_launch_after_a_lost_reply_adopts_the_job(backend: MemoryBackend) -> None:
    def lose(request: str) -> None:
        backend.after = lambda _: None
        raise BackendUnavailable("connection reset")

    backend.after = lose
    with pytest.raises(BackendUnavailable):
        await launch(backend)
    ref = await launch(backend)
    assert ref.attempt == 1
    assert len(backend.jobs) == 1


async def test_launch_knows_its_job_after_a_repeated_create(backend: MemoryBackend) -> None:
    def lose(request: str) -> None:
        backend.after = lambda _: None
        raise AlreadyExists("second try of one create")

    backend.after = lose
    ref = await launch(backend)
    assert ref.attempt == 1
    assert [JobRef.of(job) for job in backend.jobs.values()] == [ref]
    assert backend.requests[4:] == ["create", "cancels", "find"]


@pytest.mark.parametrize("earlier", ["nothing", "failed", "delivered", "deleted"])
async def test_concurrent_launches_create_one_job(backend: MemoryBackend, earlier: str) -> None:
    if earlier != "nothing":
        ref = await launch(backend)
        backend.end(ref, 3 if earlier == "failed" else 0)
        if earlier == "delivered":
            await mark_delivered(backend, ref)
        if earlier == "deleted":
            await backend.delete(ref)
    refs = await asyncio.gather(*(launch(backend) for _ in range(10)))
    assert len(set(refs)) == 1
    assert refs[0].attempt == (1 if earlier in ("nothing", "deleted") else 2)
    assert len(backend.jobs) == (1 if earlier in ("nothing", "deleted") else 2)


async def test_another_spec_with_the_same_key_is_rejected(backend: MemoryBackend) -> None:
    ref = await launch(backend, args=["--lr", "0.1"])
    with pytest.raises(SpecMismatch) as caught:
        await launch(backend, args=["--lr", "0.2"], num_nodes=2)
    text = str(caught.value)
    assert f"ns/{ref.name}" in text
    assert 'spec.trainer.args[1]: "0.1" -> "0.2"' in text
    assert "spec.trainer.numNodes: (nothing) -> 2" in text
    with pytest.raises(SpecMismatch, match="labels or annotations"):
        await launch(backend, args=["--lr", "0.1"], labels={"a": "b"})
    assert len(backend.jobs) == 1


STOPS: dict[str, Callable[[MemoryBackend, JobRef], Awaitable[object]]] = {
    "cancel of the job": lambda backend, ref: cancel(backend, ref, "suspend"),
    "cancel of the key": lambda backend, ref: cancel_key(backend, "key", namespace="ns", action="suspend"),
    "kill": lambda backend, ref: cancel_key(backend, "key", namespace="ns", action="suspend", tried=1),
    "reaper": lambda backend, ref: backend.patch(
        ref, {"metadata": {"annotations": {CANCELLED: unattended.MARK}}, "spec": {"suspend": True}}
    ),
}


@pytest.mark.parametrize("stop", STOPS)
async def test_another_spec_replaces_a_job_that_was_stopped(backend: MemoryBackend, stop: str) -> None:
    """It waits for a launch that resumes it; "fix the spec, run again" must not fail."""
    first = await launch(backend, options={"tried": 1})
    backend.running(first)
    await STOPS[stop](backend, first)
    assert observe(backend.job(first)).phase is Phase.SUSPENDED
    second = await launch(backend, options={"tried": 2}, num_nodes=2)
    assert (second.attempt, [name for _, name in backend.jobs]) == (2, [second.name])
    with pytest.raises(SpecMismatch):
        await launch(backend, options={"tried": 3})


@pytest.mark.parametrize("stop", STOPS)
async def test_the_same_spec_resumes_a_job_that_was_stopped(backend: MemoryBackend, stop: str) -> None:
    first = await launch(backend, options={"tried": 1})
    backend.running(first)
    await STOPS[stop](backend, first)
    assert await launch(backend, options={"tried": 2}) == first
    with pytest.raises(SpecMismatch):  # it is waited for
        await launch(backend, options={"tried": 3}, num_nodes=2)


@pytest.mark.parametrize("stop", STOPS)
async def test_a_stopped_job_stays_if_the_next_spec_is_refused(backend: MemoryBackend, stop: str) -> None:
    first = await launch(backend, options={"tried": 1})
    backend.running(first)
    await STOPS[stop](backend, first)
    with pytest.raises(RuntimeNotFound):
        await launch(backend, options={"tried": 2}, runtime="nosuch")
    assert await launch(backend, options={"tried": 2}) == first


async def test_a_cancel_between_two_reads_of_a_launch_keeps_the_job_that_it_suspends(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await launch(backend)
    backend.running(first)
    find = backend.find

    async def late(namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        monkeypatch.undo()
        await anyio.lowlevel.checkpoint()  # the records of cancels were read
        await cancel_key(backend, "key", namespace="ns", action="suspend")
        return await find(namespace, labels)

    monkeypatch.setattr(backend, "find", late)
    with pytest.raises(TrainJobFailed, match="its key was cancelled while it was launched"):
        await launch(backend, num_nodes=2)
    assert observe(backend.job(first)).phase is Phase.SUSPENDED


async def test_what_replaces_a_stopped_job_is_later_than_the_kill(backend: MemoryBackend) -> None:
    first = await launch(backend, options={"tried": 3})
    backend.running(first)
    await cancel_key(backend, "key", namespace="ns", action="suspend", tried=3)
    second = await launch(backend, num_nodes=2)
    assert backend.job(second)["metadata"]["annotations"][TRY] == "4"


async def test_a_job_that_a_person_suspended_is_not_replaced_by_another_spec(backend: MemoryBackend) -> None:
    first = await launch(backend)
    await backend.patch(first, {"spec": {"suspend": True}})
    with pytest.raises(SpecMismatch):
        await launch(backend, num_nodes=2)


async def test_of_launches_at_once_one_says_that_it_has_created_the_job(backend: MemoryBackend) -> None:
    adopted: list[JobRef] = []
    refs = await asyncio.gather(*(launch(backend, options={"on_adopt": adopted.append}) for _ in range(5)))
    assert adopted == refs[:1] * 4
    again = await launch(backend, options={"on_adopt": adopted.append})
    assert adopted == [again] * 5


async def test_another_spec_after_a_failure_is_the_next_attempt(backend: MemoryBackend) -> None:
    backend.end(await launch(backend), 3)
    assert (await launch(backend, num_nodes=2)).attempt == 2


@pytest.mark.parametrize(("spec", "error"), [({"runtime": "nosuch"}, RuntimeNotFound), ({"command": []}, Rejected)])
async def test_errors_of_create_are_raised(
    backend: MemoryBackend, spec: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await launch(backend, **spec)
    assert backend.requests[-1:] == ["create"]
    assert backend.requests.count("create") == 1


async def test_an_unparsed_spec_is_checked_before_any_request(backend: MemoryBackend) -> None:
    odd = TrainJobSpec.parse(SPEC).model_copy(update={"func_args": {"lr": 0.1}})
    for spec, words in ((TrainJobSpec(), "runtime: is missing"), (odd, "func_args: needs func")):
        with pytest.raises(InvalidSpec, match=words):
            await flow.launch(backend, spec, "key", namespace="ns")
        with pytest.raises(InvalidSpec, match=words):
            await flow.dry_run(backend, spec, "key", namespace="ns")
    assert backend.requests == []


# ---------------------------------------------------------------- wait


def report(**fields: Any) -> str:
    return json.dumps({"trainjob": 1, **fields})


async def test_wait_returns_the_result(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    metrics = [{"name": "loss", "value": "0.25"}, {"name": "best", "value": "epoch 3"}, {"name": "bad", "value": "nan"}]
    backend.status(ref, trainerStatus={"metrics": [{"name": "early", "value": "1"}, {"name": "loss", "value": "9"}]})
    backend.end(ref, message=report(metrics=metrics, outputs={"model": "s3://b/m"}))
    result = await waiting.wait(backend, ref)
    assert (result.name, result.uid, result.attempt) == (ref.name, ref.uid, 1)
    assert math.isnan(float(result.metrics["bad"]))
    assert {k: v for k, v in result.metrics.items() if k != "bad"} == {"loss": 0.25, "best": "epoch 3", "early": 1.0}
    assert result.outputs == {"model": "s3://b/m"}
    assert result.seconds["queued"] == 0
    assert 0 <= result.seconds["total"] < 10
    packed = result.as_dict()
    json.dumps(packed, allow_nan=False)
    assert packed["seconds"].keys() == {"queued", "total"}
    spent = packed.pop("goodput")
    assert sum(spent["seconds"].values()) == pytest.approx(result.seconds["total"], abs=0.01)
    assert packed | {"seconds": {}} == {
        "namespace": "ns",
        "name": ref.name,
        "uid": ref.uid,
        "attempt": 1,
        "metrics": {"loss": 0.25, "best": "epoch 3", "early": 1.0, "bad": "nan"},
        "outputs": {"model": "s3://b/m"},
        "seconds": {},
    }


async def test_wait_needs_one_watch(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.requests.clear()
    seen: list[Phase] = []

    def look(request: str) -> None:
        if request == "look" and seen[-1:] == [Phase.NOT_STARTED]:
            backend.running(ref)
        elif request == "look" and seen[-1:] == [Phase.RUNNING]:
            backend.end(ref)

    backend.before = look
    await waiting.wait(backend, ref, on_change=lambda observation, _: seen.append(observation.phase))
    assert seen == [Phase.NOT_STARTED, Phase.RUNNING, Phase.COMPLETE]
    assert backend.requests == ["watch", "has_own_jobset", "evidence"]


async def test_a_failure_has_its_diagnosis(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.lines = [LogLine("1", "node-0", "ValueError: no")]
    backend.end(ref, 3)
    with pytest.raises(TrainJobFailed, match=r"node-0 exited with code 3") as caught:
        await waiting.wait(backend, ref)
    assert caught.value.diagnosis.job == f"ns/{ref.name}"
    assert caught.value.diagnosis.log == ("ValueError: no",)


async def test_wait_for_a_deleted_job_fails(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await backend.delete(ref)
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref)
    assert caught.value.diagnosis.category is Category.DELETED
    assert caught.value.diagnosis.job == f"ns/{ref.name}"


@pytest.mark.parametrize("code", [0, 3])
async def test_the_final_observation_is_kept(backend: MemoryBackend, code: int) -> None:
    """The job is deleted, or runs again, after its end and before its evidence is read."""
    for becomes in ("gone", "again"):
        ref = await launch(backend, becomes)
        backend.end(ref, code)

        def change(request: str, ref: JobRef = ref, becomes: str = becomes) -> None:
            if request == "evidence" and becomes == "gone":
                backend.jobs.clear()
            elif request == "evidence":
                backend.job(ref)["status"] = {}

        backend.before = change
        if code:
            with pytest.raises(TrainJobFailed) as caught:
                await waiting.wait(backend, ref)
            assert caught.value.diagnosis.category is not Category.DELETED
        else:
            assert (await waiting.wait(backend, ref)).uid == ref.uid


async def test_all_log_lines_are_passed_on(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    heard: list[str] = []

    def look(request: str) -> None:
        if request == "lines" and len(backend.lines) < 3:
            backend.lines.append(LogLine(str(len(backend.lines)), "node-0", f"line {len(backend.lines)}"))
        elif request == "lines":
            backend.before = lambda _: None
            backend.lines.append(LogLine("9", "node-0", "last"))
            backend.end(ref)

    backend.before = look
    await waiting.wait(backend, ref, on_log=lambda line: heard.append(line.text))
    assert heard == ["line 0", "line 1", "line 2", "last"]


async def test_states_of_a_progress_bar_are_throttled(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    states = [LogLine(f"{percent:02}", "node-0", f"{percent}%", transient=True) for percent in range(99)]
    backend.lines = [*states, LogLine("99", "node-0", "100%"), LogLine("a", "node-0", "after")]
    backend.end(ref)
    heard: list[str] = []
    await waiting.wait(backend, ref, on_log=lambda line: heard.append(line.text))
    assert heard == ["0%", "100%", "after"]
    heard.clear()
    await waiting.wait(backend, ref, on_log=lambda line: heard.append(line.text), state_seconds=0)
    assert len(heard) == 101


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, BackendUnavailable("out")) for where in ("look", "on_log", "on_change")),
        *((where, Odd("bug")) for where in ("look", "lines", "on_log", "on_change")),
    ],
)
async def test_errors_are_not_wrapped_in_exception_groups(backend: MemoryBackend, where: str, error: Exception) -> None:
    ref = await launch(backend)
    backend.lines = [LogLine("1", "node-0", "x")]

    def fail(request: str) -> None:
        if request == where:
            raise error

    backend.before = fail
    with pytest.raises(type(error)) as caught:
        await waiting.wait(backend, ref, on_change=lambda *_: fail("on_change"), on_log=lambda _: fail("on_log"))
    assert caught.value is error


async def test_a_failed_log_stream_does_not_fail_the_job(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    heard: list[str] = []

    def fail(request: str) -> None:
        if request == "lines":
            backend.end(ref)
            raise BackendUnavailable("the kubelet does not answer")

    backend.before = fail
    await waiting.wait(backend, ref, on_log=lambda line: heard.append(str(line)))
    assert heard == ["[trainjob] no more log lines from here on: the kubelet does not answer"]


CRASHED = {
    "metadata": {"name": "p", "labels": {"batch.kubernetes.io/job-completion-index": "1"}},
    "status": {"containerStatuses": [{"name": "node", "lastState": {"terminated": {"exitCode": 3}}}]},
}


async def test_the_first_crash_explains_the_failure(backend: MemoryBackend) -> None:
    """A cluster deletes the pods of a failed job; only the evidence collected before is left."""
    ref = await launch(backend)
    backend.crashed[ref.uid] = [Evidence(None, [CRASHED], {"p": ["ValueError: no"]})]
    warned: list[Diagnosis] = []

    def crashed(diagnosis: Diagnosis) -> None:
        warned.append(diagnosis)
        backend.condition(ref, "Failed", reason="FailedJobs")

    with pytest.raises(TrainJobFailed) as failed:
        await waiting.wait(backend, ref, on_crash=crashed)
    assert (warned[0].exit_code, warned[0].log, warned[0].job) == (3, ("ValueError: no",), str(ref))
    assert (failed.value.diagnosis.exit_code, failed.value.diagnosis.log) == (3, ("ValueError: no",))


async def test_wait_errors_are_not_wrapped_while_logs_are_followed(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    with pytest.raises(RunTimeout):
        await waiting.wait(backend, ref, WaitOptions(run_timeout=timedelta(seconds=0.05)), on_log=lambda _: None)
    backend.end(ref, 3)
    with pytest.raises(TrainJobFailed):
        await waiting.wait(backend, ref, on_log=lambda _: None)


async def test_a_waiter_can_be_cancelled(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    with anyio.move_on_after(0.05) as scope:
        await waiting.wait(backend, ref, on_log=lambda _: None)
    assert scope.cancelled_caught
    assert backend.job(ref)


# ---------------------------------------------------------------- timeouts

SECOND = timedelta(seconds=1)
HOUR = timedelta(hours=1)


async def expired_timeout(backend: MemoryBackend, ref: JobRef, **options: Any) -> type[Exception]:
    """The timeout that has expired."""
    with pytest.raises(TimedOut) as caught, anyio.fail_after(15):
        await waiting.wait(backend, ref, WaitOptions(**options))
    assert f"ns/{ref.name}" in str(caught.value)
    return caught.type


async def keeps_waiting(backend: MemoryBackend, ref: JobRef, **options: Any) -> bool:
    """Whether no timeout expires within a moment."""
    with anyio.move_on_after(0.4) as scope:
        await waiting.wait(backend, ref, WaitOptions(**options))
    return scope.cancelled_caught


async def test_queue_timeout_counts_from_creation(backend: MemoryBackend) -> None:
    ref = await launch(backend, suspend=True, labels={QUEUE_LABEL: "q"})
    assert await keeps_waiting(backend, ref, queue_timeout=SECOND)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(2)
    assert await expired_timeout(backend, ref, queue_timeout=SECOND) is QueueTimeout
    assert await keeps_waiting(backend, ref, queue_timeout=HOUR, start_timeout=SECOND, run_timeout=SECOND)


async def test_queue_timeout_restarts_when_a_job_is_queued_again(backend: MemoryBackend) -> None:
    ref = await launch(backend, suspend=True, labels={QUEUE_LABEL: "q"})
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(7200)
    backend.condition(ref, "Suspended", "Suspended", time=ago(0))
    assert await keeps_waiting(backend, ref, queue_timeout=timedelta(seconds=5), run_timeout=HOUR)
    backend.condition(ref, "Suspended", "Suspended", time=ago(10))
    assert await expired_timeout(backend, ref, queue_timeout=timedelta(seconds=5), run_timeout=HOUR) is QueueTimeout


async def test_queue_timeout_applies_to_a_suspended_job(backend: MemoryBackend) -> None:
    ref = await launch(backend, suspend=True)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(10)
    assert await keeps_waiting(backend, ref, start_timeout=SECOND, run_timeout=SECOND)
    assert await keeps_waiting(backend, ref, queue_timeout=HOUR, start_timeout=SECOND, run_timeout=SECOND)
    assert (
        await expired_timeout(backend, ref, queue_timeout=SECOND, start_timeout=HOUR, run_timeout=HOUR) is QueueTimeout
    )


async def test_start_and_run_timeouts_count_from_admission(backend: MemoryBackend) -> None:
    ref = await launch(backend, labels={QUEUE_LABEL: "q"})
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(7200)
    # Just admitted: the condition is still Suspended for about 10 ms.
    backend.condition(ref, "Suspended", "Suspended", time=ago(7200))
    assert await keeps_waiting(backend, ref, queue_timeout=SECOND, start_timeout=HOUR, run_timeout=HOUR)
    backend.condition(ref, "Suspended", "Resumed", "False", time=ago(10))
    assert await keeps_waiting(backend, ref, queue_timeout=SECOND, start_timeout=HOUR, run_timeout=HOUR)
    assert await expired_timeout(backend, ref, start_timeout=SECOND, run_timeout=HOUR) is StartTimeout
    assert await expired_timeout(backend, ref, start_timeout=HOUR, run_timeout=SECOND) is RunTimeout
    backend.running(ref)
    assert await keeps_waiting(backend, ref, start_timeout=SECOND, run_timeout=HOUR)
    assert await expired_timeout(backend, ref, start_timeout=SECOND, run_timeout=SECOND) is RunTimeout


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            {"suspend": True, "labels": {QUEUE_LABEL: "q"}},
            WaitOptions(queue_timeout=SECOND),
            "is Queued: waiting for admission in queue q; it was not admitted within queue_timeout of 1s",
        ),
        (
            {"suspend": True},
            WaitOptions(queue_timeout=SECOND),
            "is Suspended: the TrainJob is suspended; it was not resumed within queue_timeout of 1s",
        ),
        ({}, WaitOptions(start_timeout=SECOND), "is NotStarted; no rank was running within start_timeout of 1s"),
        (
            {},
            WaitOptions(run_timeout=SECOND, start_timeout=HOUR),
            "is NotStarted; it did not end within run_timeout of 1s",
        ),
    ],
)
async def test_timeout_error_names_the_timeout_and_the_phase(
    backend: MemoryBackend, spec: dict[str, Any], options: WaitOptions, words: str
) -> None:
    ref = await launch(backend, **spec)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(10)
    with pytest.raises(TimedOut) as caught:
        await waiting.wait(backend, ref, options)
    assert str(caught.value) == f"TrainJob {ref} {words}"


async def test_a_timeout_expires_during_the_wait(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    began = anyio.current_time()
    with pytest.raises(StartTimeout, match=r"no rank was running within start_timeout of 0\.3s"):
        await waiting.wait(backend, ref, WaitOptions(start_timeout=timedelta(seconds=0.3)))
    assert 0.2 < anyio.current_time() - began < 10
    assert backend.job(ref), "the job is not changed"


async def test_start_timeout_does_not_apply_to_a_job_that_has_run(backend: MemoryBackend) -> None:
    """The node is NotReady, so no rank counts as ready, and the waiter started after the job."""
    ref = await launch(backend)
    backend.ran.add(ref.uid)
    backend.status(ref, jobsStatus=[{"name": "node", "active": 1}])
    seen: list[tuple[Phase, str]] = []
    with pytest.raises(RunTimeout):
        await waiting.wait(
            backend,
            ref,
            WaitOptions(start_timeout=timedelta(seconds=0.2), run_timeout=timedelta(seconds=0.6)),
            on_change=lambda observation, notice: seen.append((observation.phase, notice)),
        )
    assert [phase for phase, _ in seen] == [Phase.STARTING, Phase.RESTARTING], seen
    assert seen[-1][1] == "a rank has been running before, so start_timeout does not apply"


async def test_dry_run_ignores_existing_jobs_and_creates_nothing(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    stored = await flow.dry_run(backend, TrainJobSpec.parse(SPEC), "key", namespace="ns")
    assert [*backend.jobs] == [("ns", ref.name)]
    theirs = {"uid", "creationTimestamp"}
    launched = {name: value for name, value in without_launch(backend.job(ref)).items() if name != "status"}
    del launched["metadata"]["resourceVersion"]
    assert {name: value for name, value in stored["metadata"].items() if name not in theirs} == {
        name: value for name, value in launched["metadata"].items() if name not in theirs
    }
    assert stored["metadata"].keys() >= theirs, "the server's defaults are shown"
    assert {**stored, "metadata": None} == {**launched, "metadata": None}


async def test_a_job_with_progress_counts_as_has_run(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.status(ref, jobsStatus=[{"name": "node", "active": 1}], trainerStatus={"progressPercentage": 40})
    with pytest.raises(RunTimeout):
        await waiting.wait(
            backend, ref, WaitOptions(start_timeout=timedelta(seconds=0.1), run_timeout=timedelta(seconds=0.3))
        )
    assert "has_run" not in backend.requests


async def test_wait_reports_a_cancel_by_another_client(backend: MemoryBackend) -> None:
    ref = await launch(backend)

    async def cancel_later() -> None:
        await anyio.sleep(0.1)
        await cancel(backend, ref)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel_later)
        with pytest.raises(TrainJobFailed, match="the job was cancelled with trainjob, by its task") as failed:
            await waiting.wait(backend, ref)
    assert failed.value.diagnosis.category == "deleted"
    assert "launch it again" in failed.value.diagnosis.advice


async def test_message_of_a_job_suspended_by_cancel_names_the_cancel(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await cancel(backend, ref, "suspend")
    assert "cancelled with trainjob" in observe(backend.job(ref)).message


async def test_timeouts_continue_after_a_restart_of_the_waiter(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(3598)
    for _ in range(2):
        assert await expired_timeout(backend, ref, run_timeout=HOUR) is RunTimeout


async def test_a_finished_job_comes_before_an_expired_timeout(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(7200)
    backend.end(ref)
    assert (await waiting.wait(backend, ref, WaitOptions(SECOND, SECOND, SECOND))).uid == ref.uid


async def test_a_timeout_does_not_cancel_a_slow_consumer(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    seen: list[Observation] = []

    async def consume() -> None:
        async for observation, _ in following.follow(backend, ref, WaitOptions(run_timeout=timedelta(seconds=0.1))):
            await anyio.sleep(0.3)
            seen.append(observation)

    with pytest.raises(RunTimeout):
        await consume()
    assert len(seen) == 1


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize("action", ["cancel", "suspend"])
async def test_cancel_waits_for_the_last_pod(backend: MemoryBackend, action: Any) -> None:
    ref = await launch(backend)
    backend.lingering.add(ref.uid)
    looks = 0

    def look(request: str) -> None:
        nonlocal looks
        looks += request == "stopped"
        if looks == 3:
            backend.lingering.clear()

    backend.before = look
    assert await cancel(backend, ref, action)
    assert looks == 3
    assert (ref.name in {name for _, name in backend.jobs}) == (action == "suspend")


async def test_cancel_returns_false_after_its_timeout(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.lingering.add(ref.uid)
    assert not await cancel(backend, ref, timeout_seconds=0.1)


@pytest.mark.parametrize("code", [0, 3])
async def test_cancel_does_not_change_a_finished_job(backend: MemoryBackend, code: int) -> None:
    ref = await launch(backend)
    backend.end(ref, code)
    before = dict(backend.job(ref))
    for action in ("cancel", "suspend"):
        assert await cancel(backend, ref, action)
    assert backend.job(ref) == before


async def test_cancel_ignores_deleted_and_other_jobs(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    other = JobRef(ref.namespace, ref.name, "another-uid")
    assert await cancel(backend, other)
    assert backend.job(ref)
    assert await cancel(backend, ref)
    assert await cancel(backend, ref)
    assert backend.jobs == {}


async def test_cancel_deletes_a_queued_job_instead_of_suspending_it(backend: MemoryBackend) -> None:
    ref = await launch(backend, labels={QUEUE_LABEL: "q"})
    assert await cancel(backend, ref, "suspend")
    assert backend.jobs == {}


async def test_mark_delivered_sets_an_annotation(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await mark_delivered(backend, ref)
    assert backend.job(ref)["metadata"]["annotations"][DELIVERED] == "true"


BLOCKER = Blocker("Inadmissible", "no such queue", permanent=True, advice="create the queue")


async def test_fail_fast_raises_stuck_for_a_permanent_blocker(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = await launch(backend)
    watch = backend.watch

    async def watched(ref: JobRef) -> AsyncGenerator[Snapshot]:
        async with aclosing(watch(ref)) as snapshots:
            async for snapshot in snapshots:
                yield Snapshot(snapshot.trainjob, blocker=BLOCKER)

    monkeypatch.setattr(backend, "watch", watched)
    assert await keeps_waiting(backend, ref), "the wait continues without fail_fast"
    assert await expired_timeout(backend, ref, fail_fast=True) is Stuck
    with pytest.raises(Stuck) as caught:
        await waiting.wait(backend, ref, WaitOptions(fail_fast=True))
    assert str(caught.value) == (
        f"TrainJob {ref} is NotStarted and cannot proceed: no such queue\nwhat to do: create the queue"
    )


class Unchangeable(MemoryBackend):
    """Rejects every patch, like Trainer's webhook if a job's runtime is gone; deletion works."""

    async def patch(self, ref: JobRef, patch: Any) -> None:
        raise Rejected("runtimeRef: Invalid value: must be created before")


async def test_a_job_that_cannot_be_suspended_is_deleted() -> None:
    backend = Unchangeable()
    await cancel(backend, await launch(backend), "suspend", timeout_seconds=0.1)
    assert backend.jobs == {}
    ref = await launch(backend, "other")
    why = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "node-0 exited with code 3")
    text = await give_up(backend, ref, why)
    assert text == f"{ref} was deleted: it could not be suspended: runtimeRef: Invalid value: must be created before"
    assert backend.jobs == {}


# ---------------------------------------------------------------- on_retry

GROWING: dict[str, Any] = {
    "resources_per_node": {"memory": "16Gi"},
    "on_retry": {"out_of_memory": {"max_memory": "30Gi"}, "quota": {"queue": "backfill"}},
}


def memory_of(backend: MemoryBackend, ref: JobRef) -> str:
    return str(backend.job(ref)["spec"]["trainer"]["resourcesPerNode"]["limits"]["memory"])


async def fail_for_lack_of_memory(backend: MemoryBackend, ref: JobRef) -> Diagnosis:
    backend.end(ref, 137, reason="OOMKilled")
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref)
    return caught.value.diagnosis


async def test_attempts_after_a_lack_of_memory_get_more(backend: MemoryBackend) -> None:
    first = await launch(backend, **GROWING)
    why = await fail_for_lack_of_memory(backend, first)
    assert (why.retry, why.change) == (RetryVerdict.INFRASTRUCTURE, "memory 16Gi -> 24Gi")
    backend.terminated.clear()  # with the pods the evidence is deleted
    second = await launch(backend, **GROWING, options={"after_failure": "infrastructure"})
    assert (second.attempt, memory_of(backend, second)) == (2, "24Gi")
    assert await launch(backend, **GROWING) == second, "the changed job is the same work"
    assert (await fail_for_lack_of_memory(backend, second)).change == "memory 24Gi -> 30Gi"
    third = await launch(backend, **GROWING)
    assert memory_of(backend, third) == "30Gi"
    why = await fail_for_lack_of_memory(backend, third)
    assert (why.retry, why.change) == (RetryVerdict.UNKNOWN, ""), "the bound is reached"
    with pytest.raises(TrainJobFailed):
        await launch(backend, **GROWING, options={"after_failure": "infrastructure"})
    assert memory_of(backend, await launch(backend, **GROWING)) == "30Gi", "a person may retry"


async def test_a_launcher_reads_the_evidence_if_nobody_waited(backend: MemoryBackend) -> None:
    first = await launch(backend, **GROWING)
    backend.end(first, 137, reason="OOMKilled")
    options = {"after_failure": "infrastructure"}
    assert memory_of(backend, await launch(backend, **GROWING, options=options)) == "24Gi"


async def test_a_waiter_reports_the_change(backend: MemoryBackend) -> None:
    await fail_for_lack_of_memory(backend, await launch(backend, **GROWING))
    second = await launch(backend, **GROWING)
    backend.end(second)
    notices: list[str] = []
    await waiting.wait(backend, second, on_change=lambda _, notice: notices.append(notice))
    (notice,) = filter(None, notices)
    assert notice.startswith("on_retry changed this attempt: memory 16Gi -> 24Gi; because of out of memory: node-0 was")


async def test_new_work_of_a_key_starts_without_changes(backend: MemoryBackend) -> None:
    await fail_for_lack_of_memory(backend, await launch(backend, **GROWING))
    second = await launch(backend, **GROWING)
    backend.end(second)
    await mark_delivered(backend, second)
    assert memory_of(backend, await launch(backend, **GROWING)) == "16Gi"


@pytest.mark.parametrize("request_name", ["find", "evidence", "create"])
async def test_a_launcher_that_is_killed_computes_the_same_change(backend: MemoryBackend, request_name: str) -> None:
    first = await launch(backend, **GROWING)
    backend.end(first, 137, reason="OOMKilled")

    def kill(request: str) -> None:
        if request == request_name:
            backend.before = lambda _: None
            raise asyncio.CancelledError

    backend.before = kill
    with pytest.raises(asyncio.CancelledError):
        await launch(backend, **GROWING, options={"tried": 2})
    second = await launch(backend, **GROWING, options={"tried": 2})
    assert (second.attempt, memory_of(backend, second)) == (2, "24Gi")
    assert len(backend.jobs) == 2


async def test_concurrent_launches_create_one_changed_job(backend: MemoryBackend) -> None:
    backend.end(await launch(backend, **GROWING), 137, reason="OOMKilled")
    refs = await asyncio.gather(*(launch(backend, **GROWING) for _ in range(10)))
    assert {ref.attempt for ref in refs} == {2}
    assert len(set(refs)) == 1
    assert memory_of(backend, refs[0]) == "24Gi"


async def test_a_crash_that_fails_the_step_changes_the_next_attempt(backend: MemoryBackend) -> None:
    first = await launch(backend, **GROWING)
    backend.running(first)
    backend.end(first, 137, reason="OOMKilled")
    evidence = Evidence(None, backend.terminated.pop(first.uid))
    backend.status(first, conditions=[])
    backend.crashed[first.uid] = [evidence]
    with pytest.raises(RankCrashed) as caught:
        await waiting.wait(backend, first, WaitOptions(fail_on_first_crash=True))
    assert caught.value.retry is RetryVerdict.INFRASTRUCTURE
    await give_up(backend, first, caught.value.diagnosis)
    assert memory_of(backend, await launch(backend, **GROWING)) == "24Gi"


QUEUED: dict[str, Any] = {**GROWING, "suspend": True, "labels": {QUEUE_LABEL: "main"}}


async def time_out_in_queue(backend: MemoryBackend) -> JobRef:
    ref = await launch(backend, **QUEUED)
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, ref, WaitOptions(queue_timeout=timedelta(0)))
    return ref


async def test_a_job_without_capacity_is_replaced_in_another_queue(backend: MemoryBackend) -> None:
    first = await time_out_in_queue(backend)
    second = await launch(backend, **QUEUED)
    assert (second.attempt, backend.job(second)["metadata"]["labels"][QUEUE_LABEL]) == (2, "backfill")
    assert [JobRef.of(job) for job in backend.jobs.values()] == [second], "never two jobs of one key wait for capacity"
    assert await launch(backend, **QUEUED) == second
    assert first.attempt == 1


@pytest.mark.parametrize("since", ["admitted", "ran"])
async def test_a_job_that_got_capacity_after_its_timeout_is_adopted(backend: MemoryBackend, since: str) -> None:
    first = await time_out_in_queue(backend)
    if since == "admitted":
        await backend.patch(first, {"spec": {"suspend": False}})
        backend.running(first)
    else:
        backend.ran.add(first.uid)
    assert await launch(backend, **QUEUED) == first


async def test_a_job_that_nobody_waited_too_long_for_is_adopted(backend: MemoryBackend) -> None:
    first = await launch(backend, **QUEUED)
    assert await launch(backend, **QUEUED) == first
    plain = {**QUEUED, "on_retry": None}
    other = await launch(backend, "other", **plain)
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, other, WaitOptions(queue_timeout=timedelta(0)))
    assert FAILURE not in backend.job(other)["metadata"]["annotations"], "without a rule nothing is recorded"
    assert await launch(backend, "other", **plain) == other


async def test_a_job_that_a_person_suspended_is_not_replaced(backend: MemoryBackend) -> None:
    first = await launch(backend, **GROWING)
    await backend.patch(first, {"spec": {"suspend": True}})
    with pytest.raises(QueueTimeout):
        await waiting.wait(backend, first, WaitOptions(queue_timeout=timedelta(0)))
    assert await launch(backend, **GROWING) == first


async def test_another_spec_does_not_adopt_a_changed_job(backend: MemoryBackend) -> None:
    await fail_for_lack_of_memory(backend, await launch(backend, **GROWING))
    second = await launch(backend, **GROWING)
    with pytest.raises(SpecMismatch) as caught:
        await launch(backend, **GROWING, args=["--other"])
    assert second.name in str(caught.value)
    assert "resourcesPerNode" not in str(caught.value), "what on_retry changed is no difference of the specs"


def active(backend: MemoryBackend) -> list[JobRef]:
    """Jobs that run or wait for capacity: not ended, not given up, no records of failures."""
    return [
        JobRef.of(job)
        for job in backend.jobs.values()
        if not observe(job).phase.terminal and GIVEN_UP not in job["metadata"]["annotations"]
    ]


def records(backend: MemoryBackend) -> list[str]:
    return [job["metadata"]["name"] for job in backend.jobs.values() if FAILURE_OF in job["metadata"]["labels"]]


def killed_at(number: int | None, backend: MemoryBackend) -> list[str]:
    """Kill the caller before its request of that number, or after it has created a job; returns its requests."""
    requests: list[str] = []

    def kill(request: str) -> None:
        requests.append(request)
        if number is None or len(requests) == number + 1:
            raise asyncio.CancelledError

    setattr(backend, "after" if number is None else "before", kill)
    return requests


def survives(backend: MemoryBackend) -> None:
    backend.before = backend.after = lambda _: None


@pytest.mark.parametrize("tried", [1, 2])
@pytest.mark.parametrize("number", [*range(24), None])
@pytest.mark.parametrize("failing", ["memory", "capacity"])
async def test_a_launcher_killed_at_any_request_leaves_one_job_with_the_change(
    backend: MemoryBackend, number: int | None, failing: str, tried: int
) -> None:
    """`number`: the launcher is killed before this request, or after it has created the job."""
    fields = GROWING if failing == "memory" else QUEUED
    if failing == "memory":
        await fail_for_lack_of_memory(backend, await launch(backend, **fields))
    else:
        await time_out_in_queue(backend)
    killed_at(number, backend)
    options = {"tried": tried}
    with suppress(asyncio.CancelledError):
        await launch(backend, **fields, options=options)
    survives(backend)
    second = await launch(backend, **fields, options=options)
    assert second.attempt == 2
    assert active(backend) == [second]
    assert not records(backend), "no record is left"
    assert await launch(backend, **fields, options=options) == second
    if failing == "memory":
        assert memory_of(backend, second) == "24Gi"
    else:
        assert backend.job(second)["metadata"]["labels"][QUEUE_LABEL] == "backfill"


async def test_concurrent_launches_replace_a_job_without_capacity_once(backend: MemoryBackend) -> None:
    await time_out_in_queue(backend)
    refs = await asyncio.gather(*(launch(backend, **QUEUED) for _ in range(10)))
    assert active(backend) == [refs[0]]
    assert (len(set(refs)), refs[0].attempt) == (1, 2)
    assert backend.job(refs[0])["metadata"]["labels"][QUEUE_LABEL] == "backfill"
    assert not records(backend)


async def crash_in_kueue(backend: MemoryBackend) -> tuple[JobRef, Diagnosis]:
    """A job in a queue whose rank had too little memory, with `fail_on_first_crash`."""
    ref = await launch(backend, **GROWING, labels={QUEUE_LABEL: "main"})
    backend.end(ref, 137, reason="OOMKilled")
    evidence = Evidence(None, backend.terminated.pop(ref.uid))
    backend.status(ref, conditions=[])
    backend.running(ref)
    backend.crashed[ref.uid] = [evidence]
    with pytest.raises(RankCrashed) as caught:
        await waiting.wait(backend, ref, WaitOptions(fail_on_first_crash=True))
    return ref, caught.value.diagnosis


@pytest.mark.parametrize("number", [*range(5), None, 99])
async def test_a_crash_in_a_queue_changes_the_next_attempt_although_its_job_is_deleted(
    backend: MemoryBackend, number: int | None
) -> None:
    """`number`: the process that gives the job up is killed before this request, or after it has created the record."""
    first, why = await crash_in_kueue(backend)
    killed_at(number, backend)
    with suppress(asyncio.CancelledError):
        await give_up(backend, first, why)
    survives(backend)
    kept = [job for job in backend.jobs.values() if JobRef.of(job) == first]
    for _ in range(2):
        second = await launch(backend, **GROWING, labels={QUEUE_LABEL: "main"})
        assert active(backend) == [second]
        assert second == first if kept else (second.attempt, memory_of(backend, second)) == (2, "24Gi")
        assert not records(backend)
    assert bool(kept) is (number is None or number < 3), "the job is deleted last"


async def test_changes_accumulate_over_deleted_jobs(backend: MemoryBackend) -> None:
    for memory in ("16Gi", "24Gi"):
        first, why = await crash_in_kueue(backend)
        assert memory_of(backend, first) == memory
        await give_up(backend, first, why)
    third = await launch(backend, **GROWING, labels={QUEUE_LABEL: "main"})
    assert (third.attempt, memory_of(backend, third)) == (3, "30Gi")


async def test_a_cancelled_job_that_got_no_capacity_changes_the_next_attempt(backend: MemoryBackend) -> None:
    """As by a KFP step, which does not know whether KFP retries it."""
    first = await time_out_in_queue(backend)
    assert await cancel(backend, first)
    assert active(backend) == []
    second = await launch(backend, **QUEUED)
    assert (second.attempt, backend.job(second)["metadata"]["labels"][QUEUE_LABEL]) == (2, "backfill")


async def test_a_record_is_no_attempt_and_fails_if_it_is_resumed(backend: MemoryBackend) -> None:
    first, why = await crash_in_kueue(backend)
    await give_up(backend, first, why)
    (record,) = backend.jobs.values()
    assert not labels_of("key").items() & record["metadata"]["labels"].items()
    assert QUEUE_LABEL not in record["metadata"]["labels"]
    assert record["spec"]["trainer"]["command"] == ["false"]
    assert len(record["metadata"]["name"]) <= MAX_NAME
    assert given_up(record) == unpack_diagnosis(pack_diagnosis(why))


async def test_the_verdict_of_a_job_in_a_queue_outlives_it(backend: MemoryBackend) -> None:
    fields: dict[str, Any] = {"labels": {QUEUE_LABEL: "main"}}
    ref = await launch(backend, options={"tried": 2}, **fields)
    why = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 1")
    await give_up(backend, ref, why)
    assert (active(backend), len(records(backend))) == ([], 1)
    for options in ({"after_failure": "verdict"}, {"last_try": 2}):
        with pytest.raises(TrainJobFailed, match="node-0 exited with code 1"):
            await launch(backend, options={"tried": 3, **options}, **fields)
    again = await launch(backend, options={"tried": 3, "last_try": 3}, **fields)
    assert (again.attempt, active(backend), records(backend)) == (2, [again], [])


async def test_a_record_that_a_queue_would_start_is_deleted(
    backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, why = await crash_in_kueue(backend)
    create = backend.create

    async def with_queue(trainjob: Any, *, dry_run: bool = False) -> Any:
        trainjob["metadata"]["labels"][QUEUE_LABEL] = "default"  # Kueue's LocalQueueDefaulting
        return await create(trainjob, dry_run=dry_run)

    monkeypatch.setattr(backend, "create", with_queue)
    await give_up(backend, first, why)
    assert backend.jobs == {}


async def test_a_launch_with_rules_reads_the_records_beside_the_first_look(backend: MemoryBackend) -> None:
    await launch(backend, **GROWING)
    assert backend.requests[:5] == ["cancels", "find", "remaining_pods", "is_free", "find"]
    assert backend.requests[5:] == ["create", "cancels", "find"]
