"""The spec of the trials and the parameters of one trial -> the spec of its TrainJob.

A parameter ``lr`` reaches the script as the environment variable ``KUBEFLOW_TRAINER_OPT_LR``, the name that Kubeflow
Trainer's OptimizationJob uses, and, where the author wrote ``$(KUBEFLOW_TRAINER_OPT_LR)``, in command, args and env.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from trainjob._spec import TrainJobSpec
from trainjob.data.locations import join
from trainjob.errors import InvalidStudy, Problem
from trainjob.tuning.study import Parameters, Scalar, Study

PREFIX = "KUBEFLOW_TRAINER_OPT_"
TRIAL = "TRAINJOB_TRIAL"
"""Environment variable with the number of the trial."""

_USED = re.compile(r"(?<!\$)\$\((KUBEFLOW_TRAINER_OPT_\w+)\)")


def check_template(study: Study, template: TrainJobSpec) -> None:
    """Refuse a template that uses parameters that the space does not have.

    Raises:
        InvalidStudy: The template uses an unknown parameter, or sets one of the variables itself.
    """
    known = {variable(name) for name in study.space}
    problems = [
        Problem(
            f"template.{path}", f"uses {used}, but the space has no such parameter", f"use {', '.join(sorted(known))}"
        )
        for path, text in _texts(template)
        for used in sorted({*_USED.findall(text)} - known)
    ]
    problems += [
        Problem(f"template.env.{name}", "is set by the study", "remove it")
        for name in template.env
        if name in known or name == TRIAL
    ]
    if template.manifest is not None:
        problems.append(Problem("template.manifest", "cannot be a template", "write the fields of the spec"))
    if problems:
        raise InvalidStudy(problems)


def unused(study: Study, template: TrainJobSpec) -> str:
    """A hint for people about parameters that command, args and env leave out while they use others; empty if none.

    No error: a script may read them from its environment.
    """
    used = {each for _, text in _texts(template) for each in _USED.findall(text)}
    left = [variable(name) for name in study.space if variable(name) not in used]
    if not used or not left:
        return ""
    return f"the template does not use {', '.join(left)}: the script must read that from its environment"


def spec_of(template: TrainJobSpec, number: int, parameters: Parameters) -> TrainJobSpec:
    """The spec of one trial.

    Words of command and args that use a parameter that does not apply are left out. Each trial has its own directory
    below the outputs of the template.
    """
    values = {variable(name): text_of(value) for name, value in parameters.items()}
    command, args = (
        [word for word in words if {*_USED.findall(word)} <= values.keys()]
        for words in (template.command, template.args)
    )
    env = {name: value for name, value in template.env.items() if not isinstance(value, str) or _applies(value, values)}
    fields: dict[str, Any] = {
        "env": {**values, TRIAL: str(number), **env},
        "command": command,
        "args": args,
        "outputs": {name: join(uri, str(number)) for name, uri in template.outputs.items()},
    }
    return template.model_copy(update=fields)


def variable(name: str) -> str:
    """The environment variable of a parameter."""
    return PREFIX + name.upper()


def text_of(value: Scalar) -> str:
    """A value as text: bools as in JSON, numbers exactly."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _applies(text: str, values: dict[str, str]) -> bool:
    return {*_USED.findall(text)} <= values.keys()


def _texts(template: TrainJobSpec) -> Iterator[tuple[str, str]]:
    for path, words in (("command", template.command), ("args", template.args)):
        yield from ((f"{path}[{number}]", word) for number, word in enumerate(words))
    yield from ((f"env.{name}", value) for name, value in template.env.items() if isinstance(value, str))
