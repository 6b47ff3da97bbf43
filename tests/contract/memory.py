"""A `Backend` in a dictionary, for tests of the flows above it. It passes the same contract tests as the real ones.

Like a cluster, it forgets the name of a deleted job, and refuses a request with an old version.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from trainjob._backends.base import Snapshot, TrainJob, Waiter
from trainjob._diagnosis.crashes import crashes_in
from trainjob._jobs.fencing import JOBSET_NAME
from trainjob._manifest.attempts import Cancel, work_of
from trainjob._support.log_lines import LogLine
from trainjob.errors import AlreadyExists, NotFound, Rejected, RuntimeNotFound
from trainjob.job import JobRef
from trainjob.verdicts import Evidence

NODE = dict.fromkeys(("ready", "succeeded", "failed", "active", "suspended"), 0) | {"name": "node"}


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def remaining_pod(
    job: str, rank: int = 0, *, phase: str = "Running", node: str = "a", lost: bool = False, grace: float = 30
) -> dict[str, Any]:
    """A pod of the job of that name that has not ended, for `MemoryBackend.remaining`."""
    return {
        "metadata": {
            "name": f"{job}-node-0-{rank}",
            "labels": {
                JOBSET_NAME: job,
                "jobset.sigs.k8s.io/replicatedjob-name": "node",
                "batch.kubernetes.io/job-completion-index": str(rank),
            },
        },
        "spec": {"terminationGracePeriodSeconds": grace, "nodeName": node},
        "status": {"phase": phase, "conditions": [{"type": "Ready", "status": "Unknown" if lost else "True"}]},
    }


class MemoryBackend:
    """Stores objects; tests set their status (`running`, `end`, `condition`)."""

    default_namespace = "default"
    home: Path | None = None
    cluster = None

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], dict[str, Any]] = {}
        self.version = 0
        self.records: dict[tuple[str, str, str], Cancel] = {}
        """Records of cancels, by namespace, hash of the key and name."""
        self.remaining: list[dict[str, Any]] = []
        """Pods that have not ended, also of deleted jobs."""
        self.taken: set[str] = set()
        """Names of which something is left."""
        self.requests: list[str] = []
        self.crashed: dict[str, list[Evidence]] = {}
        self.lines: list[LogLine] = []
        self.terminated: dict[str, list[dict[str, Any]]] = {}
        self.before: Callable[[str], None] = lambda _: None
        """Called with the name of each request before it is served; may raise or change things."""
        self.after: Callable[[str], None] = lambda _: None
        """The same, after the request was served: simulates a lost reply."""
        self.turn: Callable[[str], Awaitable[object]] | None = None
        """Awaited before each request is served: decides when."""
        self.lingering: set[str] = set()
        """UIDs of jobs whose pods are still ending."""
        self.last: dict[str, dict[str, Any]] = {}
        """UID -> the last state of a deleted job."""
        self.ran: set[str] = set()
        """UIDs of jobs that have run, as their pods or Events show."""
        self.attending: list[JobRef] = []
        self.left: list[tuple[JobRef, bool]] = []
        """Jobs that are no longer attended, and whether they had ended."""

    # ------------------------------------------------ actions of the cluster

    def job(self, ref: JobRef) -> dict[str, Any]:
        found = self.jobs.get((ref.namespace, ref.name))
        if found is None or found["metadata"]["uid"] != ref.uid:
            raise NotFound(f"{ref} is gone")
        return found

    def status(self, ref: JobRef, **fields: Any) -> None:
        self.job(ref)["status"] = {**self.job(ref)["status"], **fields}
        self.job(ref)["metadata"]["resourceVersion"] = self._next_version()

    def running(self, ref: JobRef) -> None:
        self.status(ref, jobsStatus=[{**NODE, "active": 1, "ready": 1}])

    def condition(self, ref: JobRef, kind: str, reason: str, value: str = "True", time: str = "") -> None:
        condition = {
            "type": kind,
            "status": value,
            "reason": reason,
            "message": reason,
            "lastTransitionTime": time or now(),
        }
        kept = [c for c in self.job(ref)["status"].get("conditions") or [] if c["type"] != kind]
        self.status(ref, conditions=[*kept, condition])

    def end(self, ref: JobRef, code: int = 0, message: str = "", **ended: Any) -> None:
        pod = {
            "metadata": {
                "name": f"{ref.name}-node-0-0",
                "labels": {
                    "jobset.sigs.k8s.io/replicatedjob-name": "node",
                    "batch.kubernetes.io/job-completion-index": "0",
                },
            },
            "status": {
                "phase": "Failed" if code else "Succeeded",
                "containerStatuses": [
                    {"state": {"terminated": {"exitCode": code, "message": message, "finishedAt": now(), **ended}}}
                ],
            },
        }
        self.terminated[ref.uid] = [pod]
        self.condition(ref, *(("Failed", "FailedJobs") if code else ("Complete", "AllJobsCompleted")))

    # ------------------------------------------------ requests of clients

    async def _request(self, name: str) -> None:
        await anyio.lowlevel.checkpoint()
        if self.turn is not None:
            await self.turn(name)
        self.requests.append(name)
        self.before(name)

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        await self._request("create")
        name = (trainjob["metadata"]["namespace"], trainjob["metadata"]["name"])
        if trainjob["spec"]["runtimeRef"]["name"] == "nosuch":
            raise RuntimeNotFound("there is no runtime nosuch")
        if not (trainjob["spec"].get("trainer") or {}).get("command"):
            raise Rejected("no command")
        if name in self.jobs:
            raise AlreadyExists(f"{name} exists")
        metadata = {**trainjob["metadata"], "uid": str(uuid.uuid4()), "creationTimestamp": now()}
        if dry_run:
            return {**trainjob, "metadata": metadata}
        metadata["resourceVersion"] = self._next_version()
        self.jobs[name] = {**copy.deepcopy(dict(trainjob)), "metadata": metadata, "status": {}}
        stored = copy.deepcopy(self.jobs[name])
        self.after("create")
        return stored

    def _next_version(self) -> str:
        self.version += 1
        return str(self.version)

    async def recover(self, ref: JobRef) -> None:
        pass

    async def is_free(self, namespace: str, name: str) -> bool:
        await self._request("is_free")
        return name not in self.taken

    async def remaining_pods(self, namespace: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
        await self._request("remaining_pods")
        return [pod for pod in self.remaining if pod["metadata"]["labels"][JOBSET_NAME] in names]

    async def announce_cancel(self, namespace: str, work: str, cancel: Cancel) -> Cancel | None:
        await self._request("announce_cancel")
        version = int(self._next_version())
        made = replace(cancel, version=version, at=datetime.now(UTC), record=f"{work}-{version}")
        self.records[namespace, work, made.record] = made
        return made

    async def cancels(self, namespace: str, work: str) -> tuple[int | None, list[Cancel]]:
        await self._request("cancels")
        found = [cancel for (where, key, _), cancel in self.records.items() if (where, key) == (namespace, work)]
        return self.version, found

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        await self._request("get")
        return copy.deepcopy(self.jobs.get((namespace, name)))

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        await self._request("find")
        return [
            copy.deepcopy(job)
            for (where, _), job in self.jobs.items()
            if where == namespace and labels.items() <= (job["metadata"].get("labels") or {}).items()
        ]

    async def refs(self, namespace: str, names: Collection[str]) -> tuple[dict[str, JobRef], set[str]]:
        await self._request("refs")
        found = {name: JobRef.of(job) for (where, name), job in self.jobs.items() if where == namespace}
        works = {work_of(name) for name in found} - {""}
        return {name: ref for name, ref in found.items() if name in names}, works

    async def runtimes(self) -> list[str]:
        await self._request("runtimes")
        return ["trainjob-step"]

    async def has_run(self, ref: JobRef) -> bool:
        await self._request("has_run")
        return ref.uid in self.ran

    async def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        await self._request("watch")
        seen = None
        while True:
            self.before("look")
            job = self.jobs.get((ref.namespace, ref.name))
            if job is None or job["metadata"]["uid"] != ref.uid:
                if ref.uid in self.last and self.last[ref.uid] != seen:  # the state in a watch's DELETED event
                    yield Snapshot(self.last[ref.uid])
                yield Snapshot(None)
                return
            if job != seen:
                seen = copy.deepcopy(job)
                yield Snapshot(copy.deepcopy(job))
            await anyio.sleep(0.001)

    async def state(self, ref: JobRef) -> Evidence:
        evidence = await self.evidence(ref)
        return replace(evidence, logs={}, events=())

    async def states(self, namespace: str, labels: Mapping[str, str]) -> list[Evidence]:
        return [await self.state(JobRef.of(job)) for job in await self.find(namespace, labels)]

    async def evidence(self, ref: JobRef) -> Evidence:
        await self._request("evidence")
        try:
            job = copy.deepcopy(self.job(ref))
        except NotFound:
            return Evidence(None)
        pods = self.terminated.get(ref.uid, [])
        failed = {crash.pod for crash in crashes_in(pods)}  # as on a cluster: no logs of running ranks
        return Evidence(job, pods, {name: [line.text for line in self.lines] for name in failed})

    async def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        for evidence in self.crashed.get(ref.uid, ()):
            yield evidence

    async def logs(
        self,
        ref: JobRef,
        *,
        ranks: Sequence[str] = (),
        follow: bool = False,
        since: str = "",
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine]:
        await self._request("logs")
        given = 0
        while True:
            self.before("lines")
            job = self.jobs.get((ref.namespace, ref.name))
            over = job is None or any(c["type"] in ("Complete", "Failed") for c in job["status"].get("conditions", ()))
            for line in self.lines[given:]:
                given += 1
                yield line
            if over or not follow:
                return
            await anyio.sleep(0.001)

    async def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        await self._request("tails")
        labels = {"jobset.sigs.k8s.io/replicatedjob-name": "node"}
        for rank in sorted({line.rank for line in self.lines}):
            pod = {"metadata": {"labels": {**labels, "batch.kubernetes.io/job-completion-index": rank[5:]}}}
            yield pod, [line for line in self.lines if line.rank == rank][-count:]

    def attend(self, ref: JobRef) -> None:
        self.attending.append(ref)

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        self.attending.remove(ref)
        self.left.append((ref, ended))

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        await self._request("patch")
        job = self.job(ref)
        version = job["metadata"]["resourceVersion"]
        if patch.get("metadata", {}).get("resourceVersion", version) != version:
            raise NotFound(f"{ref} was changed")
        before = copy.deepcopy(job)
        for name, part in patch.items():
            job[name] = _merged(job.get(name), part)
        if job == before:
            return  # as on an API server: the version stays
        job["metadata"]["resourceVersion"] = self._next_version()
        if "suspend" in patch.get("spec", {}):
            suspended = job["spec"]["suspend"]
            self.condition(ref, "Suspended", "Suspended" if suspended else "Resumed", str(bool(suspended)))

    async def cancel(self, ref: JobRef) -> None:
        await self.delete(ref)

    async def delete(self, ref: JobRef, version: str = "") -> None:
        await self._request("delete")
        job = self.jobs.get((ref.namespace, ref.name))
        current = job is not None and version in ("", job["metadata"]["resourceVersion"])
        if job is not None and current and job["metadata"]["uid"] == ref.uid:
            self.last[ref.uid] = self.jobs.pop((ref.namespace, ref.name))

    async def stopped(self, ref: JobRef) -> bool:
        await self._request("stopped")
        if ref.uid in self.lingering:
            return False
        try:
            job = self.job(ref)
        except NotFound:
            return True
        true = {c["type"] for c in job["status"].get("conditions") or [] if c["status"] == "True"}
        return bool(true & {"Complete", "Failed", "Suspended"})

    async def aclose(self) -> None:
        self.requests.append("aclose")


class MemoryCluster(MemoryBackend):
    """The same with what only a cluster has and `launch`, `wait` and the reaper use."""

    def __init__(self) -> None:
        super().__init__()
        self.foreign: set[str] = set()
        """UIDs of jobs whose JobSet belongs to an earlier job of the same name."""
        self.leases: list[Waiter] = []
        self.time = datetime.now(UTC)
        """The time of the API server."""

    @property
    def cluster(self) -> Any:  # type: ignore[override]
        return self

    def now(self) -> datetime:
        return self.time

    def waits(self, *refs: JobRef, lease: str = "other", age: float = 0) -> None:
        """Another process waits for jobs; it has renewed its Lease `age` seconds ago."""
        renewed = self.time - timedelta(seconds=age)
        uids = frozenset(ref.uid for ref in refs)
        self.leases.append(Waiter(lease, renewed, dict.fromkeys(uids, renewed), uids))

    async def has_own_jobset(self, ref: JobRef) -> bool | None:
        await self._request("has_own_jobset")
        return False if ref.uid in self.foreign else None

    async def waiters(self, namespace: str) -> list[Waiter]:
        await self._request("waiters")
        return list(self.leases)

    async def forget(self, namespace: str, waiter: Waiter) -> None:
        await self._request("forget")
        self.leases.remove(waiter)

    async def all_cancels(self, namespace: str) -> dict[str, list[Cancel]]:
        await self._request("all_cancels")
        found: dict[str, list[Cancel]] = {}
        for (where, key, _), cancel in self.records.items():
            if where == namespace:
                found.setdefault(key, []).append(cancel)
        return found

    async def forget_cancel(self, namespace: str, cancel: Cancel) -> None:
        await self._request("forget_cancel")
        for name, record in [*self.records.items()]:
            if name[0] == namespace and record == cancel:  # one that was written again has another version
                del self.records[name]


def _merged(value: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    merged = {**(value or {}), **{name: _merged((value or {}).get(name), part) for name, part in patch.items()}}
    return {name: part for name, part in merged.items() if part is not None}
