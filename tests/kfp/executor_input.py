"""What KFP's driver gives to a step: its parameters with defaults, and where its outputs are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Artifacts = Mapping[str, list[Any]]


def executor_input(
    definition: Mapping[str, Any], root: Path, parameters: Mapping[str, Any], given: Artifacts, logs: Artifacts
) -> dict[str, Any]:
    """The executor input of a step.

    Args:
        definition: Inputs and outputs of the component, as compiled.
        root: Where the outputs of this execution are written.
        parameters: Its input parameters.
        given: Its input artifacts.
        logs: Output artifacts that the component does not declare.
    """
    inputs, outputs = definition["inputDefinitions"], definition["outputDefinitions"]
    defaults = {name: each["defaultValue"] for name, each in inputs["parameters"].items() if "defaultValue" in each}
    made = {
        name: [{"name": name, "type": each["artifactType"], "uri": str(root / name)}]
        for name, each in outputs.get("artifacts", {}).items()
    }
    return {
        "inputs": {
            "parameterValues": {**defaults, **parameters},
            "artifacts": {name: {"artifacts": each} for name, each in given.items()},
        },
        "outputs": {
            "parameters": {name: {"outputFile": str(root / name)} for name in outputs.get("parameters", {})},
            "artifacts": {name: {"artifacts": each} for name, each in {**logs, **made}.items()},
            "outputFile": str(root / "output_metadata.json"),
        },
    }
