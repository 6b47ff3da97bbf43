"""Checks the literal arguments of a component when the pipeline is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kfp.dsl.pipeline_channel import PipelineChannel

from trainjob import ConfigurationError, InvalidSpec, TrainJobSpec, names
from trainjob._backends import BACKENDS
from trainjob._spec.arguments import ARGUMENTS, STEP_RUNTIME, wrong_value
from trainjob._spec.function import Function
from trainjob._spec.literals import (
    check_literals,
    has_open,
)
from trainjob._spec.reading import check_limits
from trainjob._spec.texts import as_text
from trainjob._spec.validation import field_name
from trainjob.data.options import STEPS, Step
from trainjob.tuning import Study
from trainjob.tuning.template import check_template
from trainjob_kfp.channels import check_channels
from trainjob_kfp.execution import TRAINING_ARGUMENTS, TRAINING_FIELDS, location, refused_fields

_PLACEHOLDERS = ("{{channel:", "{{$.")  # the first: parameters and step outputs inside a text; the second: of the run
_STEPS: dict[str, Step] = {
    "initialize-dataset": "initialize-dataset",
    "initialize-model": "initialize-model",
    "evaluate-model": "evaluate",
    "export-model": "export",
}
_REQUIRED = {
    "tune": ("study",),
    **dict.fromkeys(("initialize-dataset", "initialize-model"), ("source",)),
    "evaluate-model": ("candidate", "dataset"),
    "export-model": ("source", "name"),
    "wait": ("job", "run_id"),
    "cleanup": ("run_id",),
}
_ALLOWED: dict[str, tuple[str, ...]] = {
    "action": ("suspend", "cancel"),
    "backend": BACKENDS,
}
_OPTIONS = (
    "source",
    "target",
    "digest",
    "if_missing",
    "registry",
    "name",
    "alias",
    "metric",
    "mode",
    "min_improvement",
    "evaluation",
    "metrics",
)
_EVALUATION = (
    "candidate",
    "champion",
    "dataset",
    "dataset_digest",
    "target",
    "gate",
    "registry",
    "command",
    "function",
)
_UNKNOWN = "file:///evaluation"


def check_arguments(component: str, arguments: Mapping[str, Any]) -> None:
    """Check the literals among the arguments of a component.

    Args:
        component: Name of the component, such as ``export-model``.
        arguments: The arguments in the pipeline.

    Raises:
        TrainJobError: an argument is invalid; the message has the valid form.
    """
    for name, value in arguments.items():
        check_limits(value, name)
    check_channels(arguments)
    # Do not compare a channel: `==` returns a condition object, which is true.
    given = {
        name: value
        for name, value in arguments.items()
        if is_runtime_value(value) or value not in (None, "", 0, [], {})
    }
    for name in _REQUIRED.get(component, ()):
        if name in arguments and name not in given:
            raise ConfigurationError(f"{component}: {name} is empty; give it a value")
    for name, value in given.items():
        if not is_runtime_value(value):
            _check(name, value)
    if component == "wait" and not is_runtime_value(given["job"]):
        names.job(str(given["job"]))
    if component in {"train", "tune", *_STEPS}:
        _check_study(given.get("study"), _check_spec(component, given))
    if component in _STEPS:
        names_of = _EVALUATION if component == "evaluate-model" else _OPTIONS
        options = {name: given.get(name) for name in names_of}
        known = {name: value for name, value in options.items() if not has_open(value, is_runtime_value)}
        if "metrics" in (known.get("metrics") or {}):  # the result of `train`
            del known["metrics"]
        if is_runtime_value(options.get("evaluation")):  # the rules that exclude each other are still checked
            known["evaluation"] = _UNKNOWN
        STEPS[_STEPS[component]].known(known).check()


def source_of(function: Callable[..., Any]) -> dict[str, str]:
    """Name and source of a function that an author gives to a component.

    Raises:
        ConfigurationError: the function cannot run in a job.
    """
    try:
        return Function.of(function, arguments="").model_dump()
    except ValueError as error:
        raise ConfigurationError(f"function {error}") from None


def _check(name: str, value: object) -> None:
    """Check an argument that has the same meaning in all components."""
    if name in ARGUMENTS and (wrong := wrong_value(name, value)):
        raise ConfigurationError(f"{name} {wrong}")
    if name in _ALLOWED and value not in _ALLOWED[name]:
        raise ConfigurationError(f"{name} must be {' or '.join(map(repr, _ALLOWED[name]))}, not {value!r}")
    if name.endswith("timeout") and isinstance(value, int) and value < 0:
        raise ConfigurationError(f"{name} is {value!r}; give a number of seconds, 0 or more")
    if name == "namespace":
        names.namespace(str(value))


def is_runtime_value(value: object) -> bool:
    """Whether a value is known only in the run: a pipeline parameter, an output of a step, or a placeholder."""
    if isinstance(value, PipelineChannel):
        return True
    return isinstance(value, str) and any(placeholder in value for placeholder in _PLACEHOLDERS)


def _check_study(study: object, template: TrainJobSpec | None) -> None:
    """Check a study, if there is one and it has no value that is known only in the run, and its template."""
    if study is None or has_open(study, is_runtime_value):
        return
    read = Study.read(study)
    if template is not None:
        check_template(read, template)


def _number_as_text(value: Any) -> Any:
    return as_text(value) if isinstance(value, int | float) else value


def _check_spec(component: str, given: Mapping[str, Any]) -> TrainJobSpec | None:
    fields: dict[str, Any] = {name: given[name] for name in TRAINING_FIELDS if name in given}
    for name in ("command", "args"):
        if isinstance(given.get(name), list):
            fields[name] = [_number_as_text(each) for each in given[name]]
    if isinstance(given.get("env"), Mapping):
        fields["env"] = {name: _number_as_text(value) for name, value in given["env"].items()}
    for name in ("inputs", "outputs"):
        if isinstance(given.get(name), Mapping):
            fields[name] = {key: uri if is_runtime_value(uri) else location(uri) for key, uri in given[name].items()}
    if "checkpoints" in given:
        value = given["checkpoints"]
        fields["checkpoints"] = value if is_runtime_value(value) else location(value)
    if component not in {"train", "tune"}:
        fields.setdefault("runtime", STEP_RUNTIME)
    if isinstance(given.get("spec"), Mapping):
        if component in {"train", "tune"} and (refused := refused_fields(given["spec"], TRAINING_ARGUMENTS)):
            raise InvalidSpec(refused)
        fields |= {field_name(name): value for name, value in given["spec"].items()}
    return check_literals(fields, is_runtime_value)
