"""What every backend can do. `trainjob.lifecycle` is written against this and nothing else."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainjob.diagnosis import Evidence
from trainjob.logs import LogLine
from trainjob.manifest import JobRef
from trainjob.status import Blocker

if TYPE_CHECKING:
    from datetime import datetime

    from trainjob.backends.kubernetes.attendance import Waiter
    from trainjob.backends.kubernetes.credentials import Credentials
    from trainjob.backends.kubernetes.prepared import PreparedRequest

TrainJob = Mapping[str, Any]
"""A TrainJob object as JSON."""


@dataclass(frozen=True)
class Snapshot:
    """A job as it stands now; earlier states may have been skipped (level-triggered).

    Attributes:
        trainjob: What `observe` looks at of the object; None once it is certain that the job of this UID is gone.
        notice: What a person should know that is not in the object: an outage that is being waited out, …
        blocker: What is in the way of a job that does not get on, where that is known.
    """

    trainjob: TrainJob | None
    notice: str = ""
    blocker: Blocker | None = None


class Backend(Protocol):
    """Where TrainJobs live. Every method may raise `BackendUnavailable` once an outage has outlasted its budgets."""

    @property
    def default_namespace(self) -> str:
        """Namespace of jobs that name none."""

    @property
    def home(self) -> Path | None:
        """Directory of the jobs, where they run on this machine and see its files; None for a cluster."""

    @property
    def cluster(self) -> Cluster | None:
        """This backend with the methods that only a cluster has; None where jobs run on this machine."""

    async def runtimes(self) -> list[str]:
        """Names of the runtimes that a job can name. One request, not retried."""

    async def create(self, trainjob: TrainJob, *, dry_run: bool = False) -> TrainJob:
        """Create `trainjob` and return it as it was stored; with `dry_run`, as it would be stored.

        Raises:
            AlreadyExists: a job of that name exists, or existed and was deleted.
            RuntimeNotFound: its runtime is not there.
            Rejected: anything else is wrong with it.
        """

    async def recover(self, ref: JobRef) -> None:
        """Finish what the process that created the job may have left undone. Called by each launch that adopts it."""

    async def get(self, namespace: str, name: str) -> TrainJob | None:
        """The job of that name, or None."""

    async def find(self, namespace: str, labels: Mapping[str, str]) -> list[TrainJob]:
        """All jobs of `namespace` that have all `labels`, in no particular order."""

    async def refs(self, namespace: str, names: Collection[str]) -> dict[str, JobRef]:
        """The jobs of those names, by name; what is not there is left out."""

    def watch(self, ref: JobRef) -> AsyncGenerator[Snapshot]:
        """The job now, and again whenever it changed, until it is gone. Transient errors become notices."""

    async def has_run(self, ref: JobRef) -> bool:
        """Whether a rank of the job has been running at any time, as far as it can still be seen."""

    async def evidence(self, ref: JobRef) -> Evidence:
        """What can be known about the job at this moment: pods, terminations, last log lines."""

    def crashes(self, ref: JobRef) -> AsyncGenerator[Evidence]:
        """Containers that ended badly, as soon as they did, with their last log lines; ends with the job or before.

        What happened within a second comes together, and what happened before, as far as pods still tell of it, comes
        first: a waiter that is started again finds the crash that the first one saw.

        A pod may be started again in its place, and the pods of a job that failed may be deleted with it: what is not
        taken at the crash is often gone at the end. Yields nothing where `evidence` still has all of it then.
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
        """Lines of all ranks, or of those in `ranks` (``node-0``), oldest first.

        Args:
            ref: The job.
            ranks: Ranks to read; all if empty.
            follow: Go on until the job has ended and everything was read.
            since: Time of a line; only later lines are given, so that a reader can go on where an earlier one stopped.
            tail: Give only that many of each rank's lines that are already there.
        """

    def attend(self, ref: JobRef) -> None:
        """Record, until `leave`, that this process waits for the job, see `trainjob.unattended`.

        Returns at once and raises nothing. The record is written soon after, and renewed until `leave`.
        """

    def leave(self, ref: JobRef, *, ended: bool) -> None:
        """Take one `attend` back; `ended`: the job has ended, so that nobody has to wait for it any more."""

    async def patch(self, ref: JobRef, patch: Mapping[str, Any]) -> None:
        """Merge `patch` into the object (JSON merge patch): suspend and resume, annotations.

        Raises:
            NotFound: the job of this UID is gone.
        """

    async def cancel(self, ref: JobRef) -> None:
        """Ask for the job of this UID to be ended; nothing happens if it has ended, or is gone.

        A backend that can keep a job's logs and metrics ends it as `Phase.CANCELLED`; others delete it.
        """

    async def delete(self, ref: JobRef) -> None:
        """Ask for the job of this UID to be deleted; nothing happens if it is gone already."""

    async def stopped(self, ref: JobRef) -> bool:
        """True once no process or pod of the job is left running."""

    async def aclose(self) -> None:
        """Let go of connections; jobs are not touched."""


class Cluster(Backend, Protocol):
    """A backend on a cluster: also what `trainjob.reaper`, `trainjob.doctor` and steps that run in a pod need."""

    @property
    def credentials(self) -> Credentials:
        """Credentials of the API server."""

    async def waiters(self, namespace: str) -> list[Waiter]:
        """The processes that wait for jobs of a namespace, or waited for them, according to their Leases."""

    async def forget(self, namespace: str, waiter: Waiter) -> None:
        """Remove the Lease of a process that has ended."""

    def now(self) -> datetime:
        """The present time by the clock of the API server."""

    async def prepared_request(self, ref: JobRef, patch: Mapping[str, Any] | None) -> PreparedRequest | None:
        """A `patch` of the job, or its deletion if None, that can be sent within milliseconds; None behind a proxy."""

    async def prepared_pod_request(self, namespace: str, name: str) -> PreparedRequest | None:
        """A read of a pod that can be sent within milliseconds; None behind a proxy."""

    async def owners_of_pod(self, namespace: str, name: str) -> list[Mapping[str, Any]]:
        """``ownerReferences`` of a pod; none if the pod does not exist."""
