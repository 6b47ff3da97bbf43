"""``initialize_dataset``: download a dataset for the training."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("both")
def initialize_dataset(
    *,
    source: str,
    dataset: dsl.Output[dsl.Dataset],
    target: str = "",
    digest: str = "",
    include: list = [],
    exclude: list = [],
    in_pod: bool = False,
    env: dict = {},
    spec: dict = {},
    queue_timeout: int = 0,
    start_timeout: int = 0,
    run_timeout: int = 0,
    fail_fast: bool = False,
    on_kill_action: str = "suspend",
    cancel_on_timeout: bool = True,
    backend: str = "",
    namespace: str = "",
    owned_by_run: bool = False,
    task_config: dsl.TaskConfig = None,
) -> NamedTuple("Outputs", [("uri", str), ("digest", str)]):
    """Download a dataset to where the training reads it, complete and verified.

    Args:
        source: Location of the dataset: s3://..., https://..., file:///...
        dataset: The dataset. Its metadata has uri, digest, bytes and files.
        target: Directory to download to; the artifact's URI if empty.
        digest: SHA-256 of a single file, or sha256:<root digest> of a directory; not verified if empty.
        include: Patterns of the files to download; all files if empty.
        exclude: Patterns of files that are not downloaded.
        in_pod: Do the work in this step's pod instead of in a TrainJob of one node.
        env: Environment variables of the nodes; secrets by reference.
        spec: Other fields of the TrainJobSpec. The runtime is trainjob-step unless it is set here.
        queue_timeout: Longest time that the job waits for admission (Kueue), in seconds; 0 for no limit.
        start_timeout: Longest time from admission to the first running rank, in seconds; 0 for no limit.
        run_timeout: Longest time from admission to the end, in seconds; 0 for no limit.
        fail_fast: Fail as soon as the job is blocked by something that only a person can remove: a queue or an image
            that does not exist, or a request for more than the queue can ever admit.
        on_kill_action: Action on the job when a person ends the step. suspend: the next try or "Retry run" resumes it
            (it is deleted if suspending takes too long). cancel: the job is deleted. keep: the job keeps running, as it
            always does when the step's pod is drained.
        cancel_on_timeout: Cancel a job that exceeds a timeout. Otherwise the job keeps running and the next try adopts
            it.
        backend: kubernetes or local; the value of TRAINJOB_BACKEND if empty.
        namespace: Kubernetes namespace of the job; the value of TRAINJOB_NAMESPACE if empty.
        owned_by_run: Let Kubernetes delete the job together with the run's Workflow, which KFP keeps for a day or less.
            The job must be in the run's namespace.
        task_config: Set by KFP from the settings of the task: resources, environment, node selector, tolerations,
            affinity and volumes apply to the job.

    Returns:
        uri: Location of the downloaded dataset.
        digest: sha256:<root digest>.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_initialize

    outcome = run_initialize("dataset", given)
    return outcome["uri"], outcome["digest"]
