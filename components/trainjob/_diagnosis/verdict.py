"""`Evidence` of a job -> `Diagnosis`: its ranks and what blocks it are judged, and the verdict is put into words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainjob._diagnosis import blockers, output, ranks, termination_messages
from trainjob._diagnosis.cluster import Termination, terminations_in
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.meaning import NOTHING_KNOWN, Meaning, while_running
from trainjob._diagnosis.output import TAIL_LINES, UNREAD, Output
from trainjob._diagnosis.ranks import Rank
from trainjob._diagnosis.root_cause import describe, meaning_of
from trainjob._diagnosis.rules import objects
from trainjob._support.control_characters import plain
from trainjob._support.kube_objects import annotated, mapping, name_of, parse_time, rank_of
from trainjob._support.masking import masked_lines, public
from trainjob.errors import CUT, Category, Diagnosis, RetryVerdict
from trainjob.status import QUEUE_LABEL, Observation, Phase, observe

ON_RETRY = "trainjob.dev/on-retry"
"""Annotation: what `on_retry` of the spec changes in the next attempt, as JSON: category of the failure -> text."""

_SHOWN, _KEPT = 2000, 1900  # characters of a log line that are shown; of a longer one, those that are kept
_LONGEST_SECRET = 4096  # characters; only so much more than is shown is searched, since a line may have 16 KB
_QUOTED = 400  # characters of a message that a summary quotes


def diagnosis_of(evidence: Evidence, final: Observation | None = None) -> Diagnosis:
    """Diagnose a failed or a running job, as well as the evidence allows.

    Args:
        evidence: What is known of the job.
        final: The final observation, if it was made before the evidence was read: it counts, even if the object has
            changed since.
    """
    metadata = mapping(evidence.trainjob, "metadata")
    name = f"{metadata.get('namespace', '?')}/{metadata.get('name', '?')}"
    job = _read(evidence, observe(evidence.trainjob, final))
    found = next(found for judge in _JUDGES if (found := judge(job)) is not None)
    advice = found.advice if job.observation.phase.terminal else while_running(found.advice)
    messages = ((each.name, each.termination.message) for each in job.ranks)
    problems = (termination_messages.problem_of(message, rank) for rank, message in messages)
    unseen = tuple(map(public, [*evidence.unseen, *filter(None, problems)]))
    found = replace(found, job=name, advice=advice, unseen=unseen, phase=job.observation.phase)
    return with_change(with_node(found, evidence), evidence.trainjob)


def with_change(diagnosis: Diagnosis, trainjob: Mapping[str, Any] | None) -> Diagnosis:
    """Add what the next attempt changes, by the annotation `ON_RETRY` of the job; such a failure is retried."""
    change = mapping(annotated(trainjob, ON_RETRY)).get(diagnosis.category.value)
    if not change or not _is_changed(diagnosis):
        return diagnosis
    final = not diagnosis.retry.retried(user_errors=False)
    return replace(diagnosis, retry=RetryVerdict.INFRASTRUCTURE if final else diagnosis.retry, change=str(change))


def _is_changed(diagnosis: Diagnosis) -> bool:
    """Whether a rule for the category applies: more memory for the node does not help if that of a GPU was full."""
    if diagnosis.category is Category.OUT_OF_MEMORY:
        return diagnosis.node_memory
    return bool(diagnosis.node) or diagnosis.category in (Category.QUOTA, Category.SCHEDULING)


def with_node(diagnosis: Diagnosis, evidence: Evidence) -> Diagnosis:
    """Add the node of the pod, or if that is unknown, of the rank."""
    of_pod = [pod for pod in evidence.pods if diagnosis.pod and name_of(pod) == diagnosis.pod]
    of_rank = [pod for pod in evidence.pods if diagnosis.rank and rank_of(pod) == diagnosis.rank]
    nodes = (mapping(pod, "spec").get("nodeName") for pod in of_pod or of_rank)
    return replace(diagnosis, node=next((str(node) for node in nodes if node), ""))


@dataclass(frozen=True)
class _Job:
    """A job whose evidence has been read.

    Attributes:
        evidence: The evidence, with logs of the training alone.
        observation: The state of the job.
        ranks: The ranks that failed, the root cause first.
        findings: What blocks it, by its pods and Events.
        nodes: Number of nodes that train; 0 if it is unknown.
    """

    evidence: Evidence
    observation: Observation
    ranks: Sequence[Rank] = ()
    findings: Sequence[blockers.Finding] = ()
    nodes: int = 0

    @property
    def failed(self) -> bool:
        """Whether the job has failed."""
        return self.observation.phase is Phase.FAILED

    @property
    def first(self) -> Rank | None:
        """The rank that is the root cause; None if none has failed."""
        return self.ranks[0] if self.ranks else None


def _read(evidence: Evidence, observation: Observation) -> _Job:
    logs = {pod: output.of_training(log) for pod, log in evidence.logs.items()}
    outputs = {pod: output.read(log) for pod, log in logs.items()}
    every = ranks.of_terminations(terminations_in(evidence.pods, evidence.events), outputs, evidence.logs)
    requested = mapping(evidence.trainjob, "spec", "trainer").get("numNodes")
    seen = {rank for pod in evidence.pods if (rank := rank_of(pod)).startswith("node-")}
    return _Job(
        replace(evidence, logs=logs),
        observation,
        ranks.first(every),
        blockers.around(evidence.pods if evidence.pods_visible else None, evidence.events),
        max(requested if isinstance(requested, int) else 0, len(seen)),
    )


# ---------------------------------------------------------------- judges: the first that finds something decides


def _ended(job: _Job) -> Diagnosis | None:
    """A job that was cancelled or deleted, or is complete."""
    phase, message = job.observation.phase, job.observation.message
    again = "if that was not intended, launch it again"
    if phase is Phase.COMPLETE:
        return _no_failure("the job is complete")
    if phase is Phase.CANCELLED:
        return _deleted(message or "the job was cancelled", f"{again}; its logs and metrics are kept")
    if phase is Phase.DELETED and job.observation.cancelled:
        return _deleted("the job was cancelled with trainjob, by its task or `trainjob cancel`", again)
    if phase is Phase.DELETED:
        return _deleted(
            "the TrainJob was deleted before it finished",
            "find out who deletes TrainJobs in this namespace, then launch the job again",
        )
    return None


def _condition(job: _Job) -> Diagnosis | None:
    """The reason that the failed job's own condition has."""
    meaning = objects.meaning_of(job.observation.reason, job.observation.message)
    if not job.failed or meaning is None:
        return None
    summary = job.observation.message or job.observation.reason
    if meaning.category is Category.DEADLINE:
        summary = f"the job exceeded its deadline ({summary})"
        if job.first is not None and not job.first.termination.stopped:
            summary += f"; before that, {_line(describe(job.first))}"
        elif found := blockers.first(job.findings):
            summary += f"; {found.blocker.message}"
    pod = (job.first.termination.pod if job.first else "") or next(iter(job.evidence.logs), "")
    return _diagnosis(meaning, summary, log=_shown(job.evidence, pod, job.first.output if job.first else UNREAD))


def _failure(job: _Job) -> Diagnosis | None:
    """The first rank that failed, or that ended before the others; with the sidecar that keeps its pod running."""
    if job.first is None or job.first.termination.stopped:
        return None
    found = _of_rank(job, job.first)
    if ranks.lost_another(job.first) and (blocked := _never_started(job, job.first)):
        return _of_findings(job, blocked)
    kept = next((each for each in job.findings if each.reason == blockers.KEPT and each.rank == found.rank), None)
    if kept is None or job.failed:
        return found
    summary = f"{found.summary}; {kept.message.partition('; ')[2]}"
    return replace(found, summary=_line(summary), advice=f"{found.advice}; {kept.meaning.advice}")


def _never_started(job: _Job, victim: Rank) -> Sequence[blockers.Finding]:
    """What blocks the ranks for which a rank waited in vain, and not those that were created again after its end."""
    created = {rank_of(pod): parse_time(mapping(pod, "metadata").get("creationTimestamp")) for pod in job.evidence.pods}
    waited = {rank for rank, time in created.items() if time and victim.finished and time < victim.finished}
    others = waited - {victim.termination.rank}
    return [each for each in job.findings if each.rank in others and each.reason != blockers.KEPT]


def _missing(job: _Job) -> Diagnosis | None:
    """A missing object without which the job cannot start."""
    missing = job.evidence.missing
    return None if job.failed or not missing else _of_findings(job, [blockers.of_missing(missing[0])])


def _queue(job: _Job) -> Diagnosis | None:
    """What Kueue reports of a job that waits in a queue, or has none."""
    workload, labels = job.evidence.workload, mapping(job.evidence.trainjob, "metadata", "labels")
    found = None
    if job.observation.phase is Phase.QUEUED:
        found = blockers.of_workload(workload or {}, job.evidence.related)
    elif job.observation.phase is Phase.SUSPENDED and workload and not labels.get(QUEUE_LABEL):
        found = blockers.without_queue()
    return _of_findings(job, [found] if found else [])


def _blocked(job: _Job) -> Diagnosis | None:
    """What its pods and Events report; a pod that no node matches is explained by its flavor."""
    finding, flavor = blockers.first(job.findings), blockers.of_flavors(job.evidence.related)
    unscheduled = finding is not None and finding.meaning.category is Category.SCHEDULING
    return _of_findings(job, [flavor] if flavor is not None and unscheduled else job.findings)


def _stopped(job: _Job) -> Diagnosis | None:
    """A failed job of which all that is known is that its pods were deleted."""
    return _of_rank(job, job.first) if job.first is not None and job.failed else None


def _nothing(job: _Job) -> Diagnosis:
    """Nothing is known of a failure, or nothing blocks the job."""
    message = job.observation.message
    if not job.failed:
        wait = blockers.starting(job.evidence.pods, job.evidence.events) or message
        return _no_failure(wait or "nothing blocks the job")
    if job.evidence.pods or not job.evidence.pods_visible:
        return _diagnosis(NOTHING_KNOWN, message or "the job failed, and no evidence of the reason is left")
    return _diagnosis(
        _PODS_GONE,
        f"{message or 'the job failed'}; its pods were deleted before the reason was read: by the backoff limit of "
        "their Job, or by a TTL",
    )


_JUDGES: tuple[Callable[[_Job], Diagnosis | None], ...] = (
    _ended, _condition, _failure, _missing, _queue, _blocked, _stopped, _nothing,
)  # fmt: skip


def _no_failure(summary: str) -> Diagnosis:
    return Diagnosis(Category.NONE, RetryVerdict.UNKNOWN, summary)


def _deleted(summary: str, advice: str) -> Diagnosis:
    return Diagnosis(Category.DELETED, RetryVerdict.CONFIGURATION, summary, advice=advice)


def _diagnosis(meaning: Meaning, summary: str, **more: Any) -> Diagnosis:
    return Diagnosis(
        meaning.category, meaning.retry, summary, advice=meaning.advice, node_memory=meaning.node_memory, **more
    )


def _of_findings(job: _Job, findings: Sequence[blockers.Finding]) -> Diagnosis | None:
    finding = blockers.first(findings)
    if finding is None:
        return None
    alike = len({each.rank for each in findings if each.rank and each.reason == finding.reason})
    if finding.rank:
        others = f" (and {alike - 1} more)" if alike > 1 else ""
        summary = f"{finding.rank}{others} {finding.text}"
    else:
        summary = finding.blocker.message
    if job.failed and job.observation.message:
        summary = f"{job.observation.message}; {summary}"
    return _diagnosis(finding.meaning, _line(summary), rank=finding.rank)


def _of_rank(job: _Job, rank: Rank) -> Diagnosis:
    ended, slow = rank.termination, rank.output.collective
    named = f"node-{slow.rank}" if slow is not None else ""  # where each node has one process, that number is its own
    known = job.nodes > 1 and any(rank_of(pod) == named for pod in job.evidence.pods)
    return _diagnosis(
        meaning_of(rank, job.nodes),
        _line(describe(rank)),
        rank=named if known else ended.rank,
        exit_code=ended.exit_code,
        log=_shown(job.evidence, ended.pod, rank.output) or _message_lines(ended),
        pod=ended.pod,
    )


# fmt: off
_PODS_GONE = Meaning(Category.UNKNOWN, RetryVerdict.UNKNOWN,
    "wait for the job with trainjob while it runs, which keeps the evidence of each crash; or set restartPolicy "
    "Never in the runtime, and a longer ttlSecondsAfterFinished")
# fmt: on

# ---------------------------------------------------------------- the log


def _shown(evidence: Evidence, pod: str, out: Output) -> tuple[str, ...]:
    return _masked_begins(output.excerpt(evidence.logs.get(pod, ()), out))


def _message_lines(ended: Termination) -> tuple[str, ...]:
    """The termination message instead of the log: ``FallbackToLogsOnError`` writes the end of the log to it."""
    if ended.meaning is not None or ended.message.startswith("{"):  # a progress report, not a log
        return ()
    return _masked_begins([*map(plain, ended.message.splitlines())])[-TAIL_LINES:]


def _masked_begins(log: Sequence[str]) -> tuple[str, ...]:
    """The begins of consecutive lines, without secrets."""
    searched = masked_lines(line[: _SHOWN + _LONGEST_SECRET] for line in log)
    return tuple(_shortened(line, masked) for line, masked in zip(log, searched, strict=True))


def _shortened(line: str, searched: str) -> str:
    left = max(0, len(line) - _SHOWN - _LONGEST_SECRET)
    if not left and len(searched) <= _SHOWN:
        return searched
    # A secret that the search has cut must not move into what is shown because those before it were masked.
    kept = max(0, min(_KEPT, len(searched) - _LONGEST_SECRET)) if left else _KEPT
    return f"{searched[:kept]} … ({len(searched) - kept + left}{CUT}"


def _line(text: str) -> str:
    cut = public(" ".join(text.split()))
    return cut if len(cut) <= _QUOTED else cut[: _QUOTED - 1] + "…"
