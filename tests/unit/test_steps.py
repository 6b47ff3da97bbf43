"""`finish`: a step that fails ends its own job, as its policy says."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.virtually import virtually

from trainjob import JobRef, TrainJobSpec, WaitOptions
from trainjob._jobs.launching import launch
from trainjob._jobs.steps import KEEP, StepPolicy, finish
from trainjob.errors import BackendUnavailable, QueueTimeout, RankCrashed, RunTimeout, TrainJobError
from trainjob.status import QUEUE_LABEL, Phase, observe

SECOND = timedelta(seconds=1)
CRASHES, TIMES_OUT = WaitOptions(fail_on_first_crash=True), WaitOptions(run_timeout=SECOND)
CANCELS = StepPolicy("cancel")
FIELDS = {"runtime": "torch-distributed", "command": ["train"]}
SPEC = TrainJobSpec.parse(FIELDS)


async def launched(backend: DirectBackend, **fields: Any) -> JobRef:
    return await launch(backend, TrainJobSpec.parse({**FIELDS, **fields}), "key", namespace="ns", tried=2)


async def running(backend: DirectBackend) -> JobRef:
    ref = await launched(backend)
    backend.running(ref)
    return ref


@pytest.mark.parametrize(
    ("options", "policy", "error", "left", "note"),
    [
        (CRASHES, StepPolicy(), RankCrashed, Phase.SUSPENDED, "was suspended"),
        (CRASHES, CANCELS, RankCrashed, Phase.DELETED, "was deleted"),
        (CRASHES, KEEP, RankCrashed, Phase.RUNNING, "keeps running"),
        (TIMES_OUT, StepPolicy(), RunTimeout, Phase.DELETED, "it was cancelled"),
        (TIMES_OUT, StepPolicy(tried=2), RunTimeout, Phase.DELETED, "it was cancelled"),
        (TIMES_OUT, StepPolicy(tried=1), RunTimeout, Phase.RUNNING, "it keeps running: try 2 has adopted it"),
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


@pytest.mark.parametrize(("has_retry", "note"), [(True, "the next try replaces it"), (False, "it was cancelled")])
@virtually
async def test_a_job_without_capacity_is_left_to_the_next_try(
    backend: DirectBackend, has_retry: bool, note: str
) -> None:
    ref = await launched(backend, labels={QUEUE_LABEL: "q"}, on_retry={"quota": {"queue": "large"}})
    backend.change(ref, {"metadata": {"creationTimestamp": backend.ago(10)}, "spec": {"suspend": True}})
    with pytest.raises(QueueTimeout) as caught:
        await finish(backend, ref, WaitOptions(queue_timeout=SECOND), StepPolicy(has_retry=has_retry))
    assert note in caught.value.__notes__[0]
    assert (await backend.get(ref.namespace, ref.name) is None) is not has_retry


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
