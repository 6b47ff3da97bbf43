"""Rules for names, environment and secrets, for the fields of a spec and for whole manifests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainjob import names
from trainjob._spec.wording import text_problem
from trainjob._support import volumes
from trainjob._support.masking import holds_secret, names_a_secret, source_holds_secret
from trainjob.errors import Problem
from trainjob.job import RESERVED_PREFIX
from trainjob.progress.message import STALL_TIMEOUT
from trainjob.status import QUEUE_LABEL

_RESERVED_ENV = {
    # Trainer's webhook rejects the first three groups; Trainer silently overwrites the fourth.
    "torch": {"PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"},
    "xgboost": {"DMLC_TRACKER_URI", "DMLC_TRACKER_PORT", "DMLC_TASK_ID", "DMLC_NUM_WORKER"},
    "MPI": {
        "OMPI_MCA_orte_default_hostfile",
        "OMPI_MCA_plm_rsh_args",
        "OMPI_MCA_orte_keep_fqdn_hostnames",
        "OMPI_MCA_orte_set_default_slots",
    },
    "JAX": {"JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"},
}


_ENV_NAME = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
"""The value of a label in Kubernetes (``IsValidLabelValue``)."""
_QUALIFIED_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LOCATION_NAME = re.compile(r"[a-z][a-z0-9_]*")
_LOCATION = re.compile(rf"pvc://{volumes.NAME}(/\S*)?|(?!pvc:)[A-Za-z][A-Za-z0-9+.-]*:\S+")
_CHECKPOINTS = re.compile(rf"pvc://{volumes.NAME}(/\S*)?|file:///\S*|(?!pvc:|file:)[A-Za-z][A-Za-z0-9+.-]*://\S+")

_CLAIM = re.compile(rf"pvc://({volumes.NAME})(?=/|$)")

_ABOUT_SECRETS = "vault.hashicorp.com/"
"""Prefix of annotations with the names of secrets that Vault's injector adds to the pod."""

_OF_PODS = re.compile(
    r"(sidecar|proxy)\.istio\.io/|(config\.)?linkerd\.io/|vault\.hashicorp\.com/|prometheus\.io/|karpenter\.sh/do-not"
    r"|cluster-autoscaler\.kubernetes\.io/|iam\.amazonaws\.com/|k8s\.v1\.cni\.cncf\.io/|azure\.workload\.identity/"
    r"|gke-gcsfuse/|(ad|admission)\.datadoghq\.com/|kubernetes\.io/(in|e)gress-bandwidth|container\.apparmor"
)
"""Labels and annotations that only the admission webhooks and agents of pods read."""

_MOST_WORDS = 128  # of a command, and of args: Trainer's CRD

_BY_REFERENCE = "write {name}: {{'valueFrom': {{'secretKeyRef': {{'name': …, 'key': …}}}}}}"


def label_problems(labels: Mapping[str, str], where: str, *, values: bool = True) -> Iterator[Problem]:
    """Problems of names with values as Kubernetes has them: labels, node selectors; without `values`, annotations."""
    for name, value in labels.items():
        key = str(name)  # in YAML, a number or a bool, too
        if not _QUALIFIED_NAME.fullmatch(key):
            instead = "write [domain/]name with letters, digits, '-', '_', '.'"
            yield Problem(f"{where}.{key}", "is not a Kubernetes key", instead)
        if not isinstance(value, str):
            yield text_problem(f"{where}.{key}", value)
        elif values and not LABEL_VALUE.fullmatch(value):
            yield Problem(f"{where}.{key}", f"{value!r} is not a label value: up to 63 letters, digits, '-', '_', '.'")


def metadata_problems(
    labels: Mapping[str, str], annotations: Mapping[str, str], prefix: str = "", *, own: bool = False
) -> Iterator[Problem]:
    """Problems of metadata of a TrainJob or, with `own`, of a pod or of a job that trainjob itself labels."""
    yield from label_problems(labels, f"{prefix}labels")
    yield from label_problems(annotations, f"{prefix}annotations", values=False)
    for kind, pairs in (("labels", labels), ("annotations", annotations)):
        for key, value in ((str(name), value) for name, value in pairs.items() if isinstance(value, str)):
            where = f"{prefix}{kind}.{key}"
            if not own and (key.startswith(RESERVED_PREFIX) or key == "app.kubernetes.io/managed-by"):
                yield Problem(where, "is reserved for the job's identity")
            elif not own and _OF_PODS.match(key):
                write = f"write pod: {{metadata: {{{kind}: {{{key}: {value!r}}}}}}}"
                yield Problem(where, "has an effect on pods only, and Trainer does not pass it on to them", write)
            elif key == QUEUE_LABEL and LABEL_VALUE.fullmatch(value) and not names.JOB.fullmatch(value):
                yield Problem(where, f"{value!r} is not the name of a LocalQueue: lower-case letters, digits, '-', '.'")
            elif holds_secret(value) or (not key.startswith(_ABOUT_SECRETS) and names_a_secret(key, value)):
                yield Problem(where, "is a literal secret", "remove it, and pass a Secret by env")


def env_problems(
    env: Sequence[Mapping[str, Any]], where: str, *, reserved: bool = False, fields: bool = True
) -> Iterator[Problem]:
    """Problems of an environment in the API's form.

    Args:
        env: The variables.
        where: Their path.
        reserved: Whether the names that runtimes set on nodes are refused.
        fields: Whether those of inputs and outputs are, too, which a whole manifest has no fields for.
    """
    if len(env) > 128:
        yield Problem(where, f"has {len(env)} variables; the API accepts 128")
    for variable in env:
        name, value = str(variable.get("name", "")), variable.get("value")
        path = f"{where}.{name}"
        if not _ENV_NAME.fullmatch(name):
            yield Problem(path, "is not a name of an environment variable")
        from_fields = ("TRAINJOB_CHECKPOINT", *(("TRAINJOB_INPUT_", "TRAINJOB_OUTPUT_") if fields else ()))
        if name.startswith(from_fields) and reserved:
            yield Problem(path, "is set from inputs and outputs or checkpoints", "set those fields")
        if name == STALL_TIMEOUT and reserved:
            yield Problem(path, "is set from stall_timeout", "set that field")
        for framework, variables in _RESERVED_ENV.items() if reserved else ():
            if name in variables:
                yield Problem(path, f"is set by Trainer's {framework} runtimes", "use num_nodes and num_proc_per_node")
        source = variable.get("valueFrom")
        if source is not None and (value or (isinstance(source, Mapping) and len(source) != 1)):
            yield Problem(path, "must have a value, or one source in valueFrom")
        if value is not None and not isinstance(value, str):
            yield text_problem(path, value)
        elif value and "\x00" in value:
            yield Problem(path, "contains a NUL character")
        elif value and (names_a_secret(name, value) or holds_secret(value)):
            yield Problem(path, "is a literal secret", _BY_REFERENCE.format(name=name))


def secret_texts(value: object, path: str) -> Iterator[str]:
    """Paths of all text in a JSON value that contains a secret."""
    if isinstance(value, str) and holds_secret(value):
        yield path
    elif isinstance(value, Mapping):
        variable = str(value.get("name")) if "value" in value else ""  # of an env
        for name, part in value.items():
            named = str(name) if name != "value" else variable
            if isinstance(part, str) and not str(name).startswith(_ABOUT_SECRETS) and names_a_secret(named, part):
                yield f"{path}.{name}"
            else:
                yield from secret_texts(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from secret_texts(part, f"{path}[{i}]")


def argument_problems(trainer: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """Problems of a trainer's command and args."""
    before: list[str] = []  # words of the command so far
    for field in ("command", "args"):
        words = trainer.get(field) or []
        if len(words) > _MOST_WORDS:
            yield Problem(f"{prefix}{field}", f"has {len(words):,} entries; the API accepts {_MOST_WORDS}")
        for i, argument in enumerate(words[:_MOST_WORDS]):
            path = f"{prefix}{field}[{i}]"
            if not isinstance(argument, str):
                yield text_problem(path, argument)
                continue
            if _is_secret_word(before, argument):
                yield Problem(
                    path,
                    "contains a secret, which everyone who can see the job can read",
                    "put it into env by secretKeyRef and write $(NAME)",
                )
            if "\x00" in argument:
                yield Problem(path, "contains a NUL character")
            before.append(argument)


def _is_secret_word(before: Sequence[str], word: str) -> bool:
    """Whether a word of a command contains a secret, alone or after the words `before` it."""
    last = before[-1] if before else ""
    if last == "-c" and any("python" in each.rpartition("/")[2] for each in before):
        return source_holds_secret(word)
    if holds_secret(word) or (
        last.startswith("--") and "=" not in last and not word.startswith("-") and names_a_secret(last, word)
    ):
        return True
    # `curl -u NAME:PASSWORD`: without words that contain blanks, so that only the command itself counts.
    joined = " ".join([*(each for each in before[-8:] if not re.search(r"\s", each)), word])
    return not re.search(r"\s", word) and holds_secret(joined) and not holds_secret(joined[: -len(word) - 1])


def location_problems(locations: Mapping[str, str], where: str) -> Iterator[Problem]:
    """Problems of named URIs."""
    for name, uri in locations.items():
        if not _LOCATION_NAME.fullmatch(name):
            yield Problem(
                f"{where}.{name}",
                "is not a valid name",
                "use lower-case letters, digits and '_', starting with a letter",
            )
        if uri and not _LOCATION.fullmatch(uri):
            yield Problem(
                f"{where}.{name}", f"{uri!r} is not a URI", "write s3://…, hf://…, pvc://claim/…, file:///…, …"
            )
        yield from _uri_problems(uri, f"{where}.{name}")


def checkpoint_problems(uri: str) -> Iterator[Problem]:
    """Problems of a checkpoint location."""
    if not _CHECKPOINTS.fullmatch(uri):
        yield Problem(
            "checkpoints", f"{uri!r} is not a checkpoint location", "write pvc://claim/path, s3://… or file:///…"
        )
    yield from _uri_problems(uri, "checkpoints")


def checkpoint_directory_problems(directory: object, checkpoints: str, path: str) -> Iterator[Problem]:
    """Problems of a checkpoint directory that an author has chosen, below or beside the location `checkpoints`."""
    if not isinstance(directory, str):
        yield Problem(path, "is a reference", "write the path or URI of the directory")
    elif not (directory.startswith("/") or _CHECKPOINTS.fullmatch(directory)):
        write = "write pvc://claim/path, s3://…, file:///… or an absolute path"
        yield Problem(path, f"{directory!r} is not a checkpoint directory", write)
    elif (claim := _claim(directory)) and claim != _claim(checkpoints):
        yield Problem(path, f"is on the PVC volume {claim}, which is not mounted", f"set checkpoints to pvc://{claim}")
    elif directory.startswith(f"{volumes.CHECKPOINT_MOUNT}/") and not _claim(checkpoints):
        yield Problem(path, "is on a PVC volume, and none is mounted", "set checkpoints to pvc://claim/path")
    else:
        yield from _uri_problems(directory, path)


def _claim(uri: str) -> str:
    return found[1] if (found := _CLAIM.match(uri)) else ""


def _uri_problems(uri: str, path: str) -> Iterator[Problem]:
    if "\x00" in uri:
        yield Problem(path, "contains a NUL character")
    if holds_secret(uri):
        yield Problem(path, "contains a credential", "pass credentials to the job by secretKeyRef")
