"""The protocol of backends. `trainjob._jobs.launching` and `trainjob._jobs.waiting` use nothing else of a backend."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol, Self

from trainjob._backends.credentials import Credentials
from trainjob._diagnosis.evidence import Evidence
from trainjob._manifest.attempts import Cancel
from trainjob._support.log_lines import LogLine
from trainjob.job import JobRef
from trainjob.status import Blocker

TrainJob = Mapping[str, Any]
"""A TrainJob object as JSON."""


@dataclass(frozen=True)
class Usage:
    """The resources that a rank uses, as measured within the last minute.

    Attributes:
        rank: As ``node-1``.
        cpu: Cores.
        memory: Bytes.
    """

    rank: str
    cpu: float
    memory: int


@dataclass(frozen=True)
class Snapshot:
    """The current state of a job; earlier states may have been skipped (level-triggered).

    Attributes:
        trainjob: The parts of the object that `observe` reads; None once the job of this UID certainly does not exist.
        notice: A message for people about something outside the object, such as an outage of the API server.
        blocker: Why the job makes no progress, if known.
    """

    trainjob: TrainJob | None
    notice: str = ""
    blocker: Blocker | None = None


@dataclass(frozen=True)
class Waiter:
    """A process that waits or waited for jobs, by one of its Leases.

    Attributes:
        lease: Name of the Lease.
        renewed: Latest renewal of the Lease, by the API server's clock.
        jobs: UID of a job -> time until which the process is known to have waited for it.
        waiting: UIDs of the jobs that it has not stopped waiting for, unless it has ended since `renewed`.
        holder: Host of the process; in a pod, the name of the pod.
        lasts: How long after `renewed` the process may still wait: it has missed three renewals then.
        own: Whether this process has written the Lease.
    """

    lease: str
    renewed: datetime
    jobs: Mapping[str, datetime]
    waiting: frozenset[str] = frozenset()
    holder: str = ""
    lasts: timedelta = timedelta(0)
    own: bool = False


@dataclass(frozen=True)
class Run:
    """A run of a pipeline, by its Workflow.

    Attributes:
        label: Value of the label `trainjob._manifest.workflow_labels.KFP_RUN` of its jobs.
        workflow: Name of the Workflow, with which the names of its pods begin.
        state: ``running``, ``completed``, ``terminated``, or ``deleted`` if it was deleted before it had completed.
    """

    label: str
    workflow: str
    state: str


@dataclass(frozen=True)
class Overview:
    """What decides which jobs of a namespace may run.

    Attributes:
        jobs: The jobs that trainjob has launched: the parts of the objects that `observe` and `decide` read.
        waiters: The processes that wait for jobs, or waited.
        cancels: The records of cancels, by the hash of the key.
        ended: The runs that were terminated or deleted, by their label.
        reliable_since: Monotonic time since when no outage of the API server was noticed.
    """

    jobs: Sequence[TrainJob]
    waiters: Sequence[Waiter]
    cancels: Mapping[str, Sequence[Cancel]]
    ended: Mapping[str, Run]
    reliable_since: float


class Observer(Protocol):
    """Follows what decides about the jobs of a namespace."""

    async def run(self) -> None:
        """Follow it until this call is cancelled, beside calls of `next`."""

    async def next(self, seconds: float) -> Overview:
        """What is known after the next change, or after some seconds without one."""


class PreparedRequest(Protocol):
    """A ready-made request to one object, for a process with milliseconds left.

    Attributes:
        took: Seconds that dry runs of a PATCH take, including webhooks: the shortest of the latest ones, since one slow
            run proves nothing. None before the first, if the server refuses them, and for other methods.
        forbidden: Whether the server answered 403 to the latest request that kept the connection open.
    """

    took: float | None
    forbidden: bool

    async def warm(self) -> None:
        """Open the connection, or keep it open by a request that changes nothing."""

    def send(self) -> bool:
        """Send the request and wait for the reply; whether it was accepted. For signal handlers."""

    def read(self, seconds: float) -> bytes | None:
        """Send the request and return the body of the reply; None without one in time. For signal handlers."""

    def send_or(self, other: Self, seconds: float) -> Self | None:
        """Send the request, and `other` if no reply has come in time; return the one that was accepted, if any."""

    def close(self) -> None:
        """Close the connection."""


class Backend(Protocol):
    """Where TrainJobs run. Every method may raise `BackendUnavailable` when an outage outlasts its retry budget."""

    @property
    def default_namespace(self) -> str:
        """Namespace of jobs without a namespace."""

    @property
    def home(self) -> Path | None:
        """Directory of the jobs if they run on this machine and read its files; None for a cluster."""

    @property
    def cluster(self) -> Cluster | None:
        """This backend with the methods that only a cluster has; None if jobs run on this machine."""

    def now(self) -> datetime:
        """The current time by the clock that writes the times of jobs: the API server's; on one machine, its own.

        Only this time may be compared with times of jobs, Leases and other objects of the backend: the clock of this
        process may be wrong. Before the first reply of an API server it is the clock of this process.
        """

    async def runtimes(self) -> list[str]:
        """Names of the runtimes that a job can name. One request, not retried."""

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        """Create `trainjob` and return the stored object; with `dry_run`, the object that would be stored.

        A request without a reply is repeated only while the name is free and nothing of a job of that name is left.

        Raises:
            AlreadyExists: A job of that name exists, or may have existed: a cluster forgets the name of a deleted job.
            RuntimeNotFound: The runtime does not exist.
            Rejected: The job is invalid in another way.
        """

    async def recover(self, ref: JobRef) -> None:
        """Complete a creation that was interrupted. Called by each launch that adopts the job."""

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        """The job of that name, or None."""

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        """All jobs of `namespace` that have all `labels`, in no particular order; never from a cache.

        Raises:
            Rejected: This account may not list them.
        """

    async def is_free(self, namespace: str, name: str) -> bool:
        """Whether nothing is left of a deleted job of that name that a new job would take over."""

    async def remaining_pods(self, namespace: str, names: Sequence[str]) -> list[Mapping[str, Any]]:
        """The pods of jobs of those names that have not ended, also of deleted jobs."""

    async def announce_cancel(self, namespace: str, work: str, cancel: Cancel) -> Cancel | None:
        """Write the record of a cancel, which is kept for an hour; None if this account may not.

        Args:
            namespace: Namespace of the jobs.
            work: Hash of the key.
            cancel: The cancel, without version, time and name of the record.
        """

    async def cancels(self, namespace: str, work: str) -> tuple[int | None, list[Cancel]]:
        """The version of the records of cancels, and those of the key with the hash `work`; one request.

        The version is None if this account may not read them.
        """

    async def refs(self, namespace: str, names: Collection[str]) -> tuple[dict[str, JobRef], set[str]]:
        """The jobs of those names, by name, without names that no job has; and the hashes of all jobs' keys."""

    def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """Yield the job now and after each change, until it does not exist. Transient errors become notices."""

    async def has_run(self, ref: JobRef) -> bool:
        """Whether a rank of the job has ever run, according to the pods and Events that still exist."""

    async def state(self, ref: JobRef) -> Evidence:
        """The job and its pods as they are now, without logs and Events: for a page that is renewed every few seconds.

        At most two requests, and a third one for the Workload of a job in a queue.
        """

    async def states(self, namespace: str, labels: Mapping[str, str]) -> list[Evidence]:
        """All jobs of `namespace` that have all `labels`, each as `state` returns it, in no particular order.

        Lists jobs, pods and, if a job is in a queue, Workloads once, however many jobs there are.
        """

    async def evidence(self, ref: JobRef) -> Evidence:
        """Collect the pods, terminations and last log lines of the job as they are now."""

    def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """Yield containers that failed, as soon as they fail, with their last log lines; ends with the job or earlier.

        Failures within one second are yielded together. Earlier failures that pods still record come first: a
        restarted waiter finds the crash that the first one found.

        A pod may be restarted in place, and the pods of a failed job may be deleted with it: evidence that is not
        collected at the crash is often lost at the end. Yields nothing on a backend where `evidence` keeps all of it.
        """

    def logs(
        self,
        ref: JobRef,
        *,
        ranks: Sequence[str] = (),
        follow: bool = False,
        since: str = "",
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine]:
        """Yield log lines of all ranks, or of those in `ranks` (``node-0``), oldest first.

        Args:
            ref: The job.
            ranks: Ranks to read; all if empty.
            follow: Continue until the job has finished and all lines were read.
            since: Time of a line; only later lines are yielded, so that a reader can resume where another one stopped.
            tail: Yield only this many of the existing lines of each rank.
        """

    def tails(self, ref: JobRef, count: int) -> AsyncGenerator[tuple[Mapping[str, Any], list[LogLine]]]:
        """Yield each pod of the job with the last `count` lines of its training container.

        The pods of one rank come in the order of their creation. Lists the pods once, then reads a few logs at a time,
        each once. A pod whose log cannot be read has no lines.
        """

    def attend(self, ref: JobRef) -> None:
        """Record, until `leave`, that this process waits for the job (`trainjob._manifest.unattended`).

        Returns immediately and raises nothing. The record is written soon after, and renewed until `leave`.
        """

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Revoke one `attend`; `ended`: the job has finished, and no process has to wait for it."""

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        """Merge `patch` into the object (JSON merge patch): suspend and resume, annotations.

        Raises:
            NotFound: The job of this UID does not exist, or has another ``resourceVersion`` than `patch` names.
        """

    async def cancel(self, ref: JobRef) -> None:
        """Request the cancellation of the job of this UID; does nothing if it has finished or does not exist.

        A backend that can keep the logs and metrics of a job sets `Phase.CANCELLED`; others delete the job.
        """

    async def delete(self, ref: JobRef, version: str = "") -> None:
        """Request the deletion of the job of this UID; does nothing if it does not exist or was changed.

        Args:
            ref: The job.
            version: The ``resourceVersion`` that it must have; any if empty.
        """

    async def stopped(self, ref: JobRef) -> bool:
        """Whether no process or pod of the job is running any more."""

    async def aclose(self) -> None:
        """Close connections; jobs are not changed."""


class Cluster(Backend, Protocol):
    """A backend on a cluster: also what the reaper, the doctor and steps that run in a pod need."""

    @property
    def credentials(self) -> Credentials:
        """Credentials of the API server."""

    async def usage(self, ref: JobRef) -> list[Usage] | None:
        """The resources that the ranks use, by the metrics API; None if the cluster does not provide it."""

    async def queue_position(self, ref: JobRef, queue: str) -> int | None:
        """Number of workloads before the job in its LocalQueue, by Kueue's visibility API; None if unknown."""

    async def waiters(self, namespace: str) -> list[Waiter]:
        """The processes that wait for jobs of a namespace, or waited for them, according to their Leases."""

    def observer(self, namespace: str) -> Observer:
        """Follows the jobs of a namespace, its Leases, and the runs of pipelines."""

    async def report_event(self, trainjob: TrainJob, reason: str, message: str) -> None:
        """Write an Event about a job; does nothing if this account may not."""

    async def forget(self, namespace: str, waiter: Waiter) -> None:
        """Remove the Lease of a process that has ended."""

    async def all_cancels(self, namespace: str) -> dict[str, list[Cancel]]:
        """The records of all cancels of a namespace, by the hash of the key."""

    async def forget_cancel(self, namespace: str, cancel: Cancel) -> None:
        """Remove the record of a cancel."""

    async def has_own_jobset(self, ref: JobRef) -> bool | None:
        """Whether the JobSet of that name belongs to this job; None if it is gone, has no owner or cannot be read."""

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> PreparedRequest | None:
        """A `patch` of the job, or its deletion if None, that can be sent within milliseconds; None if it cannot be."""

    async def prepared_pod_request(self, namespace: str, name: str) -> PreparedRequest | None:
        """A read of a pod that can be sent within milliseconds; None if it cannot be."""

    async def owners_of_pod(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """``ownerReferences`` of a pod; none if the pod does not exist."""
