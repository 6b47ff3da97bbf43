"""Checks the literals of a spec while a workflow is parsed, before templates and results of other steps are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainjob._spec import torchtune
from trainjob._spec.reading import check_limits
from trainjob._spec.trainjob import TrainJobSpec

IsOpen = Callable[[object], bool]
"""Whether a single value is set later: a template, the result of another step."""

_BY_ENTRY = (
    *("env", "inputs", "outputs", "labels", "annotations", "func_args", "command", "args", "pod", "runtime_patches"),
    *("packages_to_install", "pip_index_urls", "resources_per_node"),
)
"""Fields whose entries are checked one by one; any other field is checked if it is completely known."""
_OF_TORCHTUNE = ("runtime", "initializer", "args", "num_nodes", "num_proc_per_node", "resources_per_node")

_OF_ON_RETRY = ("num_nodes", "resources_per_node")
_OF_FUNC = ("func", "func_args", "packages_to_install", "pip_index_urls")


def check_literals(fields: Mapping[str, Any], is_open: IsOpen) -> TrainJobSpec | None:
    """Check the known fields of a spec.

    Args:
        fields: Fields of a `TrainJobSpec`, or a whole TrainJob object.
        is_open: Which values, or parts of them, are set later.

    Returns:
        The spec without values that are set later; None for a whole object that has such values.

    Raises:
        InvalidSpec: With every problem that no later value can solve.
    """
    check_limits(fields)
    if "apiVersion" in fields or "kind" in fields:
        return None if has_open(fields, is_open) else TrainJobSpec.parse(fields)
    known = {name: _known(value, is_open) for name, value in fields.items() if not _is_hidden(name, value, is_open)}
    if "pod" in known:
        known["pod"] = _known_pod(fields["pod"], is_open)
    if fields.get("runtime") is not None:
        known.setdefault("runtime", "not-known-yet")
    if any(has_open(fields.get(name), is_open) for name in _OF_TORCHTUNE):
        known.pop("torchtune", None)
        if known.get("command") == torchtune.COMMAND:
            del known["command"]
    if any(has_open(fields.get(name), is_open) for name in _OF_ON_RETRY):
        known.pop("on_retry", None)
    arguments = fields.get("func_args") or {}
    if is_open(arguments) or has_open([*arguments], is_open):  # any parameter may get its value later
        known = {name: value for name, value in known.items() if name not in _OF_FUNC}
    elif isinstance(arguments, Mapping) and arguments:
        known["func_args"] = dict.fromkeys(arguments) | known["func_args"]
    return TrainJobSpec.parse(known)


def has_open(value: object, is_open: IsOpen) -> bool:
    """Whether any part of a value is set later."""
    if is_open(value):
        return True
    if isinstance(value, Mapping):
        return any(has_open(part, is_open) for pair in value.items() for part in pair)
    return isinstance(value, list | tuple) and any(has_open(part, is_open) for part in value)


def _is_hidden(name: str, value: object, is_open: IsOpen) -> bool:
    return is_open(value) or (name not in _BY_ENTRY and has_open(value, is_open))


def _known_pod(pod: Any, is_open: IsOpen) -> Any:
    """The known fields of a pod: without its containers where only a run knows its volumes, which they mount."""
    if not isinstance(pod, Mapping):
        return pod
    parts = {name: _known_pod(part, is_open) if name == "spec" else part for name, part in pod.items()}
    if has_open(pod.get("volumes"), is_open):
        parts = {name: part for name, part in parts.items() if "ontainers" not in name}
    return _known(parts, is_open)


def _known(value: Any, is_open: IsOpen) -> Any:
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if not has_open([name, part], is_open)}
    if isinstance(value, list | tuple):
        return [part for part in value if not has_open(part, is_open)]
    return value
