"""Reads compiled pipelines as a KFP backend does: unknown fields are an error."""

# No `from __future__ import annotations`: KFP reads those of pipelines as objects.

from pathlib import Path
from typing import Any

import yaml
from google.protobuf import json_format
from kfp import compiler, dsl
from kfp.kubernetes.kubernetes_executor_config_pb2 import KubernetesExecutorConfig
from kfp.pipeline_spec import pipeline_spec_pb2


def validated(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pipeline spec of a compiled file, and its Kubernetes settings by executor."""
    spec, *platforms = yaml.safe_load_all(path.read_text())
    json_format.ParseDict(spec, pipeline_spec_pb2.PipelineSpec())
    executors: dict[str, Any] = {}
    for platform in platforms:
        json_format.ParseDict(platform, pipeline_spec_pb2.PlatformSpec())
        executors |= platform["platforms"]["kubernetes"].get("deploymentSpec", {}).get("executors", {})
    for each in executors.values():
        json_format.ParseDict(each, KubernetesExecutorConfig())
    return spec, executors


def compiled(pipeline: Any, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Compile a pipeline or a component, and read it."""
    compiler.Compiler().compile(pipeline, str(path))
    return validated(path)


def calling(component: Any, **arguments: Any) -> Any:
    """A pipeline of one task."""

    @dsl.pipeline(name="wrapper")  # type: ignore[untyped-decorator]  # KFP has no types
    def wrapper() -> None:
        component(**arguments)

    return wrapper


def dangling(spec: dict[str, Any]) -> list[str]:
    """Parameters that a task reads from its DAG but that the DAG does not have; the driver would fail the task.

    The compiler (kfp 2.17) does not pass on parameters that are used only for a task's resources.
    """
    definitions = {**spec["components"], "root": spec["root"]}
    found = []
    for name, component in definitions.items():
        has = set(component.get("inputDefinitions", {}).get("parameters", {}))
        for task, each in component.get("dag", {}).get("tasks", {}).items():
            given = each.get("inputs", {}).get("parameters", {})
            taken = {value["componentInputParameter"] for value in given.values() if "componentInputParameter" in value}
            found += [f"{name}: {task} takes {missing}" for missing in taken - has]
            wanted = definitions[each["componentRef"]["name"]].get("inputDefinitions", {}).get("parameters", {})
            items = each.get("parameterIterator", {}).get("itemInput")
            found += [
                f"{name}: {task} is not given {parameter}"
                for parameter, definition in wanted.items()
                if parameter not in given
                and parameter != items
                and not definition.get("isOptional")
                and "defaultValue" not in definition
            ]
    return sorted(found)
