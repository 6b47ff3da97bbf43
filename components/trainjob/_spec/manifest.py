"""A complete TrainJob object in place of a spec's fields: read from a file, or from a cluster by kubectl."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from trainjob._spec import torchtune
from trainjob._spec.checks import argument_problems, env_problems, metadata_problems, secret_texts
from trainjob._spec.parts import resource_problems
from trainjob._spec.pods import metadata_of, patch_problems, pod_problems, volumes_of
from trainjob._spec.schema import read, schema
from trainjob._support.kube_objects import mapping, mappings
from trainjob._support.masking import holds_secret
from trainjob._support.volumes import CHECKPOINT_VARIABLE
from trainjob.errors import Problem
from trainjob.job import API_VERSION, KIND, RESERVED_PREFIX
from trainjob.progress.message import STALL_TIMEOUT
from trainjob.status import QUEUE_LABEL

_log = logging.getLogger(__name__)

_TOP: Mapping[str, Any] = {name: {} for name in ("apiVersion", "kind", "metadata", "spec", "status")}
_METADATA: Mapping[str, Any] = {
    **{name: {"type": "string"} for name in ("name", "namespace", "generateName")},
    **{name: {"type": "object", "additionalProperties": {}} for name in ("labels", "annotations")},
    **{name: {"type": "array", "items": {}} for name in ("finalizers", "ownerReferences")},
}
"""Fields of an object's metadata that an author writes; name and namespace are those of the launch."""

_SERVER = {
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "managedFields",
    "selfLink",
    "deletionTimestamp",
}
"""Fields of metadata that the API server sets: an object with one of them comes from a cluster."""
_OF_KUEUE = {
    *("kueue.x-k8s.io/multikueue-origin", "kueue.x-k8s.io/prebuilt-workload-name"),
    "kueue.x-k8s.io/trainjob-override-idx",
}
_OF_OTHERS = {"kubectl.kubernetes.io/last-applied-configuration", "app.kubernetes.io/managed-by", *_OF_KUEUE}
_OF_A_JOB = {CHECKPOINT_VARIABLE, STALL_TIMEOUT}
"""Variables that trainjob has set for that job: its checkpoint directory is not that of the next one."""

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
    """What the author of a TrainJob wrote, of an object that comes from a cluster, which has added to it.

    Its status, identity and owners are left out, and what trainjob and Kueue wrote. One line of the log says what.
    """
    metadata, spec = mapping(manifest, "metadata"), mapping(manifest, "spec")
    if not {name for name in _SERVER if metadata.get(name) is not None}:
        return dict(manifest)
    left_out: list[str] = []

    def without(value: Mapping[str, Any], where: str, names: Collection[object]) -> dict[str, Any]:
        left_out.extend(f"{where}{name}" for name in value if name in names)
        return {name: part for name, part in value.items() if name not in names}

    kept = without(manifest, "", {"status"})
    kept["metadata"] = without(metadata, "metadata.", {*metadata} - {"name", "namespace", "labels", "annotations"})
    for kind in ("labels", "annotations"):
        if pairs := mapping(metadata, kind):
            own = {name for name in pairs if str(name).startswith(RESERVED_PREFIX)} | _OF_OTHERS
            kept["metadata"][kind] = without(pairs, f"metadata.{kind}.", own)
    kept["spec"] = without(spec, "spec.", {"suspend"} if QUEUE_LABEL in mapping(metadata, "labels") else set())
    first = str(mapping(metadata, "annotations").get("kueue.x-k8s.io/trainjob-override-idx"))  # of Kueue's, on 2.1
    if first.isdecimal() and isinstance(overrides := spec.get("podTemplateOverrides"), list):
        left_out.append(f"spec.podTemplateOverrides[{first}] and the following, of Kueue")
        kept["spec"]["podTemplateOverrides"] = overrides[: int(first)]
    if isinstance(patches := spec.get("runtimePatches"), list):
        of_kueue = [each for each in patches if str(mapping(each).get("manager")).startswith("kueue.x-k8s.io/")]
        left_out += [f"spec.runtimePatches of {each['manager']}" for each in of_kueue]
        own_patches = [each for each in patches if each not in of_kueue]
        kept["spec"]["runtimePatches"] = [
            without(each, "", {"time"}) if isinstance(each, Mapping) else each for each in own_patches
        ]
    if isinstance(env := mapping(spec, "trainer").get("env"), list):
        left_out += [f"spec.trainer.env.{name}" for each in env if (name := mapping(each).get("name")) in _OF_A_JOB]
        own_env = [each for each in env if mapping(each).get("name") not in _OF_A_JOB]
        kept["spec"]["trainer"] = {**mapping(spec, "trainer"), "env": own_env}
    if "spec" in manifest and not isinstance(manifest["spec"], Mapping):
        kept["spec"] = manifest["spec"]
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
    ref, trainer = mapping(spec, "runtimeRef"), mapping(spec, "trainer")
    kind, runtime = ref.get("kind") or "ClusterTrainingRuntime", str(ref.get("name") or "")
    shipped = runtime if kind == "ClusterTrainingRuntime" else ""
    yield from metadata_problems(mapping(metadata, "labels"), mapping(metadata, "annotations"), "manifest.metadata.")
    yield from _trainer_problems(runtime, trainer, "manifest.spec.trainer")
    for name, source in mapping(spec, "initializer").items():
        where = f"manifest.spec.initializer.{name}"
        yield from env_problems(mappings(source, "env"), f"{where}.env")
        if holds_secret(str(mapping(source).get("storageUri"))):
            yield Problem(f"{where}.storageUri", "contains a credential", "use secretRef")
    yield from patch_problems(mappings(spec, "runtimePatches"), "manifest.spec.runtimePatches", shipped)
    overrides = mappings(spec, "podTemplateOverrides")
    volumes = volumes_of(mappings(spec, "runtimePatches"), overrides)
    for i, each in enumerate(overrides):
        where = f"manifest.spec.podTemplateOverrides[{i}]"
        yield from pod_problems(mapping(each, "spec"), f"{where}.spec", shipped, volumes)
        yield from metadata_of(each, f"{where}.metadata")
    for field in sorted(set(spec) - {"trainer", "initializer"}):
        for path in secret_texts(spec[field], f"manifest.spec.{field}"):
            if ".env" not in path and ".metadata." not in path:  # checked by name above
                yield Problem(path, "is a literal secret", "refer to a Secret of the namespace")


def _trainer_problems(runtime: str, trainer: Mapping[str, Any], where: str) -> Iterator[Problem]:
    yield from env_problems(mappings(trainer, "env"), f"{where}.env", reserved=True, fields=False)
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
