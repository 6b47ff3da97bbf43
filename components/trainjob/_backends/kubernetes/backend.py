"""`KubernetesBackend`: the `Backend` protocol over the API server's TrainJobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from datetime import datetime
from typing import Any, TypeVar

import anyio

from trainjob._backends.base import Snapshot, TrainJob, Usage, Waiter
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes import leases, pods
from trainjob._backends.kubernetes.blockers import RelatedObjects
from trainjob._backends.kubernetes.client import ApiClient, Request, Timings
from trainjob._backends.kubernetes.errors import (
    Forbidden,
    ObjectNotFound,
)
from trainjob._backends.kubernetes.job_watch import JobWatch
from trainjob._backends.kubernetes.leases import Attendance
from trainjob._backends.kubernetes.logs import RankLogs
from trainjob._backends.kubernetes.objects import TrainJobObjects, deleting, patching
from trainjob._backends.kubernetes.optional_apis import OptionalApis
from trainjob._backends.kubernetes.overview import Observer, event_of
from trainjob._backends.kubernetes.pod_watch import PodWatch
from trainjob._backends.kubernetes.prepared import PreparedRequest
from trainjob._backends.kubernetes.shared_watch import SharedWatch
from trainjob._diagnosis.evidence import Evidence
from trainjob._manifest.attempts import work_of
from trainjob._manifest.unattended import LABEL as UNATTENDED
from trainjob._support.kube_objects import mapping
from trainjob._support.log_lines import LogLine
from trainjob.job import API_VERSION, JobRef
from trainjob.status import QUEUE_LABEL, observe

W = TypeVar("W", bound=SharedWatch)

_EVIDENCE = 16  # jobs whose evidence is read at once; a log of a lost node takes 5 s


class KubernetesBackend(TrainJobObjects):
    """TrainJobs of one cluster.

    Args:
        credentials: Source of the credentials; kubeconfig or service account by default.
        shared: Watch all jobs and pods of a namespace, for many waiters. Otherwise the requests name the single job,
            and so can its Role. In both cases waiting for a job, its blockers, crashes and logs share two watches.
        timings: Timeouts and intervals.
    """

    def __init__(
        self, credentials: Credentials | None = None, *, shared: bool = False, timings: Timings | None = None
    ) -> None:
        self.credentials = credentials or Credentials()
        super().__init__(ApiClient(self.credentials, timings))
        self._optional = OptionalApis(self._client)
        self._evidence = anyio.Semaphore(_EVIDENCE)
        self._shared = shared
        self._job_watches: dict[tuple[str, str], JobWatch] = {}  # by namespace and job; the latter is empty if shared
        self._pod_watches: dict[tuple[str, str], PodWatch] = {}
        self._attendances: dict[str, Attendance] = {}

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

    async def runtimes(self) -> list[str]:
        """Names of the cluster's ClusterTrainingRuntimes: one page, requested without retries.

        Raises:
            ApiError: The request failed.
        """
        path = f"/apis/{API_VERSION}/clustertrainingruntimes"
        found = await self._client.send(Request("GET", path, {"limit": "500"}))
        return [runtime["metadata"]["name"] for runtime in found.get("items") or []]

    async def refs(self, namespace: str, names: Collection[str]) -> tuple[dict[str, JobRef], set[str]]:
        """See `Backend.refs`. A shared watch has all jobs, so 10,000 names are not 10,000 requests."""
        if self._shared:
            found = await self._job_watch(namespace).refs()
        else:
            found = [JobRef.of(trainjob) for trainjob in await self.find(namespace, {})]
        return {ref.name: ref for ref in found if ref.name in names}, {work_of(ref.name) for ref in found} - {""}

    def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """Yield the job now and after each change, until it is gone."""
        return self._job_watch(ref.namespace, ref.name).snapshots(ref)

    def _job_watch(self, namespace: str, job: str = "") -> JobWatch:
        key = (namespace, "" if self._shared else job)
        if key not in self._job_watches:
            _drop_idle(self._job_watches)
            self._job_watches[key] = JobWatch(self._client, *key, self._confirm)
        return self._job_watches[key]

    def _pod_watch(self, ref: JobRef) -> PodWatch:
        key = (ref.namespace, "" if self._shared else ref.name)
        if key not in self._pod_watches:
            _drop_idle(self._pod_watches)
            self._pod_watches[key] = PodWatch(self._client, *key)
        return self._pod_watches[key]

    async def _confirm(self, ref: JobRef) -> TrainJob | None:
        found = await self.get(ref.namespace, ref.name)
        return found if found is not None and found["metadata"]["uid"] == ref.uid else None

    async def has_run(self, ref: JobRef) -> bool:
        """Whether a rank of the job has ever been running, as far as pods and Events show."""
        return await self.retry(lambda: RelatedObjects(self._client, ref.namespace).has_run(ref))

    async def state(self, ref: JobRef) -> Evidence:
        """The job and its pods: two requests, and one for the Workload of a job in a queue."""
        trainjob = await self._confirm(ref)
        try:
            state = Evidence(trainjob, await self.retry(lambda: pods.list_pods(self._client, ref)))
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
            found = await self.retry(lambda: pods.list_all(self._client, namespace, name)) if jobs else {}
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
        found = await self.retry(lambda: related.workloads_by_job(only))
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
        """Collect pods, terminations, last log lines, Events and blockers of the job.

        Of a few jobs at once: of many that end together, the first would else be known as late as the last.
        """
        async with self._evidence:
            return await self._evidence_of(ref)

    async def _evidence_of(self, ref: JobRef) -> Evidence:
        trainjob = await self._confirm(ref)
        # Quiet: `unseen` has it, and a page reads the evidence of a waiting job every few seconds.
        related = RelatedObjects(self._client, ref.namespace, quiet=True)
        unseen, visible = [], True
        try:
            found = await self.retry(lambda: pods.list_pods(self._client, ref))
        except Forbidden as error:
            found, unseen, visible = [], [f"pods: {error.message}"], False
        evidence = await self.retry(lambda: pods.gather(self._client, found, trainjob))
        events = await self.retry(lambda: related.events(ref))
        workloads = await self.retry(lambda: related.workloads(ref))
        workload = next(iter(workloads), None)
        missing = await self.retry(lambda: related.missing(trainjob, workload)) if trainjob is not None else []
        objects: Sequence[dict[str, Any]] = ()
        if workload is not None:
            reads = related.queues_of if not mapping(workload, "status").get("admission") else related.flavors_of
            objects = await self.retry(lambda: reads(workload)) if _waits(trainjob) else ()
        unseen += [*evidence.unseen, *(f"{what}: {message}" for what, message in related.hidden.items())]
        seen = replace(evidence, events=events, workload=workload, missing=missing, related=objects)
        return replace(seen, unseen=unseen, pods_visible=visible)

    def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """Yield crashes as they occur."""
        return self._pod_watch(ref).crashes(ref)

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
        reader = RankLogs(self._pod_watch(ref), ref, ranks, since, tail)
        if follow:
            found = reader.follow(self.watch(ref))
        else:
            found = reader.stored(await self.retry(lambda: pods.list_pods(self._client, ref)))
        async with aclosing(found) as lines:
            async for line in lines:
                yield line

    async def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        """Yield each pod with the last lines of its training container: one list, and one request for each log."""
        found = await self.retry(lambda: pods.list_pods(self._client, ref))
        async with aclosing(pods.tails_of(self._client, found, count)) as tails:
            async for tail in tails:
                yield tail

    def attend(self, ref: JobRef) -> None:
        """Record that this process waits for the job: one Lease for 2,000 jobs of a namespace."""
        if ref.namespace not in self._attendances:
            self._attendances[ref.namespace] = Attendance(self._client, ref.namespace, self._opt_out)
        self._attendances[ref.namespace].attend(ref)

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Take one `attend` back; nothing is left of it once the backend is closed."""
        if ref.namespace in self._attendances:
            self._attendances[ref.namespace].leave(ref, ended=ended)

    async def _opt_out(self, ref: JobRef) -> None:
        """Remove the label by which a job without waiters is ended."""
        await self.patch(ref, {"metadata": {"labels": {UNATTENDED: None}}})

    async def waiters(self, namespace: str) -> list[Waiter]:
        """The processes that wait or waited for jobs of a namespace, according to their Leases."""
        found = await self.retry(lambda: leases.waiters(self._client, namespace))
        own = self._attendances[namespace].names if namespace in self._attendances else set()
        return [replace(waiter, own=waiter.lease in own) for waiter in found]

    async def forget(self, namespace: str, waiter: Waiter) -> None:
        """Delete the Lease of a process that has ended."""
        with suppress(ObjectNotFound):
            await self.retry(lambda: self._client.send(leases.deletion(namespace, waiter.lease)))

    def observer(self, namespace: str) -> Observer:
        """Follows the jobs of a namespace, its Leases, and the Workflows of pipelines."""
        return Observer(self._client, namespace)

    async def report_event(self, trainjob: TrainJob, reason: str, message: str) -> None:
        """Write an Event about a job; does nothing if this account may not."""
        with suppress(Forbidden, ObjectNotFound):
            await self.retry(lambda: self._client.send(event_of(trainjob, reason, message, self.now())))

    def now(self) -> datetime:
        """The current time by the API server's clock."""
        return self._client.now()

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> PreparedRequest | None:
        """A `patch` of the job, or its deletion if None, ready to be sent within milliseconds.

        Returns:
            None behind a proxy, and for an impersonated user.
        """
        return await self._prepared_request(deleting(ref) if patch is None else patching(ref, patch))

    async def prepared_pod_request(self, namespace: str, name: str) -> PreparedRequest | None:
        """The same for a read of a pod; requires permission to list pods."""
        return await self._prepared_request(Request("GET", pods.collection(namespace, "pods"), _named(name)))

    async def _prepared_request(self, request: Request) -> PreparedRequest | None:
        access = await self._client.access()
        return None if access.proxy is not None or access.impersonates else PreparedRequest(self._client, request)

    async def owners_of_pod(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """``ownerReferences`` of a pod, empty if the pod does not exist; requires permission to list pods."""
        found = await self.retry(lambda: self._client.items(pods.collection(namespace, "pods"), _named(name)))
        return [owner for pod in found for owner in pod["metadata"].get("ownerReferences") or []]

    async def aclose(self) -> None:
        """Close all watches and connections; jobs are not touched. Whatever still waits gets `BackendUnavailable`."""
        watches: list[SharedWatch | Attendance] = [*self._job_watches.values(), *self._pod_watches.values()]
        kept = [*watches, *self._attendances.values()]
        self._job_watches, self._pod_watches, self._attendances = {}, {}, {}
        for each in kept:
            await each.aclose()
        await self._client.aclose()


def _drop_idle(watches: dict[tuple[str, str], W]) -> None:
    for key in [key for key, watch in watches.items() if watch.idle]:
        del watches[key]


def _named(name: str) -> dict[str, str]:
    return {"fieldSelector": f"metadata.name={name}"}


def _waits(trainjob: TrainJob | None) -> bool:
    return trainjob is not None and observe(trainjob).phase.idle


def _in_queue(trainjob: TrainJob) -> bool:
    return QUEUE_LABEL in mapping(trainjob, "metadata", "labels")
