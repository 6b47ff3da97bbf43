"""``wait``: wait for a TrainJob that something else has launched."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("pod")
def wait(
    *,
    job: str,
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
    """Wait for a TrainJob that something else has launched. The step never changes the job.

    Args:
        job: Name of the TrainJob.
        run_id: Id of the run, dsl.PIPELINE_JOB_ID_PLACEHOLDER, so that KFP's cache never reuses the result of an
            earlier run.
        metrics: Metrics of the training that are finite numbers; goodput, the share of the time that was training; and
            the seconds of each activity: seconds.queued, seconds.starting, seconds.training, ...
        report: HTML page about the training: curves of its metrics, its ranks and times, the last lines of their logs.
        queue_timeout: Longest time that the job waits for admission (Kueue), in seconds; 0 for no limit.
        start_timeout: Longest time from admission to the first running rank, in seconds; 0 for no limit.
        run_timeout: Longest time from admission to the end, in seconds; 0 for no limit.
        fail_fast: Fail as soon as the job is blocked by something that only a person can remove: a queue or an image
            that does not exist, or a request for more than the queue can ever admit.
        fail_on_first_crash: Fail as soon as a rank crashes; report the last lines of its log.
        backend: kubernetes or local; the value of TRAINJOB_BACKEND if empty.
        namespace: Kubernetes namespace of the job; the value of TRAINJOB_NAMESPACE if empty.

    Returns:
        result: The TrainJob's name, uid, attempt, metrics, outputs and times.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_wait

    return (run_wait(given),)
