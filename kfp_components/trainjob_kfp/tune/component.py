"""``tune``: search hyperparameters; each trial is a TrainJob."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("job")
def tune(
    *,
    study: dict,
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
    workspace: str = "",
    key: str = "",
    queue_timeout: int = 0,
    start_timeout: int = 0,
    run_timeout: int = 0,
    fail_fast: bool = False,
    fail_on_first_crash: bool = False,
    on_kill_action: str = "suspend",
    backend: str = "",
    namespace: str = "",
    owned_by_run: bool = False,
    task_config: dsl.TaskConfig = None,
) -> NamedTuple("Outputs", [("model_uri", str), ("result", dict)]):
    """Search hyperparameters; each trial is a TrainJob.

    A retry and "Retry run" continue the study: trials that have ended do not run again. The step fails if no trial
    completes.

    Args:
        study: The search: space, metric, direction, max_trials, and optionally sampler, pruner, parallel, ...
        runtime: Name of a ClusterTrainingRuntime, such as torch-distributed.
        model: The model of the best trial. Trial n writes its model below the artifact's URI, or below the location of
            it in outputs, as <location>/<n>. Its metadata has uri, trainjob, trial, each parameter as parameter.<name>
            and each metric as metric.<name>.
        metrics: Metrics of the best trial that are finite numbers, and the number of trials by their state.
        report: HTML page about the study: history, parameter importance, learning curves and all trials.
        image: Container image of the nodes; the runtime's if left out.
        command: Entry point of each node. $(NAME) is replaced by an environment variable, $$ by $. The parameter lr is
            $(KUBEFLOW_TRAINER_OPT_LR). A word with a parameter that does not apply to a trial is left out.
        args: Arguments of the command, or of the runtime's entry point.
        num_nodes: Number of nodes.
        num_proc_per_node: Processes on each node; the runtime's if 0.
        resources_per_node: Resources of each node, such as cpu, memory and gpu: {"cpu": 4, "memory": "16Gi", "gpu": 1}.
            They can also be set on the task, where KFP's cache ignores them.
        env: Environment variables of the nodes; secrets by reference, as {"NAME": {"valueFrom": {"secretKeyRef":
            ...}}}.
        inputs: URIs that the trials read, by name; the nodes have each as TRAINJOB_INPUT_<NAME>.
        outputs: URIs below which the trials write, by name; the nodes of trial n have <uri>/<n> as
            TRAINJOB_OUTPUT_<NAME>.
        checkpoints: Location of checkpoints, from which an interrupted training resumes. Each trial has a directory in
            it.
        labels: Labels of the TrainJob, such as kueue.x-k8s.io/queue-name.
        stall_timeout: Longest time without progress of any rank; after it the step fails and names the rank that hangs.
            In seconds; 0 for no limit. A trial that hangs has failed.
        on_retry: Changes of the next attempt after a failure, by its category, such as {"out_of_memory":
            {"max_memory": "64Gi"}}.
        spec: Other fields of the TrainJobSpec: runtime_patches, active_deadline_seconds, ...
        workspace: Directory or object store of the study's journal, such as s3://bucket/prefix; if empty, the value of
            TRAINJOB_WORKSPACE, else beside the artifacts of this step, for which the pod needs credentials.
        key: Identity of the study. If empty, each execution of this task in a run is a study. With the same key, other
            runs continue the study, with the workspace and the outputs of the first one.
        queue_timeout: Longest time that a trial waits for admission (Kueue), in seconds; 0 for no limit. A trial that
            exceeds a timeout is cancelled and counts as failed.
        start_timeout: Longest time from admission of a trial to its first running rank, in seconds; 0 for no limit.
        run_timeout: Longest time from admission of a trial to its end, in seconds; 0 for no limit.
        fail_fast: End a trial as failed as soon as it is blocked by something that only a person can remove: a queue or
            an image that does not exist, or a request for more than the queue can ever admit.
        fail_on_first_crash: End a trial as failed as soon as a rank crashes. Trainer's default runtimes restart a
            crashed rank several times.
        on_kill_action: Action on the running trials when a person ends the step. suspend: the next try or "Retry run"
            resumes them (they are deleted if suspending takes too long). cancel: they are deleted, and run again when
            the study is continued. keep: they keep running, as they always do when the step's pod is drained.
        backend: kubernetes or local; the value of TRAINJOB_BACKEND if empty.
        namespace: Kubernetes namespace of the trials; the value of TRAINJOB_NAMESPACE if empty.
        owned_by_run: Let Kubernetes delete the trials together with the run's Workflow, which KFP keeps for a day or
            less. The trials must be in the run's namespace. Not with key.
        task_config: Set by KFP from the settings of the task: resources, environment, node selector, tolerations,
            affinity and volumes apply to the trials.

    Returns:
        model_uri: Location of the model of the best trial.
        result: Key, metric, best trial, number of trials by state, the best 50 trials, importances, reason of the end,
            and the location of the journal.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_tune

    return run_tune(given)
