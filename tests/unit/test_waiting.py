"""What a wait returns, raises and reports: results, failures, log lines, crashes, timeouts; and its options."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta
from typing import Any

import anyio
import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.fakes.kube.objects import Object
from tests.unit.launches import block, launch

from trainjob import JobRef, LogLine, Phase, TrainJobFailed, WaitOptions
from trainjob._jobs.following import follow
from trainjob._jobs.waiting import wait
from trainjob.cli.program import program
from trainjob.errors import BackendUnavailable, Category, QueueTimeout, RunTimeout, StartTimeout, Stuck, TimedOut
from trainjob.status import QUEUE_LABEL, Blocker, Observation
from trainjob.wait_options import InvalidWaitOptions

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture
async def ref(backend: DirectBackend) -> JobRef:
    """A job that was just launched."""
    return await launch(backend)


def log(backend: DirectBackend, *lines: LogLine | Exception) -> None:
    """The lines of a job's ranks, and what ends the stream."""

    async def logs(_: JobRef, **__: Any) -> AsyncGenerator[LogLine]:
        for each in lines:
            if isinstance(each, Exception):
                raise each
            yield each

    backend.logs = logs  # type: ignore[method-assign,assignment]  # test_pod_logs.py reads logs of pods


# ---------------------------------------------------------------- results and failures


async def test_a_wait_returns_the_result(backend: DirectBackend, ref: JobRef) -> None:
    metrics = [{"name": "loss", "value": "0.25"}, {"name": "best", "value": "epoch 3"}, {"name": "bad", "value": "nan"}]
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(10)}})
    early = [{"name": "early", "value": "1"}, {"name": "loss", "value": "9"}]
    backend.status(ref, trainerStatus={"metrics": early})
    backend.end(ref, message=json.dumps({"trainjob": 1, "metrics": metrics, "outputs": {"model": "s3://b/m"}}))
    result = await wait(backend, ref)
    assert math.isnan(float(result.metrics["bad"]))
    assert (result.seconds["queued"], 9 <= result.seconds["total"] < 30) == (0, True)
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


async def test_a_wait_needs_one_watch_of_the_job_and_one_of_its_pods(backend: DirectBackend, ref: JobRef) -> None:
    backend.requests.clear()
    seen: list[Phase] = []

    def change(observation: Observation, _: str) -> None:
        seen.append(observation.phase)
        if observation.phase is Phase.NOT_STARTED:
            backend.running(ref)
        elif observation.phase is Phase.RUNNING:
            backend.condition(ref, "Complete", "AllJobsCompleted")

    await wait(backend, ref, on_change=change)
    assert seen == [Phase.NOT_STARTED, Phase.RUNNING, Phase.COMPLETE]
    watches = ["LIST pods", "LIST trainjobs", "WATCH pods", "WATCH trainjobs"]
    assert sorted(backend.requests[:4]) == watches
    assert backend.requests[4:7] == ["GET jobsets", "GET trainjobs", "LIST pods"]
    assert backend.requests.count("WATCH trainjobs") == backend.requests.count("WATCH pods") == 1


@pytest.mark.parametrize("becomes", ["gone", "again"])
@pytest.mark.parametrize("code", [0, 3])
async def test_the_final_observation_is_kept(backend: DirectBackend, ref: JobRef, code: int, becomes: str) -> None:
    """The job is deleted, or runs again, after its end and before its evidence is read."""
    backend.end(ref, code)

    def change(request: str) -> None:
        if request == "GET trainjobs" and becomes == "gone":
            backend.store.delete_job(backend.job(ref), "")
            backend.before = lambda _: None
        elif request == "GET trainjobs":
            backend.status(ref, conditions=[])

    backend.before = change
    if code:
        with pytest.raises(TrainJobFailed) as caught:
            await wait(backend, ref)
        assert caught.value.diagnosis.category is not Category.DELETED
    else:
        assert (await wait(backend, ref)).uid == ref.uid


# ---------------------------------------------------------------- log lines


async def test_states_of_a_progress_bar_are_throttled_and_all_other_lines_are_passed_on(
    backend: DirectBackend, ref: JobRef
) -> None:
    states = [LogLine(f"{percent:02}", "node-0", f"{percent}%", transient=True) for percent in range(99)]
    log(backend, *states, LogLine("99", "node-0", "100%"), LogLine("a", "node-0", "after"))
    backend.end(ref)
    heard: list[str] = []
    await wait(backend, ref, on_log=lambda line: heard.append(line.text))
    assert heard == ["0%", "100%", "after"]
    heard.clear()
    await wait(backend, ref, on_log=lambda line: heard.append(line.text), state_seconds=0)
    assert len(heard) == 101


async def test_lines_that_come_after_the_end_are_passed_on(backend: DirectBackend, ref: JobRef) -> None:
    heard: list[str] = []
    ended = asyncio.Event()

    async def logs(*_: object, **__: object) -> AsyncGenerator[LogLine]:
        yield LogLine("1", "node-0", "first")
        backend.end(ref)
        await ended.wait()
        yield LogLine("2", "node-0", "last")

    def change(observation: Observation, _: str) -> None:
        if observation.phase.terminal:
            ended.set()

    backend.logs = logs  # type: ignore[method-assign]  # the order of the last line and the end is chosen
    await wait(backend, ref, on_change=change, on_log=lambda line: heard.append(line.text))
    assert heard == ["first", "last"]


async def test_a_failed_log_stream_does_not_fail_the_job(backend: DirectBackend, ref: JobRef) -> None:
    log(backend, BackendUnavailable("the kubelet does not answer"))
    heard: list[str] = []

    def hear(line: LogLine) -> None:
        heard.append(str(line))
        backend.end(ref)

    await wait(backend, ref, on_log=hear)
    assert heard == ["[trainjob] no more log lines from here on: the kubelet does not answer"]


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, BackendUnavailable("out")) for where in ("LIST trainjobs", "on_log", "on_change")),
        *((where, Odd("bug")) for where in ("logs", "on_log", "on_change")),
    ],
)
async def test_errors_are_not_wrapped_in_exception_groups(
    backend: DirectBackend, ref: JobRef, where: str, error: Exception
) -> None:
    def fail(place: str) -> Callable[..., None]:
        def failing(*_: object) -> None:
            if place == where:
                raise error

        return failing

    backend.before = lambda request: fail(request)()
    log(backend, *([error] if where == "logs" else [LogLine("1", "node-0", "x")]))
    with pytest.raises(type(error)) as caught:
        await wait(backend, ref, on_change=fail("on_change"), on_log=fail("on_log"))
    assert caught.value is error


async def test_a_waiter_can_be_cancelled_while_it_follows_logs(backend: DirectBackend, ref: JobRef) -> None:
    with anyio.move_on_after(0.05) as scope:
        await wait(backend, ref, on_log=lambda _: None)
    assert scope.cancelled_caught
    assert backend.job(ref)


# ---------------------------------------------------------------- timeouts

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
IN_QUEUE: dict[str, Any] = {"suspend": True, "labels": {QUEUE_LABEL: "q"}}
SUSPENDED: dict[str, Any] = {"suspend": True}
ADMITTED: dict[str, Any] = {"labels": {QUEUE_LABEL: "q"}}


async def expired(backend: DirectBackend, ref: JobRef, **options: Any) -> type[Exception] | None:
    """The timeout that has expired when the job is seen for the first time; None if the wait continues to its end."""

    def seen(observation: Observation, _: str) -> None:
        if not observation.phase.terminal:
            backend.condition(ref, "Complete", "AllJobsCompleted")

    try:
        await wait(backend, ref, WaitOptions(**options), on_change=seen)
    except TimedOut as error:
        return type(error)
    return None


SHORT: dict[str, Any] = {"queue_timeout": SECOND, "start_timeout": SECOND, "run_timeout": SECOND}


@pytest.mark.parametrize(
    ("fields", "suspended", "resumed", "options", "expires"),
    [
        (IN_QUEUE, None, None, SHORT, QueueTimeout),
        (IN_QUEUE, None, None, {**SHORT, "queue_timeout": timedelta(hours=3)}, None),
        (IN_QUEUE, 10, None, {"queue_timeout": timedelta(minutes=1)}, None),
        (IN_QUEUE, 100, None, {"queue_timeout": timedelta(minutes=1), "run_timeout": HOUR}, QueueTimeout),
        (SUSPENDED, None, None, {"start_timeout": SECOND, "run_timeout": SECOND}, None),
        # Just admitted: the condition is still Suspended for about 10 ms.
        (ADMITTED, 7200, None, {**SHORT, "start_timeout": HOUR, "run_timeout": HOUR}, None),
        (ADMITTED, None, 100, {**SHORT, "start_timeout": HOUR, "run_timeout": HOUR}, None),
        (ADMITTED, None, 100, {"start_timeout": SECOND, "run_timeout": HOUR}, StartTimeout),
        (ADMITTED, None, 100, {"start_timeout": HOUR, "run_timeout": SECOND}, RunTimeout),
        ({}, None, None, {"run_timeout": HOUR}, RunTimeout),
    ],
)
async def test_timeouts_count_from_creation_suspension_or_admission(
    backend: DirectBackend,
    fields: dict[str, Any],
    suspended: float | None,
    resumed: float | None,
    options: dict[str, Any],
    expires: type[Exception] | None,
) -> None:
    """Of a job that was created two hours ago, suspended and resumed so many seconds ago."""
    ref = await launch(backend, fields=fields)
    created = backend.ago(7200)
    backend.change(ref, {"metadata": {"creationTimestamp": created}, "status": {"conditions": []}})
    if suspended is not None:
        backend.condition(ref, "Suspended", "Suspended", time=backend.ago(suspended))
    if resumed is not None:
        backend.condition(ref, "Suspended", "Resumed", "False", time=backend.ago(resumed))
    assert await expired(backend, ref, **options) is expires


async def test_a_running_job_has_a_run_timeout_only(backend: DirectBackend, ref: JobRef) -> None:
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(7200)}})
    backend.running(ref)
    assert await expired(backend, ref, start_timeout=SECOND, run_timeout=timedelta(hours=3)) is None
    backend.status(ref, conditions=[])
    assert await expired(backend, ref, start_timeout=SECOND, run_timeout=SECOND) is RunTimeout


async def test_a_finished_job_comes_before_an_expired_timeout(backend: DirectBackend, ref: JobRef) -> None:
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(7200)}})
    backend.end(ref)
    assert (await wait(backend, ref, WaitOptions(**SHORT))).uid == ref.uid


QUEUED = "is Queued: waiting for admission in queue q; it was not admitted within queue_timeout of 1s"


@pytest.mark.parametrize(
    ("fields", "option", "words"),
    [
        (IN_QUEUE, "queue_timeout", QUEUED),
        (SUSPENDED, "queue_timeout", "is Suspended: Suspended; it was not resumed within queue_timeout of 1s"),
        ({}, "start_timeout", "is NotStarted; no rank was running within start_timeout of 1s"),
        ({}, "run_timeout", "is NotStarted; it did not end within run_timeout of 1s"),
    ],
)
async def test_the_error_of_a_timeout_names_it_and_the_phase(
    backend: DirectBackend, fields: dict[str, Any], option: str, words: str
) -> None:
    ref = await launch(backend, fields=fields)
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(10)}})
    for with_logs in (None, lambda _: None):
        with pytest.raises(TimedOut) as caught:
            await wait(backend, ref, WaitOptions.parse({option: 1}), on_log=with_logs)
        assert str(caught.value) == f"TrainJob {ref} {words}"
    assert backend.job(ref), "the job is not changed"


STARTING: Object = {"name": "node", "active": 1}


async def test_a_start_timeout_does_not_apply_to_a_job_that_has_run(backend: DirectBackend, ref: JobRef) -> None:
    """The node is NotReady, so no rank counts as ready, and the waiter started after the job."""
    backend.pod(ref)
    backend.status(ref, jobsStatus=[STARTING])
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(10)}})
    seen: list[tuple[Phase, str]] = []

    def change(observation: Observation, notice: str) -> None:
        seen.append((observation.phase, notice))
        if notice:
            backend.end(ref)

    await wait(backend, ref, WaitOptions(start_timeout=SECOND), on_change=change)
    assert [phase for phase, _ in seen] == [Phase.STARTING, Phase.RESTARTING, Phase.COMPLETE]
    assert seen[1][1] == "a rank has been running before, so start_timeout does not apply"


async def test_a_job_with_progress_counts_as_has_run(backend: DirectBackend, ref: JobRef) -> None:
    backend.status(ref, jobsStatus=[STARTING], trainerStatus={"progressPercentage": 40})
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(7200)}})
    assert await expired(backend, ref, start_timeout=SECOND, run_timeout=timedelta(hours=3)) is None
    assert "LIST events" not in backend.requests[: backend.requests.index("GET jobsets")]


async def test_a_timeout_expires_during_the_wait_and_cancels_no_slow_consumer(
    backend: DirectBackend, ref: JobRef
) -> None:
    seen: list[Observation] = []
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(0)}})

    async def consume() -> None:
        async for observation, _ in follow(backend, ref, WaitOptions(run_timeout=timedelta(seconds=0.2))):
            await anyio.sleep(0.3)
            seen.append(observation)

    with pytest.raises(RunTimeout):
        await consume()
    assert len(seen) == 1


async def test_fail_fast_raises_stuck_for_a_permanent_blocker(backend: DirectBackend, ref: JobRef) -> None:
    block(backend, Blocker("Inadmissible", "no such queue", permanent=True, advice="create the queue"))
    with pytest.raises(Stuck) as caught:
        await wait(backend, ref, WaitOptions(fail_fast=True))
    assert str(caught.value) == (
        f"TrainJob {ref} is NotStarted and cannot proceed: no such queue\nwhat to do: create the queue"
    )
    assert await expired(backend, ref) is None, "the wait continues without fail_fast"


# ---------------------------------------------------------------- options


def test_commands_take_one_options_object(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[WaitOptions] = []

    async def waited(_: object, names: object, options: WaitOptions) -> int:
        given.append(options)
        return 0

    monkeypatch.setattr("trainjob.cli.run.wait_for_many", waited)
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    words = "wait a b --queue-timeout 1h30m --start-timeout 90 --run-timeout 2d --fail-fast"
    program.main(words.split(), standalone_mode=False)
    assert given == [
        WaitOptions(timedelta(hours=1, minutes=30), timedelta(seconds=90), timedelta(days=2), fail_fast=True)
    ]


@pytest.mark.parametrize("value", [timedelta(minutes=15), 900, 900.0, "15m", "900"])
def test_a_timeout_is_a_timedelta_seconds_or_text(value: object) -> None:
    assert WaitOptions.parse({"queue_timeout": value, "runtime": "x"}) == WaitOptions(timedelta(minutes=15))


def test_missing_options_have_defaults() -> None:
    assert WaitOptions.parse({}) == WaitOptions.parse({"run_timeout": None, "fail_fast": False}) == WaitOptions()


@pytest.mark.parametrize(
    "value", [0, True, "", "soon", "0s", [], timedelta(0), timedelta(-1), float("nan"), float("inf"), 1e300]
)
def test_invalid_timeouts_are_rejected(value: object) -> None:
    with pytest.raises(
        InvalidWaitOptions, match=r"^start_timeout must be a timedelta, a number of seconds above 0, or text"
    ):
        WaitOptions.parse({"start_timeout": value})


@pytest.mark.parametrize("value", ["no", 1, 0, None])
def test_invalid_switches_are_rejected(value: object) -> None:
    with pytest.raises(ValueError, match=r"^fail_fast must be True or False, not "):
        WaitOptions.parse({"fail_fast": value})


def test_every_invalid_option_is_named() -> None:
    with pytest.raises(InvalidWaitOptions) as caught:
        WaitOptions.parse({"queue_timeout": -1, "run_timeout": "soon", "fail_fast": "no"})
    assert caught.value.invalid == {"queue_timeout": -1, "run_timeout": "soon", "fail_fast": "no"}
    assert all(name in str(caught.value) for name in caught.value.invalid)


@pytest.mark.parametrize(
    "options",
    [
        WaitOptions(),
        WaitOptions(timedelta(hours=12), timedelta(seconds=1.5), timedelta(days=2), True, True),
        WaitOptions(fail_on_first_crash=True),
    ],
)
def test_serialized_options_are_read_back(options: WaitOptions) -> None:
    assert WaitOptions.from_json(options.as_json()) == options


def test_the_serialized_form_is_flat_and_has_no_defaults() -> None:
    """A triggerer rejects the options of a newer worker: one that is not used must not be sent to it."""
    assert WaitOptions().as_json() == {}
    assert WaitOptions(timedelta(minutes=1), fail_fast=True).as_json() == {"queue_timeout": 60.0, "fail_fast": True}


def test_unknown_options_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"^unknown options que_timeout; known: queue_timeout, "):
        WaitOptions.from_json({"que_timeout": 1})
