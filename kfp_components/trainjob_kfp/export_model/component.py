"""``export_model``: store, register and promote a trained model."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
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
    evaluation: str = "",
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
    """Store a trained model, register it as a version, and move an alias to it if it is better.

    Idempotent: a retry registers the same version.

    Args:
        source: The model, a file or a directory; usually the output model_uri of train.
        name: Name of the model in the registry.
        exported: The stored model. Its metadata has uri, digest, name, version, promoted, bytes and files.
        target: Directory of all models, below which this model is stored; the artifact's URI if empty.
        metrics: Measured metrics: numbers by name, or the result of train, whose numeric metrics are used and whose job
            is recorded as the model's origin.
        alias: Alias to move to the version, such as champion; none if empty.
        metric: Metric that must be better than that of the version that holds the alias; if empty, the alias always
            moves.
        mode: max if a higher value of the metric is better, min if a lower one is.
        min_improvement: Minimum improvement, in units of the metric.
        datasets: Datasets of the training, each as {"uri": ..., "digest": ...}.
        base_model: Base model of the training, in the same form; ignored if its uri or digest is empty.
        provenance: Other facts about the model's origin, stored beside the model.
        evaluation: Location of an evaluation of this model, the output evaluation of evaluate_model. Its metrics
            replace metrics, and its gate decides alone about the alias: leave out metric and min_improvement.
        registry: Registry, such as mlflow+https://host; the value of TRAINJOB_REGISTRY if empty.
        allow_pickle: Accept all file formats, including pickle and others that can run code when they are loaded.
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
        uri: Location of the stored model.
        digest: sha256:<root digest>.
        version: Version in the registry.
        promoted: Whether the alias points to the version.
        reason: Why the alias was moved, or why not.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_export

    outcome = run_export(given)
    return outcome["uri"], outcome["digest"], outcome["version"], outcome["promoted"], outcome["reason"]
