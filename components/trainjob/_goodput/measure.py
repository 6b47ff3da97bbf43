"""The attempts of a piece of work, and how its time was spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.attempts import (
    Attempt,
    by_admissions,
    by_conditions,
    by_phases,
    by_pods,
    created_at,
    ended_at,
    gpus_of,
    hung_seconds,
    ordinal_of,
    runs_of,
)
from trainjob._goodput.spans import IDLE, Span, clipped, over
from trainjob._goodput.steps import Steps
from trainjob._support.kube_objects import mapping
from trainjob.goodput import Activity, Goodput, Segment, Source
from trainjob.job import KEY
from trainjob.status import Phase, observe

_RANK_0 = ("launcher-0", "node-0")


def pieces_of_work(jobs: Iterable[Evidence]) -> list[list[Evidence]]:
    """Group jobs by the result that they worked for, the attempts of each in their order, the latest work first.

    The attempts of a key work for the same result until one is complete; the next one is other work, see
    `trainjob.job.DELIVERED`.
    A job without a key is a piece of work by itself.
    """
    by_key: dict[tuple[str, ...], list[Evidence]] = {}
    for job in jobs:
        if job.trainjob is not None and created_at(job) is not None:
            metadata = mapping(job.trainjob, "metadata")
            key = mapping(metadata, "annotations").get(KEY)
            work = ("key", str(key)) if key else ("job", str(metadata.get("name")))
            by_key.setdefault((str(metadata.get("namespace")), *work), []).append(job)
    found: list[list[Evidence]] = []
    for attempts in by_key.values():
        piece: list[Evidence] = []
        for job in sorted(attempts, key=ordinal_of):
            piece.append(job)
            if observe(job.trainjob).phase is Phase.COMPLETE:
                found.append(piece)
                piece = []
        if piece:
            found.append(piece)
    return sorted(found, key=lambda piece: created_at(piece[-1]) or 0.0, reverse=True)


def measure(attempts: Sequence[Attempt], now: datetime) -> Goodput:
    """How the time of a piece of work was spent.

    The rules of the steps. The usual time of a step is the median over the intervals between two reports, without those
    that end with a checkpoint or an evaluation.

    * The time before the first report, less the usual time of the steps until then, belongs to the start or restart.
    * Steps up to the highest one that was reported before a restart are repeated. A restart is a new container, a new
      attempt, or a counter that goes backwards in the reports of a waiter. A counter that goes backwards in the reports
      of one process counts on: such a script counts the steps of each epoch.
    * An interval that ends with a checkpoint or an evaluation and took longer than its steps usually take, ends with
      that activity. Without steps in between, as in Hugging Face's Trainer, all of the interval is that activity. If
      the same report has both, it counts as evaluation.
    * An interval that took `STALL_SECONDS`, or a shorter ``stall_timeout`` of the job, longer than its steps and pauses
      usually take, and twice as long, has a stall. So has the time after the last report, unless the job is complete
      or the reports were cut. A job that hangs has stalled for its ``stall_timeout`` at least.

    Clocks of nodes, waiters and the API server may disagree. The times of the TrainJobs, by the API server, are the
    frame. Times of containers are clamped into it; the reports of a process are shifted by the smallest offset that
    moves them into its container's run, and those of a waiter into the attempt. No segment is negative.

    Args:
        attempts: The attempts of one piece of work, see `pieces_of_work`; those without a creation time are left out.
        now: End of a piece of work that has not ended.
    """
    known = [each for each in attempts if created_at(each.evidence) is not None]
    known.sort(key=lambda each: ordinal_of(each.evidence))
    if not known:
        return Goodput("", "", "", Phase.DELETED)
    segments: list[Segment] = []
    steps = Steps()
    at, waited = created_at(known[0].evidence) or 0.0, Activity.RESTARTING
    for attempt, following in zip(known, [*known[1:], None], strict=True):
        start = max(at, created_at(attempt.evidence) or at)
        if segments and start > at:
            segments.append(Segment(waited, at, start, segments[-1].attempt, Source.CONDITIONS, 0.0))
        next_start = created_at(following.evidence) if following is not None else None
        end = ended_at(attempt.evidence)
        if end is None:
            end = now.timestamp() if next_start is None else next_start
        elif next_start is not None:
            end = min(end, next_start)
        at = max(start, end)
        gpus, ordinal = gpus_of(attempt.evidence), ordinal_of(attempt.evidence)[0]
        for span in _spans_of(attempt, start, at, steps):
            held = 0.0 if span.activity in IDLE else gpus
            segments.append(Segment(span.activity, span.start, span.end, ordinal, span.source, held))
        cancelled = observe(attempt.evidence.trainjob).phase is Phase.CANCELLED
        waited = Activity.STOPPED if cancelled else Activity.RESTARTING
    last = known[-1].evidence.trainjob
    metadata, ordinals = mapping(last, "metadata"), {ordinal_of(each.evidence)[0] for each in known}
    return Goodput(
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        str(mapping(metadata, "annotations").get(KEY, "")),
        observe(last).phase,
        segments,
        [each for each in range(min(ordinals), max(ordinals)) if each not in ordinals],
    )


def _spans_of(attempt: Attempt, start: float, end: float, steps: Steps) -> list[Span]:
    """What an attempt did from `start` to `end`; each source replaces what the ones before it know less well."""
    if end <= start:
        return []
    spans = over(by_conditions(attempt, start, end), by_phases(attempt.phases, start, end))
    spans = by_admissions(attempt, spans)
    runs = runs_of(attempt.evidence)
    spans = over(spans, by_pods(attempt.evidence, runs, spans))
    spans = steps.divide(attempt, spans, [run for run in runs if run.rank in _RANK_0])
    trained = [span for span in spans if span.activity in (Activity.TRAINING, Activity.REPEATED)]
    if not trained or not (seconds := hung_seconds(attempt)):
        return spans
    since = trained[-1].end - seconds
    found = [span._replace(activity=Activity.STALLED, source=Source.OBSERVATIONS) for span in trained]
    return over(spans, clipped(found, since, trained[-1].end))
