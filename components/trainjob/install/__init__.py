"""What a cluster must have for this package: runtimes, the rights of who launches and waits, and the reaper.

The objects are the YAML files of this directory, each of them. Only names that differ from cluster to cluster are
filled in. What changes an object of somebody else is in ``opt_in`` and is given only where it is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Literal

import yaml

from trainjob.version import __version__

Part = Literal["runtimes", "rbac", "reaper", "kfp", "policy"]

STEP_IMAGE = f"trainjob-step:{__version__}"
"""The step image as the files name it: in no registry, since where images come from is each cluster's own."""

STORAGE = "trainjob-storage"
"""ConfigMap and Secret with the addresses and keys of storage and registry, as the files name them."""

OPT_IN: tuple[Part, ...] = ("kfp", "policy")
"""Printed only where they are named."""

_PARTS: dict[str, Part] = {"role.yaml": "rbac", "rolebinding.yaml": "rbac", "reaper.yaml": "reaper"}

SINCE = {"jax-resilient": "2.2", "torch-initialized": "2.2"}
"""Runtime -> the release of Kubeflow Trainer that brought what it is made of (a policy, claims of a job's own), where
that is not the oldest, 2.1."""


def objects(
    only: Part | None = None,
    *,
    namespace: str | None = None,
    service_accounts: Sequence[tuple[str, str]] = (),
    image: str = STEP_IMAGE,
    pins: Sequence[str] = (),
    storage_config: str = STORAGE,
    storage_secret: str = STORAGE,
    trainer: str = "2.3",
) -> list[dict[str, Any]]:
    """The objects to apply, in the order of the files' names.

    Args:
        only: Runtimes are there once a cluster, rights (``rbac``) and the ``reaper`` once a namespace; all if None.
            Never part of the others: ``kfp``, a change of the ConfigMap of KFP's workflow controller, and ``policy``,
            a ValidatingAdmissionPolicy for the TrainJobs of a namespace.
        namespace: Where rights and reaper are. If None, the rights are wherever they are applied, and there is no
            reaper, whose rights name the namespace of its account. For ``kfp``, where KFP itself is; ``kubeflow`` if
            None. ``policy`` requires one.
        service_accounts: Namespace and name of each account that gets the rights. Without any there is no binding.
        image: The step image.
        pins: Images with their digests, ``name:tag@sha256:…``, each for the image ``name:tag`` of a file.
        storage_config: Name of the ConfigMap with the settings of storage and registry.
        storage_secret: Name of the Secret with their keys.
        trainer: Release of the cluster's Kubeflow Trainer: 2.1, 2.2, or 2.3 for any newer one. Runtimes with
            what it does not know are left out.
    """
    names = {
        **{("image", pin.partition("@")[0]): pin for pin in pins},
        ("image", STEP_IMAGE): image,
        ("configMapRef", STORAGE): storage_config,
        ("secretRef", STORAGE): storage_secret,
    }
    subjects = [{"kind": "ServiceAccount", "namespace": where, "name": name} for where, name in service_accounts]
    found = []
    if only in OPT_IN:
        return _opted_in(only, namespace)
    for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name):
        part = _PARTS.get(file.name, "runtimes")
        if not file.name.endswith(".yaml") or only not in (None, part) or (part == "reaper" and not namespace):
            continue
        for each in yaml.safe_load_all(file.read_text()):
            bound = (
                subjects if part == "rbac" else [{**who, "namespace": namespace} for who in each.get("subjects", ())]
            )
            if each["kind"] == "RoleBinding" and not bound:
                continue
            if SINCE.get(each["metadata"]["name"], trainer) > trainer:
                continue
            filled = _filled(each, names)
            if part != "runtimes" and namespace:
                filled["metadata"] = {**filled["metadata"], "namespace": namespace}
            if each["kind"] == "RoleBinding":
                filled["subjects"] = bound
            found.append(filled)
    return found


def images(value: Any) -> list[str]:
    """The images that the containers of `value`, objects or parts of one, run; each once."""
    if isinstance(value, list):
        return list(dict.fromkeys(image for item in value for image in images(item)))
    if not isinstance(value, dict):
        return []
    image = value.get("image")
    return [image] if isinstance(image, str) else images(list(value.values()))


def _opted_in(part: Part, namespace: str | None) -> list[dict[str, Any]]:
    found = list(yaml.safe_load_all(resources.files(__name__).joinpath("opt_in", f"{part}.yaml").read_text()))
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
    """`value` with other names: `names` has a field and what stands there now, by itself or as its ``name``."""
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
