"""The programs of ``python -m trainjob.data`` as commands of TrainJobs of one node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from trainjob.settings import Settings

STEP_RUNTIME = "trainjob-step"
"""Runtime of the steps around training; its image has this package with the extras for storage and registries."""

Step = Literal["initialize-dataset", "initialize-model", "export"]


def step_command(step: Step, options: Mapping[str, Any]) -> list[str]:
    """The command of a TrainJob that runs `step`.

    Args:
        step: Which program.
        options: Arguments of `trainjob.data.initialize` or `export`, by name. What is None, False or empty is left
            out, a list is given once for each item, a mapping as JSON. Without a ``registry``, the one of this process
            is named, so that the step's pod needs no setting of its own.
    """
    command = ["python", "-m", "trainjob.data", step]
    given = {**options, "registry": options.get("registry") or Settings().registry}
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list | tuple) else [value]:
            if each is True:
                command.append(option)
            elif each not in (None, False, "", {}):
                text = (
                    json.dumps(each, sort_keys=True, separators=(",", ":")) if isinstance(each, Mapping) else str(each)
                )
                # One argument, so that a value may begin with a dash; "$" is Kubernetes' own in commands.
                command.append(f"{option}={text.replace('$', '$$')}")
    return command
