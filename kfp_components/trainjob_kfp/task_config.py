"""``dsl.TaskConfig``: what a pipeline's author sets on a KFP task, as fields of the TrainJob that the task launches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob import InvalidSpec
from trainjob.errors import Problem
from trainjob.spec import for_every_node
from trainjob.spec.checks import RESERVED_PREFIX

MANAGER = f"{RESERVED_PREFIX}kfp"
"""Who asks for the patch, in ``spec.runtimePatches``."""

_THE_STEPS_OWN = ("TRAINJOB_", "KFP_", "ARGO_", "KUBERNETES_")


def apply(
    config: Mapping[str, Any], fields: Mapping[str, Any], added: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a spec, and what its author added to them, with what was set on the task.

    Resources and environment become those of the nodes, everything else (node selector, tolerations, affinity, volumes
    and their mounts) a runtime patch. Secrets stay references. Of an environment variable, the component's own ``env``
    wins, and the step's own settings (``TRAINJOB_*``) are not passed on.

    Args:
        config: The fields of a ``dsl.TaskConfig``; all None or empty with kfp.local.
        fields: Fields of the spec that are parameters of the component.
        added: The component's ``spec``, by field.

    Raises:
        InvalidSpec: resources are given both on the task and as a parameter, or this manager has a patch already.
    """
    fields, added, problems = dict(fields), dict(added), []
    resources = {kind: amounts for kind, amounts in (config.get("resources") or {}).items() if amounts}
    if resources:
        taken = fields.get("resources_per_node") or added.get("resources_per_node")
        if taken:
            problems.append(
                Problem("resources_per_node", "is given, and resources are set on the task, too", "give one of the two")
            )
        fields["resources_per_node"] = resources
    env = {each["name"]: each.get("valueFrom", each.get("value", "")) for each in config.get("env") or []}
    passed_on = {name: value for name, value in env.items() if not name.startswith(_THE_STEPS_OWN)}
    fields["env"] = {**passed_on, **(fields.get("env") or {})}
    if pod := _pod(config):
        patches = added.get("runtime_patches") or []
        patches = patches if isinstance(patches, list) else [patches]  # which the spec refuses
        if any(isinstance(patch, Mapping) and patch.get("manager") == MANAGER for patch in patches):
            problems.append(Problem("spec.runtime_patches", f"has a patch of {MANAGER}", "give it another manager"))
        added["runtime_patches"] = [for_every_node(_runtime(fields, added), pod, MANAGER), *patches]
    if problems:
        raise InvalidSpec(problems)
    return fields, added


_ASKED = {
    "cpu_limit": ("limits", "cpu"),
    "cpu_request": ("requests", "cpu"),
    "memory_limit": ("limits", "memory"),
    "memory_request": ("requests", "memory"),
}
"""What KFP's compiler calls the resources of a task among its parameters -> where they are in a TaskConfig."""


def lost(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[Problem]:
    """Resources that were set on the task and did not arrive.

    KFP 2.17 drops values from pipeline parameters that are numbers (its driver reads them as texts), and the step would
    succeed without a GPU.

    Args:
        config: The fields of a ``dsl.TaskConfig``.
        parameters: All parameters of the step, also those that the compiler added.
    """
    resources = config.get("resources") or {}
    missing = {
        name: parameters[name]
        for name, (kind, resource) in _ASKED.items()
        if parameters.get(name) and not (resources.get(kind) or {}).get(resource)
    }
    count = parameters.get("accelerator_count")
    if count and str(count) not in ("0", "0.0") and not set(resources.get("limits") or {}) - {"cpu", "memory"}:
        missing["accelerator_count"] = count
    return [
        Problem(
            name,
            f"is {value}, and KFP has not passed it on to the TrainJob",
            "give a constant, or a pipeline parameter of type str",
        )
        for name, value in missing.items()
    ]


def _pod(config: Mapping[str, Any]) -> dict[str, Any]:
    """A PodSpecPatch of what is neither resources nor environment."""
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
