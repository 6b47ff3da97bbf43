"""``evaluate_model``: evaluate a model beside the current champion, and apply a gate."""

# KFP requires annotations that are real objects (no `from __future__ import annotations`), constants as defaults, and
# imports in the body. It copies the source of the function, comments included, so the suppressions are here instead:
# mypy: disable-error-code="type-arg, valid-type, untyped-decorator"
from typing import NamedTuple

from kfp import dsl

from trainjob_kfp.component import step


@step("job")
def evaluate_model(
    *,
    candidate: str,
    dataset: str,
    evaluated: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
    classification: dsl.Output[dsl.ClassificationMetrics],
    report: dsl.Output[dsl.HTML],
    command: list = [],
    function: dict = {},
    champion: str = "",
    target: str = "",
    dataset_digest: str = "",
    gate: dict = {},
    code: dict = {},
    registry: str = "",
    runtime: str = "",
    image: str = "",
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
) -> NamedTuple(
    "Outputs",
    [
        ("evaluation", str),
        ("digest", str),
        ("passed", bool),
        ("rule", str),
        ("reason", str),
        ("champion_version", str),
        ("result", dict),
    ],
):
    """Evaluate a model, and in the same TrainJob the current champion, on a held-out dataset, and apply a gate.

    The command or the function runs once for each model. A model that does not pass is no error: use the output passed
    in dsl.If, or give the output evaluation to export_model, which moves the alias only if the gate has passed.

    Args:
        candidate: Location of the model; usually the output model_uri of train.
        dataset: Location of the held-out dataset.
        evaluated: The report, evaluation.json. Its metadata has uri, digest, passed, rule and reason.
        metrics: Metrics of the candidate, and of the champion with the prefix "champion.".
        classification: Confusion matrix and ROC curve of the candidate, if the evaluation reports them. Thresholds of
            the curve are 0 if they are not reported.
        report: HTML page about the job and the evaluation: verdict, differences with intervals, slices, charts.
        command: Command that evaluates one model. In its words, {model}, {dataset} and {scores} stand for local paths,
            which are also in TRAINJOB_MODEL, TRAINJOB_DATASET and TRAINJOB_SCORES. It writes the scores to the last.
        function: Function that evaluates one model, instead of command; in Python a function with the parameters model
            and dataset that returns the scores, in YAML its name and source. It imports what it uses in its body.
        champion: Location of the model to compare with, or models:/name@champion, where a missing version is no error.
        target: Directory for the report; the artifact's URI if empty.
        dataset_digest: Expected digest of the dataset; other content is refused.
        gate: Rules that the candidate must pass, such as {"metrics": {"accuracy": {"min_improvement": 0}}}.
        code: Location (uri) and revision of the evaluation's code, for the report.
        registry: Registry of the champion, such as mlflow+https://host; the value of TRAINJOB_REGISTRY if empty.
        runtime: Runtime of one node; trainjob-step if empty. Its image has trainjob and what the evaluation imports.
        image: Image of the node; the runtime's if empty.
        env: Environment variables of the nodes; secrets by reference.
        spec: Other fields of the TrainJobSpec.
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
        evaluation: Location of the report's directory, for export_model.
        digest: Digest of the report, sha256:<digest>.
        passed: Whether the gate has passed; false without a gate.
        rule: The rule that decided, such as metrics.accuracy.min_improvement.
        reason: Why the gate has passed or not.
        champion_version: Version of the champion in the registry, or its digest; empty if there is no champion.
        result: The TrainJob's name, uid, attempt, metrics, outputs and times.
    """
    given = dict(locals())
    from trainjob_kfp.runtime import run_evaluate

    return run_evaluate(given)
