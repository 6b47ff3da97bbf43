"""The attempts of a document, and how the time of each was spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput import Attempt, measure, pieces_of_work, ratio_of, sums
from trainjob._goodput.history import MetricHistory, Points
from trainjob._jobs.report import Report
from trainjob._manifest import checkpoint_directories
from trainjob._support.display import iso, short_text
from trainjob.goodput import Activity, Goodput, Segment, Source
from trainjob.job import JobRef
from trainjob.status import Phase

LATEST = 20
"""Attempts of a document, the latest."""

_CHECKPOINTS = 200  # latest of one attempt
_SEGMENTS = 100  # longest of one attempt: 10 KB


def attempt_of(
    report: Report, spent: Mapping[str, Mapping[str, Any]], checkpoints: Sequence[Sequence[Any]] = ()
) -> dict[str, Any]:
    """One attempt of a document.

    Args:
        report: The state of its job.
        spent: UID -> how the time of an attempt was spent.
        checkpoints: Points of the checkpoints that a waiter has seen.
    """
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
            {"time": iso(time), "step": step, "uri": short_text(directory)}
            for step, time in sorted(found.items(), key=lambda each: each[1])[-_CHECKPOINTS:]
        ],
        "history": {},
        "goodput": spent.get(report.ref.uid),
        "summary": report.diagnosis.summary if report.diagnosis.failed or report.given_up else "",
    }


def order(attempt: Mapping[str, Any]) -> tuple[int, str]:
    """Orders the attempts of a document, the latest last."""
    return attempt["attempt"], attempt["created"] or ""


def spent_by_attempt(
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
    times = {"start": iso(segment.start), "end": iso(segment.end)}
    return {"activity": str(segment.activity), **times, "source": str(segment.source)}


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


def goodput_of(attempts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
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
