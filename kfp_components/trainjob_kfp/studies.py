"""The study of a step: run or continue it, log its trials, and report its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainjob import InvalidSpec, Problem, Settings, TrainJobClient, TrainJobError, TrainJobSpec
from trainjob._manifest.unattended import of_step
from trainjob._pages.page import page_html
from trainjob._pages.study import (
    document_of_study,
    find_study,
)
from trainjob._support.display import rounded
from trainjob.job import key_hash
from trainjob.tuning import (
    Study,
    StudyResult,
    Trial,
    tune,
)
from trainjob.tuning.journal import (
    journal_location,
    open_journal,
)
from trainjob_kfp.execution import Execution, artifact_location, origin_of
from trainjob_kfp.jobs import connect_shared, wait_options_of, workflow_of_this_pod
from trainjob_kfp.steplog import write_line
from trainjob_kfp.stopping_studies import StopTrialsWithStep


def run_study(
    execution: Execution,
    study: Study,
    template: TrainJobSpec,
    parameters: Mapping[str, Any],
    *,
    model_uri: str,
    report: Path,
) -> tuple[StudyResult, str]:
    """Run the study of an execution, or continue it where an earlier try ended.

    Args:
        execution: The execution of the step.
        study: What to search.
        template: Spec of the trials.
        parameters: The parameters of the component.
        model_uri: URI of the artifact `model`, beside which the journal is kept if no workspace is set.
        report: Path of the HTML page about the study.

    Returns:
        The result, and the location of the journal.

    Raises:
        TrainJobError: the study cannot be run, or no trial has completed.
    """
    options = wait_options_of(parameters)
    key = parameters["key"] or execution.key
    workspace = workspace_of(execution, parameters, model_uri)
    where = journal_location(key_hash(key), workspace)
    action = parameters["on_kill_action"]
    with connect_shared(parameters) as client, StopTrialsWithStep(client, key, action, execution.run) as stop:
        if parameters["owned_by_run"]:
            template = template.model_copy(update={"owner_reference": workflow_of_this_pod(client)})
        write_line(f"study {key}, journal {where}")
        origin = origin_of(execution) | of_step(action)
        log = _TrialLog(client, study)

        def change(trials: Sequence[Trial]) -> None:
            stop.change(trials)
            log.change(trials)

        with open_journal(where) as journal:
            client.start(stop.keep_ready)
            stop.search = client.start(
                lambda: tune(
                    client.backend,
                    study,
                    template,
                    key,
                    journal,
                    namespace=client.namespace,
                    origin=origin,
                    options=options,
                    on_change=change,
                )
            )
            result: StudyResult = stop.search.result()
        _write_report(key, workspace, report)
    best = result.best
    write_line(f"{result.reason}; best: trial {best.number}, {result.metric} {_text(best.value)}, TrainJob {best.job}")
    return result, where


def workspace_of(execution: Execution, parameters: Mapping[str, Any], model_uri: str) -> str | None:
    """The directory of the journal's study; None for the directory of this machine.

    A pod of a KFP backend has no directory that outlives it, so without a workspace the journal is beside the
    artifacts of the execution, where all its tries find it.
    """
    workspace = parameters["workspace"] or Settings().workspace
    if workspace or execution.local:
        return workspace
    return artifact_location(model_uri).rpartition("/")[0]


def check_shared_key(execution: Execution, parameters: Mapping[str, Any], outputs: Mapping[str, str]) -> None:
    """Refuse a key of several runs together with what differs in each run: it would be another study.

    Raises:
        InvalidSpec: with the parameters to change.
    """
    if not parameters["key"]:
        return
    problems = []
    if "model" not in outputs:
        problems.append(
            Problem("outputs.model", "is missing", "with key, give a location that is the same in all runs")
        )
    if parameters["owned_by_run"]:
        problems.append(Problem("owned_by_run", "cannot be combined with key", "leave one of them out"))
    if not (parameters["workspace"] or Settings().workspace or execution.local):
        problems.append(
            Problem("workspace", "is missing", "with key, give an object store, such as s3://bucket/prefix")
        )
    if problems:
        raise InvalidSpec(problems)


class _TrialLog:
    """Logs each trial when it was launched and when it has ended."""

    def __init__(self, client: TrainJobClient, study: Study) -> None:
        self._namespace, self._metric = client.namespace, study.metric
        self._shown: dict[int, str] = {}

    def change(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            if trial.job and self._shown.get(trial.number) != trial.state:
                self._shown[trial.number] = trial.state
                write_line(self._line(trial))

    def _line(self, trial: Trial) -> str:
        value = f", {self._metric} {_text(trial.value)}" if trial.ended and trial.value is not None else ""
        reason = f" ({trial.reason})" if trial.reason else ""
        parameters = ", ".join(f"{name} {_text(each)}" for name, each in trial.parameters.items())
        return (
            f"trial {trial.number} {trial.state}{value}{reason}: {parameters}; TrainJob {self._namespace}/{trial.job}"
        )


def _text(value: object) -> str:
    return rounded(value) if isinstance(value, bool | int | float | str) else str(value)


def _write_report(key: str, workspace: str | None, report: Path) -> None:
    try:
        state = find_study(key_hash(key), workspace)
        if state is not None:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(page_html(document_of_study(state)), encoding="utf-8")
    except (TrainJobError, OSError) as error:  # the search is complete; a missing report must not fail the step
        write_line(f"cannot write the report about study {key}: {error}")


def metrics_of(result: StudyResult) -> dict[str, Any]:
    """The metrics of the best trial, and the number of trials by state."""
    counts = result.summary()["counts"]
    states = {f"trials.{state}": count for state, count in counts.items()}
    return {**result.best.metrics, result.metric: result.best.value, "trials": len(result.trials), **states}
