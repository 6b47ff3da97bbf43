"""Launch, wait and cancel, against objects in memory."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from tests.contract.memory import MemoryBackend

from trainjob import (
    InvalidSpec,
    JobRef,
    LogLine,
    Observation,
    Phase,
    TrainJobFailed,
    TrainJobSpec,
    WaitOptions,
    lifecycle as flow,
    waiting,
)
from trainjob.backends.base import Snapshot
from trainjob.diagnosis import Category, Diagnosis, Evidence
from trainjob.errors import (
    AlreadyExists,
    BackendUnavailable,
    QueueTimeout,
    Rejected,
    RuntimeNotFound,
    RunTimeout,
    SpecMismatch,
    StartTimeout,
    Stuck,
    TimedOut,
)
from trainjob.manifest import DELIVERED, job_name
from trainjob.status import QUEUE_LABEL, Blocker, observe
from trainjob.verdicts import RetryVerdict

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(20)]

SPEC: dict[str, Any] = {"runtime": "torch-distributed", "command": ["train"]}


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


async def launch(
    backend: MemoryBackend, key: str = "key", options: dict[str, Any] | None = None, **spec: Any
) -> JobRef:
    parsed = TrainJobSpec.parse({**SPEC, **spec})
    return await flow.launch(backend, parsed, key, namespace="ns", **(options or {}))


def ago(seconds: float) -> str:
    return (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


# ---------------------------------------------------------------- launch


async def test_a_fresh_launch_is_one_request(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    assert backend.requests == ["create"]
    assert (ref.name, ref.namespace, ref.attempt) == (job_name("key", 1), "ns", 1)


async def test_labels_of_the_origin_are_no_part_of_the_spec(backend: MemoryBackend) -> None:
    asked = {"team": "vision", "dag_id": "theirs"}
    origin = {"dag_id": "digits", "try_number": "1"}
    ref = await launch(backend, options={"origin": origin}, labels=asked)
    labels = backend.job(ref)["metadata"]["labels"]
    assert ({"team": "vision"} | origin).items() <= labels.items()
    assert await launch(backend, options={"origin": origin | {"try_number": "2"}}, labels=asked) == ref
    assert backend.job(ref)["metadata"]["labels"] == labels, "it says who has launched it"


@pytest.mark.parametrize("state", ["fresh", "running", "suspended", "complete"])
async def test_what_goes_on_is_adopted(backend: MemoryBackend, state: str) -> None:
    ref = await launch(backend)
    if state == "running":
        backend.running(ref)
    elif state == "suspended":
        await backend.patch(ref, {"spec": {"suspend": True}})
    elif state == "complete":
        backend.end(ref)
    before = dict(backend.job(ref))
    assert await launch(backend) == ref
    assert backend.job(ref) == before
    assert len(backend.jobs) == 1


async def test_another_key_is_another_job(backend: MemoryBackend) -> None:
    assert await launch(backend, "one") != await launch(backend, "two")


async def test_a_delivered_result_asked_for_again_is_made_again(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.end(ref)
    await flow.mark_delivered(backend, ref)
    again = await launch(backend)
    assert again.attempt == 2
    assert await launch(backend) == again


async def test_marking_what_is_gone_does_nothing(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await backend.delete(ref)
    await flow.mark_delivered(backend, ref)
    assert backend.jobs == {}


async def test_after_a_failure_comes_the_next_attempt(backend: MemoryBackend) -> None:
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
async def test_after_a_failure_by_its_verdict(
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


async def test_a_name_is_not_used_again_after_deletion(backend: MemoryBackend) -> None:
    for attempt in (1, 2, 3):
        ref = await launch(backend)
        assert ref.attempt == attempt
        await backend.delete(ref)


async def test_the_name_of_a_deleted_attempt_is_skipped_beside_one_that_failed(backend: MemoryBackend) -> None:
    backend.end(await launch(backend), 3)
    await backend.delete(await launch(backend))
    assert (await launch(backend)).attempt == 3


async def test_a_job_that_is_being_deleted_is_not_adopted(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.job(ref)["metadata"]["deletionTimestamp"] = ago(0)
    assert (await launch(backend)).attempt == 2


async def test_callers_that_count_their_tries(backend: MemoryBackend) -> None:
    """Airflow's try_number: never a name of an earlier try, yet whatever goes on is adopted."""
    first = await launch(backend, "other", options={"first_attempt": 1})
    assert await launch(backend, "other", options={"first_attempt": 2}) == first
    third = await launch(backend, options={"first_attempt": 3})
    assert third.attempt == 3
    assert await launch(backend, options={"first_attempt": 4}) == third
    backend.end(third, 3)
    fourth = await launch(backend, options={"first_attempt": 4})
    assert fourth.attempt == 4
    await backend.delete(fourth)
    assert (await launch(backend, options={"first_attempt": 5})).attempt == 5


async def test_a_reply_that_is_lost(backend: MemoryBackend) -> None:
    def lose(request: str) -> None:
        backend.after = lambda _: None
        raise BackendUnavailable("connection reset")

    backend.after = lose
    with pytest.raises(BackendUnavailable):
        await launch(backend)
    ref = await launch(backend)
    assert ref.attempt == 1
    assert len(backend.jobs) == 1


async def test_a_create_that_a_backend_repeated_by_itself(backend: MemoryBackend) -> None:
    def lose(request: str) -> None:
        backend.after = lambda _: None
        raise AlreadyExists("second try of one create")

    backend.after = lose
    assert (await launch(backend)).attempt == 1
    assert backend.requests == ["create", "find"]


@pytest.mark.parametrize("earlier", ["nothing", "failed", "delivered", "deleted"])
async def test_many_launches_at_once_make_one_job(backend: MemoryBackend, earlier: str) -> None:
    if earlier != "nothing":
        ref = await launch(backend)
        backend.end(ref, 3 if earlier == "failed" else 0)
        if earlier == "delivered":
            await flow.mark_delivered(backend, ref)
        if earlier == "deleted":
            await backend.delete(ref)
    refs = await asyncio.gather(*(launch(backend) for _ in range(10)))
    assert len(set(refs)) == 1
    assert refs[0].attempt == (1 if earlier == "nothing" else 2)
    assert len(backend.jobs) == (1 if earlier in ("nothing", "deleted") else 2)


async def test_another_spec_under_the_same_key(backend: MemoryBackend) -> None:
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


async def test_another_spec_after_a_failure_is_just_the_next_attempt(backend: MemoryBackend) -> None:
    backend.end(await launch(backend), 3)
    assert (await launch(backend, num_nodes=2)).attempt == 2


@pytest.mark.parametrize(("spec", "error"), [({"runtime": "nosuch"}, RuntimeNotFound), ({"command": []}, Rejected)])
async def test_refusals_pass_through(backend: MemoryBackend, spec: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        await launch(backend, **spec)
    assert backend.requests == ["create"]


async def test_a_spec_built_by_hand_is_checked_before_anything_is_sent(backend: MemoryBackend) -> None:
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


async def test_the_result_of_a_job(backend: MemoryBackend) -> None:
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
    assert packed | {"seconds": {}} == {
        "namespace": "ns",
        "name": ref.name,
        "uid": ref.uid,
        "attempt": 1,
        "metrics": {"loss": 0.25, "best": "epoch 3", "early": 1.0, "bad": "nan"},
        "outputs": {"model": "s3://b/m"},
        "seconds": {},
    }


async def test_waiting_costs_one_watch(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    seen: list[Phase] = []

    def look(request: str) -> None:
        if request == "look" and seen[-1:] == [Phase.NOT_STARTED]:
            backend.running(ref)
        elif request == "look" and seen[-1:] == [Phase.RUNNING]:
            backend.end(ref)

    backend.before = look
    await waiting.wait(backend, ref, on_change=lambda observation, _: seen.append(observation.phase))
    assert seen == [Phase.NOT_STARTED, Phase.RUNNING, Phase.COMPLETE]
    assert backend.requests == ["create", "watch", "evidence"]


async def test_a_failure_carries_its_diagnosis(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.lines = [LogLine("1", "node-0", "ValueError: no")]
    backend.end(ref, 3)
    with pytest.raises(TrainJobFailed, match=r"node-0 exited with code 3") as caught:
        await waiting.wait(backend, ref)
    assert caught.value.diagnosis.job == f"ns/{ref.name}"
    assert caught.value.diagnosis.log == ("ValueError: no",)


async def test_a_job_that_is_deleted(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await backend.delete(ref)
    with pytest.raises(TrainJobFailed) as caught:
        await waiting.wait(backend, ref)
    assert caught.value.diagnosis.category is Category.DELETED
    assert caught.value.diagnosis.job == f"ns/{ref.name}"


@pytest.mark.parametrize("code", [0, 3])
async def test_what_was_seen_last_stands(backend: MemoryBackend, code: int) -> None:
    """The job is deleted, or trains again, between its end and the reading of its evidence."""
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


async def test_lines_are_passed_on_to_the_last(backend: MemoryBackend) -> None:
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


async def test_states_of_a_progress_bar_are_passed_on_now_and_then(backend: MemoryBackend) -> None:
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
async def test_errors_come_out_bare(backend: MemoryBackend, where: str, error: Exception) -> None:
    ref = await launch(backend)
    backend.lines = [LogLine("1", "node-0", "x")]

    def fail(request: str) -> None:
        if request == where:
            raise error

    backend.before = fail
    with pytest.raises(type(error)) as caught:
        await waiting.wait(backend, ref, on_change=lambda *_: fail("on_change"), on_log=lambda _: fail("on_log"))
    assert caught.value is error


async def test_an_outage_of_the_log_stream_is_no_verdict(backend: MemoryBackend) -> None:
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


async def test_the_first_crash_explains_the_end(backend: MemoryBackend) -> None:
    """A cluster deletes the pods of a job that failed; what was seen of them before is what is left."""
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


async def test_verdicts_come_out_bare_while_logs_are_followed(backend: MemoryBackend) -> None:
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


async def expired_timeout(backend: MemoryBackend, ref: JobRef, **options: Any) -> type[Exception] | None:
    """The timeout that has expired; None if none does within a moment."""
    with pytest.raises((TimedOut, TimeoutError)) as caught, anyio.fail_after(0.1):
        await waiting.wait(backend, ref, WaitOptions(**options))
    assert caught.type is TimeoutError or f"ns/{ref.name}" in str(caught.value)
    return None if caught.type is TimeoutError else caught.type


async def test_queue_budget(backend: MemoryBackend) -> None:
    ref = await launch(backend, suspend=True, labels={QUEUE_LABEL: "q"})
    assert await expired_timeout(backend, ref, queue_timeout=SECOND) is None
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(2)
    assert await expired_timeout(backend, ref, queue_timeout=SECOND) is QueueTimeout
    assert await expired_timeout(backend, ref, queue_timeout=HOUR, start_timeout=SECOND, run_timeout=SECOND) is None


async def test_queue_budget_of_a_job_that_was_taken_back(backend: MemoryBackend) -> None:
    ref = await launch(backend, suspend=True, labels={QUEUE_LABEL: "q"})
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(7200)
    backend.condition(ref, "Suspended", "Suspended", time=ago(0))
    assert await expired_timeout(backend, ref, queue_timeout=timedelta(seconds=5), run_timeout=HOUR) is None
    backend.condition(ref, "Suspended", "Suspended", time=ago(10))
    assert await expired_timeout(backend, ref, queue_timeout=timedelta(seconds=5), run_timeout=HOUR) is QueueTimeout


async def test_a_suspended_job_is_waited_for_as_long_as_one_in_a_queue(backend: MemoryBackend) -> None:
    ref = await launch(backend, suspend=True)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(10)
    assert await expired_timeout(backend, ref, start_timeout=SECOND, run_timeout=SECOND) is None
    assert await expired_timeout(backend, ref, queue_timeout=HOUR, start_timeout=SECOND, run_timeout=SECOND) is None
    assert (
        await expired_timeout(backend, ref, queue_timeout=SECOND, start_timeout=HOUR, run_timeout=HOUR) is QueueTimeout
    )


async def test_start_and_run_budgets_count_from_admission(backend: MemoryBackend) -> None:
    ref = await launch(backend, labels={QUEUE_LABEL: "q"})
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(7200)
    # Just admitted: for some 10 ms the condition still says Suspended.
    backend.condition(ref, "Suspended", "Suspended", time=ago(7200))
    assert await expired_timeout(backend, ref, queue_timeout=SECOND, start_timeout=HOUR, run_timeout=HOUR) is None
    backend.condition(ref, "Suspended", "Resumed", "False", time=ago(10))
    assert await expired_timeout(backend, ref, queue_timeout=SECOND, start_timeout=HOUR, run_timeout=HOUR) is None
    assert await expired_timeout(backend, ref, start_timeout=SECOND, run_timeout=HOUR) is StartTimeout
    assert await expired_timeout(backend, ref, start_timeout=HOUR, run_timeout=SECOND) is RunTimeout
    backend.running(ref)
    assert await expired_timeout(backend, ref, start_timeout=SECOND, run_timeout=HOUR) is None
    assert await expired_timeout(backend, ref, start_timeout=SECOND, run_timeout=SECOND) is RunTimeout


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (
            {"suspend": True, "labels": {QUEUE_LABEL: "q"}},
            WaitOptions(queue_timeout=SECOND),
            "is Queued: waiting for admission in queue q; it was not admitted within queue_timeout of 0:00:01",
        ),
        (
            {"suspend": True},
            WaitOptions(queue_timeout=SECOND),
            "is Suspended: the TrainJob is suspended; it was not resumed within queue_timeout of 0:00:01",
        ),
        ({}, WaitOptions(start_timeout=SECOND), "is NotStarted; no rank was running within start_timeout of 0:00:01"),
        (
            {},
            WaitOptions(run_timeout=SECOND, start_timeout=HOUR),
            "is NotStarted; it did not end within run_timeout of 0:00:01",
        ),
    ],
)
async def test_the_error_names_the_budget_and_where_the_job_stands(
    backend: MemoryBackend, spec: dict[str, Any], options: WaitOptions, words: str
) -> None:
    ref = await launch(backend, **spec)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(10)
    with pytest.raises(TimedOut) as caught:
        await waiting.wait(backend, ref, options)
    assert str(caught.value) == f"TrainJob {ref} {words}"


async def test_a_budget_runs_out_while_waiting(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    began = anyio.current_time()
    with pytest.raises(StartTimeout, match=r"no rank was running within start_timeout of 0:00:00\.3"):
        await waiting.wait(backend, ref, WaitOptions(start_timeout=timedelta(seconds=0.3)))
    assert 0.2 < anyio.current_time() - began < 2
    assert backend.job(ref), "the job is left as it is"


async def test_a_new_waiter_does_not_take_a_job_that_has_run_for_one_that_starts(backend: MemoryBackend) -> None:
    """Its node is NotReady, so that no rank counts as ready, and this waiter is younger than the job."""
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


async def test_a_dry_run_creates_nothing_and_minds_no_job_of_the_same_key(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    stored = await flow.dry_run(backend, TrainJobSpec.parse(SPEC), "key", namespace="ns")
    assert [*backend.jobs] == [("ns", ref.name)]
    theirs = {"uid", "creationTimestamp"}
    launched = {name: value for name, value in backend.job(ref).items() if name != "status"}
    assert {name: value for name, value in stored["metadata"].items() if name not in theirs} == {
        name: value for name, value in launched["metadata"].items() if name not in theirs
    }
    assert stored["metadata"].keys() >= theirs, "the server's defaults are shown"
    assert {**stored, "metadata": None} == {**launched, "metadata": None}


async def test_a_job_that_reports_progress_has_run(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.status(ref, jobsStatus=[{"name": "node", "active": 1}], trainerStatus={"progressPercentage": 40})
    with pytest.raises(RunTimeout):
        await waiting.wait(
            backend, ref, WaitOptions(start_timeout=timedelta(seconds=0.1), run_timeout=timedelta(seconds=0.3))
        )
    assert "has_run" not in backend.requests


async def test_a_cancel_by_somebody_else_is_reported_as_a_cancel(backend: MemoryBackend) -> None:
    ref = await launch(backend)

    async def cancel() -> None:
        await anyio.sleep(0.1)
        await flow.cancel(backend, ref)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancel)
        with pytest.raises(TrainJobFailed, match="the job was cancelled with trainjob, by its task") as failed:
            await waiting.wait(backend, ref)
    assert failed.value.diagnosis.category == "deleted"
    assert "launch it again" in failed.value.diagnosis.advice


async def test_a_job_that_was_suspended_by_a_cancel_says_so(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await flow.cancel(backend, ref, "suspend")
    assert "cancelled with trainjob" in observe(backend.job(ref)).message


async def test_a_restarted_waiter_does_not_begin_again(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    began = anyio.current_time()
    for _ in range(2):
        with pytest.raises(RunTimeout):
            await waiting.wait(backend, ref, WaitOptions(run_timeout=timedelta(seconds=0.4)))
    assert anyio.current_time() - began < 0.7


async def test_an_end_that_is_there_comes_before_any_budget(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.job(ref)["metadata"]["creationTimestamp"] = ago(7200)
    backend.end(ref)
    assert (await waiting.wait(backend, ref, WaitOptions(SECOND, SECOND, SECOND))).uid == ref.uid


async def test_a_slow_consumer_is_not_cancelled_in_place_of_the_clock(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    seen: list[Observation] = []

    async def consume() -> None:
        async for observation, _ in waiting.follow(backend, ref, WaitOptions(run_timeout=timedelta(seconds=0.1))):
            await anyio.sleep(0.3)
            seen.append(observation)

    with pytest.raises(RunTimeout):
        await consume()
    assert len(seen) == 1


# ---------------------------------------------------------------- cancel


@pytest.mark.parametrize("action", ["delete", "suspend"])
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
    assert await flow.cancel(backend, ref, action)
    assert looks == 3
    assert (ref.name in {name for _, name in backend.jobs}) == (action == "suspend")


async def test_cancel_gives_up_after_its_time(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    backend.lingering.add(ref.uid)
    assert not await flow.cancel(backend, ref, timeout_seconds=0.1)


@pytest.mark.parametrize("code", [0, 3])
async def test_cancel_leaves_a_finished_job_as_it_is(backend: MemoryBackend, code: int) -> None:
    ref = await launch(backend)
    backend.end(ref, code)
    before = dict(backend.job(ref))
    for action in ("delete", "suspend"):
        assert await flow.cancel(backend, ref, action)
    assert backend.job(ref) == before


async def test_cancel_of_what_is_gone_or_another(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    other = JobRef(ref.namespace, ref.name, "another-uid")
    assert await flow.cancel(backend, other)
    assert backend.job(ref)
    assert await flow.cancel(backend, ref)
    assert await flow.cancel(backend, ref)
    assert backend.jobs == {}


async def test_kueues_jobs_are_deleted_even_where_they_were_to_be_suspended(backend: MemoryBackend) -> None:
    ref = await launch(backend, labels={QUEUE_LABEL: "q"})
    assert await flow.cancel(backend, ref, "suspend")
    assert backend.jobs == {}


async def test_delivered_is_noted(backend: MemoryBackend) -> None:
    ref = await launch(backend)
    await flow.mark_delivered(backend, ref)
    assert backend.job(ref)["metadata"]["annotations"][DELIVERED] == "true"


BLOCKER = Blocker("Inadmissible", "no such queue", permanent=True, advice="create the queue")


async def test_what_only_a_person_can_change(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = await launch(backend)
    watch = backend.watch

    async def watched(ref: JobRef) -> AsyncGenerator[Snapshot]:
        async with aclosing(watch(ref)) as snapshots:
            async for snapshot in snapshots:
                yield Snapshot(snapshot.trainjob, blocker=BLOCKER)

    monkeypatch.setattr(backend, "watch", watched)
    assert await expired_timeout(backend, ref) is None, "waited for, unless asked otherwise"
    assert await expired_timeout(backend, ref, fail_fast=True) is Stuck
    with pytest.raises(Stuck) as caught:
        await waiting.wait(backend, ref, WaitOptions(fail_fast=True))
    assert str(caught.value) == (
        f"TrainJob {ref} is NotStarted and cannot proceed: no such queue\nwhat to do: create the queue"
    )


class Unchangeable(MemoryBackend):
    """Refuses every change, as Trainer's webhook does where a job's runtime is gone; deletion goes."""

    async def patch(self, ref: JobRef, patch: Any) -> None:
        raise Rejected("runtimeRef: Invalid value: must be created before")


async def test_what_may_not_be_suspended_is_deleted() -> None:
    backend = Unchangeable()
    await flow.cancel(backend, await launch(backend), "suspend", timeout_seconds=0.1)
    assert backend.jobs == {}
    ref = await launch(backend, "other")
    why = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "node-0 exited with code 3")
    said = await flow.give_up(backend, ref, why)
    assert said == f"{ref} was deleted: it could not be suspended: runtimeRef: Invalid value: must be created before"
    assert backend.jobs == {}
