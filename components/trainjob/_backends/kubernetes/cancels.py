"""Records of cancels: a small Lease for each, which launches of the same key read, and the reaper.

The version of a Lease orders it among launches: a launch lists the Leases of its key when it begins, and the version of
that list is its begin. Kubernetes compares versions within one resource (KEP-5504), so that no clock is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Conflict, Forbidden
from trainjob._manifest.attempts import Cancel, stops_by
from trainjob._support.display import iso
from trainjob._support.kube_objects import mapping, parse_time
from trainjob._support.numbers import count_of
from trainjob.job import RESERVED_PREFIX
from trainjob.names import namespace as checked

KEY_LABEL = RESERVED_PREFIX + "cancelled-key"
"""Label of the record of a cancel: the hash of the key."""
_ACTION, _TRY, _UID = (RESERVED_PREFIX + name for name in ("action", "try", "uid"))


async def write(client: ApiClient, namespace: str, work: str, cancel: Cancel) -> Cancel:
    """Write the record of a cancel.

    Args:
        client: The connection.
        namespace: Namespace of the jobs.
        work: Hash of the key.
        cancel: The cancel; ``record`` is the name of its Lease.

    Raises:
        ApiError: The request failed.
    """
    tried = {} if cancel.tried is None else {_TRY: str(cancel.tried)}
    only = {_UID: cancel.uid} if cancel.uid else {}
    lease = {
        "metadata": {
            "name": cancel.record,
            "labels": {KEY_LABEL: work},
            "annotations": {_ACTION: cancel.action, **tried, **only},
        },
        "spec": {"renewTime": iso(client.now(), "microseconds")},
    }
    try:
        return _cancel(await client.send(Request("POST", _path(namespace), body=lease)))
    except Conflict as error:
        if error.reason != "AlreadyExists":
            raise
    # The reply to the same request was lost. A list needs no other permission than those of a launch.
    _, found = await read(client, namespace, work)
    return next((each for each in found.get(work, ()) if each.record == cancel.record), cancel)


async def read(client: ApiClient, namespace: str, work: str = "") -> tuple[int | None, dict[str, list[Cancel]]]:
    """The version of the Leases, and the records of cancels by the hash of the key; with `work`, of that key only.

    Raises:
        ApiError: The request failed.
    """
    params = {"labelSelector": f"{KEY_LABEL}={work}" if work else KEY_LABEL}
    found = await client.send(Request("GET", _path(namespace), params))
    cancels: dict[str, list[Cancel]] = {}
    for lease in found.get("items") or []:
        work, cancel = parsed(lease)
        cancels.setdefault(work, []).append(cancel)
    return count_of(mapping(found, "metadata").get("resourceVersion")), cancels


async def read_if_allowed(client: ApiClient, namespace: str, work: str) -> tuple[int | None, list[Cancel]]:
    """The same of one key; nothing if this account may not list Leases.

    Raises:
        ApiError: The request failed.
    """
    try:
        version, cancels = await read(client, namespace, work)
    except Forbidden:
        return None, []
    return version, cancels.get(work, [])


def removal(namespace: str, cancel: Cancel) -> Request:
    """The request that removes a record."""
    return Request("DELETE", f"{_path(namespace)}/{cancel.record}")


def parsed(lease: Mapping[str, Any]) -> tuple[str, Cancel]:
    """The hash of the key and the cancel that a Lease records."""
    return str(mapping(lease, "metadata", "labels").get(KEY_LABEL)), _cancel(lease)


def _cancel(lease: Mapping[str, Any]) -> Cancel:
    metadata, about = mapping(lease, "metadata"), mapping(lease, "metadata", "annotations")
    action = stops_by(about.get(_ACTION))
    return Cancel(
        version=count_of(metadata.get("resourceVersion")) or 0,
        tried=count_of(about.get(_TRY)),
        uid=str(about.get(_UID) or ""),
        action=action,
        at=parse_time(metadata.get("creationTimestamp")) or parse_time(mapping(lease, "spec").get("renewTime")),
        record=str(metadata.get("name")),
    )


def _path(namespace: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{checked(namespace)}/leases"
