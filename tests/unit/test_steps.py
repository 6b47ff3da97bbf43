"""`finish`: a step that fails ends its own job, as its policy says."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.virtually import virtually

from trainjob import JobRef, TrainJobSpec, WaitOptions
from trainjob._jobs.cancellation import cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.steps import KEEP, StepPolicy, finish, pack_error, unpack_error
from trainjob.errors import (
    BackendUnavailable,
    Category,
    ConfigurationError,
    Diagnosis,
    JobHung,
    QueueTimeout,
    RankCrashed,
    RetryVerdict,
    RunTimeout,
    Stuck,
    TimedOut,
    TrainJobError,
    TrainJobFailed,
)
from trainjob.status import Phase, observe

SECOND = timedelta(seconds=1)
CRASHES, TIMES_OUT = WaitOptions(fail_on_first_crash=True), WaitOptions(run_timeout=SECOND)
CANCELS = StepPolicy("cancel")
SPEC = TrainJobSpec.parse({"runtime": "torch-distributed", "command": ["train"]})


async def running(backend: DirectBackend) -> JobRef:
    ref = await launch(backend, SPEC, "key", namespace="ns")
    backend.running(ref)
    return ref


@pytest.mark.parametrize(
    ("options", "policy", "error", "left", "note"),
    [
        (CRASHES, StepPolicy(), RankCrashed, Phase.SUSPENDED, "was suspended"),
        (CRASHES, CANCELS, RankCrashed, Phase.DELETED, "was deleted"),
        (CRASHES, KEEP, RankCrashed, Phase.RUNNING, "keeps running"),
        (TIMES_OUT, StepPolicy(), RunTimeout, Phase.DELETED, "it was cancelled"),
        (TIMES_OUT, KEEP, RunTimeout, Phase.RUNNING, "it keeps running"),
    ],
)
@virtually
async def test_a_step_that_fails_ends_its_job(
    backend: DirectBackend, options: WaitOptions, policy: StepPolicy, error: type[TrainJobError], left: Phase, note: str
) -> None:
    ref = await running(backend)
    if options is CRASHES:
        backend.crash(ref, 1, 3)
    with pytest.raises(error) as caught:
        await finish(backend, ref, options, policy)
    assert note in caught.value.__notes__[0]
    assert observe(await backend.get(ref.namespace, ref.name)).phase is left


@virtually
async def test_a_timeout_is_the_error_also_if_the_job_cannot_be_cancelled(backend: DirectBackend) -> None:
    ref = await running(backend)

    def fail(request: str) -> None:
        if request.startswith("DELETE"):
            raise BackendUnavailable("the API server is away")

    backend.before = fail
    with pytest.raises(RunTimeout) as caught:
        await finish(backend, ref, TIMES_OUT, StepPolicy())
    assert caught.value.__notes__ == ["it could not be cancelled and keeps running: the API server is away"]


@virtually
async def test_the_attempt_that_is_waited_for_is_ended(backend: DirectBackend) -> None:
    """Another attempt of the key has replaced the job of the step."""
    first = await running(backend)
    second = backend.replaced(first, SPEC)
    followed: list[JobRef] = []
    with pytest.raises(RunTimeout):
        await finish(backend, first, TIMES_OUT, StepPolicy(), on_follow=followed.append)
    assert followed == [second]
    assert await backend.get(second.namespace, second.name) is None


@pytest.mark.parametrize(("tried", "error"), [(1, TimedOut), (2, TrainJobFailed)])
@virtually
async def test_a_try_that_has_cancelled_its_job_has_timed_out(
    backend: DirectBackend, tried: int, error: type[TrainJobError]
) -> None:
    """A triggerer ended while it cancelled the job, and another one starts the same trigger."""
    ref = await running(backend)
    await cancel(backend, ref, tried=1, timeout_seconds=0)
    with pytest.raises(error) as caught:
        await finish(backend, ref, WaitOptions(), StepPolicy(tried=tried))
    assert caught.value.retry.retryable is (tried == 1)


@virtually
async def test_the_limit_of_the_step_itself(backend: DirectBackend) -> None:
    ref = await running(backend)
    with pytest.raises(TimedOut, match=f"TrainJob {ref} did not end within execution_timeout") as caught:
        await finish(backend, ref, WaitOptions(), StepPolicy(), seconds=5)
    assert caught.value.__notes__ == ["it was cancelled"]


FAILURE = Diagnosis(Category.USER_CODE, RetryVerdict.UNKNOWN, "it failed", rank="node-1", exit_code=3, job="ns/x")
TIMED_OUT = RunTimeout("too late")
TIMED_OUT.goodput = {"ratio": 0.5}


@pytest.mark.parametrize(
    "error",
    [
        TrainJobFailed(FAILURE, {"ratio": 0.25}), RankCrashed(FAILURE), JobHung(FAILURE), QueueTimeout("queued"),
        TIMED_OUT, Stuck("blocked"), BackendUnavailable("away"), ConfigurationError("no kubeconfig"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_an_error_reaches_another_process(error: TrainJobError) -> None:
    error.add_note("it was cancelled")
    again = unpack_error(json.loads(json.dumps(pack_error(error))))
    known = TrainJobError if isinstance(error, ConfigurationError) else type(error)
    assert (type(again), str(again), again.retry) == (known, str(error), error.retry)
    assert again.__notes__ == ["it was cancelled"]
    for name in ("diagnosis", "goodput"):
        assert getattr(again, name, None) == getattr(error, name, None)


@pytest.mark.parametrize("packed", [None, [], "x", {}, {"type": "OfALaterVersion", "retry": 7, "notes": None}])
def test_any_json_is_an_error_that_ends_the_wait(packed: object) -> None:
    error = unpack_error(packed)
    assert (type(error), error.retry) == (TrainJobError, RetryVerdict.CONFIGURATION)
