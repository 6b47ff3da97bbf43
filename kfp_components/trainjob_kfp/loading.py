"""Load components from YAML with what KFP's own loader leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from kfp import components
from kfp.dsl.component_task_config import TaskConfigField, TaskConfigPassthrough

from trainjob_kfp.component import noticing

_OWN = "trainjob_kfp.runtime"  # which the source of each of this package's components imports


def load(source: str | Path) -> Any:
    """A component from compiled YAML, its task-config passthroughs included.

    ``kfp.components.load_component_from_text`` and ``_from_file`` of kfp 2.15 to 2.17 do not read them back, so that
    GPUs, tolerations and volumes that are set on the component's tasks stay with the pod of the step, without a word,
    and the TrainJob gets none.

    Args:
        source: A path, or the YAML itself.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no compiled component.
    """
    text = source if isinstance(source, str) and "\n" in source else Path(source).read_text(encoding="utf-8")
    component = noticing(components.load_component_from_text(text), own=_OWN in text)
    component.component_spec.task_config_passthroughs = _passthroughs(text)
    return component


def _passthroughs(text: str) -> list[TaskConfigPassthrough] | None:
    for document in yaml.safe_load_all(text):
        for definition in (document.get("components") or {}).values():
            if given := definition.get("taskConfigPassthroughs"):
                return [
                    TaskConfigPassthrough(TaskConfigField[each["field"]], bool(each.get("applyToTask")))
                    for each in given
                ]
    return None
