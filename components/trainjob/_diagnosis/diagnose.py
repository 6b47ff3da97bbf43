"""`Evidence` of a job -> `Diagnosis`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from trainjob._diagnosis import blockers, log_tails, reasons
from trainjob._diagnosis.crashes import Crash, crashes_in, in_order
from trainjob._diagnosis.log_tails import TAIL_LINES, Tail
from trainjob._diagnosis.meaning import while_running
from trainjob._diagnosis.terminations import RootCause, describe, meaning_of
from trainjob._support.control_characters import plain
from trainjob._support.kube_objects import mapping, name_of, rank_of
from trainjob._support.masking import masked_lines, public
from trainjob.status import Observation, Phase, observe
from trainjob.verdicts import CUT, Category, Diagnosis, Evidence, RetryVerdict

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
    job = f"{metadata.get('namespace', '?')}/{metadata.get('name', '?')}"
    observation = observe(evidence.trainjob, final)
    evidence = replace(evidence, logs={pod: log_tails.of_training(lines) for pod, lines in evidence.logs.items()})
    found = _judge(evidence, observation)
    advice = found.advice if observation.phase.terminal else while_running(found.advice)
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
    read = {name: log_tails.parse(lines) for name, lines in evidence.logs.items()}
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
