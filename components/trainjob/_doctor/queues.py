"""Kueue: whether it is installed, and the queues of a namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._doctor.findings import Finding, Level
from trainjob._support.kube_objects import mapping, mappings

GROUP = "kueue.x-k8s.io"
NO_KUEUE = Finding("kueue", Level.SKIPPED, "not installed: jobs start at once, without a queue")
"""The finding about a cluster without Kueue, if nobody asked for a queue."""

_READ = "bind Kueue's ClusterRole kueue-batch-user-role, which allows reading queues"


async def look(client: ApiClient, queue: str) -> tuple[str, Finding]:
    """The version of Kueue's API, empty without Kueue; a missing one is a failure only if a `queue` is given."""
    try:
        group = await client.send(Request("GET", f"/apis/{GROUP}"))
    except ObjectNotFound:
        if not queue:
            return "", NO_KUEUE
        message = f"not installed: a job for queue {queue} would start at once"
        return "", Finding("kueue", Level.FAILURE, message, "install Kueue, or remove the queue label from the job")
    served = ", ".join(str(each.get("version")) for each in mappings(group, "versions"))
    version = str(mapping(group, "preferredVersion").get("version") or "v1beta1")
    return version, Finding("kueue", Level.OK, f"serves {served}")


async def check(client: ApiClient, version: str, namespace: str, queue: str) -> list[Finding]:
    """Whether `queue` takes jobs, or else each queue of the namespace.

    Args:
        client: The connection.
        version: Version of Kueue's API.
        namespace: Namespace of the queues.
        queue: The LocalQueue that jobs are to name; empty for all.

    Raises:
        ApiError: The server does not answer.
    """
    path = f"/apis/{GROUP}/{version}/namespaces/{namespace}/localqueues"
    try:
        found = [await client.send(Request("GET", f"{path}/{queue}"))] if queue else await client.items(path, {})
    except ObjectNotFound:
        advice = f"list the queues: kubectl get localqueues -n {namespace}, or have this one created"
        message = f"LocalQueue {queue} does not exist in {namespace}: its jobs would never start"
        return [Finding("queue", Level.FAILURE, message, advice)]
    except Forbidden as error:
        return [Finding("queue", Level.SKIPPED, error.message, _READ)]
    if not found:
        return [Finding("queue", Level.SKIPPED, f"no LocalQueue in {namespace}: jobs start without a queue")]
    return [_state(each, Level.FAILURE if queue else Level.WARNING) for each in found]


def _state(queue: Mapping[str, Any], bad: Level) -> Finding:
    """The state of a LocalQueue, which Kueue derives from that of its ClusterQueue."""
    place = f"LocalQueue {mapping(queue, 'metadata').get('name')}"
    place += f" -> ClusterQueue {mapping(queue, 'spec').get('clusterQueue')}"
    conditions = mappings(queue, "status", "conditions")
    active = next((each for each in conditions if each.get("type") == "Active"), None)
    if active is not None and active.get("status") == "True":
        return Finding("queue", Level.OK, f"{place}, active")
    why = "Kueue has not processed it; its controller may not be running"
    if active is not None:
        why = f"{active.get('reason')}: {active.get('message')}"
    return Finding(
        "queue", bad, f"{place} takes no jobs: {why}", f"ask an administrator of Kueue to activate it: {place}"
    )
