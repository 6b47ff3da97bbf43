"""Secrets that a TrainJob names: which, and whether they are there. Their content is never requested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob.doctor.findings import Finding, Level

_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_REFERENCES = {
    "secretKeyRef": "name",
    "secretRef": "name",
    "nodePublishSecretRef": "name",
    "secret": "secretName",
}
"""Field -> the field of its value that names a Secret: env, envFrom and initializers, CSI volumes, volumes."""


@dataclass(frozen=True)
class Needed:
    """A Secret that a job names.

    Attributes:
        name: Of the Secret.
        pulls: It is for pulling images: pods start without it if the image is there or public.
    """

    name: str
    pulls: bool = False


def needed(value: Any) -> Iterator[Needed]:
    """The Secrets that a job does not start without, and those for pulling images.

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
            # A source of a projected volume is called as a volume is, and names its Secret as env does.
            names = [part[key] for key in (_REFERENCES[field], "name") if _named(part, key)]
            if names and part.get("optional") is not True:
                yield Needed(str(names[0]))
        else:
            yield from needed(part)


def _named(value: Any, field: str) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get(field), str) and bool(value[field])


async def check(client: ApiClient, namespace: str, secret: Needed) -> Finding:
    """Whether a Secret is there.

    Args:
        client: The connection.
        namespace: Of the Secret.
        secret: Which one.

    Raises:
        ApiError: The server gave no answer.
    """
    path = f"/api/v1/namespaces/{namespace}/secrets/{secret.name}"
    try:
        await client.send(Request("GET", path, accept=_METADATA))
    except ObjectNotFound:
        level = Level.WARNING if secret.pulls else Level.FAILURE
        without = "images of private registries cannot be pulled" if secret.pulls else "pods of the job would not start"
        advice = f"create it in the namespace: kubectl create secret -n {namespace} …"
        return Finding("secret", level, f"there is no Secret {secret.name} in {namespace}: {without}", advice)
    except Forbidden:
        message = f"Secret {secret.name} in {namespace} cannot be checked: you may not read Secrets there"
        return Finding("secret", Level.SKIPPED, message)
    return Finding("secret", Level.OK, f"there is a Secret {secret.name} in {namespace}")
