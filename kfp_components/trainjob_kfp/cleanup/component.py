"""``cleanup``: an exit handler that stops the jobs that a run has left running."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
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
    """Stop the TrainJobs that a run has left running. As an exit handler it also runs after Terminate.

    Args:
        run_id: Id of the run, dsl.PIPELINE_JOB_ID_PLACEHOLDER. It is different in every run, so KFP's cache never skips
            this step.
        action: suspend, so that "Retry run" resumes the jobs, or cancel, which deletes them, including suspended ones.
            Jobs in a Kueue queue are deleted in both cases, because Kueue would resume them.
        timeout: Maximum seconds until all pods of the jobs are gone.
        backend: kubernetes or local; the value of TRAINJOB_BACKEND if empty.
        namespace: Kubernetes namespace of the jobs; the value of TRAINJOB_NAMESPACE if empty.

    Returns:
        stopped: Names of the TrainJobs that were still running.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_cleanup

    return (run_cleanup(given),)
