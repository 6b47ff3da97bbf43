"""``train``: a TrainJob as a step of a pipeline."""

# What KFP asks of this file: annotations that are real objects (no `from __future__ import annotations`), constants as
# defaults, imports in the body, whose source alone travels. Hence, not beside the lines, which would travel too:
# ruff: noqa: B006, PLC0415
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("job")
def train(
    *,
    runtime: str,
    model: dsl.Output[dsl.Model],
    metrics: dsl.Output[dsl.Metrics],
    report: dsl.Output[dsl.HTML],
    image: str = "",
    command: list = [],
    args: list = [],
    num_nodes: int = 1,
    num_proc_per_node: int = 0,
    resources_per_node: dict = {},
    env: dict = {},
    inputs: dict = {},
    outputs: dict = {},
    spec: dict = {},
    queue_timeout: int = 0,
    start_timeout: int = 0,
    run_timeout: int = 0,
    fail_fast: bool = False,
    fail_on_first_crash: bool = False,
    on_crash_action: str = "suspend",
    on_kill_action: str = "suspend",
    cancel_on_timeout: bool = True,
    retry_user_errors: bool = True,
    backend: str = "",
    namespace: str = "",
    owned_by_run: bool = False,
    task_config: dsl.TaskConfig = None,
) -> NamedTuple("Outputs", [("model_uri", str), ("result", dict)]):
    """Run a Kubeflow TrainJob and wait for it: launched exactly once, however often this step's pod is started.

    Args:
        runtime: Name of a ClusterTrainingRuntime.
        model: What was trained. Unless outputs names another place, the training writes below its URI. Its metadata has
            uri, trainjob, trainjob_uid, and each metric as metric.<name>.
        metrics: The training's metrics, those that are finite numbers.
        report: One page about the job: its ranks, times, events and metrics.
        image: Container image of the nodes; the runtime's if empty.
        command: Entry point of each node. $(NAME) is replaced by an environment variable, $$ is a $.
        args: Arguments of the command, or of the runtime's entry point.
        num_nodes: Number of nodes.
        num_proc_per_node: Processes on each node; the runtime's if 0.
        resources_per_node: As {"cpu": 4, "memory": "16Gi", "gpu": 1}; or set them on the task, where KFP's cache does
            not see them.
        env: Environment of the nodes; secrets by reference, as {"NAME": {"valueFrom": {"secretKeyRef": ...}}}.
        inputs: What the training reads, name to URI; the nodes find each as TRAINJOB_INPUT_<NAME>.
        outputs: Where the training writes, name to URI; the nodes find each as TRAINJOB_OUTPUT_<NAME>.
        spec: Everything else that a TrainJobSpec can hold: labels, runtime_patches, active_deadline_seconds, ...
        queue_timeout: Seconds that the job may wait for admission; 0 for no limit.
        start_timeout: Seconds from admission to the first running rank; 0 for no limit.
        run_timeout: Seconds from admission to the end; 0 for no limit.
        fail_fast: Fail at once where something is in the job's way that only a person can remove: a queue that does not
            exist, an image that is not there, more than the queue will ever have.
        fail_on_first_crash: Fail as soon as a rank has crashed, with its last lines. Trainer's own runtimes start it
            again and again, and the job fails minutes later if at all. Without this, a crash is told in the log.
        on_crash_action: What becomes of the job then, which would go on: suspend, which keeps the object with the
            diagnosis in it, cancel, which deletes it, or keep. The next try is a new job, unless it was kept.
        on_kill_action: What becomes of the job when this step is terminated: suspend, so that the next try or "Retry
            run" continues with it (or deletion, where a suspend takes too long), cancel, which deletes it, or keep. A
            step whose pod is drained always keeps it.
        cancel_on_timeout: Whether a job that outlasts one of the timeouts is deleted; else the next try adopts it.
        retry_user_errors: Whether a retry of this step (set_retry) runs a training again that failed by itself in a way
            that may not come again (an exception, an exit code); else only what came from outside is run again. What is
            certain to fail again never is (a missing module, a wrong argument).
        backend: kubernetes or local; what TRAINJOB_BACKEND says if empty.
        namespace: Kubernetes namespace of the job; what TRAINJOB_NAMESPACE says if empty.
        owned_by_run: Let Kubernetes delete the job together with the run's Workflow, which KFP keeps for a day or less.
            The job has to be in the run's own namespace.
        task_config: What is set on the task, by KFP itself: resources, environment, node selector, tolerations,
            affinity and volumes are the job's.

    Returns:
        model_uri: Where the model is.
        result: The TrainJob's name, uid, attempt, metrics, outputs and times.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_train

    return run_train(given)
