"""``export_model``: store, register and promote what was trained."""

# What KFP asks of this file: annotations that are real objects (no `from __future__ import annotations`), constants as
# defaults, imports in the body, whose source alone travels. Hence, not beside the lines, which would travel too:
# ruff: noqa: B006, PLC0415
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("both")
def export_model(
    *,
    source: str,
    name: str,
    exported: dsl.Output[dsl.Model],
    target: str = "",
    metrics: dict = {},
    alias: str = "",
    metric: str = "",
    mode: str = "max",
    min_improvement: float = 0.0,
    datasets: list = [],
    base_model: dict = {},
    provenance: dict = {},
    registry: str = "",
    allow_pickle: bool = False,
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
) -> NamedTuple("Outputs", [("uri", str), ("digest", str), ("version", str), ("promoted", bool), ("reason", str)]):
    """Store a trained model, register it as a version, and give it an alias if it is better. Done twice, done once.

    Args:
        source: The model: a file or a directory; model_uri of train.
        name: Model in the registry.
        exported: The stored model; its metadata has uri, digest, name, version, promoted, bytes and files.
        target: Directory of all models, this one goes below it; the artifact's own URI if empty.
        metrics: What the model was measured to reach: numbers by name, or the result of train, whose numeric metrics
            are taken, and whose job is noted as the model's origin.
        alias: Name such as champion to give to the version; none if empty.
        metric: Metric that has to be better than that of the version which holds the alias; the alias moves always if
            empty.
        mode: max or min: whether more of the metric is better, or less.
        min_improvement: By how much, in units of the metric.
        datasets: What it was trained on, each as {"uri": ..., "digest": ...}.
        base_model: What its training started from, likewise; with an empty uri or digest, none.
        provenance: Written beside the model: whatever else tells where it came from.
        registry: As mlflow+https://host; what TRAINJOB_REGISTRY says if empty.
        allow_pickle: Accept files of every form, also pickles and others that can run code when they are loaded.
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
        uri: Where the model is stored.
        digest: sha256:<root digest>.
        version: Its version in the registry.
        promoted: Whether the alias points to it.
        reason: Why, or why not.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_export

    outcome = run_export(given)
    return outcome["uri"], outcome["digest"], outcome["version"], outcome["promoted"], outcome["reason"]
