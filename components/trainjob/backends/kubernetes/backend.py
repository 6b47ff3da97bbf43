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
from trainjob.backends.base import Snapshot, TrainJob, Usage
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
from trainjob.backends.kubernetes.optional_apis import OptionalApis
from trainjob.backends.kubernetes.pod_informer import PodInformer
from trainjob.backends.kubernetes.prepared import PreparedRequest
from trainjob.backends.kubernetes.related import RelatedObjects
from trainjob.diagnosis import Evidence
from trainjob.errors import AlreadyExists, BackendUnavailable, ConfigurationError, NotFound, Rejected, RuntimeNotFound
from trainjob.kube_objects import mapping
from trainjob.logs import LogLine
from trainjob.manifest import JobRef
from trainjob.spec import API_VERSION
from trainjob.spec.checks import RESERVED_PREFIX
from trainjob.status import QUEUE_LABEL, observe
from trainjob.unattended import LABEL as UNATTENDED
from trainjob.verdicts import RetryVerdict

_REQUEST = RESERVED_PREFIX + "request"
_MAX_JSON_BYTES = 3 << 20  # a server closes the connection during a larger request, which looks like an outage

_SLOW_SECONDS = 8.0  # a request without a reply for so long is logged

_log = logging.getLogger(__name__)

T = TypeVar("T")


class KubernetesBackend:
    """TrainJobs of one cluster.

    Args:
        credentials: Source of the credentials; kubeconfig or service account by default.
        shared: Share one watch of jobs and one of pods among all waiters of a namespace (`JobInformer`, `PodInformer`).
            Without it the requests name the single job, and so can its Role.
        timings: Timeouts and intervals.
    """

    def __init__(
        self, credentials: Credentials | None = None, *, shared: bool = False, timings: Timings | None = None
    ) -> None:
        self.credentials = credentials or Credentials()
        self._client = ApiClient(self.credentials, timings)
        self._adapting = AdaptingClient(self._client)
        self._optional = OptionalApis(self._client)
        self._shared = shared
        self._job_informers: dict[str, JobInformer] = {}
        self._pod_informers: dict[str, PodInformer] = {}
        self._attendances: dict[str, Attendance] = {}
        self._stop_requested: dict[str, float] = {}  # UID -> time, until pods are seen after it

    @property
    def default_namespace(self) -> str:
        """The namespace of the kubeconfig's context or of the pod, else ``default``."""
        return self.credentials.namespace() or "default"

    @property
    def home(self) -> None:
        """None: the jobs are not on this machine."""
        return

    @property
    def cluster(self) -> KubernetesBackend:
        """This backend."""
        return self

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        """Create the TrainJob, as `Backend.create`. After a lost reply the job is looked up."""
        if (size := len(json.dumps(trainjob))) > _MAX_JSON_BYTES:
            raise Rejected(
                f"TrainJob {trainjob['metadata']['name']} is {size / 2**20:.1f} MiB of JSON, and an API server accepts "
                f"{_MAX_JSON_BYTES >> 20} MiB: stage large data as an input"
            )
        # After a lost reply, the annotation distinguishes the job of this request from an earlier job of the same name.
        mark = secrets.token_hex(8)
        annotations = {**(trainjob["metadata"].get("annotations") or {}), _REQUEST: mark}
        metadata = {**trainjob["metadata"], "annotations": annotations}
        # Strict: a field that this cluster's Trainer does not have is an error; otherwise it is dropped silently.
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
        """Do nothing: creating a job is a single request."""

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        """Return the job of that name, or None."""
        try:
            return await self._retry(lambda: self._client.send(Request("GET", _path(namespace, name))))
        except ObjectNotFound as error:
            _refuse_without_trainer(error)
            return None

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        """Return all jobs of `namespace` that have all `labels`."""
        selector = ",".join(f"{name}={value}" for name, value in labels.items())
        return [*await self._retry(lambda: self._client.items(_path(namespace), {"labelSelector": selector}))]

    async def runtimes(self) -> list[str]:
        """Names of the cluster's ClusterTrainingRuntimes: one page, requested without retries.

        Raises:
            ApiError: The request failed.
        """
        path = f"/apis/{API_VERSION}/clustertrainingruntimes"
        found = await self._client.send(Request("GET", path, {"limit": "500"}))
        return [runtime["metadata"]["name"] for runtime in found.get("items") or []]

    async def refs(self, namespace: str, names: Collection[str]) -> dict[str, JobRef]:
        """Return the jobs of those names. A shared watch has them all, so 10,000 names are not 10,000 requests."""
        if self._shared:
            return await self._job_informer(namespace).refs(names)
        found = [await self.get(namespace, name) for name in names]
        return {ref.name: ref for ref in (JobRef.of(trainjob) for trainjob in found if trainjob is not None)}

    def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """Yield the job now and after each change, until it is gone."""
        return self._job_informer(ref.namespace).subscribe(ref) if self._shared else self._watch_alone(ref)

    async def _watch_alone(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        informer = self._new_job_informer(ref.namespace, f"metadata.name={ref.name}")
        try:
            async with aclosing(informer.subscribe(ref)) as snapshots:
                async for snapshot in snapshots:
                    yield snapshot
        finally:
            await informer.aclose()

    def _job_informer(self, namespace: str) -> JobInformer:
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
        """Whether a rank of the job has ever been running, as far as pods and Events show."""
        return await self._retry(lambda: RelatedObjects(self._client, ref.namespace).has_run(ref))

    async def state(self, ref: JobRef) -> Evidence:
        """The job and its pods: two requests, and one for the Workload of a job in a queue."""
        trainjob = await self._confirm(ref)
        try:
            state = Evidence(trainjob, await self._retry(lambda: pods.list_pods(self._client, ref)))
        except Forbidden as error:
            state = Evidence(trainjob, unseen=[f"pods: {error.message}"], pods_visible=False)
        return (await self._with_workloads(ref.namespace, [state]))[0]

    async def states(self, namespace: str, labels: Mapping[str, str]) -> list[Evidence]:
        """All jobs with those labels, and their pods: two lists, of the pods of one JobSet or of all of them.

        A third list has the Workloads if a job is in a queue.
        """
        jobs = await self.find(namespace, labels)
        name = jobs[0]["metadata"]["name"] if len(jobs) == 1 else ""
        try:
            found = await self._retry(lambda: pods.list_all(self._client, namespace, name)) if jobs else {}
        except Forbidden as error:
            states = [Evidence(job, unseen=[f"pods: {error.message}"], pods_visible=False) for job in jobs]
        else:
            states = [Evidence(job, found.get(job["metadata"]["name"], ())) for job in jobs]
        return await self._with_workloads(namespace, states)

    async def _with_workloads(self, namespace: str, states: list[Evidence]) -> list[Evidence]:
        """Add the Workloads of jobs in queues, of which Kueue counts for how long they were admitted before."""
        queued = [each.trainjob for each in states if each.trainjob is not None and _in_queue(each.trainjob)]
        if not queued:
            return states
        only = JobRef.of(queued[0]) if len(queued) == 1 else None
        related = RelatedObjects(self._client, namespace, quiet=True)
        found = await self._retry(lambda: related.workloads_by_job(only))
        unseen = [f"{what}: {message}" for what, message in related.hidden.items()]
        return [
            replace(each, workload=found.get(each.trainjob["metadata"]["uid"]), unseen=[*each.unseen, *unseen])
            if each.trainjob is not None and _in_queue(each.trainjob)
            else each
            for each in states
        ]

    async def usage(self, ref: JobRef) -> list[Usage] | None:
        """The resources that the ranks use; one request, or none for a minute after a refusal."""
        return await self._optional.usage(ref)

    async def queue_position(self, ref: JobRef, queue: str) -> int | None:
        """Number of workloads before the job in its LocalQueue; requests as `usage`."""
        return await self._optional.queue_position(ref, queue)

    async def evidence(self, ref: JobRef) -> Evidence:
        """Collect pods, terminations, last log lines, Events and blockers of the job."""
        trainjob = await self._confirm(ref)
        # Quiet: `unseen` has it, and a page reads the evidence of a waiting job every few seconds.
        related = RelatedObjects(self._client, ref.namespace, quiet=True)
        unseen, visible = [], True
        try:
            found = await self._retry(lambda: pods.list_pods(self._client, ref))
        except Forbidden as error:
            found, unseen, visible = [], [f"pods: {error.message}"], False
        evidence = await self._retry(lambda: pods.gather(self._client, found, trainjob))
        events = await self._retry(lambda: related.events(ref))
        workloads = await self._retry(lambda: related.workloads(ref))
        missing = await self._retry(lambda: related.missing(trainjob)) if trainjob is not None else []
        unseen += [*evidence.unseen, *(f"{what}: {message}" for what, message in related.hidden.items())]
        workload = next(iter(workloads), None)
        seen = replace(evidence, events=events, workload=workload, missing=missing)
        return replace(seen, unseen=unseen, pods_visible=visible)

    def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """Yield crashes as they occur. Opens a watch of the job's pods, or shares one of the namespace's pods."""
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
        """Yield the lines of the ranks, oldest first; with `follow` until the job has ended."""
        reader = RankLogs(self._client, ref, ranks, since, tail)
        if not follow:
            for line in await self._retry(reader.stored):
                yield line
            return
        listen = partial(self._pod_informer(ref.namespace).listening, ref) if self._shared else None
        # No task group: a consumer that stops early would get an ExceptionGroup of GeneratorExit.
        watching = asyncio.create_task(self._until_finished(ref, reader.finish))
        try:
            async with aclosing(reader.follow(listen)) as lines:
                async for line in lines:
                    yield line
            await watching
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        """Yield each pod with the last lines of its training container: one list, and one request for each log."""
        found = await self._retry(lambda: pods.list_pods(self._client, ref))
        async with aclosing(pods.tails_of(self._client, found, count)) as tails:
            async for tail in tails:
                yield tail

    async def _until_finished(self, ref: JobRef, finish: Callable[[], None]) -> None:
        try:
            async with aclosing(self.watch(ref)) as snapshots:
                async for snapshot in snapshots:
                    if observe(snapshot.trainjob).phase.terminal:
                        return
        finally:
            finish()

    def attend(self, ref: JobRef) -> None:
        """Record that this process waits for the job: one Lease per namespace, for any number of jobs."""
        if ref.namespace not in self._attendances:
            self._attendances[ref.namespace] = Attendance(self._client, ref.namespace, self._opt_out)
        self._attendances[ref.namespace].attend(ref)

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Take one `attend` back."""
        self._attendances[ref.namespace].leave(ref, ended=ended)

    async def _opt_out(self, ref: JobRef) -> None:
        """Remove the label by which a job without waiters is ended."""
        await self.patch(ref, {"metadata": {"labels": {UNATTENDED: None}}})

    async def waiters(self, namespace: str) -> list[Waiter]:
        """The processes that wait or waited for jobs of a namespace, according to their Leases."""
        return await self._retry(lambda: attendance.waiters(self._client, namespace))

    async def forget(self, namespace: str, waiter: Waiter) -> None:
        """Delete the Lease of a process that has ended."""
        with suppress(ObjectNotFound):
            await self._retry(lambda: self._client.send(attendance.deletion(namespace, waiter.lease)))

    def now(self) -> datetime:
        """The current time by the API server's clock."""
        return self._client.now()

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        """Merge `patch` and the UID into the object: the server refuses to change another job of the same name."""
        try:
            await self._retry(lambda: self._client.send(_patching(ref, patch)))
        except ApiError as error:
            other_uid = isinstance(error, Invalid) and "metadata.uid" in error.message
            if other_uid or isinstance(error, ObjectNotFound | Conflict):
                raise NotFound(f"TrainJob {ref} (uid {ref.uid}) is gone") from error
            raise Rejected(f"TrainJob {ref} could not be changed: {error.message}") from error
        if patch.get("spec", {}).get("suspend"):
            self._stop_requested[ref.uid] = time.monotonic()

    async def cancel(self, ref: JobRef) -> None:
        """Delete the job: nothing else ends a TrainJob. Its pods and their logs are deleted with it."""
        await self.delete(ref)

    async def delete(self, ref: JobRef) -> None:
        """Request the deletion of the job of this UID; do nothing if it is gone."""
        try:
            await self._retry(lambda: self._client.send(_deleting(ref)))
        except (ObjectNotFound, Conflict):
            return
        self._stop_requested[ref.uid] = time.monotonic()

    async def stopped(self, ref: JobRef) -> bool:
        """Whether no pod of the job is running or pending, and none can appear any more."""
        trainjob = await self.get(ref.namespace, ref.name)
        if trainjob is not None and trainjob["metadata"]["uid"] != ref.uid:
            return True  # the pods belong to another job of this name
        suspended = trainjob is not None and trainjob["spec"].get("suspend")
        if trainjob is not None and not suspended and not observe(trainjob).phase.terminal:
            return False
        found = await self._retry(lambda: pods.list_pods(self._client, ref))
        if any(pod["status"].get("phase") in ("Pending", "Running") for pod in found):
            self._stop_requested.pop(ref.uid, None)  # Jobs end before their pods, so no pods appear after these
            return False
        return time.monotonic() >= self._stop_requested.get(ref.uid, 0) + self._client.timings.settle

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> PreparedRequest | None:
        """A `patch` of the job, or its deletion if None, ready to be sent within milliseconds; None behind a proxy."""
        return await self._prepared_request(_deleting(ref) if patch is None else _patching(ref, patch))

    async def prepared_pod_request(self, namespace: str, name: str) -> PreparedRequest | None:
        """The same for a read of a pod; requires permission to list pods."""
        return await self._prepared_request(Request("GET", pods.collection(namespace, "pods"), _named(name)))

    async def _prepared_request(self, request: Request) -> PreparedRequest | None:
        return None if (await self._client.access()).proxy is not None else PreparedRequest(self._client, request)

    async def owners_of_pod(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """``ownerReferences`` of a pod, empty if the pod does not exist; requires permission to list pods."""
        found = await self._retry(lambda: self._client.items(pods.collection(namespace, "pods"), _named(name)))
        return [owner for pod in found for owner in pod["metadata"].get("ownerReferences") or []]

    async def aclose(self) -> None:
        """Close all watches and connections; jobs are not touched."""
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

    async def _retry(self, request: Callable[[], Awaitable[T]]) -> T:
        """The result of `request`, retried after transient errors until `Timings.request_backoff` is used up.

        A list that expired before its last page is restarted.
        """
        backoff = self._client.timings.request_backoff()
        loop = asyncio.get_running_loop()
        slow = loop.call_later(_SLOW_SECONDS, _log.warning, "the API server has not answered for %.0f s", _SLOW_SECONDS)
        try:
            while True:
                try:
                    return await request()
                except (Expired, Transient) as error:
                    if backoff.failure():
                        raise BackendUnavailable(f"the API server is unavailable: {error}") from error
                    if backoff.count == 1 and isinstance(error, NoConnection):
                        _log.warning("the API server cannot be reached, retrying for a minute: %s", error)
                        slow.cancel()
                    await anyio.sleep(backoff.pause(error.retry_after))
        finally:
            slow.cancel()


def _named(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"}


def _in_queue(trainjob: TrainJob) -> bool:
    return QUEUE_LABEL in mapping(trainjob, "metadata", "labels")


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
    """Raise if the 404 is about the path: this cluster serves no TrainJobs."""
    if "could not find the requested resource" in error.message:
        raise ConfigurationError(f"this cluster has no {API_VERSION} TrainJobs: install Kubeflow Trainer 2.1 or newer")


# Message of Trainer's webhook about a runtime that does not fit `initializer` -> advice.
_ADVICE = {
    "-initializer job when trainJob is configured": "this runtime has no such initializer: stage the data in a "
    "separate step before this one, or use a runtime with that initializer",
    "must have volumeMount with name - initializer": "mount a volume called initializer there by runtime_patches (see "
    "docs/how-to/runtimes.md)",
}
# The second is about a quota not counted yet (k8s.io/apiserver, admission/plugin/resourcequota).
_NO_QUOTA = ("exceeded quota", "status unknown for quota", "insufficient quota")


def _refusal(error: ApiError, trainjob: TrainJob) -> Exception:
    """The error for a refused job; its class says who has to act."""
    name = f"TrainJob {trainjob['metadata']['namespace']}/{trainjob['metadata']['name']}"
    if isinstance(error, ObjectNotFound):
        try:
            _refuse_without_trainer(error)
        except ConfigurationError as missing:
            return missing
    runtime = trainjob["spec"]["runtimeRef"]
    # From Trainer's webhook or Kueue's, whichever answers first.
    phrases = ("must be created before the TrainJob is created", f"runtime '{runtime['name']}' not found")
    if any(phrase in error.message for phrase in phrases):
        return RuntimeNotFound(f"{name}: there is no {runtime.get('kind', 'runtime')} {runtime['name']!r}")
    advice = [f"; {text}" for phrase, text in _ADVICE.items() if phrase in error.message]
    refused = Rejected(f"{name} was refused: {error.message}{''.join(advice)}")
    if any(phrase in error.message for phrase in _NO_QUOTA):
        refused.retry = RetryVerdict.QUOTA
    return refused
