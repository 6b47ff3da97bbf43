"""Changes to the pods of one job: `pod` and `runtime_patches`, as Trainer's ``spec.runtimePatches`` allows them.

The fields are those of TrainJob's schema. What else a pod must be is checked as the API server does when it makes the
pods, long after it has accepted the TrainJob (``pkg/apis/core/validation`` of Kubernetes 1.37).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BeforeValidator

from trainjob import names
from trainjob._spec.base import refuse
from trainjob._spec.checks import LABEL_VALUE, env_problems, label_problems, metadata_problems
from trainjob._spec.schema import POD, read, schema
from trainjob._support.kube_objects import mapping, mappings
from trainjob.errors import Problem
from trainjob.job import RESERVED_PREFIX

_MANAGER = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/[^/]+)+")

_LAUNCHER_IS_A_NODE = ("deepspeed-distributed", "mlx-distributed")
"""Runtimes that Trainer ships whose MPI launcher trains, too (``mpi.runLauncherAsNode``), as a separate Job. Runtimes
with other names are unknown, and Trainer's webhook refuses a patch of a Job that the runtime lacks."""

_SHIPPED = (
    *(f"{each}-distributed" for each in ("torch", "deepspeed", "mlx", "jax", "xgboost", "flux")),
    *("torchtune-llama3.2-1b", "torchtune-llama3.2-3b", "torchtune-qwen2.5-1.5b", "trainjob-step"),
)
"""ClusterTrainingRuntimes whose pods are known: containers `_CONTAINERS`, and no volume but ``initializer``."""
_CONTAINERS = ("node", "launcher", "dataset-initializer", "model-initializer")
_NODE_ONLY = ("node", "dataset-initializer", "model-initializer")

_OF_THE_SPEC = {
    "image": "write image in the spec",
    "command": "write command in the spec",
    "args": "write args in the spec",
    "env": "write env in the spec",
    "resources": "write resources_per_node in the spec",
}
"""Field of a container -> where it belongs: Trainer sets it from ``spec.trainer``."""


def for_every_node(
    runtime: str, pod: Mapping[str, Any], manager: str, metadata: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """An entry of ``spec.runtimePatches`` that changes the pods of all nodes.

    Args:
        runtime: Name of the job's runtime.
        pod: The changes, a PodSpec as in the API; the training container is called ``node``.
        manager: Name of the patch's manager, such as ``trainjob.dev/checkpoints``.
        metadata: Labels and annotations to add to the pods.
    """
    template = {**({"metadata": dict(metadata)} if metadata else {}), "spec": dict(pod)}
    jobs = ["node", "launcher"] if runtime in _LAUNCHER_IS_A_NODE else ["node"]
    replicated = [{"name": name, "template": {"spec": {"template": template}}} for name in jobs]
    return {"manager": manager, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}}}


def pod_patch(runtime: str, template: Mapping[str, Any]) -> dict[str, Any]:
    """The patch for a spec's `pod`."""
    return for_every_node(runtime, mapping(template, "spec"), f"{RESERVED_PREFIX}pod", mapping(template, "metadata"))


# ---------------------------------------------------------------- reading


def read_pod(value: object) -> object:
    """A pod template as in the API, of a PodSpec or of a PodTemplateSpec; its containers are called node."""
    if not isinstance(value, Mapping):
        return value
    template = value if {*value} <= _OF_A_TEMPLATE else {"spec": value}
    template = {name: template.get(name) for name in ("metadata", "spec")}
    spec = mapping(template, "spec")
    containers = spec.get("containers")
    if isinstance(containers, list | tuple):
        named = [{"name": "node", **each} if isinstance(each, Mapping) else each for each in containers]
        template = {**template, "spec": {**spec, "containers": named}}
    found: list[Problem] = []
    known = mapping(schema(*POD), "properties")
    if not known:
        refuse([_NO_PATCHES])
    result = {
        name: read(part, known[name], "" if name == "spec" else name, found)
        for name, part in template.items()
        if part is not None
    }
    refuse([_of_a_pod(each) for each in found])
    return {name: part for name, part in result.items() if part}


def _of_a_pod(problem: Problem) -> Problem:
    """The problem of a field of a pod that cannot be changed for one job, with the place where it is set."""
    place, _, name = problem.path.rpartition(".")
    if problem.message != "no such field" or problem.instead.startswith("did you mean"):
        return problem
    if place.startswith("containers[") and name in _OF_THE_SPEC:
        return Problem(problem.path, "is set by Trainer from the spec", _OF_THE_SPEC[name])
    if place.startswith(("containers[", "initContainers[")) or not place:
        message = "cannot be changed for one job by Trainer's runtimePatches"
        return Problem(problem.path, message, problem.instead if "it is" in problem.instead else _OWN_RUNTIME)
    return problem


_OF_A_TEMPLATE = {"apiVersion", "api_version", "kind", "metadata", "spec", "status"}  # those of a V1Pod, too
_NO_PATCHES = Problem("", "is not possible: the schema of TRAINJOB_CRD has no runtimePatches", "use a newer Trainer")
_OWN_RUNTIME = "set it in a training runtime of this kind of job"


def read_patches(value: object) -> object:
    """Runtime patches as in the API; a patch without a manager is that of ``trainjob.dev/author``."""
    found: list[Problem] = []
    if isinstance(value, list | tuple):
        value = [{"manager": "trainjob.dev/author", **each} if isinstance(each, Mapping) else each for each in value]
    known = mapping(schema(), "properties", "runtimePatches")
    if not known:
        refuse([_NO_PATCHES])
    result = read(value, known, "", found)
    refuse(found)
    return result


PodTemplate = BeforeValidator(read_pod)
RuntimePatches = BeforeValidator(read_patches)


# ---------------------------------------------------------------- checks


def patch_problems(patches: Sequence[Mapping[str, Any]], where: str, runtime: str) -> Iterator[Problem]:
    """Problems of `runtimePatches` that their schema does not have.

    Args:
        patches: The patches, in the API's names.
        where: Path of the list.
        runtime: Name of the job's ClusterTrainingRuntime; empty for another kind.
    """
    volumes = volumes_of(patches)
    for i, patch in enumerate(patches):
        if not _MANAGER.fullmatch(str(patch.get("manager"))):
            yield Problem(f"{where}[{i}].manager", "must be a domain-prefixed path such as example.com/team")
        template = mapping(patch, "trainingRuntimeSpec", "template")
        yield from metadata_of(template, f"{where}[{i}].trainingRuntimeSpec.template.metadata")
        for j, job in enumerate(mappings(template, "spec", "replicatedJobs")):
            at = f"{where}[{i}].trainingRuntimeSpec.template.spec.replicatedJobs[{j}].template"
            yield from metadata_of(mapping(job, "template"), f"{at}.metadata")
            pod = mapping(job, "template", "spec", "template")
            yield from metadata_of(pod, f"{at}.spec.template.metadata")
            yield from pod_problems(mapping(pod, "spec"), f"{at}.spec.template.spec", runtime, volumes)


def template_problems(template: Mapping[str, Any], where: str, runtime: str, volumes: set[str]) -> Iterator[Problem]:
    """Problems of a pod template that the schema does not have.

    Args:
        template: ``metadata`` and ``spec`` of pods.
        where: Path of the spec, and of ``metadata`` beside its fields.
        runtime: Name of the job's runtime.
        volumes: Names of the job's volumes, those of the template included.
    """
    yield from pod_problems(mapping(template, "spec"), where, runtime, volumes, ("node",))
    yield from metadata_of(template, f"{where}.metadata")


def volumes_of(patches: Sequence[Mapping[str, Any]], templates: Sequence[Mapping[str, Any]] = ()) -> set[str]:
    """Names of the volumes that runtime patches and pod templates add to pods."""
    jobs = [
        job for each in patches for job in mappings(each, "trainingRuntimeSpec", "template", "spec", "replicatedJobs")
    ]
    pods = [mapping(job, "template", "spec", "template", "spec") for job in jobs]
    pods += [mapping(each, "spec") for each in templates]
    return {str(volume.get("name")) for pod in pods for volume in mappings(pod, "volumes")}


def metadata_of(template: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Problems of the metadata of a pod template, or of another object below a TrainJob."""
    metadata = mapping(template, "metadata")
    labels, annotations = mapping(metadata, "labels"), mapping(metadata, "annotations")
    yield from metadata_problems(labels, annotations, f"{where}.", own=True)


def pod_problems(
    pod: Mapping[str, Any], where: str, runtime: str, volumes: set[str], known: Sequence[str] = _CONTAINERS
) -> Iterator[Problem]:
    """Problems of a PodSpec, which has the schema's fields.

    Args:
        pod: The PodSpec.
        where: Its path.
        runtime: Name of the job's runtime: the volumes and containers of those that Trainer ships are known.
        volumes: Names of the volumes that the job has.
        known: Names of the containers of Trainer's runtimes.
    """
    shipped = runtime in _SHIPPED
    yield from label_problems(mapping(pod, "nodeSelector"), f"{where}.nodeSelector")
    yield from _name(pod.get("serviceAccountName"), f"{where}.serviceAccountName")
    for i, each in enumerate(mappings(pod, "imagePullSecrets")):
        yield from _name(each.get("name"), f"{where}.imagePullSecrets[{i}].name")
    yield from _volume_problems(mappings(pod, "volumes"), f"{where}.volumes")
    for i, each in enumerate(mappings(pod, "tolerations")):
        yield from _toleration_problems(each, f"{where}.tolerations[{i}]")
    yield from _affinity_problems(mapping(pod, "affinity"), f"{where}.affinity")
    yield from _security_problems(mapping(pod, "securityContext"), f"{where}.securityContext")
    for field in ("containers", "initContainers"):
        for i, container in enumerate(mappings(pod, field)):
            at, name = f"{where}.{field}[{i}]", container.get("name")
            if shipped and field == "containers" and name not in known:
                yield Problem(
                    f"{at}.name", f"runtime {runtime} has no container {name}", "the training container is node"
                )
            if container.get("env") and name in _NODE_ONLY:
                yield Problem(f"{at}.env", f"Trainer refuses env here for {name}", "use env")
            yield from env_problems(mappings(container, "env"), f"{at}.env")
            present = {*volumes, "initializer"} if shipped else None
            yield from _mount_problems(mappings(container, "volumeMounts"), f"{at}.volumeMounts", present)
            yield from _security_problems(mapping(container, "securityContext"), f"{at}.securityContext")


def _name(name: object, where: str) -> Iterator[Problem]:
    if isinstance(name, str) and name and not names.JOB.fullmatch(name):
        yield Problem(where, f"{name!r} is not a name of a Kubernetes object: lower-case letters, digits, '-' and '.'")


_REFERENCES = {"persistentVolumeClaim": "claimName", "secret": "secretName", "configMap": "name"}


def _volume_problems(volumes: Sequence[Mapping[str, Any]], where: str) -> Iterator[Problem]:
    for i, volume in enumerate(volumes):
        at, name = f"{where}[{i}]", volume.get("name")
        sources = [field for field in volume if field != "name"]
        if isinstance(name, str) and not names.NAMESPACE.fullmatch(name):
            yield Problem(f"{at}.name", f"{name!r} is not a name of a volume: lower-case letters, digits and '-'")
        if len(sources) > 1:  # without one it is an emptyDir
            yield Problem(at, f"has {' and '.join(sources)}", "remove all but one")
        for source, field in _REFERENCES.items():
            yield from _name(mapping(volume, source).get(field), f"{at}.{source}.{field}")
        yield from _choice(mapping(volume, "emptyDir"), "medium", ("", "Memory", "HugePages"), f"{at}.emptyDir")


def _mount_problems(mounts: Sequence[Mapping[str, Any]], where: str, volumes: set[str] | None) -> Iterator[Problem]:
    """Problems of a container's mounts; `volumes` are those of the pod, None if they are unknown."""
    for i, mount in enumerate(mounts):
        name, path = mount.get("name"), str(mount.get("mountPath"))
        if volumes is not None and name not in volumes:
            yield Problem(
                f"{where}[{i}].name",
                f"the pod has no volume {name}",
                f"add {{name: {name}, …}} to volumes; a volume of the runtime itself needs a runtime of another name",
            )
        if not path.startswith("/") or ":" in path:
            yield Problem(f"{where}[{i}].mountPath", f"{path!r} is not an absolute path without ':'")
        inside = str(mount.get("subPath") or "")
        if inside.startswith("/") or ".." in inside.split("/"):
            yield Problem(f"{where}[{i}].subPath", f"{inside!r} is not a relative path without '..'")
        yield from _choice(mount, "mountPropagation", ("None", "HostToContainer", "Bidirectional"), f"{where}[{i}]")
        yield from _choice(mount, "recursiveReadOnly", ("Disabled", "IfPossible", "Enabled"), f"{where}[{i}]")


def _toleration_problems(toleration: Mapping[str, Any], where: str) -> Iterator[Problem]:
    operator, effect = toleration.get("operator") or "Equal", toleration.get("effect")
    if toleration.get("key"):
        yield from label_problems({str(toleration["key"]): str(toleration.get("value") or "")}, where)
    yield from _choice(toleration, "operator", ("Exists", "Equal", "Lt", "Gt"), where)
    yield from _choice(toleration, "effect", ("", "NoSchedule", "PreferNoSchedule", "NoExecute"), where)
    if not toleration.get("key") and operator != "Exists":
        yield Problem(where, "without a key it needs operator: Exists, which tolerates every taint")
    if operator == "Exists" and toleration.get("value"):
        yield Problem(where, "operator Exists does not allow a value")
    if toleration.get("tolerationSeconds") is not None and effect != "NoExecute":
        yield Problem(f"{where}.tolerationSeconds", "has an effect only with effect: NoExecute")


_NUMBERS = ("Gt", "Lt")
_IN = ("In", "NotIn")
_EXIST = ("Exists", "DoesNotExist")


def _affinity_problems(value: object, where: str) -> Iterator[Problem]:
    """Problems of all expressions (``matchExpressions``, ``matchFields``) of an affinity."""
    if isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _affinity_problems(part, f"{where}[{i}]")
    elif isinstance(value, Mapping):
        if "operator" in value:
            yield from _expression_problems(value, where)
        if "topologyKey" in value and not value["topologyKey"]:
            yield Problem(f"{where}.topologyKey", "is empty", "write kubernetes.io/hostname, or another label of nodes")
        weight = value.get("weight", 1)
        if isinstance(weight, int) and not 1 <= weight <= 100:
            yield Problem(f"{where}.weight", f"is {weight}; 1 to 100")
        if "nodeSelectorTerms" in value and not value["nodeSelectorTerms"]:
            yield Problem(f"{where}.nodeSelectorTerms", "is empty", "write at least one term")
        for name, part in value.items():
            yield from _affinity_problems(part, f"{where}.{name}")


def _expression_problems(expression: Mapping[str, Any], where: str) -> Iterator[Problem]:
    operator, values = expression["operator"], expression.get("values") or []
    allowed = (*_IN, *_EXIST, *(_NUMBERS if "nodeAffinity" in where else ()))
    yield from _choice(expression, "operator", allowed, where)
    if operator in _IN and not values:
        yield Problem(f"{where}.values", f"is missing; {operator} needs at least one value")
    if operator in _EXIST and values:
        yield Problem(f"{where}.values", f"{operator} does not allow values")
    if operator in _NUMBERS and not (len(values) == 1 and re.fullmatch(r"-?\d+", str(values[0]))):
        yield Problem(f"{where}.values", f"{operator} needs one whole number, as text")
    for i, each in enumerate(values):
        if operator in _IN and not LABEL_VALUE.fullmatch(str(each)) and ".matchFields" not in where:
            yield Problem(f"{where}.values[{i}]", f"{each!r} is not a label value")


def _security_problems(context: Mapping[str, Any], where: str) -> Iterator[Problem]:
    groups = enumerate(context.get("supplementalGroups") or ())
    given = {name: context.get(name) for name in ("runAsUser", "runAsGroup", "fsGroup")}
    for name, number in {**given, **{f"supplementalGroups[{i}]": each for i, each in groups}}.items():
        if isinstance(number, int) and not 0 <= number < 1 << 31:
            yield Problem(f"{where}.{name}", f"is {number}; 0 to {(1 << 31) - 1}")
    if context.get("runAsNonRoot") and context.get("runAsUser") == 0:
        yield Problem(f"{where}.runAsUser", "is 0, the root user, with runAsNonRoot: true")
    for name in ("seccompProfile", "appArmorProfile"):
        profile = mapping(context, name)
        yield from _choice(profile, "type", ("RuntimeDefault", "Unconfined", "Localhost"), f"{where}.{name}")
        if profile and (profile.get("type") == "Localhost") != bool(profile.get("localhostProfile")):
            yield Problem(f"{where}.{name}.localhostProfile", "goes with type: Localhost, and only with it")
    yield from _choice(context, "fsGroupChangePolicy", ("OnRootMismatch", "Always"), where)
    if context.get("privileged") and context.get("allowPrivilegeEscalation") is False:
        yield Problem(f"{where}.allowPrivilegeEscalation", "cannot be false with privileged: true")


def _choice(value: Mapping[str, Any], field: str, allowed: Sequence[str], where: str) -> Iterator[Problem]:
    given = value.get(field)
    if isinstance(given, str) and given not in allowed and not (field == "medium" and given.startswith("HugePages-")):
        yield Problem(f"{where}.{field}", f"is {given!r}", f"use one of: {', '.join(filter(None, allowed))}")


# ---------------------------------------------------------------- names that people try

_IN_POD = (
    *("volumes", "tolerations", "affinity", "node_selector", "service_account_name", "image_pull_secrets"),
    *("security_context", "scheduling_gates", "termination_grace_period_seconds"),
)
_IN_RUNTIME = {
    "image_pull_policy": "it belongs to the container of the training runtime, which a job cannot change",
    "priority_class_name": "in a Kueue queue write labels: {kueue.x-k8s.io/priority-class: …}; otherwise it belongs to "
    "the pod of the training runtime",
    "env_from": "Trainer's API has no envFrom: write each variable, as env: {NAME: {secretKeyRef: {name: …, key: …}}}",
    **dict.fromkeys(
        (
            *("host_network", "host_ipc", "restart_policy", "scheduler_name", "dns_policy", "runtime_class_name"),
            *("topology_spread_constraints", "working_dir", "backoff_limit", "ttl_seconds_after_finished"),
        ),
        "it belongs to the training runtime, which a job cannot change there",
    ),
}
_EXAMPLES = {
    "node_selector": "{nodeSelector: {…}}",
    "service_account_name": "{serviceAccountName: …}",
    "image_pull_secrets": "{imagePullSecrets: [{name: …}]}",
    "security_context": "{securityContext: {…}}",
}

WRITTEN_AS: Mapping[str, str] = {
    **{name: f"write pod: {_EXAMPLES.get(name, f'{{{name}: […]}}')}" for name in _IN_POD},
    "image_pull_secret": "write pod: {imagePullSecrets: [{name: …}]}",
    "service_account": "write pod: {serviceAccountName: …}",
    **dict.fromkeys(("queue", "queue_name", "local_queue"), "write labels: {kueue.x-k8s.io/queue-name: …}"),
    **dict.fromkeys(("cpu", "memory"), "write resources_per_node: {cpu: 4, memory: 16Gi}"),
    "volume_mounts": "write pod: {containers: [{name: node, volumeMounts: [{name: …, mountPath: …}]}]}",
    "container_security_context": "write pod: {containers: [{name: node, securityContext: {…}}]}",
    **dict.fromkeys(("pod_labels", "pod_annotations"), "write pod: {metadata: {labels: {…}, annotations: {…}}}"),
    **dict.fromkeys(
        ("pod_template_overrides", "pod_spec_overrides", "pod_spec", "full_pod_spec"),
        "write pod: {…}, or runtime_patches for other steps",
    ),
    "pod_template": "write pod: {metadata: {…}, spec: {…}}",
    "init_containers": "pod: {initContainers: […]} changes those of the runtime; a new one needs a training runtime",
    **_IN_RUNTIME,
    **dict.fromkeys(("configmaps", "config_maps", "secrets"), _IN_RUNTIME["env_from"]),
    **dict.fromkeys(("cmds", "entrypoint"), "write command: [python, train.py]"),
    **dict.fromkeys(("arguments", "parameters"), "write args: […]"),
    "env_vars": "write env: {NAME: value}",
    **dict.fromkeys(
        ("resources", "container_resources", "pod_resources"), "write resources_per_node: {cpu: 4, gpu: 1}"
    ),
    **dict.fromkeys(("gpus", "gpu", "num_gpus"), "write resources_per_node: {gpu: 1}"),
    **dict.fromkeys(("nodes", "num_workers", "replicas", "world_size"), "write num_nodes"),
    **dict.fromkeys(("startup_timeout_seconds", "startup_timeout"), "write start_timeout"),
    "trainer": "write its fields in the spec: command, args, env, num_nodes, resources_per_node",
}
"""Name that people know from KubernetesPodOperator, kubectl or Kubeflow's SDK -> what to write in a spec."""
