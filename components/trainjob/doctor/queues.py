"""Kueue: whether there is one, which queues a namespace has, and whether it starts TrainJobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainjob.backends.base import Backend
from trainjob.backends.kubernetes.client import ApiClient, Request
from trainjob.backends.kubernetes.compat import kueue_needs_patches
from trainjob.backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob.doctor.admission import try_job
from trainjob.doctor.findings import Finding, Level
from trainjob.kube_objects import mapping, mappings
from trainjob.spec import RuntimeRef
from trainjob.status import QUEUE_LABEL

GROUP = "kueue.x-k8s.io"
_READ = "bind Kueue's ClusterRole kueue-batch-user-role, which lets queues be read"


@dataclass(frozen=True)
class Kueue:
    """What is known of it.

    Attributes:
        version: Of its API; empty if it is not there.
        starts_by_patches: Whether it starts TrainJobs by `runtimePatches` alone (0.17 and newer).
    """

    version: str = ""
    starts_by_patches: bool = False


async def look(client: ApiClient, queue: str) -> tuple[Kueue, list[Finding]]:
    """Whether there is a Kueue; that matters if a `queue` is asked for."""
    try:
        group = await client.send(Request("GET", f"/apis/{GROUP}"))
    except ObjectNotFound:
        if not queue:
            return Kueue(), [Finding("kueue", Level.OK, "not installed: jobs start at once, without a queue")]
        message = f"not installed, so that a job for queue {queue} would start at once"
        return Kueue(), [Finding("kueue", Level.FAILURE, message, "install Kueue, or leave the queue's label out")]
    version = str(mapping(group, "preferredVersion").get("version") or "v1beta1")
    kueue = Kueue(version, await kueue_needs_patches(client))
    served = ", ".join(str(each.get("version")) for each in mappings(group, "versions"))
    release = "Kueue 0.17 or newer" if kueue.starts_by_patches else "Kueue older than 0.17"
    return kueue, [Finding("kueue", Level.OK, f"serves {served} ({release})")]


async def local_queues(client: ApiClient, kueue: Kueue, namespace: str, queue: str) -> tuple[list[str], list[Finding]]:
    """The LocalQueues that can be used, and what is to be said about `queue`, or about all of the namespace."""
    path = f"/apis/{GROUP}/{kueue.version}/namespaces/{namespace}/localqueues"
    try:
        found = [await client.send(Request("GET", f"{path}/{queue}"))] if queue else await client.items(path, {})
    except ObjectNotFound:
        advice = f"kubectl get localqueues -n {namespace}, or have the queue made"
        message = f"there is no LocalQueue {queue} in {namespace}: its jobs would wait for ever"
        return [], [Finding("queue", Level.FAILURE, message, advice)]
    except Forbidden as error:
        return [queue] if queue else [], [Finding("queue", Level.SKIPPED, error.message, _READ)]
    findings = [await _queue(client, kueue, each, asked=bool(queue)) for each in found]
    if not found:
        findings.append(Finding("queue", Level.OK, f"no LocalQueue in {namespace}: jobs start without a queue"))
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
    except Forbidden:  # cluster-wide; the LocalQueue says it too, if in fewer words
        known, why = False, None
    if why is not None:
        message = f"LocalQueue {name} leads to ClusterQueue {above}, which takes no jobs: {why}"
        return Finding("queue", bad, message, f"have whoever runs Kueue see to ClusterQueue {above}")
    if (why := _inactive(queue)) is not None:
        return Finding("queue", bad, f"LocalQueue {name} takes no jobs: {why}", f"have it seen to: {name} -> {above}")
    seen = "active" if known else "active, by what the LocalQueue says: the ClusterQueue itself may not be read"
    return Finding("queue", Level.OK, f"LocalQueue {name} -> ClusterQueue {above}, {seen}")


def _inactive(queue: Mapping[str, Any]) -> str | None:
    """Why a queue of either kind is not active; None if it is."""
    conditions = mappings(queue, "status", "conditions")
    active = next((each for each in conditions if each.get("type") == "Active"), None)
    if active is None:
        return "Kueue has not looked at it, so that its controller may not run"
    return None if active.get("status") == "True" else f"{active.get('reason')}: {active.get('message')}"


async def integration(
    backend: Backend, namespace: str, runtime: RuntimeRef, queue: str, *, never: bool, asked: bool
) -> list[Finding]:
    """Whether a job that names a queue would be held and started by Kueue.

    Args:
        backend: Of the cluster.
        namespace: Of the job.
        runtime: Of the job.
        queue: A LocalQueue.
        never: Whether Kueue and Trainer do not fit together, see `misfit`.
        asked: Whether it was asked about this queue.

    Raises:
        LaunchError: a job for that queue is refused.
        BackendUnavailable: there is no answer.
    """
    if never:
        message = f"a job for queue {queue} would wait for ever: {_MISFIT}"
        return [Finding("queueing", Level.FAILURE if asked else Level.WARNING, message, _FIT)]
    stored = await try_job(backend, namespace, runtime, queue)
    if mapping(stored, "spec").get("suspend") is True:
        return [Finding("queueing", Level.OK, f"a job for queue {queue} would wait for its admission")]
    message = f"a job for queue {queue} would start at once: this Kueue does not manage TrainJobs"
    advice = "add trainer.kubeflow.org/trainjob to integrations.frameworks in Kueue's configuration, and restart it"
    return [Finding("queueing", Level.FAILURE if asked else Level.WARNING, message, advice)]


def taken_by_default(stored: Mapping[str, Any], namespace: str, *, never: bool) -> list[Finding]:
    """What becomes of a job that names no queue where a LocalQueue takes it all the same (kueue LocalQueueDefaulting).

    Args:
        stored: Such a job, as the server would store it.
        namespace: Its namespace.
        never: Whether Kueue and Trainer do not fit together, see `misfit`.
    """
    queue = mapping(stored, "metadata", "labels").get(QUEUE_LABEL)
    if not queue:
        return []
    message = f"LocalQueue {queue} takes every job of {namespace} that names no other"
    if never:
        message = f"{message}, and none of them would ever start: {_MISFIT}"
        return [Finding("queueing", Level.FAILURE, message, f"{_FIT}, or delete LocalQueue {queue} of {namespace}")]
    return [Finding("queueing", Level.OK, message)]


def misfit(kueue: Kueue, release: str) -> bool:
    """Whether this Kueue admits the TrainJobs of that release of Trainer, but cannot start them (kueue#10127)."""
    return kueue.starts_by_patches and release == "2.1"


_MISFIT = "Kueue 0.17 and newer start a TrainJob by its field runtimePatches, which Kubeflow Trainer 2.1 has not"
_FIT = "upgrade Kubeflow Trainer to 2.2 or newer, or keep to Kueue 0.16"
