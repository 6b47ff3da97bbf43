"""The implementation of the components, in the step's process. The component functions are shims that call it.

Each function takes the arguments of the shim as KFP passes them, and returns the outputs of the shim.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trainjob import InvalidSpec, Problem, TrainJobError, TrainJobResult, TrainJobSpec
from trainjob._manifest.attempts import CancelAction
from trainjob._pages.documents.evaluation import with_evaluation
from trainjob._spec.arguments import STEP_RUNTIME
from trainjob._spec.reading import check_limits
from trainjob._spec.texts import as_text, with_texts
from trainjob._spec.validation import field_name
from trainjob._support.display import numeric
from trainjob._support.foreign import LARGE, mapping_of
from trainjob._support.signals import exiting, handled
from trainjob.data.options import STEPS, Step
from trainjob.registry.base import storable_metrics
from trainjob.tuning import Study
from trainjob_kfp import task_config
from trainjob_kfp.execution import (
    TRAINING_FIELDS,
    WORKSPACE,
    Execution,
    artifact_location,
    location,
    refused_fields,
)
from trainjob_kfp.exit_handler import stop_all
from trainjob_kfp.jobs import (
    AddToDocument,
    address_of,
    connect,
    finish_and_report,
    offered_report,
    run_job,
    unchanged,
    wait_options_of,
    write_job,
)
from trainjob_kfp.steplog import report_failures, write_line
from trainjob_kfp.studies import check_shared_key, metrics_of, run_study

Parameters = Mapping[str, Any]
Outcome = dict[str, Any]


def run_train(given: Parameters) -> tuple[str, dict[str, Any]]:
    """Run ``train``; return the model's URI and the result."""
    with report_failures():
        execution, parameters = _read(given)
        model = given["model"]
        fields, uri = _training_of(parameters, model.uri)
        spec = spec_of(execution, fields, parameters)
        result = run_job(execution, spec, parameters, Path(given["report"].path)).as_dict()
        _log_metrics(given["metrics"], result)
        _log_goodput(given["metrics"], result)
        # A separate entry for each metric: KFP's UI shows a dict as {"struct": …}.
        metrics = {f"metric.{name}": value for name, value in result["metrics"].items()}
        model.metadata |= {"uri": uri, "trainjob": result["name"], "trainjob_uid": result["uid"], **metrics}
        if address := address_of(result["namespace"], result["name"], result["uid"]):
            model.metadata["trainjob_url"] = address
        if uri != location(model.uri):
            _write_reference(model)
    return uri, result


def run_tune(given: Parameters) -> tuple[str, dict[str, Any]]:
    """Run ``tune``; return the URI of the best model and the result."""
    with report_failures():
        execution, parameters = _read(given)
        model = given["model"]
        study = Study.read(parameters["study"])
        check_shared_key(execution, parameters, parameters["outputs"])
        fields, models = _training_of(parameters, model.uri)
        template = spec_of(execution, fields, parameters)
        report = Path(given["report"].path)
        result, journal = run_study(execution, study, template, parameters, model_uri=model.uri, report=report)
        best = result.best
        uri = f"{models.rstrip('/')}/{best.number}"
        _log_metrics(given["metrics"], {"metrics": metrics_of(result)})
        metrics = {f"metric.{name}": value for name, value in best.as_dict()["metrics"].items()}
        chosen = {f"parameter.{name}": value for name, value in best.parameters.items()}
        model.metadata |= {"uri": uri, "trainjob": best.job, "trial": best.number, **chosen, **metrics}
        _write_reference(model)
    return uri, {**result.summary(), "journal": journal}


def _training_of(parameters: Parameters, model_uri: str) -> tuple[dict[str, Any], str]:
    """The fields of a training among the parameters of a component, and the location of its model."""
    names = (*TRAINING_FIELDS, "command", "args", "env", "inputs", "outputs")
    fields = with_texts({name: parameters[name] for name in names}, lambda _: True)
    inputs, outputs = ({name: location(uri) for name, uri in fields[each].items()} for each in ("inputs", "outputs"))
    uri = outputs.setdefault("model", artifact_location(model_uri))
    return fields | {"inputs": inputs, "outputs": outputs, "checkpoints": location(parameters["checkpoints"])}, uri


def run_wait(given: Parameters) -> dict[str, Any]:
    """Run ``wait``; return the result of the job, which the step never changes."""
    with report_failures():
        _, parameters = _read(given)
        options = wait_options_of(parameters)
        with connect(parameters) as client:
            ref = client.find(parameters["job"])
            write_job(client, ref)
            with offered_report(client):
                result = finish_and_report(client, ref, options, Path(given["report"].path)).as_dict()
        _log_metrics(given["metrics"], result)
        _log_goodput(given["metrics"], result)
    return result


def run_cleanup(given: Parameters) -> list[str]:
    """Run ``cleanup``; return the names of the jobs that were still running."""
    with report_failures():
        execution, parameters = _read(given)
        action: CancelAction = parameters["action"]
        if action not in ("suspend", "cancel"):
            raise InvalidSpec([Problem("action", f"is {action!r}", "give one of suspend, cancel")])
        # With kfp.local the placeholder is a number, but the jobs have the label of `execution.run`.
        run = execution.run if parameters["run_id"].isdigit() else parameters["run_id"]
        with connect(parameters) as client:
            stopped = stop_all(client, run, action, parameters["timeout"], own=run == execution.run)
        write_line(f"run {run}: " + (f"stopped {', '.join(stopped)}" if stopped else "no jobs were running"))
    return stopped


def run_initialize(what: Literal["dataset", "model"], given: Parameters) -> Outcome:
    """Run ``initialize_dataset`` or ``initialize_model``; return uri, digest, version, fresh."""
    with report_failures():
        execution, parameters = _read(given)
        artifact = given[what]
        in_pod = parameters["in_pod"]
        # In the pod, KFP's launcher uploads the artifact's path, so the step needs no permissions for the bucket.
        default_target = artifact.path if in_pod else artifact_location(artifact.uri)
        options = {
            "source": location(parameters["source"]),
            "target": location(parameters["target"]) or default_target,
            "digest": parameters["digest"],
            "include": parameters["include"],
            "exclude": parameters["exclude"],
        }
        if what == "model":
            options |= {"registry": parameters["registry"], "if_missing": parameters["if_missing"]}
        if in_pod:
            outcome = _in_pod("initialize", options)
            if outcome["uri"] and not parameters["target"]:
                outcome["uri"] = location(artifact.uri)
        else:
            program: Step = "initialize-dataset" if what == "dataset" else "initialize-model"
            outcome = _as_job(execution, program, options, parameters)
        _describe(artifact, outcome)
    return outcome


def run_evaluate(given: Parameters) -> tuple[str, str, bool, str, str, str, dict[str, Any]]:
    """Run ``evaluate_model``; return evaluation, digest, passed, rule, reason, champion_version, result."""
    with report_failures():
        execution, parameters = _read(given)
        artifact, function = given["evaluated"], given["function"]
        options = {
            "candidate": location(parameters["candidate"]),
            "dataset": location(parameters["dataset"]),
            "target": location(parameters["target"]) or artifact_location(artifact.uri),
            "champion": location(parameters["champion"]),
            "dataset_digest": parameters["dataset_digest"],
            "gate": parameters["gate"] or None,
            "code": parameters["code"],
            "registry": parameters["registry"],
            "function": function.get("name", ""),
            "function_source": function.get("source", ""),
            "command": [as_text(word) for word in parameters["command"]],
        }
        fields = {"runtime": parameters["runtime"] or STEP_RUNTIME, "image": parameters["image"]}
        read = cache(_read_evaluation)

        def add(done: TrainJobResult, document: dict[str, Any]) -> dict[str, Any]:
            found = read(str(done.outputs.get("uri", "")))
            return with_evaluation(document, found) if found else document

        done = _run_step(execution, "evaluate", options, parameters, fields, report=Path(given["report"].path), add=add)
        outputs = {name: str(done.outputs.get(name, "")) for name in ("uri", "digest", "rule", "reason", "champion")}
        passed = done.outputs.get("passed") is True
        result = done.as_dict()
        _log_metrics(given["metrics"], result)
        if found := read(outputs["uri"]):
            _log_evaluation(found["report"], given["metrics"], given["classification"])
        verdict = {name: outputs[name] for name in ("uri", "digest", "rule", "reason")} | {"passed": passed}
        _describe(artifact, verdict | {"trainjob": done.name, "trainjob_uid": done.uid})
        if not outputs["uri"].startswith(location(artifact.uri)):
            _write_reference(artifact)
    return outputs["uri"], outputs["digest"], passed, outputs["rule"], outputs["reason"], outputs["champion"], result


def _read_evaluation(uri: str) -> dict[str, Any]:
    """``report``, ``decision`` and ``uri`` of an evaluation; empty if this step cannot read it."""
    try:
        from trainjob.data.export_evaluation import Evaluation

        return {**mapping_of(Evaluation.read(uri).as_json(), uri, LARGE), "uri": uri}
    except (TrainJobError, ImportError) as error:
        # The job has read and written everything; this pod may have no access to its storage.
        write_line(f"this step cannot read {uri}, so the report and the artifact classification lack it: {error}")
        return {}


def _log_evaluation(report: Mapping[str, Any], metrics: Any, classification: Any) -> None:
    """Log the champion's metrics, the confusion matrix and the ROC curve of an evaluation report."""
    for name, each in report["metrics"].items():
        if each["champion"] is not None:
            metrics.log_metric(f"champion.{name}", each["champion"])
    if matrix := report["confusion"]:
        classification.log_confusion_matrix(matrix["labels"], matrix["counts"])
    if curve := report["roc"]:
        rates = curve["false_positive_rate"], curve["true_positive_rate"]
        classification.log_roc_curve(*rates, curve.get("threshold") or [0.0] * len(rates[0]))


def run_export(given: Parameters) -> Outcome:
    """Run ``export_model``; return uri, digest, version, promoted, reason."""
    with report_failures():
        execution, parameters = _read(given)
        artifact, metrics, base = given["exported"], parameters["metrics"], parameters["base_model"]
        origin: dict[str, Any] = {"run": {"kfp": execution.run}, "datasets": parameters["datasets"]}
        if base.get("uri") and base.get("digest") != "":  # it is empty after a fresh start
            origin["base_model"] = base
        history: dict[str, Any] = {}
        if isinstance(metrics.get("metrics"), dict):  # the result of `train`
            origin["trainjob"], history = _identity(metrics), metrics.get("history") or {}
            metrics = storable_metrics(metrics["metrics"], write_line)
        elif isinstance(best := metrics.get("best"), dict):  # the result of `tune`
            origin["trainjob"] = {"name": best["job"]}
            origin["study"] = {"key": metrics["key"], "trial": best["number"], "parameters": best["parameters"]}
            metrics = storable_metrics(best["metrics"], write_line)
        options = {
            "source": location(parameters["source"]),
            "target": location(parameters["target"]) or artifact_location(artifact.uri),
            "name": parameters["name"],
            "export_id": execution.key,
            "registry": parameters["registry"],
            "metrics": metrics,
            "alias": parameters["alias"],
            "metric": parameters["metric"],
            "mode": parameters["mode"],
            "min_improvement": float(parameters["min_improvement"]),
            "provenance": origin | parameters["provenance"],
            "history": history,
            "evaluation": location(parameters["evaluation"]),
            "allow_pickle": parameters["allow_pickle"],
        }
        if parameters["in_pod"]:
            outcome = _in_pod("export", options)
        else:
            outcome = _as_job(execution, "export", options, parameters)
        _describe(artifact, outcome)
        if not outcome["uri"].startswith(location(artifact.uri)):
            _write_reference(artifact)
    return outcome


def _read(given: Parameters) -> tuple[Execution, dict[str, Any]]:
    execution = Execution.of(sys.argv)
    for name, value in given.items():
        check_limits(value, name)
    return execution, {name: execution.plain(_plain(value)) for name, value in given.items()}


def _plain(value: Any) -> Any:
    """`value`; a ``dsl.TaskConfig`` as a mapping of its fields."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def spec_of(execution: Execution, fields: Parameters, parameters: Parameters) -> TrainJobSpec:
    """The spec of a job: the parameters of the component, the fields of its ``spec``, and the settings of the task."""
    given = {name: value for name, value in fields.items() if value not in ("", 0, [], {})}
    added = with_texts({field_name(name): value for name, value in parameters["spec"].items()}, lambda _: True)
    problems = refused_fields(added, fields)
    if "api_version" in added or "kind" in added:
        problems = [Problem("spec", "is a complete TrainJob object", "give fields of a TrainJobSpec (torchtune, …)")]
    if fields.get("num_nodes") == 0:
        problems.append(Problem("num_nodes", "is 0", "give 1 or more"))
    if problems:
        raise InvalidSpec(problems)
    config = parameters["task_config"] or {}
    if not execution.local and (problems := task_config.lost_resources(config, execution.plain(execution.parameters))):
        raise InvalidSpec(problems)
    if not execution.local and _workspace_is_missing(given, added, config):
        raise InvalidSpec([_NO_WORKSPACE])
    given, added = task_config.apply(config, given, added)
    return TrainJobSpec.parse({**given, **added})


_NO_WORKSPACE = Problem(
    WORKSPACE,
    "is used, but KFP has not mounted the workspace",
    "KFP mounts it only if a text parameter has its path: use an output of an earlier step, or a parameter of the "
    "pipeline, that has the path as one value in inputs, outputs, checkpoints or spec",
)


def _workspace_is_missing(given: Parameters, added: Parameters, config: Parameters) -> bool:
    """Whether the job uses the path of the workspace without a mount, and so its container's file system instead."""
    patches = added.get("runtime_patches") or []
    named = json.dumps([given, {**added, "runtime_patches": []}], default=str)
    return WORKSPACE in named and WORKSPACE not in json.dumps([config.get("volume_mounts"), patches], default=str)


def _as_job(execution: Execution, program: Step, options: Parameters, parameters: Parameters) -> Outcome:
    """Run ``python -m trainjob.data`` as a TrainJob of one node; return its outputs."""
    others = {"runtime": STEP_RUNTIME, **parameters["spec"]}
    result = _run_step(execution, program, options, {**parameters, "spec": others}, {})
    return _outcome({**result.outputs, **{name: result.metrics.get(name) for name in ("bytes", "files")}}, result)


def _run_step(
    execution: Execution,
    program: Step,
    options: Parameters,
    parameters: Parameters,
    fields: Parameters,
    *,
    report: Path | None = None,
    add: AddToDocument = unchanged,
) -> TrainJobResult:
    """Run ``python -m trainjob.data`` as a TrainJob with these fields of its spec."""
    chosen = STEPS[program](**options)
    chosen.check()
    env = with_texts({"env": parameters["env"]}, lambda _: True)
    spec = spec_of(execution, {"command": chosen.to_command(), **env, **fields}, parameters)
    return run_job(execution, spec, parameters, report, add)


def _in_pod(step: Literal["initialize", "export"], options: Parameters) -> Outcome:
    """Do the same work in this process."""
    from trainjob.data import export, initialize

    arguments: dict[str, Any] = {name: value if value != "" else None for name, value in options.items()}
    with handled(exiting):
        done = (initialize if step == "initialize" else export)(**arguments, progress=write_line)
    return _outcome(asdict(done))


def _outcome(outputs: Mapping[str, Any], job: TrainJobResult | None = None) -> Outcome:
    """The outputs of a step; an unknown text is empty."""
    known: Outcome = {name: outputs.get(name) or "" for name in ("uri", "digest", "version", "name", "reason")}
    known |= {name: outputs[name] is True for name in ("fresh", "promoted") if name in outputs}
    known |= {name: int(outputs[name]) for name in ("bytes", "files") if outputs.get(name) is not None}
    return known | ({"trainjob": job.name, "trainjob_uid": job.uid} if job else {})


def _describe(artifact: Any, outcome: Outcome) -> None:
    artifact.metadata |= {name: value for name, value in outcome.items() if value != ""}


def _write_reference(artifact: Any) -> None:
    """Write a file with the metadata, including the location of the content, to the artifact's path.

    The artifact keeps KFP's URI: any other URI fails the step, or the step that reads the artifact (launcher of KFP
    2.17). Without a file the reading step would fail at its first access, without an explanation.
    """
    path = Path(artifact.path)
    with suppress(FileExistsError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as reference:
            json.dump(artifact.metadata, reference, indent=1)


def _log_metrics(metrics: Any, result: Mapping[str, Any]) -> None:
    """Metrics that are finite numbers; KFP's launcher cannot read others."""
    for name, value in numeric(result["metrics"]).items():
        metrics.log_metric(f"metric.{name}" if name in _PROPERTIES else name, value)


def _log_goodput(metrics: Any, result: Mapping[str, Any]) -> None:
    """``goodput``, ``seconds.<activity>`` of what occurred, and the number of ``stragglers``, if there are some.

    A metric of the training with such a name is kept.
    """
    known: dict[str, float] = {}
    if spent := result.get("goodput"):
        known = {"goodput": spent["ratio"]}
        known |= {f"seconds.{name}": seconds for name, seconds in spent["seconds"].items() if seconds}
    if slow := result.get("stragglers"):
        known["stragglers"] = len(slow)
    for name, value in known.items():
        if name not in result["metrics"]:
            metrics.log_metric(name, value)


_PROPERTIES = ("display_name", "store_session_info", "_kfp_workspace")
"""Properties of an artifact that KFP (2.17) itself uses; its launcher does not overwrite a metric of that name."""


def _identity(result: Mapping[str, Any]) -> dict[str, Any]:
    return {name: result.get(name) for name in ("namespace", "name", "uid", "attempt")}
