"""``wait``: wait for a TrainJob that something else has launched."""

# What KFP asks of this file: annotations that are real objects (no `from __future__ import annotations`), constants as
# defaults, imports in the body, whose source alone travels. Hence, not beside the lines, which would travel too:
# ruff: noqa: PLC0415
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("pod")
def wait(
    *,
    name: str,
    run_id: str,
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    queue_timeout: int = 0,
    start_timeout: int = 0,
    run_timeout: int = 0,
    fail_fast: bool = False,
    fail_on_first_crash: bool = False,
    backend: str = "",
    namespace: str = "",
) -> NamedTuple("Outputs", [("result", dict)]):
    """Wait for a TrainJob that something else has launched. The job is never changed: it is not this step's.

    Args:
        name: Name of the TrainJob.
        run_id: Id of the run, dsl.PIPELINE_JOB_ID_PLACEHOLDER, so that KFP's cache never gives the answer of an earlier
            run.
        metrics: The training's metrics, those that are finite numbers.
        report: One page about the job: its ranks, times, events and metrics.
        queue_timeout: Seconds that the job may wait for admission; 0 for no limit.
        start_timeout: Seconds from admission to the first running rank; 0 for no limit.
        run_timeout: Seconds from admission to the end; 0 for no limit.
        fail_fast: Fail at once where something is in the job's way that only a person can remove: a queue that does not
            exist, an image that is not there, more than the queue will ever have.
        fail_on_first_crash: Fail as soon as a rank has crashed, with its last lines.
        backend: kubernetes or local; what TRAINJOB_BACKEND says if empty.
        namespace: Kubernetes namespace of the job; what TRAINJOB_NAMESPACE says if empty.

    Returns:
        result: The TrainJob's name, uid, attempt, metrics, outputs and times.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_wait

    return (run_wait(given),)
