"""Evidence -> `Diagnosis`. Pure: plain dicts in, a value out; it never raises, whatever the evidence looks like."""

from __future__ import annotations

import signal as signals
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

from trainjob.errors import RetryVerdict
from trainjob.obstacles import in_events, in_pods
from trainjob.status import Observation, Phase, mapping, mappings, observe

TAIL_LINES = 20
"""Lines of a failing rank's log that a diagnosis shows."""


class Category(StrEnum):
    """What kind of failure it was; the values are a stable contract."""

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
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Evidence:
    """What is known about a job, as Kubernetes objects.

    Attributes:
        trainjob: The TrainJob; None if it is gone.
        pods: Its pods, finished ones included.
        logs: Pod name -> last lines of its log.
        events: The warnings about it and all that belongs to it.
        workload: Kueue's object for it, where it is queued.
        unseen: What could not be looked at, a line each (rights, objects that are gone).
    """

    trainjob: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]] = ()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    workload: Mapping[str, Any] | None = None
    unseen: Sequence[str] = ()


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        summary: One line.
        rank: The first failing rank, as ``node-1``; empty where no rank is to blame.
        exit_code: Its exit code; None where there is none. A signal N counts as 128 + N.
        log: The last lines of its log.
        job: ``namespace/name``.
        advice: What to do, for people.
        unseen: What could not be looked at.
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

    def text(self) -> str:
        """All of it, for a task log or a terminal."""
        lines = [f"TrainJob {self.job} failed: {self.summary}"]
        if self.log:
            lines.append(f"last lines of {self.rank or 'its log'}:")
            lines += [f"  | {line}" for line in self.log]
        if self.advice:
            lines.append(f"what to do: {self.advice}")
        lines.append(f"category: {self.category}; retry: {self.retry}")
        lines += [f"not seen: {what}" for what in self.unseen]
        return "\n".join(lines)

    @property
    def crash(self) -> str:
        """The line for a log while the job goes on."""
        return f"{self.summary}; the job goes on, and its runtime decides whether the rank is started again"

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Crash:
    """One container that ended badly."""

    rank: str
    pod: str
    exit_code: int
    reason: str
    message: str
    finished: str

    @property
    def order(self) -> tuple[bool, str, bool]:
        """Ranks that were only told to stop (SIGTERM, SIGKILL) come after those that failed by themselves.

        Kubernetes counts whole seconds. Of two killed in the same one, SIGTERM is the answer to the other's end: who
        has to be stopped by SIGKILL had a grace period of seconds before.
        """
        told = self.exit_code in (143, 137) and self.reason != "OOMKilled"
        return (told, self.finished, self.exit_code == 143)


def diagnose(evidence: Evidence, final: Observation | None = None) -> Diagnosis:
    """The best answer that the evidence allows.

    Args:
        evidence: What is left of the job.
        final: The final observation where one was made before the evidence was taken: it stands, whatever became of
            the object since.
    """
    metadata = mapping(evidence.trainjob, "metadata")
    job = f"{metadata.get('namespace', '?')}/{metadata.get('name', '?')}"
    return replace(_judge(evidence, observe(evidence.trainjob, final)), job=job, unseen=tuple(evidence.unseen))


def _judge(evidence: Evidence, observation: Observation) -> Diagnosis:
    crashes = sorted(_crashes(evidence.pods), key=lambda crash: crash.order)
    if observation.phase is Phase.DELETED:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            "somebody deleted the job while it was waited for",
            advice="find out who deletes TrainJobs in this namespace, then run it again",
        )
    if observation.reason == "DeadlineExceeded":
        return Diagnosis(
            Category.DEADLINE,
            RetryVerdict.USER,
            f"it ran longer than its deadline allows ({observation.message})",
            log=_tail(evidence, crashes[0].pod if crashes else next(iter(evidence.logs), "")),
            advice="raise active_deadline_seconds, or make the training shorter",
        )
    if observation.reason == "SupervisorLost":
        return Diagnosis(
            Category.NODE_LOST,
            RetryVerdict.INFRASTRUCTURE,
            observation.message,
            advice="run it again; if it happens again, look for what kills processes on this machine (memory, reboot)",
        )
    if crashes:
        return _of_crash(crashes[0], evidence)
    obstacle = in_pods(evidence.pods) or in_events(evidence.events)
    said = [text for text in (observation.message, obstacle.message if obstacle else "") if text]
    return Diagnosis(
        Category.UNKNOWN,
        RetryVerdict.INFRASTRUCTURE,
        "; ".join(said) or "it failed, and nothing is left that says why",
        advice="look at the job's events and at its nodes",
    )


def _crashes(pods: Sequence[Mapping[str, Any]]) -> Iterator[_Crash]:
    for pod in pods:
        for status in mappings(pod, "status", "containerStatuses"):
            for state in ("lastState", "state"):
                ended = mapping(status, state, "terminated")
                code = ended.get("exitCode")
                if isinstance(code, int) and code:
                    yield _Crash(
                        rank_of(pod),
                        str(mapping(pod, "metadata").get("name", "")),
                        code,
                        str(ended.get("reason") or ""),
                        str(ended.get("message") or ""),
                        str(ended.get("finishedAt") or ""),
                    )


def rank_of(pod: Mapping[str, Any]) -> str:
    """``<replicated job>-<completion index>`` of a pod of a JobSet, as ``node-1``."""
    labels = mapping(pod, "metadata", "labels")
    job = labels.get("jobset.sigs.k8s.io/replicatedjob-name", "pod")
    return f"{job}-{labels.get('batch.kubernetes.io/job-completion-index', '0')}"


def _tail(evidence: Evidence, pod: str) -> tuple[str, ...]:
    return tuple(evidence.logs.get(pod, ())[-TAIL_LINES:])


def _of_crash(crash: _Crash, evidence: Evidence) -> Diagnosis:
    category, retry, what, advice = _meaning(crash)
    return Diagnosis(
        category,
        retry,
        f"{crash.rank} {what}",
        rank=crash.rank,
        exit_code=crash.exit_code,
        log=_tail(evidence, crash.pod),
        advice=advice,
    )


def _meaning(crash: _Crash) -> tuple[Category, RetryVerdict, str, str]:
    code = crash.exit_code
    if crash.reason == "OOMKilled":
        return (
            Category.OUT_OF_MEMORY,
            RetryVerdict.USER,
            "was killed because it used more memory than its limit (OOMKilled)",
            "raise the memory in resources_per_node, or use a smaller batch",
        )
    if crash.reason in ("StartError", "ContainerCannotRun"):
        return (
            Category.CONFIGURATION,
            RetryVerdict.CONFIGURATION,
            f"could not be started: {crash.message or 'command not found'}",
            "check command, and that the image (locally: the environment) has it",
        )
    if name := _signal(code - 128):
        hint = {
            "SIGKILL": "something outside the job killed it: often the machine ran out of memory (see its kernel log)",
            "SIGSEGV": "native code crashed: check that driver, CUDA and framework versions fit together",
            "SIGTERM": "something asked it to stop from outside",
        }.get(name, "")
        outside = name in ("SIGKILL", "SIGTERM")
        category = Category.UNKNOWN if outside else Category.USER_CODE
        retry = RetryVerdict.INFRASTRUCTURE if outside else RetryVerdict.USER
        return category, retry, f"was killed by signal {code - 128} ({name})", hint
    return (
        Category.USER_CODE,
        RetryVerdict.USER,
        f"exited with code {code}",
        "mend the training code or its arguments; the last lines of the log say where it stopped",
    )


def _signal(number: int) -> str:
    """Name of signal `number`; empty if there is none (most real-time signals have no name)."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return ""
