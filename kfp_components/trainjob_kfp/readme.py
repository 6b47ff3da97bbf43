"""Generates the README of a component, with the sections of kubeflow/pipelines-components."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import docstring_parser
import yaml

_TYPES = {
    "BOOLEAN": "bool",
    "LIST": "list",
    "NUMBER_DOUBLE": "float",
    "NUMBER_INTEGER": "int",
    "STRING": "str",
    "STRUCT": "dict",
    "TASK_CONFIG": "dsl.TaskConfig",
}


def readme(component: Any, directory: Path, compiled: Path) -> str:
    """The text of ``README.md``: names and descriptions from the docstring, types and defaults from the YAML.

    Args:
        component: The component.
        directory: Directory of the component, with ``metadata.yaml`` and ``example_pipelines.py``.
        compiled: The compiled YAML of the component.
    """
    metadata = yaml.safe_load((directory / "metadata.yaml").read_text(encoding="utf-8"))
    (definition,) = yaml.safe_load(compiled.read_text(encoding="utf-8"))["components"].values()
    docstring = docstring_parser.parse(component.python_func.__doc__)
    example = (directory / "example_pipelines.py").read_text(encoding="utf-8").rstrip()
    parts = [
        "<!-- Written by `python -m trainjob_kfp.compile`. -->",
        f"# {metadata['name']}",
        f"> Stability: {metadata['stability']}",
        "## Overview",
        _plain(f"{docstring.short_description} {docstring.long_description or ''}"),
        "## Inputs",
        _table(["Parameter", "Type", "Default", "Description"], _inputs(docstring, definition)),
        "## Outputs",
        _table(["Name", "Type", "Description"], _outputs(docstring, definition)),
        "## Usage Examples",
        f"```python\n{example}\n```",
        "## Metadata",
        "\n".join(_metadata(metadata)),
        "## Additional Resources",
        "\n".join(f"- **{_title(name)}**: <{link}>" for name, link in metadata["links"].items()),
    ]
    return "\n\n".join(parts) + "\n"


def _inputs(docstring: docstring_parser.Docstring, definition: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    parameters = definition["inputDefinitions"]["parameters"]
    for each in docstring.params:
        if parameter := parameters.get(each.arg_name):
            kind, default = _TYPES[parameter["parameterType"]], "Required"
            if kind == "dsl.TaskConfig":
                default = "set by KFP"
            elif "defaultValue" in parameter:
                default = f"`{json.dumps(_integral(parameter['defaultValue']))}`"
            yield f"`{each.arg_name}`", f"`{kind}`", default, _plain(each.description or "")


def _outputs(docstring: docstring_parser.Docstring, definition: Mapping[str, Any]) -> Iterable[Sequence[str]]:
    outputs = definition["outputDefinitions"]
    for each in docstring.params:
        if artifact := outputs.get("artifacts", {}).get(each.arg_name):
            yield f"`{each.arg_name}`", f"`{artifact['artifactType']['schemaTitle']}`", _plain(each.description or "")
    for name, parameter in outputs.get("parameters", {}).items():
        yield f"`{name}`", f"`{_TYPES[parameter['parameterType']]}`", _plain(parameter.get("description", ""))


def _metadata(metadata: Mapping[str, Any]) -> Iterable[str]:
    yield f"- **Name**: {metadata['name']}"
    yield f"- **Stability**: {metadata['stability']}"
    yield "- **Dependencies**:"
    for kind, dependencies in metadata["dependencies"].items():
        if dependencies:
            yield f"  - {_title(kind)}:"
            yield from (f"    - {each['name']} {each['version']}" for each in dependencies)
    yield f"- **Tags**: {', '.join(metadata['tags'])}"
    yield f"- **Last Verified**: {metadata['lastVerified']:%Y-%m-%d}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def _plain(text: str) -> str:
    """The text on one line, with Markdown's special characters escaped."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _integral(value: Any) -> Any:
    """`value` as int where it is integral: KFP's YAML has all numbers as floats."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
