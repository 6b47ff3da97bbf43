"""`Evidence` of a job -> `Diagnosis`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainjob._diagnosis import blockers, log_tails, reasons
from trainjob._diagnosis.log_tails import TAIL_LINES, Tail
from trainjob._diagnosis.reasons import Category
from trainjob._diagnosis.terminations import Crash, RootCause, crashes_in, describe, in_order, meaning_of
from trainjob._support.control_characters import plain
from trainjob._support.kube_objects import mapping, name_of, rank_of
from trainjob._support.masking import masked_lines, public
from trainjob.status import Observation, Phase, observe
from trainjob.verdicts import RetryVerdict

ON_RETRY = "trainjob.dev/on-retry"
"""Annotation: what `on_retry` of the spec changes in the next attempt, as JSON: category of the failure -> text."""

CUT = " characters more)"
"""End of a line that is shown in part."""

_SHOWN, _KEPT = 2000, 1900  # characters of a log line that are shown; of a longer one, those that are kept
_LONGEST_SECRET = 4096  # characters; only so much more than is shown is searched, since a line may have 16 KB
_QUOTED = 400  # characters of a message that a summary quotes


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
        final: Why a retry cannot help; empty if `retry` explains it.
        node: Name of the Kubernetes node that the rank ran on; empty if it is unknown.
        resource: The resource in `resources_per_node` of which the rank needs more, as ``memory``; empty if none.
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
    final: str = ""
    node: str = ""
    resource: str = ""
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
        return f"not retried: {self.final}" if self.final else self.retry.words

    @property
    def crash(self) -> str:
        """One log line about a crashed rank of a job that has not ended yet."""
        return f"{self.summary}; the job keeps running if its runtime restarts the rank"

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as JSON values."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """The diagnosis in a notebook."""
        from trainjob.notebook import diagnosis_html  # noqa: PLC0415 - for notebooks only

        return diagnosis_html(self)


def diagnose(evidence: Evidence, final: Observation | None = None) -> Diagnosis:
    """Diagnose a failed or a running job, as well as the evidence allows.

    Args:
        evidence: What is known of the job.
        final: The final observation, if it was made before the evidence was read: it counts, even if the object has
            changed since.
    """
    metadata = mapping(evidence.trainjob, "metadata")
    job = f"{metadata.get('namespace', '?')}/{metadata.get('name', '?')}"
    observation = observe(evidence.trainjob, final)
    evidence = replace(evidence, logs={pod: log_tails.of_training(lines) for pod, lines in evidence.logs.items()})
    found = _judge(evidence, observation)
    advice = found.advice if observation.phase.terminal else reasons.while_running(found.advice)
    unseen = tuple(map(public, evidence.unseen))
    found = replace(found, job=job, advice=advice, unseen=unseen, phase=observation.phase)
    return with_change(with_node(found, evidence), evidence.trainjob)


def with_change(diagnosis: Diagnosis, trainjob: Mapping[str, Any] | None) -> Diagnosis:
    """Add what the next attempt changes, by the annotation `ON_RETRY` of the job; such a failure is retried."""
    with suppress(TypeError, ValueError):
        rules = mapping(json.loads(mapping(trainjob, "metadata", "annotations").get(ON_RETRY) or "{}"))
        if (change := rules.get(diagnosis.category.value)) and _is_changed(diagnosis):
            final = not diagnosis.retry.retried(user_errors=False)
            retry = RetryVerdict.INFRASTRUCTURE if final else diagnosis.retry
            return replace(diagnosis, retry=retry, final="", change=str(change))
    return diagnosis


def _is_changed(diagnosis: Diagnosis) -> bool:
    """Whether a rule for the category applies: more memory for the node does not help if that of a GPU was full."""
    if diagnosis.category is Category.OUT_OF_MEMORY:
        return diagnosis.resource == "memory"
    return bool(diagnosis.node) or diagnosis.category in (Category.QUOTA, Category.SCHEDULING)


def with_node(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Add the node of the pod, or if that is unknown, of the rank."""
    of_pod = [pod for pod in evidence.pods if diagnosis.pod and name_of(pod) == diagnosis.pod]
    of_rank = [pod for pod in evidence.pods if diagnosis.rank and rank_of(pod) == diagnosis.rank]
    nodes = (mapping(pod, "spec").get("nodeName") for pod in of_pod or of_rank)
    return replace(diagnosis, node=next((str(node) for node in nodes if node), ""))


def _judge(evidence: Evidence, observation: Observation) -> Diagnosis:
    if observation.phase is Phase.CANCELLED:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            observation.message or "the job was cancelled",
            advice="if that was not intended, launch it again; its logs and metrics are kept",
        )
    if observation.phase is Phase.DELETED and observation.cancelled:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            "the job was cancelled with trainjob, by its task or `trainjob cancel`",
            advice="if that was not intended, launch it again",
        )
    if observation.phase is Phase.DELETED:
        return Diagnosis(
            Category.DELETED,
            RetryVerdict.CONFIGURATION,
            "the TrainJob was deleted before it finished",
            advice="find out who deletes TrainJobs in this namespace, then launch the job again",
        )
    if observation.phase is Phase.COMPLETE:
        return _no_failure("the job is complete")
    crash = _first_crash(evidence)
    return (
        _of_condition(observation, crash, evidence)
        or (_of_crash(crash, evidence) if crash is not None and not crash.crash.stopped else None)
        or _of_missing(evidence, observation)
        or _of_queue(evidence, observation)
        or _of_findings(_findings(evidence), observation)
        or (_of_crash(crash, evidence) if crash is not None and observation.phase is Phase.FAILED else None)
        or _without_finding(evidence, observation)
    )


def _without_finding(evidence: Evidence, observation: Observation) -> Diagnosis:
    if observation.phase is not Phase.FAILED:
        wait = blockers.starting(evidence.pods, evidence.events) or observation.message
        return _no_failure(wait or "nothing blocks the job")
    return Diagnosis(
        Category.UNKNOWN,
        RetryVerdict.INFRASTRUCTURE,
        observation.message or "the job failed, and no evidence of the reason is left",
        advice=reasons.UNKNOWN.advice,
    )


def _no_failure(summary: str) -> Diagnosis:
    return Diagnosis(Category.NONE, RetryVerdict.INFRASTRUCTURE, summary)


def _findings(evidence: Evidence) -> list[blockers.Finding]:
    return blockers.around(evidence.pods if evidence.pods_visible else None, evidence.events)


# ---------------------------------------------------------------- conditions, pods, Events


def _of_condition(observation: Observation, crash: RootCause | None, evidence: Evidence) -> Diagnosis | None:
    meaning = reasons.find(observation.reason, observation.message)
    if observation.phase is not Phase.FAILED or meaning is None:
        return None
    summary = observation.message or observation.reason
    if meaning.category is Category.DEADLINE:
        summary = f"the job exceeded its deadline ({observation.message})"
        if crash is not None and not crash.crash.stopped:
            summary += f"; before that, {_line(describe(crash))}"
        elif found := blockers.first(_findings(evidence)):
            summary += f"; {found.blocker.message}"
    pod = crash.crash.pod if crash is not None else next(iter(evidence.logs), "")
    log = _shown(evidence, pod, crash.tail if crash is not None else Tail())
    return Diagnosis(meaning.category, meaning.retry, summary, log=log, advice=meaning.advice)


def _of_missing(evidence: Evidence, observation: Observation) -> Diagnosis | None:
    """A missing object without which the job cannot start."""
    if observation.phase is Phase.FAILED or not evidence.missing:
        return None
    return _of_findings([blockers.of_missing_runtime(evidence.missing[0])], observation)


def _of_queue(evidence: Evidence, observation: Observation) -> Diagnosis | None:
    found = blockers.of_workload(evidence.workload or {}) if observation.phase is Phase.QUEUED else None
    return _of_findings([found], observation) if found else None


def _of_findings(findings: Sequence[blockers.Finding], observation: Observation) -> Diagnosis | None:
    finding = blockers.first(findings)
    if finding is None:
        return None
    alike = len({each.rank for each in findings if each.rank and each.reason == finding.reason})
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
    requested = mapping(evidence.trainjob, "spec", "trainer").get("numNodes")
    seen = {rank for pod in evidence.pods if (rank := rank_of(pod)).startswith("node-")}
    return max(requested if isinstance(requested, int) else 0, len(seen))


def _of_crash(cause: RootCause, evidence: Evidence) -> Diagnosis:
    crash, meaning = cause.crash, meaning_of(cause)
    return Diagnosis(
        meaning.category,
        meaning.retry,
        _line(describe(cause)),
        rank=crash.rank,
        exit_code=crash.exit_code,
        log=_shown(evidence, crash.pod, cause.tail) or _message_lines(crash),
        advice=meaning.advice,
        pod=crash.pod,
        final=meaning.final,
        resource=meaning.resource,
    )


# ---------------------------------------------------------------- text


def _shown(evidence: Evidence, pod: str, tail: Tail) -> tuple[str, ...]:
    return _masked_begins(log_tails.excerpt(evidence.logs.get(pod, ()), tail))


def _message_lines(crash: Crash) -> tuple[str, ...]:
    """The termination message instead of the log: ``FallbackToLogsOnError`` writes the end of the log to it."""
    if crash.meaning is not None or crash.message.startswith("{"):  # a progress report, not a log
        return ()
    return _masked_begins([*map(plain, crash.message.splitlines())])[-TAIL_LINES:]


def _masked_begins(lines: Sequence[str]) -> tuple[str, ...]:
    """The begins of consecutive lines, without secrets."""
    searched = masked_lines(line[: _SHOWN + _LONGEST_SECRET] for line in lines)
    return tuple(_shortened(line, masked) for line, masked in zip(lines, searched, strict=True))


def _shortened(line: str, searched: str) -> str:
    left = max(0, len(line) - _SHOWN - _LONGEST_SECRET)
    if not left and len(searched) <= _SHOWN:
        return searched
    # A secret that the search has cut must not move into what is shown because those before it were masked.
    kept = max(0, min(_KEPT, len(searched) - _LONGEST_SECRET)) if left else _KEPT
    return f"{searched[:kept]} … ({len(searched) - kept + left}{CUT}"


def _line(text: str) -> str:
    return _cut(public(" ".join(text.split())), _QUOTED)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"
