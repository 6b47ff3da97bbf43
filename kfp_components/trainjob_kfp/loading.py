"""Load components from YAML with their task-config passthroughs, which KFP's loader drops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kfp import components
from kfp.dsl.component_task_config import TaskConfigField, TaskConfigPassthrough

from trainjob._support.foreign import Limits
from trainjob._support.foreign_yaml import documents_of
from trainjob._support.kube_objects import mapping, mappings
from trainjob_kfp.component import with_warnings

_LIMITS = Limits(16 << 20, values=500_000, of="a component")
_IMPORT = "trainjob_kfp.runtime"  # the source of every component of this package imports it


def load(source: str | Path) -> Any:
    """Load a component from compiled YAML, including its task-config passthroughs.

    ``kfp.components.load_component_from_text`` and ``_from_file`` of kfp 2.15 to 2.17 drop the passthroughs. GPUs,
    tolerations and volumes that are set on the component's tasks then silently apply to the step's pod only, and the
    TrainJob gets none.

    Args:
        source: A path, or the YAML itself.

    Raises:
        OSError: the file cannot be read.
        ValueError: the YAML is not a compiled component.
    """
    text = source if isinstance(source, str) and "\n" in source else Path(source).read_text(encoding="utf-8")
    component = with_warnings(components.load_component_from_text(text), from_this_package=_IMPORT in text)
    component.component_spec.task_config_passthroughs = _passthroughs(text)
    return component


def _passthroughs(text: str) -> list[TaskConfigPassthrough] | None:
    for document in documents_of(text, "the component", _LIMITS):
        for definition in mapping(document, "components").values():
            if given := mappings(definition, "taskConfigPassthroughs"):
                return [
                    TaskConfigPassthrough(TaskConfigField[each["field"]], bool(each.get("applyToTask")))
                    for each in given
                ]
    return None
