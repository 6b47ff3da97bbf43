"""Converts ``dsl.TaskConfig``, the settings of a KFP task, to fields of the TrainJob that the task launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob import InvalidSpec, Problem
from trainjob._spec import for_every_node
from trainjob.job import RESERVED_PREFIX

MANAGER = f"{RESERVED_PREFIX}kfp"
"""Manager of the patch in ``spec.runtimePatches``."""

_OF_THE_STEP = ("TRAINJOB_", "KFP_", "ARGO_", "KUBERNETES_")


def apply(
    config: Mapping[str, Any], fields: Mapping[str, Any], added: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Merge the settings of the task into the fields of a spec.

    Resources and environment become those of the nodes; everything else (node selector, tolerations, affinity, volumes
    and their mounts) becomes a runtime patch. Secrets stay references. If the component's ``env`` has the same variable
    as the task, ``env`` wins. Variables of the step (``TRAINJOB_*``, ``KFP_*``, ``ARGO_*``, ``KUBERNETES_*``) are not
    passed on.

    Args:
        config: The fields of a ``dsl.TaskConfig``; all None or empty with kfp.local.
        fields: Fields of the spec that are parameters of the component.
        added: The component's ``spec``, by field.

    Returns:
        `fields` and `added` with the settings.

    Raises:
        InvalidSpec: resources are set both on the task and as a parameter, or `added` already has a patch of `MANAGER`.
    """
    fields, added, problems = dict(fields), dict(added), []
    resources = {kind: amounts for kind, amounts in (config.get("resources") or {}).items() if amounts}
    if resources:
        taken = fields.get("resources_per_node") or added.get("resources_per_node")
        if taken:
            problems.append(
                Problem("resources_per_node", "is given, and resources are also set on the task", "use one of the two")
            )
        fields["resources_per_node"] = resources
    env = {each["name"]: each.get("valueFrom", each.get("value", "")) for each in config.get("env") or []}
    passed_on = {name: value for name, value in env.items() if not name.startswith(_OF_THE_STEP)}
    fields["env"] = {**passed_on, **(fields.get("env") or {})}
    if pod := _pod(config):
        patches = added.get("runtime_patches") or []
        patches = patches if isinstance(patches, list) else [patches]  # the spec rejects it
        if any(isinstance(patch, Mapping) and patch.get("manager") == MANAGER for patch in patches):
            problems.append(Problem("spec.runtime_patches", f"has a patch of {MANAGER}", "use another manager"))
        added["runtime_patches"] = [for_every_node(_runtime(fields, added), pod, MANAGER), *patches]
    if problems:
        raise InvalidSpec(problems)
    return fields, added


_REQUESTED = {
    "cpu_limit": ("limits", "cpu"),
    "cpu_request": ("requests", "cpu"),
    "memory_limit": ("limits", "memory"),
    "memory_request": ("requests", "memory"),
}
"""Parameter in which KFP's compiler stores a resource of a task -> place of the resource in a TaskConfig."""


def lost_resources(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[Problem]:
    """Find resources that are set on the task but missing in its config.

    KFP 2.17 drops resources from pipeline parameters that are numbers (its driver reads them as texts). Without this
    check the training would succeed without a GPU.

    Args:
        config: The fields of a ``dsl.TaskConfig``.
        parameters: All parameters of the step, including those that the compiler added.
    """
    resources = config.get("resources") or {}
    missing = {
        name: parameters[name]
        for name, (kind, resource) in _REQUESTED.items()
        if parameters.get(name) and not (resources.get(kind) or {}).get(resource)
    }
    count = parameters.get("accelerator_count")
    if count and str(count) not in ("0", "0.0") and not set(resources.get("limits") or {}) - {"cpu", "memory"}:
        missing["accelerator_count"] = count
    return [
        Problem(
            name,
            f"is {value}, but KFP has not passed it on to the TrainJob",
            "use a constant, or a pipeline parameter of type str",
        )
        for name, value in missing.items()
    ]


def _pod(config: Mapping[str, Any]) -> dict[str, Any]:
    """A PodSpecPatch with all settings except resources and environment."""
    mounts = config.get("volume_mounts")
    pod = {
        "nodeSelector": config.get("node_selector"),
        "tolerations": config.get("tolerations"),
        "affinity": config.get("affinity"),
        "volumes": config.get("volumes"),
        "containers": [{"name": "node", "volumeMounts": mounts}] if mounts else None,
    }
    return {name: value for name, value in pod.items() if value}


def _runtime(fields: Mapping[str, Any], added: Mapping[str, Any]) -> str:
    runtime = fields.get("runtime") or added.get("runtime") or ""
    return str(runtime.get("name", "")) if isinstance(runtime, Mapping) else str(runtime)
