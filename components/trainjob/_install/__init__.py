"""Objects that a cluster needs for this package: runtimes, permissions for launching and waiting, and the controller.

May import `_jobs`, and the layers below.

The objects are those of all YAML files of this directory. Only names that differ between clusters are replaced. Objects
that change those of other software are in ``opt_in`` and are printed only by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import resources
from typing import Any, Literal

import yaml

from trainjob._jobs.leftovers import KEEP_FOR
from trainjob._support.durations import iso_duration
from trainjob.version import __version__

Part = Literal["runtimes", "rbac", "controller", "reaper", "kfp", "policy"]

STEP_IMAGE = f"trainjob-step:{__version__}"
"""The step image in the files: without a registry, which differs between clusters."""

STORAGE = "trainjob-storage"
"""Name in the files of the ConfigMap and Secret with the addresses and keys of storage and registry."""

OPT_IN: tuple[Part, ...] = ("kfp", "policy")
"""Parts that are printed only by name."""

_PARTS: dict[str, Part] = {
    "role.yaml": "rbac",
    "rolebinding.yaml": "rbac",
    "controller.yaml": "controller",
    "reaper.yaml": "reaper",
}

SINCE = {"jax-resilient": "2.2", "torch-initialized": "2.2"}
"""Runtime -> release of Kubeflow Trainer that it requires (a policy, PersistentVolumeClaims of a job), if newer than
the oldest supported one, 2.1."""


def objects(
    only: Part | None = None,
    *,
    namespace: str | None = None,
    service_accounts: Sequence[tuple[str, str]] = (),
    image: str = STEP_IMAGE,
    pins: Sequence[str] = (),
    storage_secret: str = STORAGE,
    trainer: str = "2.3",
    keep_for: timedelta = KEEP_FOR,
    explain: bool = False,
) -> list[dict[str, Any]]:
    """The objects to apply, in the order of the file names.

    Args:
        only: ``runtimes``, needed once per cluster; ``rbac`` or ``controller``, needed once per namespace; all three if
            None. Three parts are returned only by name: ``reaper``, a CronJob in place of the controller; ``kfp``, a
            change of the ConfigMap of KFP's workflow controller; and ``policy``, a ValidatingAdmissionPolicy for the
            TrainJobs of a namespace.
        namespace: Namespace of permissions and controller. If None, the permissions have no namespace, and the
            controller is left out, because its RoleBinding names the namespace of its account. For ``kfp``, the
            namespace of KFP; ``kubeflow`` if None. ``policy`` requires one.
        service_accounts: Namespace and name of each account that gets the permissions. No binding if empty.
        image: The step image.
        pins: Images with their digests, ``name:tag@sha256:…``, each for the image ``name:tag`` of a file.
        storage_secret: Name of the Secret with the keys of storage and registry.
        trainer: Release of the cluster's Kubeflow Trainer: 2.1, 2.2, or 2.3 for any newer one. Runtimes that it does
            not support are left out.
        keep_for: How long the controller, or the reaper, keeps jobs that this package has left suspended.
        explain: Whether to add a read-only ClusterRole to the permissions, by which more failures are explained.
    """
    names = {
        **{("image", pin.partition("@")[0]): pin for pin in pins},
        ("image", STEP_IMAGE): image,
        ("secretRef", STORAGE): storage_secret,
    }
    subjects = [{"kind": "ServiceAccount", "namespace": where, "name": name} for where, name in service_accounts]
    found = []
    if only in OPT_IN:
        return _opted_in(only, namespace)
    for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name):
        part = _PARTS.get(file.name, "runtimes")
        if not file.name.endswith(".yaml") or only not in ((part,) if part == "reaper" else (None, part)):
            continue
        if part in ("controller", "reaper") and not namespace:
            continue
        for each in yaml.safe_load_all(file.read_text()):
            bound = (
                subjects if part == "rbac" else [{**who, "namespace": namespace} for who in each.get("subjects", ())]
            )
            if SINCE.get(each["metadata"]["name"], trainer) > trainer:
                continue
            filled = _filled(each, names)
            if part != "runtimes" and namespace:
                filled["metadata"] = {**filled["metadata"], "namespace": namespace}
            if each["kind"] == "RoleBinding":
                filled["subjects"] = bound
            if each["kind"] in ("CronJob", "Deployment"):
                spec = filled["spec"]["jobTemplate"]["spec"] if each["kind"] == "CronJob" else filled["spec"]
                (container,) = spec["template"]["spec"]["containers"]
                container["args"] = ["--keep-for", iso_duration(keep_for)]
            found.append(filled)
    if explain and only in (None, "rbac"):
        found += [each | ({"subjects": subjects} if "subjects" in each else {}) for each in _opt_in("explain")]
    return [each for each in found if each.get("subjects") != []]


def images(value: Any) -> list[str]:
    """The images of all containers in `value`, which is a list of objects or a part of one; each image once."""
    if isinstance(value, list):
        return list(dict.fromkeys(image for item in value for image in images(item)))
    if not isinstance(value, dict):
        return []
    image = value.get("image")
    return [image] if isinstance(image, str) else images(list(value.values()))


def _opt_in(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(resources.files(__name__).joinpath("opt_in", f"{name}.yaml").read_text()))


def _opted_in(part: Part, namespace: str | None) -> list[dict[str, Any]]:
    found = _opt_in(part)
    if not namespace:
        return found
    if part == "kfp":
        return [{**each, "metadata": {**each["metadata"], "namespace": namespace}} for each in found]
    names = {
        ("name", "trainjob-NAMESPACE"): f"trainjob-{namespace}",
        ("kubernetes.io/metadata.name", "NAMESPACE"): namespace,
    }
    return [_filled(each, names) for each in found]


def _filled(value: Any, names: Mapping[tuple[str, Any], str]) -> Any:
    """`value` with other names: `names` maps a field and its present value, or the ``name`` in it, to the new name."""
    if isinstance(value, list):
        return [_filled(item, names) for item in value]
    if not isinstance(value, dict):
        return value
    filled: dict[str, Any] = {}
    for field, part in value.items():
        if isinstance(part, dict) and (field, part.get("name")) in names:
            filled[field] = {**part, "name": names[field, part["name"]]}
        elif isinstance(part, str) and (field, part) in names:
            filled[field] = names[field, part]
        else:
            filled[field] = _filled(part, names)
    return filled
