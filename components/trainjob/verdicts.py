"""Why a job failed, as values: the evidence, the diagnosis, and who has to act before another attempt can succeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from trainjob.status import Phase

CUT = " characters more)"
"""End of a line that is shown in part."""


class RetryVerdict(StrEnum):
    """Whether another attempt of the same spec can be expected to end differently."""

    USER = "user"
    """The training code failed and would fail again: a module is missing, an argument is unknown."""
    UNKNOWN = "unknown"
    """The training failed, and the failure may not repeat: the orchestrator's own retries decide."""
    INFRASTRUCTURE = "infrastructure"
    """A node, network or service failed; another attempt may succeed."""
    PREEMPTED = "preempted"
    """The job was preempted; another attempt can succeed when capacity is available."""
    QUOTA = "quota"
    """The request exceeds the quota; wait, or request less."""
    CONFIGURATION = "configuration"
    """The spec, the permissions or the cluster's configuration is wrong. It is permanent: a person has to change it."""

    @property
    def retryable(self) -> bool:
        """Whether an automatic retry of the unchanged spec may succeed."""
        return self not in (RetryVerdict.USER, RetryVerdict.CONFIGURATION)

    def retried(self, *, user_errors: bool) -> bool:
        """Whether an orchestrator retries.

        Args:
            user_errors: Retry also after a failure of the training code that may not repeat.
        """
        return self.retryable and (user_errors or self is not RetryVerdict.UNKNOWN)

    @property
    def words(self) -> str:
        """Whether a retry makes sense, and why."""
        return _WORDS[self]


_WORDS = {
    RetryVerdict.USER: "not retried: the same code would fail again",
    RetryVerdict.UNKNOWN: "can be retried: the failure may not repeat",
    RetryVerdict.INFRASTRUCTURE: "can be retried: the cause is outside the job's own code",
    RetryVerdict.PREEMPTED: "can be retried once capacity is available",
    RetryVerdict.QUOTA: "can be retried once quota is available",
    RetryVerdict.CONFIGURATION: "not retried: the configuration must be changed first",
}


class Category(StrEnum):
    """The kind of a failure. The values are a stable contract."""

    USER_CODE = "user code"
    OUT_OF_MEMORY = "out of memory"
    IMAGE = "image"
    SCHEDULING = "scheduling"
    QUOTA = "quota"
    PREEMPTED = "preempted"
    NODE_LOST = "node lost"
    ADMISSION = "admission"
    CONFIGURATION = "configuration"
    DEADLINE = "deadline"
    DELETED = "deleted"
    OUTAGE = "outage"
    """A service that the job needs did not answer, or a disk had an error."""
    HANG = "hang"
    """No rank made progress for `stall_timeout`."""
    UNKNOWN = "unknown"
    NONE = "none"
    """No failure: the job is running or complete."""


@dataclass(frozen=True)
class Evidence:
    """What is known of a job, as Kubernetes objects.

    Attributes:
        trainjob: The TrainJob; None if it is gone.
        pods: Its pods, finished ones included.
        logs: Pod name -> last lines of its log.
        events: Events of the job and its related objects, without routine ones.
        workload: The job's Workload, if Kueue manages the job.
        unseen: Evidence that could not be read, a line each (permissions, deleted objects).
        missing: Objects that the job needs and that do not exist, as ``ClusterTrainingRuntime x``.
        pods_visible: Whether pods may be listed; if not, an empty `pods` does not mean that there are none.
        reported: What rank 0 has reported so far, as in its termination message; empty where only its end reports it.
        related: Objects that explain why it waits: its LocalQueue and ClusterQueue, flavors, and a Node of each, which
            is a Node without a name if there is none.
    """

    trainjob: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]] = ()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    workload: Mapping[str, Any] | None = None
    unseen: Sequence[str] = ()
    missing: Sequence[str] = ()
    pods_visible: bool = True
    reported: str = ""
    related: Sequence[Mapping[str, Any]] = ()

    def with_earlier(self, *earlier: Evidence) -> Evidence:
        """Add earlier evidence of the same job: crashed pods may have been deleted since."""
        return replace(
            self,
            # The current pods first: they are in order, also if several ranks terminated in the same second.
            pods=[pod for each in (self, *earlier) for pod in each.pods],
            logs={name: lines for each in (*reversed(earlier), self) for name, lines in each.logs.items() if lines},
        )


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed, or what blocks it.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        summary: One line.
        rank: The rank that is the root cause, as ``node-1``; empty if no rank is.
        exit_code: Its exit code; None if there is none. A signal N counts as 128 + N.
        log: The last lines of its log; for an earlier error, the lines up to that error, too.
        job: ``namespace/name``.
        advice: What to do, for people.
        unseen: Evidence that could not be read.
        phase: Phase of the job; a running job can be diagnosed, too.
        pod: Name of the rank's pod.
        node: Name of the Kubernetes node that the rank ran on; empty if it is unknown.
        node_memory: More memory in `resources_per_node` would help.
        change: What the next attempt changes, by `on_retry` of the spec; empty if nothing.
    """

    category: Category
    retry: RetryVerdict
    summary: str
    rank: str = ""
    exit_code: int | None = None
    log: tuple[str, ...] = ()
    advice: str = ""
    job: str = ""
    unseen: tuple[str, ...] = ()
    phase: Phase = Phase.FAILED
    pod: str = ""
    node: str = ""
    node_memory: bool = False
    change: str = ""

    @property
    def failed(self) -> bool:
        """Whether the job ended without success."""
        return self.phase in (Phase.FAILED, Phase.CANCELLED, Phase.DELETED)

    def text(self) -> str:
        """The diagnosis as text, for a task log or a terminal."""
        ended = "failed" if self.failed and self.phase is not Phase.CANCELLED else f"is {self.phase}"
        lines = [f"TrainJob {self.job} {ended}: {self.summary}"]
        if self.log:
            lines.append(self.log_heading)
            lines += [f"  | {line}" for line in self.log]
            if any(line.endswith(CUT) for line in self.log):
                lines.append(self.whole_log)
        if self.advice:
            lines.append(f"what to do: {self.advice}")
        if self.category is not Category.NONE:
            lines.append(f"category: {self.category}; {self.outlook}")
        lines += [f"not seen: {what}" for what in self.unseen]
        return "\n".join(lines)

    @property
    def whole_log(self) -> str:
        """Where complete lines can be read."""
        rank = f" --rank {self.rank}" if self.rank else ""
        return f"some lines are cut; for complete lines, while the pods exist: trainjob logs {self.job}{rank}"

    @property
    def log_heading(self) -> str:
        """The line above `log`."""
        return "stacks:" if self.category is Category.HANG else f"last lines of {self.rank or 'its log'}:"

    @property
    def outlook(self) -> str:
        """Whether a retry makes sense, and why."""
        if self.change:
            return f"can be retried: the next attempt changes {self.change}"
        return self.retry.words

    @property
    def crash(self) -> str:
        """One log line about a crashed rank of a job that has not ended yet, or about one whose pod does not end."""
        if self.exit_code is None and self.category is Category.CONFIGURATION:
            return f"{self.summary}; {self.advice}"
        return f"{self.summary}; the job keeps running if its runtime restarts the rank"

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values. A job that has not failed has no ``retry``."""
        return asdict(self) | ({"retry": None} if self.category is Category.NONE else {})
