"""`finish`: a step that fails ends its own job, as its policy says."""

from __future__ import annotations

from datetime import timedelta

import pytest
from tests.fakes.kube.direct import DirectBackend
from tests.unit.virtually import virtually

from trainjob import JobRef, TrainJobSpec, WaitOptions
from trainjob._jobs.launching import launch
from trainjob._jobs.steps import KEEP, StepPolicy, finish
from trainjob.errors import BackendUnavailable, RankCrashed, RunTimeout, TrainJobError
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
