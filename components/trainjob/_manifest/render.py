"""`TrainJobSpec` -> TrainJob object."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainjob import names
from trainjob._manifest import checkpoint_directories, node, unattended
from trainjob._manifest.retry_changes import Changes, applied, change_annotations
from trainjob._spec import TrainJobSpec, env_api, torchtune
from trainjob._spec.pods import for_every_node, pod_patch
from trainjob._support import volumes
from trainjob._support.control_characters import short_json
from trainjob._support.kube_objects import mapping
from trainjob.errors import InvalidSpec, Problem, SpecMismatch
from trainjob.job import (
    API_VERSION,
    ATTEMPT,
    KEY,
    KIND,
    RESERVED_PREFIX,
    SPEC_HASH,
    JobRef,
    check_key,
    job_name,
    labels_of,
    spec_hash,
    work_name,
)
from trainjob.progress import message
from trainjob.status import STALL_TIMEOUT, Phase, observe


def render(
    spec: TrainJobSpec,
    key: str,
    attempt: int,
    namespace: str,
    *,
    origin: Mapping[str, str] | None = None,
    changes: Changes | None = None,
    earlier: Iterable[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The TrainJob object of an attempt, as it is sent to the API server.

    Args:
        spec: What to run.
        key: Name of the piece of work.
        attempt: Number of the attempt, from 1.
        namespace: Kubernetes namespace.
        origin: Labels in addition to those of the spec, see `trainjob.launch`; `unattended.ON_KILL` is an annotation.
        changes: What this attempt changes of the spec, by `on_retry`. The hash of the spec remains that of `spec`.
        earlier: Earlier attempts of the key. After a complete one, the checkpoints are in a new directory.

    Raises:
        ConfigurationError: The name of the namespace is invalid.
        InvalidSpec: The runtime is missing, or the key is blank.
    """
    check_key(key)
    changes = changes or Changes()
    written, spec = spec, applied(spec, changes)
    if spec.manifest is not None:
        body = _with_variables(spec.manifest.get("spec") or {}, _stall_variable(spec))
        metadata = spec.manifest.get("metadata") or {}
        labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    else:
        body = _body(spec)
        if spec.checkpoints is not None:
            body = _with_checkpoints(body, spec, spec.checkpoints, f"{namespace}/{work_name(key)}", earlier)
        labels, annotations = spec.labels, spec.annotations
    origin = dict(origin or {})
    noted = {unattended.ON_KILL: origin.pop(unattended.ON_KILL)} if unattended.ON_KILL in origin else {}
    policy_labels, policy_annotations = unattended.metadata_of(spec)
    if spec.stall_timeout is not None:
        policy_annotations[STALL_TIMEOUT] = f"{spec.stall_timeout.total_seconds():g}"
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": job_name(key, attempt),
            "namespace": names.namespace(namespace),
            "labels": {**labels, **origin, **policy_labels, **labels_of(key), ATTEMPT: str(attempt)},
            "annotations": {
                **annotations,
                **noted,
                **policy_annotations,
                **change_annotations(written, changes, _hash),
                KEY: key,
                SPEC_HASH: _hash(written),
            },
            **({"ownerReferences": [spec.owner_reference.api()]} if spec.owner_reference is not None else {}),
        },
        "spec": body,
    }


def _body(spec: TrainJobSpec) -> dict[str, Any]:
    """The spec of the TrainJob, without the variable of the checkpoints."""
    if spec.runtime is None:
        raise InvalidSpec([Problem("runtime", "is missing")])
    body: dict[str, Any] = {"runtimeRef": spec.runtime.api()}
    if spec.initializer is not None:
        body["initializer"] = spec.initializer.api()
    command, args = _entry_point(spec)
    trainer = {
        "numNodes": spec.num_nodes,
        "image": spec.image,
        "command": command,
        "args": args,
        "env": [
            *_locations("INPUT", spec.inputs),
            *_locations("OUTPUT", spec.outputs),
            *_stall_variable(spec),
            *env_api({name: value for name, value in spec.env.items() if name != volumes.CHECKPOINT_VARIABLE}),
        ],
        "resourcesPerNode": spec.resources_per_node.api() if spec.resources_per_node else None,
        "numProcPerNode": spec.num_proc_per_node,
    }
    # Also sent if it is empty: Trainer's torch plugin sets the rendezvous variables only if spec.trainer exists.
    body["trainer"] = {name: value for name, value in trainer.items() if value}
    patches = [*spec.runtime_patches]
    if spec.pod is not None:
        patches.append(pod_patch(spec.runtime.name, spec.pod))
    if spec.checkpoints is not None and (mounts := volumes.checkpoint_pod(spec.checkpoints)) is not None:
        patches.append(for_every_node(spec.runtime.name, mounts, f"{RESERVED_PREFIX}checkpoints"))
    if mounted := volumes.named([*spec.inputs.values(), *spec.outputs.values(), *command, *args]):
        patches.append(for_every_node(spec.runtime.name, volumes.pod(mounted), f"{RESERVED_PREFIX}claims"))
    if patches:
        body["runtimePatches"] = patches
    if spec.suspend:
        body["suspend"] = True
    if spec.active_deadline_seconds is not None:
        body["activeDeadlineSeconds"] = spec.active_deadline_seconds
    if spec.managed_by is not None:
        body["managedBy"] = spec.managed_by
    return body


def _locations(kind: str, locations: Mapping[str, str]) -> list[dict[str, Any]]:
    return env_api({f"TRAINJOB_{kind}_{name.upper()}": volumes.as_file(uri) for name, uri in locations.items()})


def _with_checkpoints(
    body: dict[str, Any], spec: TrainJobSpec, checkpoints: str, work: str, earlier: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """`body` with the variable of the checkpoint directory, after those of inputs and outputs."""
    chosen = spec.env.get(volumes.CHECKPOINT_VARIABLE)
    if isinstance(chosen, str):
        directory = volumes.checkpoint_path(chosen)
    else:
        digest = checkpoint_directories.digest(body)
        directory = _after_complete(volumes.checkpoint_directory(checkpoints, f"{work}-{digest}"), earlier)
    env = body["trainer"].get("env") or []
    behind = len(spec.inputs) + len(spec.outputs)
    own = env_api({volumes.CHECKPOINT_VARIABLE: directory})
    return {**body, "trainer": {**body["trainer"], "env": [*env[:behind], *own, *env[behind:]]}}


def _after_complete(directory: str, earlier: Iterable[Mapping[str, Any]]) -> str:
    """The directory after a complete attempt that used `directory`: its training is done and does not continue.

    The number of the latest such attempt is a part of the name, so that all attempts after it share the directory, also
    if one of them was deleted.
    """
    latest = 0
    for trainjob in earlier:
        found = re.fullmatch(
            rf"{re.escape(directory)}(?:-([0-9]{{1,18}}))?", checkpoint_directories.directory(trainjob)
        )
        if found is not None:
            complete = observe(trainjob).phase is Phase.COMPLETE
            latest = max(latest, JobRef.of(trainjob).attempt if complete else int(found[1] or 0))
    return f"{directory}-{latest}" if latest else directory


def _stall_variable(spec: TrainJobSpec) -> list[dict[str, Any]]:
    return (
        []
        if spec.stall_timeout is None
        else env_api({message.STALL_TIMEOUT: f"{spec.stall_timeout.total_seconds():g}"})
    )


def _with_variables(body: dict[str, Any], variables: list[dict[str, Any]]) -> dict[str, Any]:
    """The spec of a whole manifest, with more variables for its ranks."""
    if not variables:
        return body
    trainer = body.get("trainer") or {}
    return {**body, "trainer": {**trainer, "env": [*variables, *(trainer.get("env") or [])]}}


def _entry_point(spec: TrainJobSpec) -> tuple[list[str], list[str]]:
    if spec.torchtune is not None:
        dataset = spec.initializer.dataset if spec.initializer else None
        return torchtune.COMMAND, [*spec.torchtune.args(dataset.storage_uri if dataset else None), *spec.args]
    if spec.func is None:
        return spec.command, spec.args
    packages = list(spec.packages_to_install)
    if spec.pip_index_urls:
        first, *others = spec.pip_index_urls
        packages = [f"--index-url={first}", *(f"--extra-index-url={url}" for url in others), *packages]
    options = {"name": spec.func.name, "args": spec.func_args, "packages": packages}
    command = ["python", "-c", _literal(inspect.getsource(node)), _literal(inspect.getsource(message))]
    return command, [_literal(spec.func.source), _literal(json.dumps(options))]


def _literal(text: str) -> str:
    """`text`, escaped for Kubernetes' ``$(NAME)`` expansion of command and args."""
    return text.replace("$", "$$")


def _hash(spec: TrainJobSpec) -> str:
    """Hash of the spec as the author wrote it, not as this version renders it: an upgrade must not change it.

    `unattended` and `on_retry` are left out, since they do not change the training.
    """
    left_out = {"unattended", "unattended_after", "on_retry"}
    fields = spec.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def check_same_spec(present: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse to adopt a job that was created from another spec.

    Raises:
        SpecMismatch: The specs differ; lists the differences.
    """
    if spec_hash(present) != spec_hash(wanted):
        found = differences(wanted, present) or ["(labels or annotations)"]
        raise SpecMismatch(
            f"TrainJob {present['metadata']['namespace']}/{present['metadata']['name']} was launched for the same key "
            "with another spec; cancel or delete it, or launch under another key. Present -> wanted:"
            + "".join(f"\n  {change}" for change in found)
        )


def differences(wanted: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Fields of `wanted` that `present` lacks or has otherwise, a line each; additions by the cluster do not count."""
    without_directory = _differences(_without_directory(wanted["spec"]), _without_directory(present["spec"]), "spec")
    return list(without_directory) or list(_differences(wanted["spec"], present["spec"], "spec"))


def _without_directory(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """`spec` without the value of the checkpoint directory, which follows from the rest."""
    trainer = spec.get("trainer")
    if not isinstance(trainer, Mapping) or not isinstance(trainer.get("env"), list):
        return spec
    name = {"name": volumes.CHECKPOINT_VARIABLE}
    env = [name if mapping(each).get("name") == name["name"] else each for each in trainer["env"]]
    return {**spec, "trainer": {**trainer, "env": env}}


def _differences(wanted: Any, present: Any, path: str) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(present, Mapping):
        for name in wanted:
            yield from _differences(wanted[name], present.get(name), f"{path}.{name}")
        if path == "spec.trainer":  # immutable, and written by the author alone
            for name in sorted(set(present) - set(wanted)):
                yield f"{path}.{name}: {short_json(present[name])} -> (nothing)"
    elif isinstance(wanted, list) and isinstance(present, list) and len(wanted) == len(present):
        for i, (new, old) in enumerate(zip(wanted, present, strict=True)):
            yield from _differences(new, old, f"{path}[{i}]")
    elif wanted != present:
        yield f"{path}: {short_json(present)} -> {short_json(wanted)}"
