"""Objects related to waiting jobs, and the blockers in them: few requests for one job or all of a namespace."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainjob._backends.base import TrainJob
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._backends.kubernetes.pods import JOBSET_NAME, collection
from trainjob._diagnosis import blockers
from trainjob._support.kube_objects import INITIALIZERS, has_trained, mapping, mappings, name_of
from trainjob.job import API_VERSION, JobRef
from trainjob.status import Blocker, Phase, observe

_NEEDS_RUNTIME = (Phase.SUSPENDED, Phase.QUEUED, Phase.NOT_STARTED)

_log = logging.getLogger(__name__)

_KUEUE_VERSIONS = ("v1beta2", "v1beta1")  # v1beta2 since Kueue 0.14
_JOB_UID = "kueue.x-k8s.io/job-uid"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
_PLURALS = {
    "TrainingRuntime": "trainingruntimes",
    "ClusterTrainingRuntime": "clustertrainingruntimes",
    "LocalQueue": "localqueues",
    "ClusterQueue": "clusterqueues",
    "ResourceFlavor": "resourceflavors",
    "WorkloadPriorityClass": "workloadpriorityclasses",
}

# Events of every job. Relevant Events are not always Warnings: Preempted, Pulling and Killing for a probe are Normal.
_ROUTINE = ("Scheduled", "Created", "Started", "SuccessfulCreate", "SuccessfulDelete", "Completed")
_ROUTINE_MESSAGE = "Stopping container "  # of Killing


@dataclass
class RelatedObjects:
    """Reads the objects related to the jobs of one namespace.

    A resource that may not be listed is logged once and not requested again.

    Attributes:
        client: The connection.
        namespace: Namespace of the jobs.
        hidden: Resource that may not be read -> the server's message.
        quiet: Whether it is not logged: the caller reports `hidden`.
    """

    client: ApiClient
    namespace: str
    hidden: dict[str, str] = field(default_factory=dict)
    quiet: bool = False

    async def blockers(self, waiting: Mapping[JobRef, TrainJob]) -> dict[str, Blocker]:
        """The blockers of the `waiting` jobs by UID: three lists, and one GET per runtime.

        Raises:
            Transient: The server is unavailable.
        """
        only = next(iter(waiting)) if len(waiting) == 1 else None
        phases = {ref: observe(trainjob).phase for ref, trainjob in waiting.items()}
        found: dict[str, Blocker | None] = {}
        if Phase.QUEUED in phases.values():
            for uid, workload in (await self.workloads_by_job(only)).items():
                found[uid] = blockers.in_workload(workload, await self.queues_of(workload))
        if set(phases.values()) - {Phase.QUEUED, Phase.SUSPENDED}:
            jobs = {ref.name for ref in waiting}
            pods, events = defaultdict(list), defaultdict(list)
            for pod in await self._pending_pods(only):
                pods[pod["metadata"]["labels"][JOBSET_NAME]].append(pod)
            for event in await self.warnings():
                events[_owner(event, jobs)].append(event)
            for ref, phase in phases.items():
                if phase not in (Phase.QUEUED, Phase.SUSPENDED):
                    seen = None if "pods" in self.hidden else pods[ref.name]
                    finding = blockers.first(blockers.around(seen, events[ref.name]))
                    found[ref.uid] = finding.blocker if finding else None
        required = {ref: needed(trainjob, found.get(ref.uid)) for ref, trainjob in waiting.items()}
        missing = {name: await self._is_missing(*name) for name in set().union(*required.values())}
        for ref, names in required.items():
            if lacks := next((name for name in names if missing[name]), None):
                found[ref.uid] = blockers.of_missing(" ".join(lacks)).blocker
        return {ref.uid: blocker for ref in waiting if (blocker := found.get(ref.uid)) is not None}

    async def events(self, ref: JobRef) -> list[dict[str, Any]]:
        """The Events of one job and all objects that belong to it, without routine ones."""
        events = await self._events(",".join(f"reason!={reason}" for reason in _ROUTINE))
        return [
            event
            for event in events
            if _owner(event, {ref.name}) == ref.name and not str(event.get("message")).startswith(_ROUTINE_MESSAGE)
        ]

    async def has_run(self, ref: JobRef) -> bool:
        """Whether a rank of a job has ever been running, as far as pods and Events still show."""
        pods = await self._list(
            "pods", collection(self.namespace, "pods"), {"labelSelector": f"{JOBSET_NAME}={ref.name}"}
        )
        if any(map(has_trained, pods)):
            return True
        started = await self._events("reason=Started,involvedObject.kind=Pod")
        return any(_owner(event, {ref.name}) == ref.name and _trains(event, ref) for event in started)

    async def missing(self, trainjob: Mapping[str, Any], workload: Mapping[str, Any] | None) -> list[str]:
        """Objects that a job needs to start and that do not exist: its runtime, its WorkloadPriorityClass."""
        return [" ".join(each) for each in needed(trainjob, workload) if await self._is_missing(*each)]

    async def _is_missing(self, kind: str, name: str) -> bool:
        """Whether an object does not exist; False if it may not be read."""
        what = _PLURALS[kind]
        if what in self.hidden:
            return False
        try:
            return await self._get(kind, name) is None and what not in self.hidden
        except ObjectNotFound:  # this version of the API does not exist
            return False

    async def _get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object by kind and name; None if it does not exist or may not be read."""
        what = _PLURALS[kind]
        scope = f"namespaces/{self.namespace}/" if kind in ("TrainingRuntime", "LocalQueue") else ""
        versions = (
            (API_VERSION,) if kind.endswith("Runtime") else [f"kueue.x-k8s.io/{each}" for each in _KUEUE_VERSIONS]
        )
        for version in versions if name and what not in self.hidden else ():
            try:
                found = await self.client.send(Request("GET", f"/apis/{version}/{scope}{what}/{name}"))
            except ObjectNotFound:
                continue
            except Forbidden as error:
                self.hidden[what] = error.message
                return None
            return {**found, "kind": kind}
        return None

    async def queues_of(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The LocalQueue and the ClusterQueue of a Workload that waits because its queue admits nothing."""
        waits = blockers.of_workload(workload)
        if waits is None or not blockers.is_of_inactive_queue(waits):
            return []
        local = await self._get("LocalQueue", str(mapping(workload, "spec").get("queueName") or ""))
        name = str(mapping(local, "spec").get("clusterQueue") or "")
        return [each for each in (local, await self._get("ClusterQueue", name)) if each is not None]

    async def flavors_of(self, workload: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The flavors of an admitted Workload, each with a Node that has its labels; one without a name is none."""
        sets = mappings(workload, "status", "admission", "podSetAssignments")
        names = dict.fromkeys(str(name) for each in sets for name in mapping(each, "flavors").values())
        found = []
        for flavor in [await self._get("ResourceFlavor", name) for name in names]:
            labels = mapping(flavor, "spec", "nodeLabels")
            selector = ",".join(f"{name}={value}" for name, value in labels.items())
            if flavor is not None and labels and "nodes" not in self.hidden:
                nodes = await self._list("nodes", "/api/v1/nodes", {"labelSelector": selector})
                if "nodes" not in self.hidden:
                    found += [flavor, {"kind": "Node", "metadata": {"name": name_of(nodes[0]) if nodes else ""}}]
        return found

    async def workloads(self, ref: JobRef | None = None) -> list[dict[str, Any]]:
        """Kueue's Workloads, or that of one job; empty in a cluster without Kueue."""
        params = {"labelSelector": f"{_JOB_UID}={ref.uid}" if ref else _JOB_UID}
        for version in _KUEUE_VERSIONS:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{self.namespace}/workloads"
            if self.client.lacks(path):
                continue
            try:
                return await self._list("workloads.kueue.x-k8s.io", path, params)
            except ObjectNotFound:
                self.client.absent(path)
        return []

    async def workloads_by_job(self, ref: JobRef | None = None) -> dict[str, dict[str, Any]]:
        """Kueue's Workloads, or that of one job, by the UID of their TrainJob."""
        return {each["metadata"]["labels"][_JOB_UID]: each for each in await self.workloads(ref)}

    async def warnings(self) -> list[dict[str, Any]]:
        """The namespace's Events of type Warning, which the server keeps for an hour."""
        return await self._events("type=Warning")

    async def _events(self, fields: str) -> list[dict[str, Any]]:
        return await self._list("events", collection(self.namespace, "events"), {"fieldSelector": fields})

    async def _pending_pods(self, ref: JobRef | None) -> list[dict[str, Any]]:
        selector = f"{JOBSET_NAME}={ref.name}" if ref else JOBSET_NAME
        params = {"labelSelector": selector, "fieldSelector": "status.phase=Pending"}
        return await self._list("pods", collection(self.namespace, "pods"), params)

    async def _list(self, what: str, path: str, params: Mapping[str, str]) -> list[dict[str, Any]]:
        if what in self.hidden:
            return []
        try:
            return await self.client.items(path, params)
        except Forbidden as error:
            self.hidden[what] = error.message
            if not self.quiet:
                _log.warning(
                    "blockers of waiting jobs may stay unknown: permission to list %s is missing: %s",
                    what,
                    error.message,
                )
            return []


def needed(trainjob: TrainJob, workload: object) -> list[tuple[str, str]]:
    """Kinds and names of what a job needs to start: its runtime; without a Workload its WorkloadPriorityClass."""
    phase = observe(trainjob).phase
    if phase not in _NEEDS_RUNTIME:
        return []
    runtime = mapping(trainjob, "spec", "runtimeRef")
    priority = str(mapping(trainjob, "metadata", "labels").get(PRIORITY_LABEL) or "")
    classed = [("WorkloadPriorityClass", priority)] if phase is Phase.QUEUED and priority and workload is None else []
    kind = str(runtime.get("kind") or "ClusterTrainingRuntime")
    return [(kind, str(runtime.get("name") or "")), *classed] if kind in _PLURALS else classed


def _trains(event: Mapping[str, Any], ref: JobRef) -> bool:
    """Whether an Event is about a training container rather than an initializer."""
    about = mapping(event, "involvedObject")
    step = str(about.get("name")).removeprefix(f"{ref.name}-")
    return not step.startswith(INITIALIZERS) and str(about.get("fieldPath")).startswith("spec.containers{")


def _owner(event: Mapping[str, Any], names: Collection[str]) -> str:
    """The job that an Event is about: objects of a job are named by its name, ``-`` and a suffix.

    A name is never used twice, so the Event cannot be that of an earlier job.
    """
    name = str((event.get("involvedObject") or {}).get("name") or "")
    while name and name not in names:
        name = name.rpartition("-")[0]
    return name
