"""The values of other tasks and of the pipeline inside the arguments of a component, when a pipeline is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kfp.dsl.for_loop import Collected, LoopArgumentVariable, LoopParameterArgument
from kfp.dsl.pipeline_channel import (
    PipelineArtifactChannel,
    PipelineChannel,
    extract_pipeline_channels_from_string,
)
from kfp.dsl.pipeline_context import Pipeline
from kfp.dsl.pipeline_task import PipelineTask
from kfp.dsl.types.type_utils import is_parameter_type

from trainjob import ConfigurationError
from trainjob._spec.texts import EXACT
from trainjob_kfp.execution import ADDED, REFERENCE, reference

# KFP's own pattern does not match the types of artifacts, which it therefore leaves as text (kfp 2.17).
_IN_TEXT = re.compile(r"\{\{channel:task=([^;]*);name=([^;]*);type=(.*?);\}\}", re.DOTALL)
_TASK_IN_TEXT = re.compile(r"<kfp\.dsl\.pipeline_task\.PipelineTask object at 0x\w+>")


def check_channels(arguments: Mapping[str, Any]) -> None:
    """Refuse what KFP cannot pass inside an argument: it would arrive as ``null``, as a placeholder or changed.

    Raises:
        ConfigurationError: With the value to give instead.
    """
    for name, value in arguments.items():
        for path, part in _parts(value, name):
            _check_part(path, part)


def pass_by_reference(task: Any) -> None:
    """Let the step insert the values of channels that are inside of its arguments.

    KFP inserts them as they are into the JSON of the arguments (kubeflow/pipelines#4242): a quote, a backslash or a
    line break of a value makes the JSON invalid or another text, and kfp.local writes ``2.0`` for 2. A value that is
    the whole of a parameter arrives unchanged, so each becomes a parameter, and the argument refers to it by name.
    `trainjob_kfp.execution.Execution.plain` inserts the values.

    Args:
        task: A task of a pipeline; its inputs are changed.
    """
    added: dict[str, Any] = {}
    for name, value in task.inputs.items():
        if not isinstance(value, PipelineChannel):
            task.inputs[name] = _referring(value, added)
    task.inputs.update(added)
    task.channel_inputs[:] = [each for each in task.inputs.values() if isinstance(each, PipelineChannel)]


def _referring(value: Any, added: dict[str, Any]) -> Any:
    if isinstance(value, PipelineChannel):
        name = f"{ADDED}{value.full_name}"
        added[name] = value
        return reference(name)
    if isinstance(value, str):
        for channel in extract_pipeline_channels_from_string(value):
            value = value.replace(channel.pattern, _referring(_of_loop(channel), added))
        return value
    if isinstance(value, Mapping):
        return {_referring(name, added): _referring(part, added) for name, part in value.items()}
    return [_referring(part, added) for part in value] if isinstance(value, list | tuple) else value


def _of_loop(channel: PipelineChannel) -> PipelineChannel:
    """The part of a loop's item for a channel that was read from text, which has lost what it is a part of."""
    for group in Pipeline.get_default_pipeline().groups:
        item = getattr(group, "loop_argument", None)
        if isinstance(item, LoopParameterArgument):
            prefix = f"{item.full_name}{LoopArgumentVariable.SUBVAR_NAME_DELIMITER}"
            if channel.full_name == item.full_name:
                return item
            if channel.full_name.startswith(prefix):
                return LoopArgumentVariable(item, channel.full_name.removeprefix(prefix))
    return channel


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The value and everything inside of it, with paths."""
    yield path, value
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield f"{path}.{name}", name
            yield from _parts(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _parts(part, f"{path}[{i}]")


def _check_part(path: str, value: Any) -> None:
    if isinstance(value, PipelineTask):
        raise ConfigurationError(f"{path} is the task {value.name}, not an output of it: {_outputs_of(value)}")
    value = value.output if isinstance(value, Collected) else value
    if isinstance(value, PipelineArtifactChannel):
        _refuse_artifact(path, value.task, value.name)
    first = next(iter(value.values()), None) if isinstance(value, Mapping) else None
    if isinstance(first, PipelineChannel) and isinstance(first.task, PipelineTask) and first.task.outputs is value:
        raise ConfigurationError(f"{path} has all outputs of the task {first.task.name}: {_outputs_of(first.task)}")
    if isinstance(value, str):
        if _TASK_IN_TEXT.search(value):
            raise ConfigurationError(
                f"{path} has the text of a task object; give one of its outputs: task.outputs['…']"
            )
        for task, name, kind in _IN_TEXT.findall(value):
            if not is_parameter_type(kind) and "@" in kind:
                _refuse_artifact(path, Pipeline.get_default_pipeline().tasks.get(task), name)
        if found := REFERENCE.search(value):
            raise ConfigurationError(f"{path} has the text {found[0]!r}, which trainjob itself uses")
    if isinstance(value, int) and abs(value) > EXACT:
        raise ConfigurationError(f"{path} is {value}: KFP rounds whole numbers above 2^53; write it as text")


def _refuse_artifact(path: str, task: Any, name: str) -> None:
    found = task.outputs if isinstance(task, PipelineTask) else {}
    texts = [f"{name}_uri", "uri", {"evaluated": "evaluation", "metrics": "result"}.get(name, "")]
    of = f" of the task {task.name}" if found else ""
    advice = next((f"give outputs[{each!r}] of that task" for each in texts if each in found), "")
    advice = advice or (
        "return its URI from that component as text (-> str: return artifact.uri), and give that output"
        if getattr(task, "importer_spec", None) is None
        else "give the artifact_uri of the importer"
    )
    raise ConfigurationError(f"{path} is the artifact {name!r}{of}, which KFP cannot pass as text: {advice}")


def _outputs_of(task: Any) -> str:
    texts = [name for name, each in task.outputs.items() if not isinstance(each, PipelineArtifactChannel)]
    return (
        f"give one output: {' or '.join(f'outputs[{each!r}]' for each in texts)}"
        if texts
        else "it has no output of text"
    )
