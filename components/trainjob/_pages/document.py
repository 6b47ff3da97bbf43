"""The JSON documents that pages show: of a training, a list of jobs, a workflow, a study. `VERSION` is their version.

A page, `trainjob report`, `trainjob ui`, the Airflow tab and the KFP artifact show nothing else. All texts are masked
and free of control sequences. Every key is present in every document; what is unknown is null or empty. Keys are only
added within a version.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from trainjob._backends.base import TrainJob, Usage
from trainjob._diagnosis import Category, Diagnosis, Evidence
from trainjob._goodput import Activity, Attempt, Goodput, Segment, Source, measure, pieces_of_work, ratio_of, sums
from trainjob._goodput.history import CHECKPOINT, METHOD, MetricHistory, Points, thinned
from trainjob._jobs.models import sources_of
from trainjob._jobs.report import Report, examine, iso, short_text, shown_lines
from trainjob._manifest import checkpoint_directories
from trainjob._manifest.render import ATTEMPT, KEY, JobRef
from trainjob._manifest.workflow_labels import task_of, title_of
from trainjob._support.kube_objects import mapping
from trainjob._support.masking import public
from trainjob.status import QUEUE_LABEL, Observation, Phase, observe
from trainjob.verdicts import RetryVerdict

VERSION = 1
MAX_POINTS = 20_000
"""Points in one document, of all metrics, attempts and compared trainings together: 700 KB."""

_ATTEMPTS = 20  # latest
_STEPS = 10  # latest points whose steps give the time of a step
_CHECKPOINTS = 200  # latest of one attempt
_SEGMENTS = 100  # longest of one attempt: 10 KB
_LINES = 500
_SLICES = 200  # of an evaluation
_LABELS = 100  # of a confusion matrix
_METRICS = 100  # of an evaluation
_COMPARED = 4000  # metrics of all slices together: 600 KB
_CHECKS = 1000
_TRIALS = 2000  # of a study
_PARAMETERS = 100
_STUDY_BYTES = 900_000  # of all trials of a study, as JSON
_ENDED = frozenset(str(phase) for phase in Phase if phase.terminal)
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
    spent = _spent(report, collected, others, histories or {})
    collected.merge(report.history)
    series = collected.points()
    own = _attempt(report, spent, series.pop(CHECKPOINT, []))
    examined = [examine(JobRef.of(each.trainjob), each, report.taken) for each in others if each.trainjob]
    shown = sorted([own, *(_attempt(each, spent) for each in examined)], key=_order)[-_ATTEMPTS:]
    return {
        "version": VERSION,
        "kind": "training",
        "taken": iso(report.taken),
        "source": source,
        "notes": list(notes),
        **report.as_dict(),
        "diagnosis": report.diagnosis.as_dict() | {"outlook": report.diagnosis.outlook} if report.troubled else None,
        "metrics": _finite(report.metrics),
        "outputs": _finite(report.outputs),
        "task": short_text(task or task_of(trainjob)),
        "href": "",
        "since": iso(_since(report)),
        "blocker": _blocker(now, trainjob, position),
        "estimate": _estimate(now),
        "step": now.step,
        "history": thinned(series, MAX_POINTS // 2),
        "method": METHOD,
        "attempts": shown,
        "goodput": _goodput(shown),
        "ranks": [_rank(each, report, series) for each in report.as_dict()["ranks"]],
        "logs": _logs(list(logs)[-_LINES:]),
        "resources": _resources(trainjob, used),
        "compare": [],
        "evaluation": None,
        "lineage": _lineage(report),
    }


def observed_document(
    ref: JobRef, observation: Observation, *, key: str = "", history: MetricHistory | None = None, task: str = ""
) -> dict[str, Any]:
    """What a waiter knows of a job without a request: for a document that is kept while the job runs."""
    nothing = Diagnosis(Category.NONE, RetryVerdict.INFRASTRUCTURE, f"the job is {observation.phase}")
    metrics = {name: short_text(each) if isinstance(each, str) else each for name, each in observation.metrics.items()}
    metadata = {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "labels": {ATTEMPT: str(ref.attempt)},
        "creationTimestamp": iso(observation.created),
    }
    evidence = Evidence({"metadata": metadata})
    taken = datetime.now(UTC)
    report = Report(ref, observation, nothing, taken, short_text(key), metrics=metrics, evidence=evidence)
    return training_document(report, history=history, source="kept", task=task)


def merge_documents(kept: Mapping[str, Any], newer: Mapping[str, Any]) -> dict[str, Any]:
    """`newer`, completed by what only the `kept` document of the same work has: parts, history, attempts.

    Both may be documents of different attempts of one key: then the older attempt becomes one of ``attempts``.
    """
    same = kept.get("uid") == newer.get("uid") or not newer.get("uid")
    document = {name: newer.get(name) or (kept.get(name) if same else None) or newer.get(name) for name in newer}
    document["source"], document["notes"] = newer["source"], newer["notes"]
    if same:
        history = MetricHistory.of(kept.get("history"), MAX_POINTS // 2)
        history.merge(MetricHistory.of(newer.get("history"), MAX_POINTS // 2).points())
        document["history"] = history.points()
        evaluated, lineage = mapping(kept, "lineage").get("evaluation"), mapping(document, "lineage")
        if evaluated and lineage and not lineage.get("evaluation"):
            document["lineage"] = {**lineage, "evaluation": evaluated}
    known = {each["uid"]: each for each in kept.get("attempts") or ()}
    if not same and kept.get("uid") in known:
        known[kept["uid"]] |= {"history": thinned(kept.get("history") or {}, MAX_POINTS // 10)}
    for each in newer.get("attempts") or ():
        before = known.get(each["uid"], {})
        known[each["uid"]] = {name: value or before.get(name) or value for name, value in each.items()}
        if _knows_more(before, each):
            known[each["uid"]]["goodput"] = before["goodput"]
    attempts = sorted(known.values(), key=_order)[-_ATTEMPTS:]
    return {**document, "attempts": attempts, "goodput": _goodput(attempts)}


def _knows_more(kept: Mapping[str, Any], newer: Mapping[str, Any]) -> bool:
    """Whether more is known of a kept attempt, which had ended: a waiter has seen it, and its pods are gone."""
    before, now = kept.get("goodput"), newer.get("goodput")
    return bool(before and now and kept["phase"] in _ENDED and before["assumed"] < now["assumed"])


def with_comparison(
    document: Mapping[str, Any], label: str, other: Mapping[str, Any], href: str = ""
) -> dict[str, Any]:
    """The document with another training for comparison, such as the ``previous run`` or the ``champion``."""
    entry = {
        "label": label,
        "name": other.get("name", ""),
        "href": href,
        "metrics": other.get("metrics") or {},
        "history": thinned(MetricHistory.of(other.get("history"), MAX_POINTS).points(), MAX_POINTS // 5),
    }
    return {**document, "compare": [*document["compare"], entry]}


def with_lineage(
    document: Mapping[str, Any], siblings: Iterable[Mapping[str, Any]], links: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The document with the digests and the registered version that other jobs of its workflow have reported.

    Args:
        document: Of a training.
        siblings: ``outputs`` of the other jobs, as the initialize and export steps report them: ``uri``, ``digest``,
            of an export also ``name``, ``version`` and ``promoted``, of an evaluation ``passed``, ``rule``, ``reason``.
        links: Label -> address, of the model registry for example.
    """
    lineage = {**document["lineage"]}
    reported = [each for each in siblings if isinstance(each.get("uri"), str) and each["uri"]]
    digests = {each["uri"]: str(each.get("digest") or "") for each in reported}
    for part in ("datasets", "outputs"):
        lineage[part] = [each | {"digest": each["digest"] or digests.get(each["uri"], "")} for each in lineage[part]]
    if base := lineage["base_model"]:
        lineage["base_model"] = base | {"digest": base["digest"] or digests.get(base["uri"], "")}
    for each in reported:
        if isinstance(each.get("passed"), bool):
            summary = ": ".join(filter(None, (short_text(each.get("rule")), short_text(each.get("reason")))))
            lineage["evaluation"] = {"passed": each["passed"], "summary": summary}
        if each.get("name") and each.get("version"):
            model, version = short_text(each["name"]), short_text(each["version"])
            alias = "champion" if each.get("promoted") is True else ""
            uri = short_text(each["uri"])
            lineage["registered"] = {"registry": "", "model": model, "version": version, "alias": alias, "uri": uri}
    lineage["links"] = [*lineage["links"], *({"label": name, "href": href} for name, href in (links or {}).items())]
    return {**document, "lineage": lineage}


def with_evaluation(document: Mapping[str, Any], evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The document with an evaluation of its model, which becomes a part of ``lineage``, too.

    Args:
        document: Of a training.
        evaluation: ``report``, an evaluation report as JSON values; ``decision``, that of the gate, or None; ``uri``
            of the report.
    """
    report, decision = evaluation["report"], evaluation.get("decision")
    notes: list[str] = []
    judged = _decision(decision, notes) if decision else None
    shown = {
        "report": _evaluation_report(report, notes),
        "decision": judged,
        "uri": short_text(public(str(evaluation.get("uri") or ""))),
    }
    verdict = judged or {"passed": None, "reason": "not judged: the evaluation has no gate"}
    lineage = {**document["lineage"], "evaluation": {"passed": verdict["passed"], "summary": verdict["reason"]}}
    new = [each for each in notes if each not in document["notes"]]
    return {**document, "notes": [*document["notes"], *new], "evaluation": shown, "lineage": lineage}


def study_document(
    title: str,
    namespace: str,
    key: str,
    study: Mapping[str, Any],
    trials: Iterable[Mapping[str, Any]],
    *,
    importances: Mapping[str, float] | None = None,
    ended: bool = False,
    reason: str = "",
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """The document of a study: a hyperparameter search.

    Args:
        title: Name of the study for readers.
        namespace: Namespace of the trials.
        key: Key of the study.
        study: ``metric``, ``direction``, ``max_trials``, ``parallel``, and ``space``: the fields of a study as it was
            given to `tune`.
        trials: Of each trial the fields of `Trial.as_dict`, and ``href``: the address of its page.
        importances: Parameter -> its importance, 0 to 1.
        ended: Whether the study has ended.
        reason: Why it ended.
        notes: What is missing in the document, and why.
    """
    found = sorted(trials, key=lambda each: int(each["number"]))
    maximize = study["direction"] == "maximize"
    complete = [each for each in found if each.get("state") == "complete" and _number(each.get("value")) is not None]
    ranked = sorted(complete, key=lambda each: -each["value"] if maximize else each["value"])
    notes = list(notes)
    shown = found
    if len(found) > _TRIALS:
        kept = {each["number"] for each in (*ranked[: _TRIALS // 2], *found[-_TRIALS // 2 :])}
        shown = [each for each in found if each["number"] in kept]
        notes.append(f"{len(shown)} of {len(found)} trials are shown: the {_TRIALS // 2} best and the latest")
    made, thinner = _trials(shown)
    notes += thinner
    return {
        "version": VERSION,
        "kind": "study",
        "taken": iso(datetime.now(UTC)),
        "notes": notes,
        "title": short_text(title),
        "namespace": short_text(namespace),
        "key": short_text(key),
        "metric": short_text(study["metric"]),
        "direction": "maximize" if maximize else "minimize",
        "state": "ended" if ended else "running",
        "reason": short_text(reason),
        "limits": {name: study.get(name) for name in ("max_trials", "parallel")},
        "space": {
            short_text(name): {"type": short_text(mapping(each).get("type")), "log": mapping(each).get("log") is True}
            for name, each in list((study.get("space") or {}).items())[:_PARAMETERS]
        },
        "best": ranked[0]["number"] if ranked else None,
        "importances": {
            short_text(name): _rounded(each)
            for name, each in list((importances or {}).items())[:_PARAMETERS]
            if _number(each) is not None
        },
        "counts": dict(Counter(short_text(each.get("state")) for each in found)),
        "method": METHOD,
        "trials": made,
    }


def list_document(jobs: Iterable[TrainJob], namespace: str, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The document of the jobs of a namespace, the newest first."""
    shown = [listed(each) for each in jobs]
    return {
        "version": VERSION,
        "kind": "list",
        "taken": iso(datetime.now(UTC)),
        "notes": list(notes),
        "namespace": namespace,
        "jobs": sorted(shown, key=lambda job: job["created"] or "", reverse=True),
    }


def workflow_document(title: str, trainings: Iterable[Mapping[str, Any]], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The document that compares the trainings of one run of a workflow."""
    shown = [dict(each) | {"logs": [], "events": [], "compare": []} for each in trainings]
    for each in shown:
        each["history"] = thinned(each["history"], MAX_POINTS // len(shown))
        each["attempts"] = [
            attempt | {"goodput": attempt.get("goodput") and with_segments(attempt["goodput"], 0)}
            for attempt in each["attempts"]
        ]
    return {
        "version": VERSION,
        "kind": "workflow",
        "taken": iso(datetime.now(UTC)),
        "notes": list(notes),
        "title": short_text(title),
        "trainings": shown,
    }


def listed(trainjob: TrainJob) -> dict[str, Any]:
    """One job of a list, from its object alone."""
    ref, now = JobRef.of(trainjob), observe(trainjob)
    return {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "attempt": ref.attempt,
        "key": short_text(mapping(trainjob, "metadata", "annotations").get(KEY)),
        "phase": str(now.phase),
        "message": short_text(now.message),
        "created": iso(now.created),
        "finished": iso(now.finished),
        "progress": now.progress,
        "remaining_seconds": now.remaining_seconds,
        "metrics": _finite({name: each for name, each in now.metrics.items() if isinstance(each, int | float)}),
        "workflow": short_text(title_of(trainjob)),
        "workflow_href": "",
        "href": "",
    }


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


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with NaN and infinity as text: JSON has neither."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


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


def _spent(
    report: Report, history: MetricHistory, others: Sequence[Evidence], histories: Mapping[str, Points]
) -> dict[str, dict[str, Any]]:
    """UID -> how the time of that attempt was spent, and the time until the next one; only what is known."""
    found: dict[str, dict[str, Any]] = {}
    for piece in pieces_of_work([report.evidence, *others]):
        attempts = [
            Attempt(each, history.phases, history.points())
            if each is report.evidence
            else Attempt(each, history=histories.get(JobRef.of(each.trainjob).uid, {}) if each.trainjob else {})
            for each in piece
        ]
        whole = measure(attempts, report.taken)
        for ref in (JobRef.of(each.trainjob) for each in piece if each.trainjob):
            segments = [each for each in whole.segments if each.attempt == ref.attempt]
            if segments:
                found[ref.uid] = _of_attempt(replace(whole, segments=segments))
    return found


def _of_attempt(goodput: Goodput) -> dict[str, Any]:
    assumed = math.fsum(each.seconds for each in goodput.segments if each.source is Source.ASSUMED)
    segments = [_shown_segment(each) for each in goodput.segments]
    times = {"start": segments[0]["start"], "end": segments[-1]["end"], "assumed": round(assumed, 3)}
    return with_segments({"gpu_hours": None, **goodput.summary(), **times, "segments": segments}, _SEGMENTS)


def _shown_segment(segment: Segment) -> dict[str, Any]:
    start, end = (datetime.fromtimestamp(time, UTC) for time in (segment.start, segment.end))
    return {"activity": str(segment.activity), "start": iso(start), "end": iso(end), "source": str(segment.source)}


def with_segments(goodput: Mapping[str, Any], limit: int) -> dict[str, Any]:
    """The goodput of an attempt with at most `limit` segments, the longest; each lasts until the next one begins."""
    every = goodput["segments"]
    longest = sorted(range(len(every)), key=lambda i: _length(every[i]), reverse=True)[:limit]
    kept = [dict(every[i]) for i in sorted(longest)]
    if kept:
        kept[0]["start"], kept[-1]["end"] = every[0]["start"], every[-1]["end"]
    for before, after in pairwise(kept):
        before["end"] = after["start"]
    return {**goodput, "segments": kept}


def _length(span: Mapping[str, str]) -> float:
    return (datetime.fromisoformat(span["end"]) - datetime.fromisoformat(span["start"])).total_seconds()


def _goodput(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The goodput of the latest attempt with those before it for the same result, and the time between them."""
    complete = [i for i, each in enumerate(attempts[:-1]) if each["phase"] == Phase.COMPLETE]
    piece = [each for each in attempts[complete[-1] + 1 if complete else 0 :] if each.get("goodput")]
    if not piece:
        return None
    seconds, hours = dict.fromkeys(Activity, 0.0), dict.fromkeys(Activity, 0.0)
    for each in piece:
        for activity in Activity:
            seconds[activity] += each["goodput"]["seconds"][activity]
            hours[activity] += (each["goodput"]["gpu_hours"] or {}).get(activity, 0.0)
    for before, after in pairwise(piece):
        waited = Activity.STOPPED if before["phase"] == Phase.CANCELLED else Activity.RESTARTING
        seconds[waited] += max(0.0, _length({"start": before["goodput"]["end"], "end": after["goodput"]["start"]}))
    unknown = any(each["goodput"]["gpu_hours"] is None for each in piece)
    of_all, ratio = sums(seconds, None if unknown else hours), ratio_of(seconds)
    assumed = round(math.fsum(each["goodput"]["assumed"] for each in piece), 3)
    parts = {name: of_all[name] for name in ("seconds", "gpu_hours")}
    return {"ratio": None if ratio is None else round(ratio, 6), **parts, "assumed": assumed}


def _attempt(
    report: Report, spent: Mapping[str, Mapping[str, Any]], checkpoints: Sequence[Sequence[Any]] = ()
) -> dict[str, Any]:
    now = report.observation
    # The value is the step of the checkpoint, the step of the point that of the training when a waiter saw it.
    found = {int(value): time for _, time, value in reversed(checkpoints)} | dict(report.checkpoints)
    directory = checkpoint_directories.location(report.trainjob)
    return {
        "attempt": report.ref.attempt,
        "name": report.ref.name,
        "uid": report.ref.uid,
        "phase": str(now.phase),
        **{name: iso(getattr(now, name)) for name in ("created", "admitted", "finished")},
        "running": iso(report.running_since),
        "restarts": report.restarts,
        "spans": [{"phase": name, "start": iso(start), "end": iso(end)} for name, start, end in report.phases],
        "checkpoints": [
            {"time": iso(datetime.fromtimestamp(time, UTC)), "step": step, "uri": short_text(directory)}
            for step, time in sorted(found.items(), key=lambda each: each[1])[-_CHECKPOINTS:]
        ],
        "history": {},
        "goodput": spent.get(report.ref.uid),
        "summary": report.diagnosis.summary if report.diagnosis.failed or report.given_up else "",
    }


def _order(attempt: Mapping[str, Any]) -> tuple[int, str]:
    return attempt["attempt"], attempt["created"] or ""


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
        "links": [],
    }


def _named(source: Mapping[str, str]) -> dict[str, str]:
    return {"name": short_text(source["name"]), "uri": short_text(public(source["uri"])), "digest": ""}


def _evaluation_report(report: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    slices = mapping(report, "slices")
    shown = dict(list(slices.items())[:_SLICES])
    if len(slices) > _SLICES:
        notes.append(f"{_SLICES} of {len(slices)} slices of the evaluation are shown")
    limit = max(1, _COMPARED // max(1, len(shown)))
    if any(len(mapping(each, "metrics")) > limit for each in shown.values()):
        notes.append(f"{limit} metrics of each slice of the evaluation are shown")
    return {
        "version": report.get("version"),
        "level": _number(report.get("level")),
        **{name: _texts(report.get(name)) for name in ("candidate", "dataset", "code")},
        "champion": _texts(report.get("champion")) if report.get("champion") is not None else None,
        "examples": report.get("examples"),
        "metrics": _compared(mapping(report, "metrics"), _METRICS),
        "slices": {
            short_text(name): {"examples": each.get("examples"), "metrics": _compared(mapping(each, "metrics"), limit)}
            for name, each in shown.items()
        },
        "confusion": _confusion(report.get("confusion"), notes),
        "roc": {name: [_rounded(rate) for rate in rates] for name, rates in (report.get("roc") or {}).items()} or None,
    }


def _texts(values: Mapping[str, Any] | None) -> dict[str, str]:
    return {short_text(name): short_text(public(str(each))) for name, each in (values or {}).items()}


def _compared(metrics: Mapping[str, Mapping[str, Any]], limit: int) -> dict[str, dict[str, Any]]:
    return {
        short_text(name): {
            **{part: _rounded(each.get(part)) for part in ("candidate", "champion", "difference")},
            "interval": [_rounded(end) for end in each["interval"]] if each.get("interval") else None,
            "method": short_text(each.get("method")),
        }
        for name, each in list(metrics.items())[:limit]
    }


def _confusion(confusion: Mapping[str, Any] | None, notes: list[str]) -> dict[str, Any] | None:
    if not confusion:
        return None
    labels = confusion["labels"]
    if len(labels) > _LABELS:
        notes.append(f"{_LABELS} of {len(labels)} labels of the confusion matrix are shown")
    return {
        "labels": [short_text(each) for each in labels[:_LABELS]],
        "counts": [[_rounded(count) for count in counts[:_LABELS]] for counts in confusion["counts"][:_LABELS]],
    }


def _decision(decision: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    checks = decision.get("checks") or ()
    if len(checks) > _CHECKS:
        notes.append(f"{_CHECKS} of {len(checks)} checks of the gate are shown, those that failed first")
        checks = sorted(checks, key=lambda each: bool(each["passed"]))[:_CHECKS]
    return {
        "passed": decision["passed"] is True,
        "rule": short_text(decision.get("rule")),
        "reason": short_text(decision.get("reason")),
        "checks": [
            {"rule": short_text(each["rule"]), "passed": each["passed"] is True, "reason": short_text(each["reason"])}
            for each in checks
        ],
    }


def _trials(trials: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The trials with as many details as a page can have, and notes of what is left out."""
    texts: dict[str, str] = {}
    share = max(4, MAX_POINTS // max(1, len(trials)))
    trials = [{**each, "values": _values(each, share), "given": len(each.get("values") or ())} for each in trials]
    for limits in _LIMITS:
        made = _Details(limits, share, texts)
        shown = [made.trial(each) for each in trials]
        if len(json.dumps(shown, separators=(",", ":"))) <= _STUDY_BYTES:
            break
    return shown, made.notes


def _values(trial: Mapping[str, Any], limit: int) -> list[tuple[float, float]]:
    """At most `limit` values during the trial."""
    series = [[step, step, value] for step, value in trial.get("values") or ()]  # a series has steps and times
    return [(step, value) for step, _, value in thinned({"": series}, limit).get("", [])]


class _Limits(NamedTuple):
    """Limits of one trial of a study."""

    length: int  # of a text
    parameters: int
    fields: int  # metrics, and outputs
    points: int  # values during the trial


_LIMITS = (
    _Limits(2000, _PARAMETERS, 20, 1000),
    _Limits(300, _PARAMETERS, 20, 40),
    _Limits(80, 50, 8, 20),
    _Limits(60, 30, 4, 10),
    _Limits(24, 8, 2, 4),
)
"""The first with which all trials fit into `_STUDY_BYTES` are used."""


class _Details:
    """Makes trials of a study with bounded texts, parameters, metrics and values.

    Args:
        limits: Limits of one trial.
        points: Values of one trial so that all trials have at most `MAX_POINTS`.
        texts: Text -> the same without secrets; names and many values repeat.
    """

    def __init__(self, limits: _Limits, points: int, texts: dict[str, str]) -> None:
        self._length, self._parameters, self._fields, self._points = limits
        self._points = min(self._points, points)
        self._texts = texts
        self._left_out: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """What is left out."""
        return list(self._left_out.values())

    def trial(self, trial: Mapping[str, Any]) -> dict[str, Any]:
        if trial["given"] > self._points:
            self._left_out["values"] = f"the values during a trial are thinned to {self._points} points: {METHOD}"
        return {
            "number": int(trial["number"]),
            "parameters": self._scalars(trial, "parameters", self._parameters),
            "state": self._text(trial.get("state")),
            "value": _rounded(trial.get("value")),
            "reason": self._text(trial.get("reason"), 3 * self._length),
            "job": short_text(trial.get("job")),
            "href": short_text(trial.get("href")),
            "metrics": self._scalars(trial, "metrics", self._fields),
            "outputs": self._scalars(trial, "outputs", self._fields),
            "values": [[step, _rounded(each)] for step, each in _values(trial, self._points)],
            "seconds": _rounded(trial.get("seconds")),
        }

    def _scalars(self, trial: Mapping[str, Any], part: str, limit: int) -> dict[str, Any]:
        found = list((trial.get(part) or {}).items())
        if len(found) > limit:
            self._left_out[part] = f"{limit} {part} of each trial are shown"
        return {self._text(name): self._scalar(value) for name, value in found[:limit]}

    def _scalar(self, value: object) -> bool | float | str:
        if isinstance(value, bool):
            return value
        number = _rounded(value)
        return self._text(value) if number is None else number

    def _text(self, value: object, length: int | None = None) -> str:
        given, length = "" if value is None else str(value), length or self._length
        if (found := self._texts.get(given)) is None:
            found = self._texts[given] = short_text(given)
        if len(found) > length:
            self._left_out["texts"] = f"texts of a trial are cut to {self._length} characters"
            return f"{found[: length - 1]}…"
        return found


def _number(value: object) -> float | None:
    """The value if it is a finite number."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can hold
        return None


def _rounded(value: object) -> float | None:
    """The value with seven digits, which no chart can show; None if it is no finite number."""
    number = _number(value)
    if number is None or isinstance(number, int):
        return number
    short = float(f"{number:.7g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
