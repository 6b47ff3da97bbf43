"""Kueue: whether it is installed, the queues of a namespace, and whether it starts TrainJobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainjob._backends.base import Backend
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._backends.kubernetes.trainer_releases import kueue_needs_patches
from trainjob._doctor.admission import try_job
from trainjob._doctor.findings import Finding, Level
from trainjob._spec import RuntimeRef
from trainjob._support.kube_objects import mapping, mappings
from trainjob.status import QUEUE_LABEL

GROUP = "kueue.x-k8s.io"
NO_KUEUE = Finding("kueue", Level.SKIPPED, "not installed: jobs start at once, without a queue")
"""The finding about a cluster without Kueue, if nobody asked for a queue."""

_READ = "bind Kueue's ClusterRole kueue-batch-user-role, which allows reading queues"


@dataclass(frozen=True)
class Kueue:
    """The installed Kueue.

    Attributes:
        version: Version of its API; empty if Kueue is not installed.
        starts_by_patches: Whether it starts TrainJobs only by `runtimePatches` (0.17 and newer).
    """

    version: str = ""
    starts_by_patches: bool = False


async def look(client: ApiClient, queue: str) -> tuple[Kueue, list[Finding]]:
    """Find the installed Kueue; a missing one is a failure only if a `queue` is given."""
    try:
        group = await client.send(Request("GET", f"/apis/{GROUP}"))
    except ObjectNotFound:
        if not queue:
            return Kueue(), [NO_KUEUE]
        message = f"not installed: a job for queue {queue} would start at once"
        return Kueue(), [
            Finding("kueue", Level.FAILURE, message, "install Kueue, or remove the queue label from the job")
        ]
    version = str(mapping(group, "preferredVersion").get("version") or "v1beta1")
    kueue = Kueue(version, await kueue_needs_patches(client))
    served = ", ".join(str(each.get("version")) for each in mappings(group, "versions"))
    release = "Kueue 0.17 or newer" if kueue.starts_by_patches else "Kueue older than 0.17"
    return kueue, [Finding("kueue", Level.OK, f"serves {served} ({release})")]


async def local_queues(client: ApiClient, kueue: Kueue, namespace: str, queue: str) -> tuple[list[str], list[Finding]]:
    """The active LocalQueues, and the findings about `queue`, or about all queues of the namespace."""
    path = f"/apis/{GROUP}/{kueue.version}/namespaces/{namespace}/localqueues"
    try:
        found = [await client.send(Request("GET", f"{path}/{queue}"))] if queue else await client.items(path, {})
    except ObjectNotFound:
        advice = f"list the queues: kubectl get localqueues -n {namespace}, or have this one created"
        message = f"LocalQueue {queue} does not exist in {namespace}: its jobs would never start"
        return [], [Finding("queue", Level.FAILURE, message, advice)]
    except Forbidden as error:
        return [queue] if queue else [], [Finding("queue", Level.SKIPPED, error.message, _READ)]
    findings = [await _queue(client, kueue, each, asked=bool(queue)) for each in found]
    if not found:
        findings.append(Finding("queue", Level.SKIPPED, f"no LocalQueue in {namespace}: jobs start without a queue"))
    active = [str(mapping(each, "metadata").get("name")) for each in found if _inactive(each) is None]
    return active, findings


async def _queue(client: ApiClient, kueue: Kueue, queue: Mapping[str, Any], *, asked: bool) -> Finding:
    name, above = str(mapping(queue, "metadata").get("name")), str(mapping(queue, "spec").get("clusterQueue"))
    bad = Level.FAILURE if asked else Level.WARNING
    try:
        cluster_queue = await client.send(Request("GET", f"/apis/{GROUP}/{kueue.version}/clusterqueues/{above}"))
        known, why = True, _inactive(cluster_queue)
    except ObjectNotFound:
        known, why = True, "it does not exist"
    except Forbidden:  # cluster-wide; the status of the LocalQueue has it too, with less detail
        known, why = False, None
    if why is not None:
        message = f"LocalQueue {name} uses ClusterQueue {above}, which takes no jobs: {why}"
        return Finding("queue", bad, message, f"ask an administrator of Kueue to activate ClusterQueue {above}")
    if (why := _inactive(queue)) is not None:
        return Finding(
            "queue",
            bad,
            f"LocalQueue {name} takes no jobs: {why}",
            f"ask an administrator of Kueue to activate it: LocalQueue {name} -> ClusterQueue {above}",
        )
    seen = "active" if known else "active according to the LocalQueue (the ClusterQueue may not be read)"
    return Finding("queue", Level.OK, f"LocalQueue {name} -> ClusterQueue {above}, {seen}")


def _inactive(queue: Mapping[str, Any]) -> str | None:
    """Why a LocalQueue or ClusterQueue is not active; None if it is active."""
    conditions = mappings(queue, "status", "conditions")
    active = next((each for each in conditions if each.get("type") == "Active"), None)
    if active is None:
        return "Kueue has not processed it; its controller may not be running"
    return None if active.get("status") == "True" else f"{active.get('reason')}: {active.get('message')}"


async def integration(
    backend: Backend, namespace: str, runtime: RuntimeRef, queue: str, *, never: bool, asked: bool
) -> list[Finding]:
    """Whether Kueue would hold and start a job of a queue.

    Args:
        backend: Backend of the cluster.
        namespace: Namespace of the job.
        runtime: Runtime of the job.
        queue: A LocalQueue.
        never: Whether Kueue cannot start the jobs of this Trainer (`incompatible`).
        asked: Whether the user named this queue.

    Raises:
        LaunchError: A job of that queue is rejected.
        BackendUnavailable: The API server gives no answer.
    """
    if never:
        message = f"a job for queue {queue} would never start: {_INCOMPATIBLE}"
        return [Finding("queueing", Level.FAILURE if asked else Level.WARNING, message, _UPGRADE)]
    stored = await try_job(backend, namespace, runtime, queue)
    if mapping(stored, "spec").get("suspend") is True:
        return [Finding("queueing", Level.OK, f"a job for queue {queue} would wait for its admission")]
    message = f"a job for queue {queue} would start at once: this Kueue does not manage TrainJobs"
    advice = "add trainer.kubeflow.org/trainjob to integrations.frameworks in Kueue's configuration, and restart Kueue"
    return [Finding("queueing", Level.FAILURE if asked else Level.WARNING, message, advice)]


def taken_by_default(stored: Mapping[str, Any], namespace: str, *, never: bool) -> list[Finding]:
    """Report a LocalQueue that takes jobs without a queue (Kueue's LocalQueueDefaulting).

    Args:
        stored: A job without a queue, as the server would store it.
        namespace: Namespace of the job.
        never: Whether Kueue cannot start the jobs of this Trainer (`incompatible`).
    """
    queue = mapping(stored, "metadata", "labels").get(QUEUE_LABEL)
    if not queue:
        return []
    message = f"LocalQueue {queue} takes every job of {namespace} that names no other"
    if never:
        message = f"{message}, and none of them would start: {_INCOMPATIBLE}"
        return [Finding("queueing", Level.FAILURE, message, f"{_UPGRADE}, or delete LocalQueue {queue} of {namespace}")]
    return [Finding("queueing", Level.OK, message)]


def incompatible(kueue: Kueue, release: str) -> bool:
    """Whether this Kueue admits TrainJobs of that release of Trainer, but cannot start them (kueue#10127)."""
    return kueue.starts_by_patches and release == "2.1"


_INCOMPATIBLE = (
    "Kueue 0.17 and newer start a TrainJob by its field runtimePatches, which Kubeflow Trainer 2.1 does not have"
)
_UPGRADE = "upgrade Kubeflow Trainer to 2.2 or newer, or use Kueue 0.16"
