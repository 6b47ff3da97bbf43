"""Reads the spec of a job from a file and from options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import click
from pydantic.alias_generators import to_camel

from trainjob._spec import TrainJobSpec
from trainjob._spec.arguments import STEP_RUNTIME
from trainjob._spec.reading import load_spec

_ADDED_TO = ("env", "inputs", "outputs", "labels")


def fields_of(options: Mapping[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """The fields of a spec that `trainjob.cli.job_options.spec_options` set, and the command behind ``--``."""
    fields = {name: dict(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {name: value for name, value in {**fields, "command": list(command)}.items() if value}


def parse_spec(source: IO[bytes] | None, fields: Mapping[str, Any]) -> TrainJobSpec:
    """The spec in the file `source`; `fields` add to its values, or replace them.

    Raises:
        UsageError: there is neither a file nor a field.
        InvalidSpec: the spec is invalid; lists every problem.
    """
    if source is None and not fields:
        raise click.UsageError("nothing to run: give a SPEC file, or --runtime … -- COMMAND")
    loaded = load_spec(source, name_of(source)) if source is not None else {}
    if source is None and "command" in fields:
        fields = {"runtime": STEP_RUNTIME, **fields}
    if fields and ("apiVersion" in loaded or "kind" in loaded):
        return TrainJobSpec.parse({"manifest": loaded, **fields})
    for name, value in fields.items():
        present = loaded.pop(to_camel(name), None) if to_camel(name) != name else loaded.get(name)
        loaded[name] = _merged(loaded.get(name, present), value) if name in _ADDED_TO else value
    if "command" in fields:
        loaded.pop("args", None)
    return TrainJobSpec.parse(loaded)


def _merged(present: Any, more: Mapping[str, str]) -> Any:
    if isinstance(present, list):  # environment as Kubernetes writes it
        kept = [item for item in present if not (isinstance(item, dict) and item.get("name") in more)]
        return [*kept, *({"name": name, "value": value} for name, value in more.items())]
    return {**present, **more} if isinstance(present, dict) else dict(more)


def name_of(source: IO[bytes]) -> str:
    """The name of a file, for errors and commands."""
    path = getattr(source, "name", None)
    return path if isinstance(path, str) and path not in ("-", "<stdin>") else "standard input"


def slug_of(source: IO[bytes] | None, command: Sequence[str]) -> str:
    """A short name of the work: the name of the spec's file, or of the script."""
    scripts = [word for word in command if word.endswith((".py", ".sh"))] or list(command[:1])
    path = getattr(source, "name", None)
    if isinstance(path, str) and path not in ("-", "<stdin>"):
        scripts = [path]
    return Path(scripts[0]).stem if scripts else "job"
