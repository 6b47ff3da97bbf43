"""``initialize_model``: bring a base model to where training finds it."""

# What KFP asks of this file: annotations that are real objects (no `from __future__ import annotations`), constants as
# defaults, imports in the body, whose source alone travels. Hence, not beside the lines, which would travel too:
# ruff: noqa: B006, PLC0415
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("both")
def initialize_model(
    *,
    source: str,
    model: dsl.Output[dsl.Model],
    target: str = "",
    digest: str = "",
    include: list = [],
    exclude: list = [],
    registry: str = "",
    if_missing: str = "fail",
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
) -> NamedTuple("Outputs", [("uri", str), ("digest", str), ("version", str), ("fresh", bool)]):
    """Bring a model to where training finds it, whole and checked.

    Args:
        source: Where it is: models:/name@alias, models:/name/version, or a location as for datasets.
        model: The model; its metadata has uri, digest, version, bytes and files.
        target: Directory to bring it to; the artifact's own URI if empty.
        digest: SHA-256 of the one file, or sha256:<root digest> of a directory. Registered models are always checked.
        include: Patterns of the only files to bring.
        exclude: Patterns of files not to bring.
        registry: Where to look for models:/..., as mlflow+https://host; what TRAINJOB_REGISTRY says if empty.
        if_missing: fail, or fresh: that the model is not registered yet is no error, uri is then empty.
        in_pod: Work in this step's own pod instead of a TrainJob of one node.
        env: Environment of the TrainJob.
        spec: Everything else of its TrainJobSpec; its runtime is trainjob-step unless given here.
        queue_timeout: Seconds that the job may wait for admission; 0 for no limit.
        start_timeout: Seconds from admission to running; 0 for no limit.
        run_timeout: Seconds from admission to the end; 0 for no limit.
        fail_fast: Fail at once where something is in the job's way that only a person can remove: a queue that does not
            exist, an image that is not there, more than the queue will ever have.
        on_kill_action: What becomes of the job when this step is terminated: suspend, so that the next try or "Retry
            run" continues with it (or deletion, where a suspend takes too long), cancel, which deletes it, or keep. A
            step whose pod is drained always keeps it.
        cancel_on_timeout: Whether a job that outlasts one of the timeouts is deleted; else the next try adopts it.
        backend: kubernetes or local; what TRAINJOB_BACKEND says if empty.
        namespace: Kubernetes namespace of the job; what TRAINJOB_NAMESPACE says if empty.
        owned_by_run: Let Kubernetes delete the job together with the run's Workflow, which KFP keeps for a day or less.
            The job has to be in the run's own namespace.
        task_config: What is set on the task, by KFP itself: resources, environment, node selector, tolerations,
            affinity and volumes are the job's.

    Returns:
        uri: Where the model is now; empty for a fresh start.
        digest: sha256:<root digest>.
        version: Its version in the registry, if it is registered.
        fresh: Whether there is no model yet, and if_missing says so: training starts without one.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_initialize

    outcome = run_initialize("model", given)
    return outcome["uri"], outcome["digest"], outcome["version"], outcome["fresh"]
