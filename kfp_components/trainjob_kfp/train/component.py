"""``train``: run a TrainJob as a step of a pipeline."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
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
    checkpoints: str = "",
    labels: dict = {},
    stall_timeout: int = 0,
    on_retry: dict = {},
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
    """Run a Kubeflow TrainJob and wait for it.

    It is launched exactly once, no matter how often KFP restarts this step's pod.

    Args:
        runtime: Name of a ClusterTrainingRuntime, such as torch-distributed.
        model: The trained model. Unless outputs has another location for it, the training writes it below the
            artifact's URI. Its metadata has uri, trainjob, trainjob_uid, and each metric as metric.<name>.
        metrics: Metrics of the training that are finite numbers; goodput, the share of the time that was training; and
            the seconds of each activity: seconds.queued, seconds.starting, seconds.training, ...
        report: HTML page about the training: curves of its metrics, its ranks and times, the last lines of their logs.
        image: Container image of the nodes; the runtime's if left out.
        command: Entry point of each node. $(NAME) is replaced by an environment variable, $$ by $.
        args: Arguments of the command, or of the runtime's entry point.
        num_nodes: Number of nodes.
        num_proc_per_node: Processes on each node; the runtime's if 0.
        resources_per_node: Resources of each node, such as cpu, memory and gpu: {"cpu": 4, "memory": "16Gi", "gpu": 1}.
            They can also be set on the task, where KFP's cache ignores them.
        env: Environment variables of the nodes; secrets by reference, as {"NAME": {"valueFrom": {"secretKeyRef":
            ...}}}.
        inputs: URIs that the training reads, by name; the nodes have each as TRAINJOB_INPUT_<NAME>.
        outputs: URIs that the training writes, by name; the nodes have each as TRAINJOB_OUTPUT_<NAME>.
        checkpoints: Location of checkpoints, from which an interrupted training resumes. Tries of this step share a
            directory in it.
        labels: Labels of the TrainJob, such as kueue.x-k8s.io/queue-name.
        stall_timeout: Longest time without progress of any rank; after it the step fails and names the rank that hangs.
            In seconds; 0 for no limit.
        on_retry: Changes of the next attempt after a failure, by its category, such as {"out_of_memory":
            {"max_memory": "64Gi"}}.
        spec: Other fields of the TrainJobSpec: runtime_patches, active_deadline_seconds, ...
        queue_timeout: Longest time that the job waits for admission (Kueue), in seconds; 0 for no limit.
        start_timeout: Longest time from admission to the first running rank, in seconds; 0 for no limit.
        run_timeout: Longest time from admission to the end, in seconds; 0 for no limit.
        fail_fast: Fail as soon as the job is blocked by something that only a person can remove: a queue or an image
            that does not exist, or a request for more than the queue can ever admit.
        fail_on_first_crash: Fail as soon as a rank crashes; report the last lines of its log. Trainer's default
            runtimes restart a crashed rank several times, so the job fails minutes later or never. If false, a crash is
            only logged.
        on_crash_action: Action on a job after fail_on_first_crash or stall_timeout. suspend: the object stays and
            contains the diagnosis. cancel: the job is deleted. keep: the job keeps running. The next try launches a new
            job unless the job was kept.
        on_kill_action: Action on the job when a person ends the step. suspend: the next try or "Retry run" resumes it
            (it is deleted if suspending takes too long). cancel: the job is deleted. keep: the job keeps running, as it
            always does when the step's pod is drained.
        cancel_on_timeout: Cancel a job that exceeds a timeout. Otherwise the job keeps running and the next try adopts
            it.
        retry_user_errors: Retry after a failure of the training code that may not recur (an exception, an exit code),
            if the step has retries (set_retry). Failures of the infrastructure are always retried, and those that would
            recur never (a missing module, a wrong argument).
        backend: kubernetes or local; the value of TRAINJOB_BACKEND if empty.
        namespace: Kubernetes namespace of the job; the value of TRAINJOB_NAMESPACE if empty.
        owned_by_run: Let Kubernetes delete the job together with the run's Workflow, which KFP keeps for a day or less.
            The job must be in the run's namespace.
        task_config: Set by KFP from the settings of the task: resources, environment, node selector, tolerations,
            affinity and volumes apply to the job.

    Returns:
        model_uri: Location of the model.
        result: The TrainJob's name, uid, attempt, metrics, outputs and times.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_train

    return run_train(given)
