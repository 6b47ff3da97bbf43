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
from trainjob._support.kube_objects import INITIALIZERS, has_trained, mapping
from trainjob.job import API_VERSION, JobRef
from trainjob.status import Blocker, Phase, observe

_NEEDS_RUNTIME = (Phase.SUSPENDED, Phase.QUEUED, Phase.NOT_STARTED)

_log = logging.getLogger(__name__)

_KUEUE_VERSIONS = ("v1beta2", "v1beta1")  # v1beta2 since Kueue 0.14
_JOB_UID = "kueue.x-k8s.io/job-uid"

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
            found |= {uid: blockers.in_workload(each) for uid, each in (await self.workloads_by_job(only)).items()}
        if set(phases.values()) - {Phase.QUEUED, Phase.SUSPENDED}:
            names = {ref.name for ref in waiting}
            pods, events = defaultdict(list), defaultdict(list)
            for pod in await self._pending_pods(only):
                pods[pod["metadata"]["labels"][JOBSET_NAME]].append(pod)
            for event in await self.warnings():
                events[_owner(event, names)].append(event)
            for ref, phase in phases.items():
                if phase not in (Phase.QUEUED, Phase.SUSPENDED):
                    seen = None if "pods" in self.hidden else pods[ref.name]
                    finding = blockers.first(blockers.around(seen, events[ref.name]))
                    found[ref.uid] = finding.blocker if finding else None
        missing = {name: await self._is_missing(*name) for name in {_runtime(each) for each in waiting.values()}}
        for ref, trainjob in waiting.items():
            if missing[_runtime(trainjob)]:
                found[ref.uid] = blockers.of_missing_runtime(" ".join(_runtime(trainjob))).blocker
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

    async def missing(self, trainjob: Mapping[str, Any]) -> list[str]:
        """The job's runtime, if it was deleted and the job still needs it to start."""
        name = _runtime(trainjob)
        return [" ".join(name)] if await self._is_missing(*name) else []

    async def _is_missing(self, kind: str, name: str) -> bool:
        """Whether a runtime does not exist; False if it may not be read."""
        what = f"{kind.lower()}s"
        if not name or what in self.hidden:
            return False
        scope = f"namespaces/{self.namespace}/" if kind == "TrainingRuntime" else ""
        try:
            await self.client.send(Request("GET", f"/apis/{API_VERSION}/{scope}{what}/{name}", last=True))
        except ObjectNotFound:
            return True
        except Forbidden as error:
            self.hidden[what] = error.message
        return False

    async def workloads(self, ref: JobRef | None = None) -> list[dict[str, Any]]:
        """Kueue's Workloads, or that of one job; empty in a cluster without Kueue."""
        params = {"labelSelector": f"{_JOB_UID}={ref.uid}" if ref else _JOB_UID}
        for version in _KUEUE_VERSIONS:
            path = f"/apis/kueue.x-k8s.io/{version}/namespaces/{self.namespace}/workloads"
            try:
                return await self._list("workloads.kueue.x-k8s.io", path, params)
            except ObjectNotFound:
                continue
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
            return await self.client.items(path, params, last=True)
        except Forbidden as error:
            self.hidden[what] = error.message
            if not self.quiet:
                _log.warning(
                    "blockers of waiting jobs may stay unknown: permission to list %s is missing: %s",
                    what,
                    error.message,
                )
            return []


def _runtime(trainjob: TrainJob) -> tuple[str, str]:
    """Kind and name of the runtime that a job needs to start; empty if it has started."""
    if observe(trainjob).phase not in _NEEDS_RUNTIME:
        return "", ""
    runtime = mapping(trainjob, "spec", "runtimeRef")
    return str(runtime.get("kind") or "ClusterTrainingRuntime"), str(runtime.get("name") or "")


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
