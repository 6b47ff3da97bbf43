"""``cleanup``: stop what a run has left running, as its exit handler."""

# What KFP asks of this file: annotations that are real objects (no `from __future__ import annotations`), constants as
# defaults, imports in the body, whose source alone travels. Hence, not beside the lines, which would travel too:
# ruff: noqa: PLC0415
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from trainjob_kfp.component import step


@step("pod")
def cleanup(
    *,
    run_id: str,
    action: str = "suspend",
    timeout: int = 300,
    backend: str = "",
    namespace: str = "",
) -> NamedTuple("Outputs", [("stopped", list)]):
    """Stop the TrainJobs that a run has left running. As exit handler it does so after Terminate, too.

    Args:
        run_id: Id of the run, dsl.PIPELINE_JOB_ID_PLACEHOLDER. No two runs have the same, so that KFP's cache never
            takes the cleaning up of an earlier run for that of this one.
        action: suspend, so that "Retry run" goes on with them, or cancel, which deletes them, suspended ones, too. What
            waits in a Kueue queue is deleted in either case: Kueue would start it again.
        timeout: Seconds until the last pod has to be gone.
        backend: kubernetes or local; what TRAINJOB_BACKEND says if empty.
        namespace: Kubernetes namespace of the jobs; what TRAINJOB_NAMESPACE says if empty.

    Returns:
        stopped: Names of the TrainJobs that were still running.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_cleanup

    return (run_cleanup(given),)
