"""The programs of ``python -m trainjob.data`` as commands of TrainJobs of one node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from trainjob.settings import Settings

STEP_RUNTIME = "trainjob-step"
"""Runtime of the steps around training. Its image has trainjob with the extras for storage and registries."""

Step = Literal["initialize-dataset", "initialize-model", "evaluate", "export"]


def step_command(step: Step, options: Mapping[str, Any]) -> list[str]:
    """The command of a TrainJob that runs `step`.

    Args:
        step: The program.
        options: Arguments of `trainjob.data.initialize`, `evaluate` or `export`, by name. None, False and empty values
            are left out, lists become one option per item, mappings JSON. ``command`` follows the options. Without
            ``registry``, this process's registry is passed, so that the step's pod needs no setting.
    """
    command = ["python", "-m", "trainjob.data", step]
    given = {**options, "registry": options.get("registry") or Settings().registry}
    words = given.pop("command", None) or ()
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                command.append(option)
            elif each not in (None, False, "", {}):
                text = (
                    json.dumps(each, sort_keys=True, separators=(",", ":")) if isinstance(each, Mapping) else str(each)
                )
                # One argument, so that a value may begin with a dash. Kubernetes expands "$" in commands.
                command.append(f"{option}={text.replace('$', '$$')}")
    return [*command, "--", *(str(word).replace("$", "$$") for word in words)] if words else command
