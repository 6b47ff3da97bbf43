"""A complete TrainJob object in place of a spec's fields: read from a file, or from a cluster by kubectl."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from trainjob._spec import torchtune
from trainjob._spec.checks import argument_problems, env_problems, metadata_problems, secret_texts
from trainjob._spec.parts import resource_problems
from trainjob._spec.pods import patch_problems, template_problems
from trainjob._spec.schema import read, schema
from trainjob._support.kube_objects import mapping, mappings
from trainjob._support.masking import holds_secret
from trainjob._support.volumes import CHECKPOINT_VARIABLE
from trainjob.errors import Problem
from trainjob.job import API_VERSION, KIND, RESERVED_PREFIX
from trainjob.status import QUEUE_LABEL

_log = logging.getLogger(__name__)

_TOP: Mapping[str, Any] = {"apiVersion": {}, "kind": {}, "metadata": {"type": "object"}, "spec": {"type": "object"}}
_METADATA: Mapping[str, Any] = {
    **{name: {"type": "string"} for name in ("name", "namespace", "generateName")},
    **{name: {"type": "object", "additionalProperties": {}} for name in ("labels", "annotations")},
    **{name: {"type": "array", "items": {}} for name in ("finalizers", "ownerReferences")},
}
"""Fields of an object's metadata that an author writes; name and namespace are those of the launch."""

_BY_THE_CLUSTER = "kubectl.kubernetes.io/last-applied-configuration"

_OTHER_KINDS = {
    "PyTorchJob": "runtime: torch-distributed",
    "MPIJob": "runtime: deepspeed-distributed",
    "JAXJob": "runtime: jax-distributed",
    "XGBoostJob": "runtime: xgboost-distributed",
    **dict.fromkeys(("TFJob", "PaddleJob"), "runtime: a training runtime of yours, since Trainer ships none for it"),
}
"""Kinds of Kubeflow's Training Operator (``kubeflow.org/v1``) -> the runtime of Trainer that replaces them."""

_INSTEAD = {
    **{
        kind: f"write a spec: {runtime}, num_nodes: the replicas of all kinds together, image, command, args and "
        "resources_per_node from the container of its worker"
        for kind, runtime in _OTHER_KINDS.items()
    },
    "Experiment": "write a study of `trainjob tune` (space, metric, direction) with the trial's container as template",
    **dict.fromkeys(
        ("TrainingRuntime", "ClusterTrainingRuntime"), "create it by `kubectl apply` and name it: runtime: …"
    ),
    **dict.fromkeys(("List", "TrainJobList"), "give one of its items"),
}


def authored(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the author of a TrainJob wrote: an object with a UID comes from a cluster, which has added to it.

    Its status, identity and owners are left out, and what trainjob and Kueue wrote. One line of the log says what.
    """
    metadata = mapping(manifest, "metadata")
    if "uid" not in metadata or not isinstance(manifest.get("spec"), Mapping):
        return dict(manifest)
    left_out: list[str] = []

    def without(value: Mapping[str, Any], where: str, names: set[str]) -> dict[str, Any]:
        left_out.extend(f"{where}{name}" for name in value if name in names)
        return {name: part for name, part in value.items() if name not in names}

    kept = without(manifest, "", {"status"})
    kept["metadata"] = without(metadata, "metadata.", {*metadata} - {"name", "namespace", "labels", "annotations"})
    for kind in ("labels", "annotations"):
        pairs = mapping(metadata, kind)
        own = {name for name in pairs if str(name).startswith(RESERVED_PREFIX) or name == _BY_THE_CLUSTER}
        own |= {"app.kubernetes.io/managed-by"} if pairs.get("app.kubernetes.io/managed-by") == "trainjob" else set()
        if pairs:
            kept["metadata"][kind] = without(pairs, f"metadata.{kind}.", own)
    spec = without(kept["spec"], "spec.", {"suspend"} if QUEUE_LABEL in mapping(metadata, "labels") else set())
    if patches := spec.get("runtimePatches"):
        of_kueue = [
            each for each in mappings(spec, "runtimePatches") if str(each.get("manager")).startswith("kueue.x-k8s.io/")
        ]
        left_out += [f"spec.runtimePatches of {each['manager']}" for each in of_kueue]
        spec["runtimePatches"] = [without(each, "", {"time"}) for each in patches if each not in of_kueue]
    if env := mappings(spec, "trainer", "env"):
        left_out += [
            f"spec.trainer.env.{CHECKPOINT_VARIABLE}" for each in env if each.get("name") == CHECKPOINT_VARIABLE
        ]
        kept_env = [each for each in env if each.get("name") != CHECKPOINT_VARIABLE]
        spec["trainer"] = {**spec["trainer"], "env": kept_env}
    kept["spec"] = spec
    name = f"{metadata.get('namespace', '')}/{metadata.get('name', '')}"
    _log.info("TrainJob %s comes from a cluster; left out of its manifest: %s", name, ", ".join(left_out))
    return kept


def manifest_problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems of a complete TrainJob object."""
    kind = str(manifest.get("kind"))
    if (manifest.get("apiVersion"), kind) != (API_VERSION, KIND):
        needed = f"apiVersion: {API_VERSION} and kind: {KIND} are needed"
        yield Problem("manifest", f"is a {manifest.get('apiVersion')} {kind}", _INSTEAD.get(kind, needed))
        if kind != KIND:
            return
    found: list[Problem] = []
    known: dict[str, Any] = {
        "properties": {**_TOP, "metadata": {"type": "object", "properties": _METADATA}, "spec": schema()}
    }
    known |= {"type": "object"}
    if not isinstance(manifest.get("spec"), Mapping):
        known["required"] = ["spec"]
    kept = read(manifest, known, "manifest", found, exact=True)
    yield from found
    spec, metadata = mapping(kept, "spec"), mapping(kept, "metadata")
    runtime, trainer = str(mapping(spec, "runtimeRef").get("name") or ""), mapping(spec, "trainer")
    yield from metadata_problems(mapping(metadata, "labels"), mapping(metadata, "annotations"), "manifest.metadata.")
    yield from _trainer_problems(runtime, trainer, "manifest.spec.trainer")
    for name, source in mapping(spec, "initializer").items():
        where = f"manifest.spec.initializer.{name}"
        yield from env_problems(mappings(source, "env"), f"{where}.env")
        if holds_secret(str(mapping(source).get("storageUri"))):
            yield Problem(f"{where}.storageUri", "contains a credential", "use secretRef")
    yield from patch_problems(mappings(spec, "runtimePatches"), "manifest.spec.runtimePatches", runtime)
    for i, each in enumerate(mappings(spec, "podTemplateOverrides")):
        yield from template_problems(each, f"manifest.spec.podTemplateOverrides[{i}]", runtime, ())
    for field in sorted(set(spec) - {"trainer", "initializer"}):
        for path in secret_texts(spec[field], f"manifest.spec.{field}"):
            if ".env[" not in path:  # checked by name above
                yield Problem(path, "is a literal secret", "use a secretKeyRef")


def _trainer_problems(runtime: str, trainer: Mapping[str, Any], where: str) -> Iterator[Problem]:
    yield from env_problems(mappings(trainer, "env"), f"{where}.env", reserved=True)
    yield from argument_problems(trainer, f"{where}.")
    yield from resource_problems(mapping(trainer, "resourcesPerNode"), f"{where}.resourcesPerNode")
    for field in ("numNodes", "numProcPerNode"):
        if isinstance(trainer.get(field), int) and trainer[field] < 1:
            yield Problem(f"{where}.{field}", "must be at least 1")
    if runtime and trainer.get("command") == torchtune.COMMAND:
        paths = {"num_nodes": f"{where}.numNodes", "args": f"{where}.args", "lora": f"{where}.args"}
        paths["runtime"] = "manifest.spec.runtimeRef.name"
        args = [arg for arg in trainer.get("args") or [] if isinstance(arg, str)]
        yield from torchtune.problems(runtime, trainer, args, paths)
