"""All that is known of a job -> one `Diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainjob.diagnosis import blockers, log_tails, reasons
from trainjob.diagnosis.log_tails import TAIL_LINES, Tail
from trainjob.diagnosis.reasons import Category
from trainjob.diagnosis.terminations import Crash, RootCause, crashes_in, describe, in_order, meaning_of
from trainjob.kube_objects import mapping, rank_of
from trainjob.masking import masked_lines, public
from trainjob.sanitizing import plain
from trainjob.status import Observation, Phase, observe
from trainjob.verdicts import RetryVerdict

CUT = " characters more)"
"""How a line ends of which not all is shown."""

_SHOWN, _KEPT = 2000, 1900  # characters of a log line that are shown, and those of one that is longer
_SAID = 400  # characters of a message that are quoted in a summary


@dataclass(frozen=True)
class Evidence:
    """What is known about a job, as Kubernetes objects.

    Attributes:
        trainjob: The TrainJob; None if it is gone.
        pods: Its pods, finished ones included.
        logs: Pod name -> last lines of its log.
        events: What was noted about it and all that belongs to it, routine left out.
        workload: Kueue's object for it, where it is queued.
        unseen: What could not be looked at, a line each (rights, objects that are gone).
        missing: What the job needs and is not there, as ``ClusterTrainingRuntime x``.
        pods_visible: Whether pods may be listed; if not, that `pods` is empty means nothing.
    """

    trainjob: Mapping[str, Any] | None
    pods: Sequence[Mapping[str, Any]] = ()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    events: Sequence[Mapping[str, Any]] = ()
    workload: Mapping[str, Any] | None = None
    unseen: Sequence[str] = ()
    missing: Sequence[str] = ()
    pods_visible: bool = True

    def with_earlier(self, *earlier: Evidence) -> Evidence:
        """This evidence and what was taken of the same job before: pods that have crashed may be gone since."""
        return replace(
            self,
            # The present ones first: of ranks that ended in the same second, they are in order.
            pods=[pod for each in (self, *earlier) for pod in each.pods],
            logs={name: lines for each in (*reversed(earlier), self) for name, lines in each.logs.items() if lines},
        )


@dataclass(frozen=True)
class Diagnosis:
    """Why a job failed, or what is in its way.

    Attributes:
        category: Kind of failure.
        retry: Who has to act before another attempt can succeed.
        summary: One line.
        rank: The first failing rank, as ``node-1``; empty where no rank is to blame.
        exit_code: Its exit code; None where there is none. A signal N counts as 128 + N.
        log: The last lines of its log; where its error stands before them, those that end with the error.
        job: ``namespace/name``.
        advice: What to do, for people.
        unseen: What could not be looked at.
        phase: Where the job stands: a job that goes on can be diagnosed, too.
        pod: Name of the rank's pod.
        final: Why no retry can help, in words; empty where `retry` says it well enough.
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
    final: str = ""

    @property
    def failed(self) -> bool:
        """Whether the job has ended without success."""
        return self.phase in (Phase.FAILED, Phase.CANCELLED, Phase.DELETED)

    def text(self) -> str:
        """All of it, for a task log or a terminal."""
        ended = "failed" if self.failed and self.phase is not Phase.CANCELLED else f"is {self.phase}"
        lines = [f"TrainJob {self.job} {ended}: {self.summary}"]
        if self.log:
            lines.append(f"last lines of {self.rank or 'its log'}:")
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
        """Where lines that are cut are whole."""
        rank = f" --rank {self.rank}" if self.rank else ""
        return f"some lines are cut; all of them, while the pods are there: trainjob logs {self.job}{rank}"

    @property
    def outlook(self) -> str:
        """Whether another try makes sense and why, in words."""
        return f"not retried: {self.final}" if self.final else self.retry.words

    @property
    def crash(self) -> str:
        """The line for a log when a rank has crashed and the job has not ended yet."""
        return f"{self.summary}; the job keeps running if its runtime restarts the rank"

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return asdict(self)


def diagnose(evidence: Evidence, final: Observation | None = None) -> Diagnosis:
    """The best answer that the evidence allows, for a job that has failed or that goes on.

    Args:
        evidence: What is left of the job.
        final: The final observation where one was made before the evidence was taken: it stands, whatever became of
            the object since.
    """
    metadata = mapping(evidence.trainjob, "metadata")
    job = f"{metadata.get('namespace', '?')}/{metadata.get('name', '?')}"
    observation = observe(evidence.trainjob, final)
    found = _judge(evidence, observation)
    advice = found.advice if observation.phase.terminal else reasons.while_running(found.advice)
    unseen = tuple(map(public, evidence.unseen))
    return replace(found, job=job, advice=advice, unseen=unseen, phase=observation.phase)


def _judge(evidence: Evidence, observation: Observation) -> Diagnosis:
    if observation.phase is Phase.CANCELLED:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            observation.message or "the job was cancelled",
            advice="launch it again if that was not intended; its logs and metrics are kept",
        )
    if observation.phase is Phase.DELETED and observation.cancelled:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            "the job was cancelled with trainjob while it was waited for",
            advice="launch it again if that was not intended: its task or `trainjob cancel` ended it",
        )
    if observation.phase is Phase.DELETED:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            "somebody deleted the job while it was waited for",
            advice="find out who deletes TrainJobs in this namespace, then run it again",
        )
    if observation.phase is Phase.COMPLETE:
        return _nothing("it is complete")
    crash = _first_crash(evidence)
    return (
        _of_condition(observation, crash, evidence)
        or (_of_crash(crash, evidence) if crash is not None and not crash.crash.stopped else None)
        or _of_missing(evidence, observation)
        or _of_queue(evidence, observation)
        or _of_findings(_around(evidence), observation)
        or (_of_crash(crash, evidence) if crash is not None and observation.phase is Phase.FAILED else None)
        or _of_nothing(evidence, observation)
    )


def _of_nothing(evidence: Evidence, observation: Observation) -> Diagnosis:
    if observation.phase is not Phase.FAILED:
        wait = blockers.starting(evidence.pods, evidence.events) or observation.message
        return _nothing(wait or "nothing is in its way")
    return Diagnosis(
        Category.UNKNOWN,
        RetryVerdict.INFRASTRUCTURE,
        observation.message or "it failed, and nothing is left that says why",
        advice=reasons.UNKNOWN.advice,
    )


def _nothing(summary: str) -> Diagnosis:
    return Diagnosis(Category.NONE, RetryVerdict.INFRASTRUCTURE, summary)


def _around(evidence: Evidence) -> list[blockers.Finding]:
    return blockers.around(evidence.pods if evidence.pods_visible else None, evidence.events)


# ---------------------------------------------------------------- what conditions, pods and Events say


def _of_condition(observation: Observation, crash: RootCause | None, evidence: Evidence) -> Diagnosis | None:
    meaning = reasons.find(observation.reason, observation.message)
    if observation.phase is not Phase.FAILED or meaning is None:
        return None
    summary = observation.message or observation.reason
    if meaning.category is Category.DEADLINE:
        summary = f"it ran longer than its deadline allows ({observation.message})"
        if crash is not None and not crash.crash.stopped:
            summary += f"; before that, {_line(describe(crash))}"
        elif found := blockers.first(_around(evidence)):
            summary += f"; {found.blocker.message}"
    pod = crash.crash.pod if crash is not None else next(iter(evidence.logs), "")
    log = _shown(evidence, pod, crash.tail if crash is not None else Tail())
    return Diagnosis(meaning.category, meaning.retry, summary, log=log, advice=meaning.advice)


def _of_missing(evidence: Evidence, observation: Observation) -> Diagnosis | None:
    """That a job which has not started cannot start any more."""
    if observation.phase is Phase.FAILED or not evidence.missing:
        return None
    return _of_findings([blockers.of_missing_runtime(evidence.missing[0])], observation)


def _of_queue(evidence: Evidence, observation: Observation) -> Diagnosis | None:
    found = blockers.of_workload(evidence.workload or {}) if observation.phase is Phase.QUEUED else None
    return _of_findings([found], observation) if found else None


def _of_findings(found: Sequence[blockers.Finding], observation: Observation) -> Diagnosis | None:
    finding = blockers.first(found)
    if finding is None:
        return None
    alike = len({each.rank for each in found if each.rank and each.reason == finding.reason})
    if finding.rank:
        others = f" (and {alike - 1} more)" if alike > 1 else ""
        summary = f"{finding.rank}{others} {finding.text}"
    else:
        summary = finding.blocker.message
    if observation.phase is Phase.FAILED and observation.message:
        summary = f"{observation.message}; {summary}"
    meaning = finding.meaning
    return Diagnosis(meaning.category, meaning.retry, _line(summary), rank=finding.rank, advice=meaning.advice)


# ---------------------------------------------------------------- crashes


def _first_crash(evidence: Evidence) -> RootCause | None:
    read = {name: log_tails.read(lines) for name, lines in evidence.logs.items()}
    ordered = in_order(crashes_in(evidence.pods, evidence.events), read)
    return RootCause(ordered[0], read.get(ordered[0].pod, Tail()), _nodes(evidence)) if ordered else None


def _nodes(evidence: Evidence) -> int:
    """Number of nodes that train; 0 if it is unknown."""
    asked = mapping(evidence.trainjob, "spec", "trainer").get("numNodes")
    seen = {rank for pod in evidence.pods if (rank := rank_of(pod)).startswith("node-")}
    return max(asked if isinstance(asked, int) else 0, len(seen))


def _of_crash(cause: RootCause, evidence: Evidence) -> Diagnosis:
    crash, meaning = cause.crash, meaning_of(cause)
    return Diagnosis(
        meaning.category,
        meaning.retry,
        _line(describe(cause)),
        rank=crash.rank,
        exit_code=crash.exit_code,
        log=_shown(evidence, crash.pod, cause.tail) or _left(crash),
        advice=meaning.advice,
        pod=crash.pod,
        final=meaning.final,
    )


# ---------------------------------------------------------------- text


def _shown(evidence: Evidence, pod: str, tail: Tail) -> tuple[str, ...]:
    return tuple(map(_shortened, masked_lines(log_tails.excerpt(evidence.logs.get(pod, ()), tail))))


def _left(crash: Crash) -> tuple[str, ...]:
    """A termination message in place of the log: ``FallbackToLogsOnError`` puts the end of the log there."""
    if crash.meaning is not None or crash.message.startswith("{"):  # a report of results is none
        return ()
    lines = masked_lines(map(plain, crash.message.splitlines()))
    return tuple(map(_shortened, lines[-TAIL_LINES:]))


def _shortened(line: str) -> str:
    return line if len(line) <= _SHOWN else f"{line[:_KEPT]} … ({len(line) - _KEPT}{CUT}"


def _line(text: str) -> str:
    return _cut(public(" ".join(text.split())), _SAID)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
