"""What the controller of a namespace sees: its TrainJobs, the Leases of waiters and of cancels, and Argo's Workflows.

Each collection is followed by one LIST and WATCH. Of an object only the fields that decide are kept: 10,000 jobs have
0.8 KB each.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from datetime import datetime
from typing import Any

import anyio

from trainjob._backends.base import Overview, Run, TrainJob
from trainjob._backends.kubernetes import cancels, leases
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.errors import Forbidden, ObjectNotFound
from trainjob._backends.kubernetes.job_watch import projection
from trainjob._backends.kubernetes.objects import collection
from trainjob._backends.kubernetes.reflector import Change, Outage, Reflector, Synced
from trainjob._manifest.attempts import Cancel
from trainjob._manifest.workflow_labels import KFP_RUN
from trainjob._support.display import iso
from trainjob._support.kube_objects import mapping
from trainjob.job import API_VERSION, KIND, MANAGED_BY, RESERVED_PREFIX
from trainjob.names import namespace as checked

_log = logging.getLogger(__name__)

_ABSENT_SECONDS = 300.0  # until Workflows are asked for again in a cluster that had none
_COMPLETED = ("Succeeded", "Failed", "Error")
_KEEP_ENDED = 3600.0  # seconds for which the end of a run is remembered: launches of it end long before


class _Followed:
    """One collection.

    Args:
        client: The connection.
        path: Path of the collection.
        selector: Selector of its objects.
        kept: What is kept of an object.
        on_change: Called after each change.
        on_gone: Called with what was kept of an object that was deleted while it was watched.
        is_quiet: Whether `on_change` is called only until all objects are known: each waiting process renews its Lease
            every 30 s.

    Attributes:
        known: What is kept of each object, by UID.
        synced: Whether all objects are known.
        reliable_since: Monotonic time since which no outage was noticed.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        selector: str,
        kept: Callable[[Mapping[str, Any]], Any],
        on_change: Callable[[], None],
        on_gone: Callable[[Any], None] = lambda _: None,
        *,
        is_quiet: bool = False,
    ) -> None:
        self._reflector = Reflector(client, path, {"labelSelector": selector})
        self._kept, self._on_change, self._on_gone, self._is_quiet = kept, on_change, on_gone, is_quiet
        self.known: dict[str, Any] = {}
        self.synced = False
        self.reliable_since = time.monotonic()

    async def run(self) -> None:
        """Follow it until this call is cancelled.

        Raises:
            TrainJobError: As `Reflector.events`.
        """
        async with aclosing(self._reflector.events()) as events:
            async for event in events:
                known = self.synced
                if isinstance(event, Change):
                    self._take(event)
                elif isinstance(event, Outage):
                    _log.warning("%s", event.notice)
                    self.reliable_since = time.monotonic()
                else:
                    self._sync(event)
                if not (known and self._is_quiet):
                    self._on_change()

    def _take(self, change: Change) -> None:
        uid = change.item["metadata"]["uid"]
        if change.deleted:
            self.known.pop(uid, None)
            self._on_gone(self._kept(change.item))
        else:
            self.known[uid] = self._kept(change.item)

    def _sync(self, synced: Synced) -> None:
        for uid in self.known.keys() - synced.uids:
            self._on_gone(self.known.pop(uid))
        self.synced = True


class Observer:
    """Follows the collections of one namespace. `run` has to run while `next` is called.

    Args:
        client: The connection.
        namespace: The namespace.
    """

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self._changed = asyncio.Event()
        changed = self._changed.set
        leases_path = f"/apis/coordination.k8s.io/v1/namespaces/{checked(namespace)}/leases"
        self._jobs = _Followed(client, collection(namespace), f"{MANAGED_BY}=trainjob", _job, changed)
        self._leases = _Followed(client, leases_path, f"{MANAGED_BY}=trainjob", _whole, changed, is_quiet=True)
        self._cancels = _Followed(client, leases_path, cancels.KEY_LABEL, cancels.parsed, changed)
        workflows = f"/apis/argoproj.io/v1alpha1/namespaces/{checked(namespace)}/workflows"
        self._workflows = _Followed(client, workflows, KFP_RUN, _workflow, changed, self._workflow_gone)
        self._deleted: dict[str, tuple[Run, float]] = {}

    async def run(self) -> None:
        """Follow the collections until this call is cancelled.

        Raises:
            TrainJobError: Jobs or Leases cannot be followed.
        """
        async with anyio.create_task_group() as tasks:
            for each in (self._jobs, self._leases, self._cancels):
                tasks.start_soon(each.run)
            tasks.start_soon(self._follow_workflows)

    async def _follow_workflows(self) -> None:
        """Follow Workflows where Argo's API exists and this account may list them."""
        while True:
            try:
                await self._workflows.run()
            except ObjectNotFound:
                self._workflows.synced = True
                self._changed.set()
                await anyio.sleep(_ABSENT_SECONDS)
            except Forbidden as error:
                _log.warning("runs of pipelines that are terminated are not noticed: %s", error)
                self._workflows.synced = True
                self._changed.set()
                await anyio.sleep(_ABSENT_SECONDS)

    def _workflow_gone(self, run: Run | None) -> None:
        if run is not None and run.state != "completed":
            self._deleted[run.label] = (replace(run, state="deleted"), time.monotonic() + _KEEP_ENDED)

    async def next(self, seconds: float) -> Overview:
        """What is seen after the next change, or after some seconds without one. Waits until all is known."""
        with anyio.move_on_after(seconds):
            await self._changed.wait()
        followed = (self._jobs, self._leases, self._cancels, self._workflows)
        while not all(each.synced for each in followed):
            self._changed.clear()
            await self._changed.wait()
        self._changed.clear()
        now = self._client.now()
        waiters = [leases.waiter(each, now) for each in self._leases.known.values()]
        by_work: dict[str, list[Cancel]] = {}
        for work, cancel in self._cancels.known.values():
            by_work.setdefault(work, []).append(cancel)
        return Overview(
            list(self._jobs.known.values()),
            [each for each in waiters if each is not None],
            by_work,
            self._ended_runs(),
            max(each.reliable_since for each in (self._jobs, self._leases)),
        )

    def _ended_runs(self) -> dict[str, Run]:
        now = time.monotonic()
        self._deleted = {label: each for label, each in self._deleted.items() if each[1] > now}
        found = {label: each for label, (each, _) in self._deleted.items()}
        for run in self._workflows.known.values():
            if run is not None and run.state == "terminated":
                found[run.label] = run
            elif run is not None and run.state == "running":
                found.pop(run.label, None)  # "Retry run" continues it
        return found


def _whole(item: Mapping[str, Any]) -> Mapping[str, Any]:
    return item


def _job(item: Mapping[str, Any]) -> TrainJob:
    """What decides about a job: the fields of a waiter, all labels, and the annotations of this package."""
    made, metadata = projection(item), item["metadata"]
    annotations = {
        name: value for name, value in mapping(metadata, "annotations").items() if name.startswith(RESERVED_PREFIX)
    }
    kept = {**made["metadata"], "labels": dict(mapping(metadata, "labels")), "annotations": annotations}
    return {**made, "metadata": {**kept, "resourceVersion": metadata.get("resourceVersion")}}


def _workflow(workflow: Mapping[str, Any]) -> Run | None:
    """The run of a Workflow; None if it is none of KFP."""
    label = str(mapping(workflow, "metadata", "labels").get(KFP_RUN) or "")
    if not label:
        return None
    spec, name = mapping(workflow, "spec"), str(mapping(workflow, "metadata").get("name"))
    # KFP's Terminate sets the deadline, Argo's own commands set `shutdown`.
    terminated = spec.get("activeDeadlineSeconds") == 0 or bool(spec.get("shutdown"))
    completed = mapping(workflow, "status").get("phase") in _COMPLETED
    return Run(label, name, "terminated" if terminated else "completed" if completed else "running")


def event_of(trainjob: TrainJob, reason: str, message: str, now: datetime) -> Request:
    """The request that writes an Event about a job."""
    metadata, at = trainjob["metadata"], iso(now)
    about = {name: metadata[name] for name in ("name", "namespace", "uid")}
    event = {
        "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(8)}", "namespace": metadata["namespace"]},
        "involvedObject": {"apiVersion": API_VERSION, "kind": KIND, **about},
        "reason": reason,
        "message": message[:1024],  # the API's limit
        "type": "Normal",
        "source": {"component": "trainjob-controller"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    return Request("POST", f"/api/v1/namespaces/{checked(metadata['namespace'])}/events", body=event)
