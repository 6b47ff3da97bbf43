"""Rules about names, environment and secrets that hold for fields and for whole manifests alike."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainjob.errors import Problem

RESERVED_PREFIX = "trainjob.dev/"
"""Labels and annotations under this prefix carry a job's identity and belong to `trainjob.manifest`."""

_RESERVED_ENV = {
    # Trainer's webhook rejects the first three groups; it overwrites the fourth without a word.
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
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
_QUALIFIED_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LOCATION_NAME = re.compile(r"[a-z][a-z0-9_]*")
_LOCATION = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:\S+")

_SECRET_WORDS = {"TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIALS", "APIKEY"}
_SECRET_PAIRS = {("API", "KEY"), ("PRIVATE", "KEY"), ("SECRET", "KEY"), ("ACCESS", "KEY"), ("ACCOUNT", "KEY")}
_NOT_THE_SECRET_ITSELF = {"FILE", "PATH", "DIR", "NAME", "ID", "URL", "URI", "TTL", "TYPE"}
_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|glpat-[\w-]{16,}|xox[abpr]-[\w-]{10,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s@]+@"
)
_BY_REFERENCE = "write {name}: {{'valueFrom': {{'secretKeyRef': {{'name': …, 'key': …}}}}}}"


def metadata_problems(labels: Mapping[str, str], annotations: Mapping[str, str], prefix: str = "") -> Iterator[Problem]:
    """What is wrong with the metadata of a TrainJob."""
    for kind, pairs in (("labels", labels), ("annotations", annotations)):
        for key, value in pairs.items():
            where = f"{prefix}{kind}.{key}"
            if not _QUALIFIED_NAME.fullmatch(key):
                yield Problem(where, "is not a Kubernetes key", "[domain/]name of letters, digits, '-', '_', '.'")
            elif key.startswith(RESERVED_PREFIX) or key == "app.kubernetes.io/managed-by":
                yield Problem(where, "is reserved for the job's identity")
            if kind == "labels" and not _LABEL_VALUE.fullmatch(str(value)):
                yield Problem(where, f"{value!r} is not a label value: up to 63 letters, digits, '-', '_', '.'")


def env_problems(env: Sequence[Mapping[str, Any]], where: str, *, reserved: bool = False) -> Iterator[Problem]:
    """What is wrong with an environment in the API's form; `reserved` names are those that runtimes set on nodes."""
    if len(env) > 128:
        yield Problem(where, f"has {len(env)} variables; the API takes 128")
    for variable in env:
        name, value = str(variable.get("name", "")), variable.get("value")
        path = f"{where}.{name}"
        if not _ENV_NAME.fullmatch(name):
            yield Problem(path, "is not a name for an environment variable")
        if name.startswith(("TRAINJOB_INPUT_", "TRAINJOB_OUTPUT_")) and reserved:
            yield Problem(path, "is made from inputs and outputs", "use those")
        for framework, names in _RESERVED_ENV.items() if reserved else ():
            if name in names:
                yield Problem(path, f"is set by Trainer's {framework} runtimes", "use num_nodes and num_proc_per_node")
        if value and (_names_a_secret(name) or holds_secret(str(value))):
            yield Problem(path, "is a secret given as a literal", _BY_REFERENCE.format(name=name))


def holds_secret(text: str) -> bool:
    """True where `text` holds what looks like a token, a private key, or a password in a URL."""
    return _SECRET_VALUE.search(text) is not None


def _names_a_secret(name: str) -> bool:
    words = re.split(r"[_.-]+", name.upper())
    if words[-1] in _NOT_THE_SECRET_ITSELF:
        return False
    return words[-1] in _SECRET_WORDS or tuple(words[-2:]) in _SECRET_PAIRS


def argument_problems(trainer: Mapping[str, Any], prefix: str = "") -> Iterator[Problem]:
    """What is wrong with a trainer's command and args."""
    for field in ("command", "args"):
        for i, argument in enumerate(trainer.get(field) or []):
            option, _, value = str(argument).partition("=")
            secret_option = value and option.startswith("--") and _names_a_secret(option.lstrip("-"))
            if secret_option or holds_secret(str(argument)):
                yield Problem(
                    f"{prefix}{field}[{i}]",
                    "holds a secret, which everyone who can see the job can read",
                    "put it into env by secretKeyRef and write $(NAME)",
                )
            if "\x00" in str(argument):
                yield Problem(f"{prefix}{field}[{i}]", "holds a NUL character")


def location_problems(locations: Mapping[str, str], where: str) -> Iterator[Problem]:
    """What is wrong with named URIs."""
    for name, uri in locations.items():
        if not _LOCATION_NAME.fullmatch(name):
            yield Problem(f"{where}.{name}", "is not a name: lower-case letters, digits and '_', a letter first")
        if uri and not _LOCATION.fullmatch(uri):
            yield Problem(f"{where}.{name}", f"{uri!r} is not a URI", "write s3://…, hf://…, file:///…, …")
        if holds_secret(uri):
            yield Problem(f"{where}.{name}", "holds a credential", "give credentials to the job by secretKeyRef")
