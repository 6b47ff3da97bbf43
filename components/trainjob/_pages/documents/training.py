"""The document of one training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from trainjob._backends.base import TrainJob, Usage
from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.history import CHECKPOINT, METHOD, MetricHistory, Points, thinned
from trainjob._jobs.models import sources_of
from trainjob._jobs.report import Report, examine
from trainjob._manifest.workflow_labels import task_of
from trainjob._pages.documents import MAX_POINTS, VERSION
from trainjob._pages.documents.attempts import LATEST, attempt_of, goodput_of, order, spent_by_attempt
from trainjob._support.display import iso, short_text, shown_lines
from trainjob._support.kube_objects import mapping
from trainjob._support.masking import public
from trainjob._support.numbers import json_values
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.job import ATTEMPT, JobRef
from trainjob.status import QUEUE_LABEL, Observation, Phase

_STEPS = 10  # latest points whose steps give the time of a step
_LINES = 500
_ESTIMATES = {"speed": "the speed of the latest half of the progress"}


def training_document(
    report: Report,
    *,
    history: MetricHistory | None = None,
    attempts: Sequence[Evidence] = (),
    logs: Iterable[Mapping[str, str]] = (),
    used: Sequence[Usage] | None = None,
    position: int | None = None,
    source: str = "live",
    notes: Sequence[str] = (),
    task: str = "",
    histories: Mapping[str, Points] | None = None,
) -> dict[str, Any]:
    """The document of one training.

    Args:
        report: The state of the job.
        history: Metrics that a waiter has collected; those that the training reported itself are added.
        attempts: The other attempts of the same key, in any order; this one is left out.
        logs: Last lines of the ranks, oldest first: ``rank``, ``time``, ``text``.
        used: Resources that the ranks use; None if unknown.
        position: Position in Kueue's queue, from 0.
        source: ``live``, or ``kept`` for what a waiter stored.
        notes: What is missing in the document, and why.
        task: Name of the task of a workflow, if the labels of the job do not have it.
        histories: UID -> metrics of another attempt that were kept: its pods may be gone.
    """
    now, trainjob = report.observation, report.trainjob
    collected = MetricHistory()
    if history is not None:
        collected.merge(history.points())
        collected.merge_phases(history.phases)
    others = [each for each in attempts if each.trainjob and JobRef.of(each.trainjob).uid != report.ref.uid]
    spent = spent_by_attempt(report, collected, others, histories or {})
    collected.merge(report.history)
    series = collected.points()
    own = attempt_of(report, spent, series.pop(CHECKPOINT, []))
    examined = [examine(JobRef.of(each.trainjob), each, report.taken) for each in others if each.trainjob]
    shown = sorted([own, *(attempt_of(each, spent) for each in examined)], key=order)[-LATEST:]
    return {
        "version": VERSION,
        "kind": "training",
        "taken": iso(report.taken),
        "source": source,
        "notes": list(notes),
        **report.as_dict(),
        "diagnosis": report.diagnosis.as_dict() | {"outlook": report.diagnosis.outlook} if report.troubled else None,
        "metrics": json_values(report.metrics),
        "outputs": json_values(report.outputs),
        "task": short_text(task or task_of(trainjob)),
        "href": "",
        "since": iso(_since(report)),
        "blocker": _blocker(now, trainjob, position),
        "estimate": _estimate(now),
        "step": now.step,
        "history": thinned(series, MAX_POINTS // 2),
        "method": METHOD,
        "attempts": shown,
        "goodput": goodput_of(shown),
        "ranks": [_rank(each, report, series) for each in report.as_dict()["ranks"]],
        "logs": _logs(list(logs)[-_LINES:]),
        "resources": _resources(trainjob, used),
        "compare": [],
        "evaluation": None,
        "lineage": _lineage(report),
    }


def observed_document(
    ref: JobRef,
    observation: Observation,
    taken: datetime,
    *,
    key: str = "",
    history: MetricHistory | None = None,
    task: str = "",
) -> dict[str, Any]:
    """What a waiter knew of a job at `taken`, by `Backend.now`: for a document that is kept while the job runs."""
    phase = observation.phase
    nothing = Diagnosis(Category.NONE, RetryVerdict.INFRASTRUCTURE, f"the job is {phase}", phase=phase)
    metrics = {name: short_text(each) if isinstance(each, str) else each for name, each in observation.metrics.items()}
    metadata = {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "labels": {ATTEMPT: str(ref.attempt)},
        "creationTimestamp": iso(observation.created),
    }
    evidence = Evidence({"metadata": metadata})
    report = Report(ref, observation, nothing, taken, short_text(key), metrics=metrics, evidence=evidence)
    return training_document(report, history=history, source="kept", task=task)


def _logs(lines: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The lines without secrets, also those of several lines, such as a private key."""
    masked = {
        rank: iter(shown_lines(line["text"] for line in lines if line["rank"] == rank))
        for rank in {line["rank"] for line in lines}
    }
    return [
        {"rank": short_text(line["rank"]), "time": short_text(line["time"]), "text": next(masked[line["rank"]], "")}
        for line in lines
    ]


def _since(report: Report) -> datetime | None:
    """When the current phase began, if that is known."""
    now = report.observation
    if now.phase.terminal:
        return now.finished
    begins = {
        Phase.NOT_STARTED: now.created,
        Phase.QUEUED: now.waiting_since,
        Phase.SUSPENDED: now.waiting_since,
        Phase.INITIALIZING: now.admitted,
        Phase.STARTING: now.admitted,
        Phase.RUNNING: report.running_since,
    }
    return begins.get(now.phase)


def _blocker(now: Observation, trainjob: TrainJob, position: int | None) -> dict[str, Any] | None:
    queue = str(mapping(trainjob, "metadata", "labels").get(QUEUE_LABEL) or "")
    if not now.phase.idle or not (now.message or now.reason):
        return None
    return {
        "reason": now.reason,
        "message": short_text(now.message),
        "permanent": now.stuck,
        "advice": short_text(now.advice),
        "queue": short_text(queue),
        "position": position,
    }


def _estimate(now: Observation) -> str:
    if now.remaining_seconds is None:
        return ""
    return _ESTIMATES.get(str(now.details.get("estimate")), "the training script")


def _rank(rank: Mapping[str, Any], report: Report, series: Points) -> dict[str, Any]:
    found = next((each for each in report.ranks if each.pod == rank["pod"]), None)
    culprit = bool(report.diagnosis.rank) and rank["rank"] == report.diagnosis.rank
    first = rank["rank"] in ("node-0", "launcher-0")
    step, seconds = (report.observation.step, _step_seconds(series)) if first else (None, None)
    bad = found is not None and found.bad
    return {**rank, "step": step, "step_seconds": seconds, "culprit": culprit, "bad": bad}


def _step_seconds(series: Points) -> float | None:
    """Time of a step over the latest points of the metric with the latest step; None if it is unknown."""
    stepped = [[point for point in points if point[0] is not None] for points in series.values()]
    latest = max((points for points in stepped if len(points) > 1), key=lambda points: points[-1][0] or 0, default=[])
    if not latest:
        return None
    (first, start, _), (last, end, _) = latest[-min(len(latest), _STEPS)], latest[-1]
    if first is None or last is None or start is None or end is None or last <= first or end <= start:
        return None  # a restart, or two reports within a tick of the clock
    return round((end - start) / (last - first), 6)


def _resources(trainjob: TrainJob, used: Sequence[Usage] | None) -> dict[str, Any]:
    trainer = mapping(trainjob, "spec", "trainer")
    asked = mapping(trainer, "resourcesPerNode")
    amounts = {**mapping(asked, "requests"), **mapping(asked, "limits")}
    nodes = trainer.get("numNodes")
    return {
        "requested": {short_text(name): short_text(amount) for name, amount in amounts.items()},
        "nodes": nodes if isinstance(nodes, int) else None,
        "used": None if used is None else [{"rank": u.rank, "cpu": u.cpu, "memory": u.memory} for u in used],
    }


def _lineage(report: Report) -> dict[str, Any]:
    base_models, datasets = sources_of(report.trainjob) if report.trainjob else ([], [])
    outputs = [
        {"name": name, "uri": value, "digest": ""}
        for name, value in report.outputs.items()
        if isinstance(value, str) and "://" in value
    ]
    return {
        "datasets": [_named(each) for each in datasets],
        "base_model": _named(base_models[0]) if base_models else None,
        "outputs": outputs,
        "registered": None,
        "evaluation": None,
    }


def _named(source: Mapping[str, str]) -> dict[str, str]:
    return {"name": short_text(source["name"]), "uri": short_text(public(source["uri"])), "digest": ""}
