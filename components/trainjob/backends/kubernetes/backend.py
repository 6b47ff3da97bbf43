"""`KubernetesBackend`: the `Backend` protocol over the API server's TrainJobs."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import anyio

from trainjob import names
from trainjob.backends.base import Snapshot, TrainJob
from trainjob.backends.kubernetes import attendance, pods
from trainjob.backends.kubernetes.attendance import Attendance, Waiter
from trainjob.backends.kubernetes.client import MERGE_PATCH, ApiClient, Request, Timings
from trainjob.backends.kubernetes.compat import AdaptingClient
from trainjob.backends.kubernetes.credentials import Credentials
from trainjob.backends.kubernetes.errors import (
    ApiError,
    Conflict,
    Expired,
    Forbidden,
    Invalid,
    NoConnection,
    ObjectNotFound,
    Transient,
)
from trainjob.backends.kubernetes.job_informer import JobInformer
from trainjob.backends.kubernetes.logs import RankLogs
from trainjob.backends.kubernetes.pod_informer import PodInformer
from trainjob.backends.kubernetes.prepared import PreparedRequest
from trainjob.backends.kubernetes.related import RelatedObjects
from trainjob.diagnosis import Evidence
from trainjob.errors import AlreadyExists, BackendUnavailable, ConfigurationError, NotFound, Rejected, RuntimeNotFound
from trainjob.logs import LogLine
from trainjob.manifest import JobRef
from trainjob.spec import API_VERSION
from trainjob.spec.checks import RESERVED_PREFIX
from trainjob.status import observe
from trainjob.unattended import LABEL as UNATTENDED
from trainjob.verdicts import RetryVerdict

_REQUEST = RESERVED_PREFIX + "request"
_LARGEST = 3 << 20  # bytes; beyond, a server hangs up in the middle of the request, which looks like an outage

_QUIET_SECONDS = 8.0  # after which it is logged that a request is not answered

_log = logging.getLogger(__name__)

T = TypeVar("T")


class KubernetesBackend:
    """TrainJobs of one cluster.

    Args:
        credentials: Where credentials come from; kubeconfig or service account if left out.
        shared: Share one watch of jobs and one of pods among all waiters of a namespace (`JobInformer`, `PodInformer`).
            For a single waiter, leave it out: the requests then name the job, and so can its Role.
        timings: How long is waited for what.
    """

    def __init__(
        self, credentials: Credentials | None = None, *, shared: bool = False, timings: Timings | None = None
    ) -> None:
        self.credentials = credentials or Credentials()
        self._client = ApiClient(self.credentials, timings)
        self._adapting = AdaptingClient(self._client)
        self._shared = shared
        self._job_informers: dict[str, JobInformer] = {}
        self._pod_informers: dict[str, PodInformer] = {}
        self._attendances: dict[str, Attendance] = {}
        self._told: dict[str, float] = {}  # UID -> when a job was told to end, until pods of it were seen since

    @property
    def default_namespace(self) -> str:
        """That of the kubeconfig's context or of the pod, else ``default``."""
        return self.credentials.namespace() or "default"

    @property
    def home(self) -> None:
        """See `Backend.home`."""
        return

    @property
    def cluster(self) -> KubernetesBackend:
        """See `Backend.cluster`."""
        return self

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        """See `Backend.create`. A reply that was lost is looked up."""
        if (size := len(json.dumps(trainjob))) > _LARGEST:
            raise Rejected(
                f"TrainJob {trainjob['metadata']['name']} is {size / 2**20:.1f} MiB of JSON, and an API server takes "
                f"{_LARGEST >> 20}: bring what is so big as an input"
            )
        # Tells a launcher whose reply was lost that the job is the one that it has just made, and not one of the same
        # work that ended before.
        mark = secrets.token_hex(8)
        annotations = {**(trainjob["metadata"].get("annotations") or {}), _REQUEST: mark}
        metadata = {**trainjob["metadata"], "annotations": annotations}
        # Strict: a field that this cluster's Trainer does not have is an error, not something to drop in silence.
        params = {"fieldValidation": "Strict", "fieldManager": "trainjob", **({"dryRun": "All"} if dry_run else {})}
        request = Request("POST", _path(metadata["namespace"]), params, body={**trainjob, "metadata": metadata})
        backoff, lost = self._client.timings.request_backoff(), False
        while True:
            try:
                return await self._adapting.create(request)
            except Transient as error:
                if backoff.failure():
                    raise BackendUnavailable(f"TrainJob {metadata['name']} could not be created: {error}") from error
                lost = True
                await anyio.sleep(backoff.pause(error.retry_after))
            except Conflict as error:
                present = await self.get(metadata["namespace"], metadata["name"]) if lost else None
                if present is not None and (present["metadata"].get("annotations") or {}).get(_REQUEST) == mark:
                    return present
                raise AlreadyExists(f"TrainJob {metadata['namespace']}/{metadata['name']} exists") from error
            except ApiError as error:
                raise _refusal(error, trainjob) from error

    async def recover(self, ref: JobRef) -> None:
        """See `Backend.recover`. The request that creates a job is all that it needs."""

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        """See `Backend.get`."""
        try:
            return await self._insist(lambda: self._client.send(Request("GET", _path(namespace, name))))
        except ObjectNotFound as error:
            _refuse_without_trainer(error)
            return None

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        """See `Backend.find`."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        return [*await self._insist(lambda: self._client.items(_path(namespace), {"labelSelector": selector}))]

    async def runtimes(self) -> list[str]:
        """Names of the cluster's ClusterTrainingRuntimes, one page of them; asked once.

        Raises:
            ApiError: anything but a success.
        """
        path = f"/apis/{API_VERSION}/clustertrainingruntimes"
        found = await self._client.send(Request("GET", path, {"limit": "500"}))
        return [runtime["metadata"]["name"] for runtime in found.get("items") or []]

    async def refs(self, namespace: str, names: Collection[str]) -> dict[str, JobRef]:
        """See `Backend.refs`. With a shared watch its list is asked, so that 10,000 names are no 10,000 requests."""
        if self._shared:
            return await self._hub(namespace).refs(names)
        found = [await self.get(namespace, name) for name in names]
        return {ref.name: ref for ref in (JobRef.of(trainjob) for trainjob in found if trainjob is not None)}

    def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """See `Backend.watch`."""
        return self._hub(ref.namespace).subscribe(ref) if self._shared else self._watch_alone(ref)

    async def _watch_alone(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        informer = self._new_job_informer(ref.namespace, f"metadata.name={ref.name}")
        try:
            async with aclosing(informer.subscribe(ref)) as snapshots:
                async for snapshot in snapshots:
                    yield snapshot
        finally:
            await informer.aclose()

    def _hub(self, namespace: str) -> JobInformer:
        if namespace not in self._job_informers:
            self._job_informers[namespace] = self._new_job_informer(namespace)
        return self._job_informers[namespace]

    def _new_job_informer(self, namespace: str, fields: str = "") -> JobInformer:
        selector = {"fieldSelector": fields} if fields else {}
        related = RelatedObjects(self._client, namespace)
        return JobInformer(self._client, _path(namespace), selector, self._confirm, related)

    async def _confirm(self, ref: JobRef) -> TrainJob | None:
        found = await self.get(ref.namespace, ref.name)
        return found if found is not None and found["metadata"]["uid"] == ref.uid else None

    async def has_run(self, ref: JobRef) -> bool:
        """See `Backend.has_run`."""
        return await self._insist(lambda: RelatedObjects(self._client, ref.namespace).has_run(ref))

    async def evidence(self, ref: JobRef) -> Evidence:
        """See `Backend.evidence`."""
        trainjob = await self._confirm(ref)
        around = RelatedObjects(self._client, ref.namespace)
        unseen, visible = [], True
        try:
            found = await self._insist(lambda: pods.list_pods(self._client, ref))
        except Forbidden as error:
            found, unseen, visible = [], [f"pods: {error.message}"], False
        evidence = await self._insist(lambda: pods.gather(self._client, found, trainjob))
        events = await self._insist(lambda: around.events(ref))
        workloads = await self._insist(lambda: around.workloads(ref))
        missing = await self._insist(lambda: around.missing(trainjob)) if trainjob is not None else []
        unseen += [*evidence.unseen, *(f"{what}: {said}" for what, said in around.hidden.items())]
        workload = next(iter(workloads), None)
        seen = replace(evidence, events=events, workload=workload, missing=missing)
        return replace(seen, unseen=unseen, pods_visible=visible)

    def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """See `Backend.crashes`. One more watch, on the job's pods, or on those of all jobs of the namespace."""
        if not self._shared:
            return PodInformer(self._client, ref.namespace, ref.name).subscribe(ref)
        return self._pod_informer(ref.namespace).subscribe(ref)

    def _pod_informer(self, namespace: str) -> PodInformer:
        if namespace not in self._pod_informers:
            self._pod_informers[namespace] = PodInformer(self._client, namespace)
        return self._pod_informers[namespace]

    async def logs(
        self,
        ref: JobRef,
        *,
        ranks: Sequence[str] = (),
        follow: bool = False,
        since: str = "",
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine]:
        """See `Backend.logs`."""
        reader = RankLogs(self._client, ref, ranks, since, tail)
        if not follow:
            for line in await self._insist(reader.stored):
                yield line
            return
        listen = partial(self._pod_informer(ref.namespace).listening, ref) if self._shared else None
        # No task group: a reader who has seen enough would leave it as an ExceptionGroup of GeneratorExit.
        watching = asyncio.create_task(self._until_finished(ref, reader.finish))
        try:
            async with aclosing(reader.follow(listen)) as lines:
                async for line in lines:
                    yield line
            await watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _until_finished(self, ref: JobRef, finish: Callable[[], None]) -> None:
        try:
            async with aclosing(self.watch(ref)) as snapshots:
                async for snapshot in snapshots:
                    if observe(snapshot.trainjob).phase.terminal:
                        return
        finally:
            finish()

    def attend(self, ref: JobRef) -> None:
        """See `Backend.attend`. One Lease in each namespace, however many jobs this process waits for there."""
        if ref.namespace not in self._attendances:
            self._attendances[ref.namespace] = Attendance(self._client, ref.namespace, self._keep)
        self._attendances[ref.namespace].attend(ref)

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """See `Backend.leave`."""
        self._attendances[ref.namespace].leave(ref, ended=ended)

    async def _keep(self, ref: JobRef) -> None:
        """Have a job kept for which nobody can be seen to wait."""
        await self.patch(ref, {"metadata": {"labels": {UNATTENDED: None}}})

    async def waiters(self, namespace: str) -> list[Waiter]:
        """The processes that wait for jobs of a namespace, or did, as far as Leases tell."""
        return await self._insist(lambda: attendance.waiters(self._client, namespace))

    async def forget(self, namespace: str, waiter: Waiter) -> None:
        """Remove the Lease of a process that has ended."""
        with suppress(ObjectNotFound):
            await self._insist(lambda: self._client.send(attendance.removing(namespace, waiter.lease)))

    def now(self) -> datetime:
        """The present by the clock of the API server."""
        return self._client.now()

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        """See `Backend.patch`. The UID goes along: the server refuses to change another job of the same name."""
        try:
            await self._insist(lambda: self._client.send(_patching(ref, patch)))
        except ApiError as error:
            other_uid = isinstance(error, Invalid) and "metadata.uid" in error.message
            if other_uid or isinstance(error, ObjectNotFound | Conflict):
                raise NotFound(f"TrainJob {ref} (uid {ref.uid}) is gone") from error
            raise Rejected(f"TrainJob {ref} could not be changed: {error.message}") from error
        if patch.get("spec", {}).get("suspend"):
            self._told[ref.uid] = time.monotonic()

    async def cancel(self, ref: JobRef) -> None:
        """See `Backend.cancel`. Nothing but its deletion ends a TrainJob, and its pods and their logs go with it."""
        await self.delete(ref)

    async def delete(self, ref: JobRef) -> None:
        """See `Backend.delete`."""
        try:
            await self._insist(lambda: self._client.send(_deleting(ref)))
        except (ObjectNotFound, Conflict):
            return
        self._told[ref.uid] = time.monotonic()

    async def stopped(self, ref: JobRef) -> bool:
        """See `Backend.stopped`."""
        trainjob = await self.get(ref.namespace, ref.name)
        if trainjob is not None and trainjob["metadata"]["uid"] != ref.uid:
            return True  # the pods are those of another job of this name
        suspended = trainjob is not None and trainjob["spec"].get("suspend")
        if trainjob is not None and not suspended and not observe(trainjob).phase.terminal:
            return False
        found = await self._insist(lambda: pods.list_pods(self._client, ref))
        if any(pod["status"].get("phase") in ("Pending", "Running") for pod in found):
            self._told.pop(ref.uid, None)  # once they are gone, so is what made them: Jobs end before their pods
            return False
        return time.monotonic() >= self._told.get(ref.uid, 0) + self._client.timings.settle

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> PreparedRequest | None:
        """A `patch` of the job, or its deletion if None, that can be sent within milliseconds; None behind a proxy."""
        return await self._prepared_request(_deleting(ref) if patch is None else _patching(ref, patch))

    async def prepared_pod_request(self, namespace: str, name: str) -> PreparedRequest | None:
        """The same for a read of a pod, by the right to list pods."""
        return await self._prepared_request(Request("GET", pods.collection(namespace, "pods"), _named(name)))

    async def _prepared_request(self, request: Request) -> PreparedRequest | None:
        return None if (await self._client.access()).proxy is not None else PreparedRequest(self._client, request)

    async def owners_of_pod(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """``ownerReferences`` of a pod, by the right to list pods; none where it is not there."""
        found = await self._insist(lambda: self._client.items(pods.collection(namespace, "pods"), _named(name)))
        return [owner for pod in found for owner in pod["metadata"].get("ownerReferences") or []]

    async def aclose(self) -> None:
        """See `Backend.aclose`."""
        kept: list[JobInformer | PodInformer | Attendance] = [
            *self._job_informers.values(),
            *self._pod_informers.values(),
        ]
        for each in [*kept, *self._attendances.values()]:
            await each.aclose()
        self._job_informers.clear()
        self._pod_informers.clear()
        self._attendances.clear()
        await self._client.aclose()

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat what can be repeated until it is answered, or the outage has lasted too long.

        An expired list is begun anew: its next page came too late.
        """
        backoff = self._client.timings.request_backoff()
        loop = asyncio.get_running_loop()
        slow = loop.call_later(
            _QUIET_SECONDS, _log.warning, "the API server has not answered for %.0f s", _QUIET_SECONDS
        )
        try:
            while True:
                try:
                    return await ask()
                except (Expired, Transient) as error:
                    if backoff.failure():
                        raise BackendUnavailable(f"the API server gives no answer: {error}") from error
                    if backoff.count == 1 and isinstance(error, NoConnection):
                        _log.warning("the API server cannot be reached, trying again for a minute: %s", error)
                        slow.cancel()
                    await anyio.sleep(backoff.pause(error.retry_after))
        finally:
            slow.cancel()


def _named(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"}


def _patching(ref: JobRef, patch: Mapping[str, Any]) -> Request:
    body = {**patch, "metadata": {**patch.get("metadata", {}), "uid": ref.uid}}
    params = {"fieldValidation": "Strict", "fieldManager": "trainjob"}
    return Request("PATCH", _path(ref.namespace, ref.name), params, body=body, content_type=MERGE_PATCH)


def _deleting(ref: JobRef) -> Request:
    body = {"propagationPolicy": "Background", "preconditions": {"uid": ref.uid}}
    return Request("DELETE", _path(ref.namespace, ref.name), body=body)


def _path(namespace: str, name: str | None = None) -> str:
    path = f"/apis/{API_VERSION}/namespaces/{names.namespace(namespace)}/trainjobs"
    return path if name is None else f"{path}/{names.job(name)}"


def _refuse_without_trainer(error: ObjectNotFound) -> None:
    """A 404 without a name is about the path, not about the job."""
    if "could not find the requested resource" in error.message:
        raise ConfigurationError(f"this cluster has no {API_VERSION} TrainJobs: install Kubeflow Trainer 2.1 or newer")


# What Trainer's webhook says of a runtime that `initializer` does not fit -> what can be done about it.
_ADVICE = {
    "-initializer job when trainJob is configured": "this runtime has no such initializer, so bring it in with a step "
    "of its own before this one, or use a runtime that has",
    "must have volumeMount with name - initializer": "mount a volume called initializer there by runtime_patches, as "
    "docs/runtimes.md shows",
}
# The second: for a quota that the controller has not counted yet (k8s.io/apiserver, admission/plugin/resourcequota).
_NO_QUOTA = ("exceeded quota", "status unknown for quota", "insufficient quota")


def _refusal(error: ApiError, trainjob: TrainJob) -> Exception:
    """Why a job was refused, as the error that says who has to act."""
    name = f"TrainJob {trainjob['metadata']['namespace']}/{trainjob['metadata']['name']}"
    if isinstance(error, ObjectNotFound):
        try:
            _refuse_without_trainer(error)
        except ConfigurationError as missing:
            return missing
    runtime = trainjob["spec"]["runtimeRef"]
    # Said by Trainer's webhook or by Kueue's, whichever answers first.
    phrases = ("must be created before the TrainJob is created", f"runtime '{runtime['name']}' not found")
    if any(phrase in error.message for phrase in phrases):
        return RuntimeNotFound(f"{name}: there is no {runtime.get('kind', 'runtime')} {runtime['name']!r}")
    advice = [f"; {text}" for phrase, text in _ADVICE.items() if phrase in error.message]
    refused = Rejected(f"{name} was refused: {error.message}{''.join(advice)}")
    if any(phrase in error.message for phrase in _NO_QUOTA):
        refused.retry = RetryVerdict.QUOTA
    return refused
