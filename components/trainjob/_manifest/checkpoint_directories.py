"""Checkpoint directories: which attempts share one, and why an attempt starts in another one. Pure.

The name of a directory follows from the key of the work and from what an attempt is asked to do. So attempts that are
asked the same continue from each other's checkpoints without stored state, also after their objects were deleted. An
attempt of the same key that is asked to do something else has another directory: for example a mapped task of Airflow
whose list changed before it was cleared, so that its index names another item.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import zip_longest
from typing import Any

from trainjob import names
from trainjob._spec import torchtune
from trainjob._support import volumes
from trainjob._support.control_characters import short_json
from trainjob._support.foreign import LENIENT, Unreadable, mapping_of
from trainjob._support.kube_objects import mapping, mappings
from trainjob._support.masking import MASK, names_a_secret, public
from trainjob.status import Phase, observe

NOT_ASKED = {
    "TRAINJOB_OUTPUT_*": "where results go, which may change with each try",
    "TRAINJOB_CHECKPOINT": "the directory itself",
    "TRAINJOB_STALL_TIMEOUT": "a timeout",
    "NCCL_*": "communication between ranks",
    "GLOO_*": "communication between ranks",
    "UCX_*": "communication between ranks",
    "FI_*": "communication between ranks",
    "OMPI_*": "communication between ranks",
    "CUDA_*": "GPUs",
    "CUDNN_*": "GPUs",
    "CUBLAS_*": "GPUs",
    "NVIDIA_*": "GPUs",
    "PYTORCH_*": "memory, compilation and debugging of PyTorch",
    "TORCH_*": "memory, compilation and debugging of PyTorch",
    "JAX_*": "memory, compilation and debugging of JAX",
    "XLA_*": "memory, compilation and debugging of JAX",
    "TF_*": "memory, compilation and debugging of TensorFlow",
    "OMP_*": "threads",
    "MKL_*": "threads",
    "KMP_*": "threads",
    "OPENBLAS_*": "threads",
    "NUMEXPR_*": "threads",
    "HF_*": "caches, downloads and credentials of Hugging Face",
    "TRANSFORMERS_*": "caches, downloads and credentials of Hugging Face",
    "TOKENIZERS_*": "threads of Hugging Face's tokenizers",
    "AWS_*": "access to stores",
    "AZURE_*": "access to stores",
    "GOOGLE_*": "access to stores",
    "MLFLOW_*": "where metrics go",
    "WANDB_*": "where metrics go",
    "OTEL_*": "where metrics go",
    "PYTHON*": "the interpreter",
    "*_PROXY": "the network",
    "*LOG_LEVEL": "log levels",
    "*LOGLEVEL": "log levels",
    "*_VERBOSITY": "log levels",
    "*_DEBUG": "log levels",
}
"""Environment variables, in upper case, that do not change what a training is asked to do, and the reason of each. A
retry or a repair changes them. Variables from a Secret do not count either: they are credentials."""

_DIGEST = 8  # characters of 36 each: 41 bits, for the few specs that one key has
_INPUT = "TRAINJOB_INPUT_"
_INITIALIZERS = ("dataset", "model")
_SHOWN = 5  # differences in a notice


def digest(spec: Mapping[str, Any]) -> str:
    """The part of a directory's name that follows from the spec of a TrainJob: a hash of what it asks."""
    canonical = json.dumps(asked(spec), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return names.digest(canonical, _DIGEST)


def asked(spec: Mapping[str, Any]) -> dict[str, Any]:
    """What the spec of a TrainJob asks the training to do, by field of `TrainJobSpec`; empty fields are left out.

    The rest is how and where it runs, which a retry or a repair changes: image, source of the function, packages,
    resources, nodes, queue, timeouts, patches, outputs and the variables of `NOT_ASKED`.
    """
    trainer = mapping(spec, "trainer")
    command, args = list(trainer.get("command") or ()), list(trainer.get("args") or ())
    found: dict[str, Any] = {}
    if (function := _function(command, args)) is not None:
        found["func_args"] = function.get("args")
    else:
        if not command or command == torchtune.COMMAND:  # the runtime names the program, or torchtune's model
            found["runtime"] = mapping(spec, "runtimeRef").get("name")
        found |= {"command": command, "args": args}
    env, inputs = {}, {}
    for variable in mappings(trainer, "env"):
        name, source = str(variable.get("name")), mapping(variable, "valueFrom")
        value = str(variable.get("value") or "")
        if name.startswith(_INPUT):
            inputs[name.removeprefix(_INPUT).lower()] = volumes.as_claim(value)
        elif "secretKeyRef" not in source and not any(fnmatchcase(name.upper(), pattern) for pattern in NOT_ASKED):
            env[name] = dict(source) if source else value
    initializer = {kind: part for kind in _INITIALIZERS if (part := _data(mapping(spec, "initializer", kind)))}
    found |= {"env": env, "inputs": inputs, "initializer": initializer}
    return {field: value for field, value in found.items() if value}


def _function(command: list[Any], args: list[Any]) -> Mapping[str, Any] | None:
    """The options of a function, as `render` passes them to its bootstrap; None for any other command."""
    if command[:2] != ["python", "-c"] or len(args) != 2:
        return None
    try:
        options = mapping_of(str(args[1]).replace("$$", "$"), "the function of a job", LENIENT)
    except Unreadable:
        return None
    return options if {"name", "args", "packages"} <= options.keys() else None


def _data(initializer: Mapping[str, Any]) -> dict[str, str]:
    """What one of Trainer's initializers downloads."""
    variables = {str(each.get("name")): str(each.get("value") or "") for each in mappings(initializer, "env")}
    parts = {"storage_uri": initializer.get("storageUri"), "metadata_loc": variables.get("METADATA_LOC")}
    return {name: str(part) for name, part in parts.items() if part}


def directory(trainjob: Mapping[str, Any]) -> str:
    """The checkpoint directory of a job, as its ranks see it; empty if it has none."""
    variables = mappings(trainjob, "spec", "trainer", "env")
    found = (each.get("value") for each in variables if each.get("name") == volumes.CHECKPOINT_VARIABLE)
    return str(next(found, None) or "")


def location(trainjob: Mapping[str, Any]) -> str:
    """The checkpoint directory of a job, as an author writes it; empty if it has none."""
    return volumes.checkpoint_location(directory(trainjob), mapping(trainjob, "spec"))


def notice(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Why an attempt does not continue from the checkpoints of an earlier one, and how it would, for a log.

    Empty if both use the same directory, or one of them uses none.

    Args:
        before: The earlier attempt.
        after: The next attempt of the same key.
    """
    old, new = location(before), location(after)
    if not old or not new or directory(before) == directory(after):
        return ""
    metadata, earlier = mapping(after, "metadata"), mapping(before, "metadata").get("name")
    job = f"TrainJob {metadata.get('namespace')}/{metadata.get('name')}"
    if changes := [*_differences(asked(mapping(before, "spec")), asked(mapping(after, "spec")), "")]:
        more = [f"{len(changes) - _SHOWN} more"] if len(changes) > _SHOWN else []
        why = f"{job} is asked to do something else than {earlier} ({', '.join([*changes[:_SHOWN], *more])}), so it"
    elif observe(before).phase is Phase.COMPLETE:
        why = f"{job} trains again, since {earlier} is complete: it"
    else:
        why = job
    return public(
        f"{why} does not continue from the checkpoints of {earlier}: its own are in {new}. To continue on purpose, set "
        f"{volumes.CHECKPOINT_VARIABLE} in env of the spec to {old}"
    )


def _differences(old: Any, new: Any, path: str, named: tuple[object, object] = ("", "")) -> Iterator[str]:
    """Each difference of two JSON values, with values of secrets masked.

    Args:
        old: The value of the earlier attempt.
        new: The value of the next one.
        path: Path of both, for people.
        named: What gives each of them its meaning: its key in a mapping, or the word before it in a list.
    """
    if isinstance(old, Mapping | None) and isinstance(new, Mapping | None):
        former, latter = old or {}, new or {}
        for name in [*former, *(each for each in latter if each not in former)]:
            where = f"{path}.{name}" if path else name
            yield from _differences(former.get(name), latter.get(name), where, (name, name))
    elif isinstance(old, list) and isinstance(new, list):
        words = zip_longest(old, new, ["", *old], ["", *new])
        for i, (was, now, *before) in enumerate([*words][: max(len(old), len(new))]):
            yield from _differences(was, now, f"{path}[{i}]", (before[0], before[1]))
    elif old != new:
        yield f"{path}: {_shown(old, named[0])} -> {_shown(new, named[1])}"


def _shown(value: Any, name: object) -> str:
    if not isinstance(value, str):
        return short_json(value)
    return MASK if names_a_secret(str(name), value) else short_json(public(value))
