"""Secrets that a TrainJob names, and whether they exist. Their content is never requested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._doctor.findings import Finding, Level

_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_REFERENCES = {
    "secretKeyRef": "name",
    "secretRef": "name",
    "nodePublishSecretRef": "name",
    "secret": "secretName",
}
"""Field -> field of its value with the name of a Secret: env, envFrom and initializers, CSI volumes, volumes."""


@dataclass(frozen=True)
class Needed:
    """A Secret that a job names.

    Attributes:
        name: Name of the Secret.
        pulls: Whether it is for pulling images: pods start without it if the image is on the node or public.
    """

    name: str
    pulls: bool = False


def needed(value: Any) -> Iterator[Needed]:
    """The Secrets that a job needs to start, and those for pulling images.

    Args:
        value: The spec of a TrainJob object, or a part of it.
    """
    if isinstance(value, list):
        for part in value:
            yield from needed(part)
    if not isinstance(value, Mapping):
        return
    for field, part in value.items():
        if field == "imagePullSecrets" and isinstance(part, list):
            yield from (Needed(str(each["name"]), pulls=True) for each in part if _named(each, "name"))
        elif field in _REFERENCES and isinstance(part, Mapping):
            # A source of a projected volume has the field of a volume, and names its Secret as env does.
            names = [part[key] for key in (_REFERENCES[field], "name") if _named(part, key)]
            if names and part.get("optional") is not True:
                yield Needed(str(names[0]))
        else:
            yield from needed(part)


def _named(value: Any, field: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(field), str) and bool(value[field])


async def check(client: ApiClient, namespace: str, secret: Needed) -> Finding:
    """Whether a Secret exists.

    Args:
        client: The connection.
        namespace: Namespace of the Secret.
        secret: The Secret.

    Raises:
        ApiError: The server gave no answer.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets/{secret.name}"
    try:
        await client.send(Request("GET", path, accept=_METADATA))
    except ObjectNotFound:
        level = Level.WARNING if secret.pulls else Level.FAILURE
        without = "images of private registries cannot be pulled" if secret.pulls else "pods of the job would not start"
        advice = f"create it: kubectl create secret generic {secret.name} -n {namespace} --from-literal=<key>=<value>"
        return Finding("secret", level, f"Secret {secret.name} does not exist in {namespace}: {without}", advice)
    except Forbidden:
        message = f"Secret {secret.name} in {namespace} cannot be checked: you may not read Secrets in it"
        return Finding("secret", Level.SKIPPED, message)
    return Finding("secret", Level.OK, f"Secret {secret.name} exists in {namespace}")
