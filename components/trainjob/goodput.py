"""How the time of a piece of work was spent, over all its attempts and restarts. Pure: no clock, no I/O.

Goodput is the time of training that counted, divided by the wall time; the rest is *badput*. These terms, and the
classes, are those of Google's ml-goodput-measurement (`Activity` names the counterparts), which records events in the
training; here the time is read from what Kubernetes and `trainjob.progress` report anyway.

Every second between the first launch and the result has one `Activity`, from the best `Source` that knows it:

* **Conditions** of the TrainJob tell when it was created, resumed last, suspended last and finished. They do not tell
  when it ran, and a second suspension replaces the times of the first one.
* **Observations** of a waiter tell each phase from the time at which it was observed.
* **Pods** tell when containers started and ended. Kubernetes keeps the current run of a container and the one before,
  and a JobSet that restarts all ranks deletes their pods. The job trains while no rank is down.
* **Steps** that the training reported divide the time in which it ran, see `measure`.

What no source can tell apart is `Activity.TRAINING` with `Source.ASSUMED`: goodput may be too high, never too low,
because of unknown time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from trainjob import progress
from trainjob.diagnosis import Evidence
from trainjob.history import CHECKPOINT, Points
from trainjob.kube_objects import (
    INITIALIZERS,
    job_restarts,
    mapping,
    mappings,
    name_of,
    parse_time,
    rank_of,
    training_container,
)
from trainjob.manifest import ATTEMPT, GIVEN_UP, KEY
from trainjob.status import QUEUE_LABEL, Phase, observe

STALL_SECONDS = 600.0
"""A pause of the steps of this length is a stall: the default timeout of PyTorch's NCCL watchdog. A shorter one may be
an evaluation or a checkpoint that the script does not report."""

_NOISE = 0.05  # of the usual time of the steps: a longer interval is no pause
_SEVERAL = 3  # pauses whose median is the usual one
_AT_ONCE_SECONDS = 2.0  # Trainer writes the condition some 10 ms after the creation; times are whole seconds
_LATE_SECONDS = 10.0  # a waiter sees a report later than the training made it
_EVALUATIONS = ("eval_", "val_", "test_")  # prefixes of Hugging Face's Trainer and of Lightning's examples
_RANK_0 = ("launcher-0", "node-0")


class Activity(StrEnum):
    """What a piece of work did at a moment; in parentheses the counterpart in ml-goodput-measurement."""

    QUEUED = "queued"
    """Kueue kept it suspended."""
    STARTING = "starting"
    """Scheduling, images, initializers, and the script until its first step (TPU initialization, training preparation,
    program startup)."""
    TRAINING = "training"
    """Training that counted: steps done for the first time (productive goodput)."""
    EVALUATING = "evaluating"
    """Evaluation during the training, which the script reports as metrics named ``eval_*``, ``val_*`` or ``test_*``."""
    CHECKPOINTING = "checkpointing"
    """The steps paused until a checkpoint was complete (unproductive checkpoint save time)."""
    REPEATED = "repeated"
    """Steps that were done before, and again after a restart (wasted progress from disruption)."""
    STALLED = "stalled"
    """The steps paused for `STALL_SECONDS` or longer, without a reported checkpoint or evaluation."""
    RESTARTING = "restarting"
    """From a failure until the steps continue or the next attempt begins; in a new attempt, `STARTING` follows."""
    STOPPED = "stopped"
    """Suspended by a person or program other than Kueue, cancelled, or its ranks had ended."""


class Source(StrEnum):
    """How the activity of a segment is known."""

    CONDITIONS = "conditions"
    OBSERVATIONS = "observations"
    PODS = "pods"
    STEPS = "steps"
    ASSUMED = "assumed"
    """No source can tell the activities apart: it counts as training."""


_IDLE = (Activity.QUEUED, Activity.STOPPED)  # without GPUs
_RAN = (Activity.TRAINING, Activity.RESTARTING)
_OF_PHASE = {
    Phase.NOT_STARTED: Activity.STARTING,
    Phase.QUEUED: Activity.QUEUED,
    Phase.INITIALIZING: Activity.STARTING,
    Phase.STARTING: Activity.STARTING,
    Phase.RUNNING: Activity.TRAINING,
    Phase.RESTARTING: Activity.RESTARTING,
    Phase.SUSPENDED: Activity.STOPPED,
}


@dataclass(frozen=True)
class Attempt:
    """What is known of one attempt.

    Attributes:
        evidence: The TrainJob, and its pods if they were read.
        phases: Unix time and phase of each observation of a waiter, oldest first.
        history: Metrics that a waiter has collected, see `trainjob.history`.
    """

    evidence: Evidence
    phases: Sequence[tuple[float, Phase]] = ()
    history: Points = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A time with one activity.

    Attributes:
        activity: Its class.
        start: Begin in Unix time, seconds.
        end: End in Unix time, seconds; the begin of the next segment.
        attempt: Ordinal of the attempt; between two attempts, that of the earlier one.
        source: How the activity is known.
        gpus: GPUs that the job held; 0 while it is queued, stopped or between two attempts, None if unknown.
    """

    activity: Activity
    start: float
    end: float
    attempt: int
    source: Source
    gpus: float | None = None

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end - self.start


@dataclass(frozen=True)
class Goodput:
    """How the time of a piece of work was spent.

    Attributes:
        namespace: Namespace of its jobs.
        name: Name of its latest job.
        key: Its key; empty if it was not launched with trainjob.
        phase: Phase of its latest job.
        segments: What it did from the first launch until its end, without gap or overlap.
        missing: Ordinals of attempts whose TrainJobs do not exist any more: their time is missing, or restarting.
    """

    namespace: str
    name: str
    key: str
    phase: Phase
    segments: Sequence[Segment] = ()
    missing: Sequence[int] = ()

    @property
    def attempts(self) -> int:
        """Number of attempts that are known."""
        return len({segment.attempt for segment in self.segments})

    @property
    def wall_seconds(self) -> float:
        """Seconds from the first launch until the end."""
        return self.segments[-1].end - self.segments[0].start if self.segments else 0.0

    @property
    def seconds(self) -> dict[Activity, float]:
        """Activity -> its seconds; all activities."""
        return {each: math.fsum(found.seconds for found in self._of(each)) for each in Activity}

    @property
    def ratio(self) -> float | None:
        """Goodput, 0 to 1; None without wall time."""
        return ratio_of(self.seconds)

    @property
    def gpu_hours(self) -> dict[Activity, float] | None:
        """Activity -> GPU-hours; all activities. None if the number of GPUs is unknown."""
        hours = dict.fromkeys(Activity, 0.0)
        for segment in self.segments:
            if segment.gpus is None:
                return None
            hours[segment.activity] += segment.gpus * segment.seconds / 3600
        return hours

    @property
    def sources(self) -> dict[Activity, dict[Source, float]]:
        """Activity -> source -> seconds known from it; only those that occur."""
        found: dict[Activity, dict[Source, float]] = {}
        for segment in self.segments:
            known = found.setdefault(segment.activity, {})
            known[segment.source] = known.get(segment.source, 0.0) + segment.seconds
        return found

    def as_dict(self, price: float | None = None) -> dict[str, Any]:
        """Its values for JSON.

        Args:
            price: Price of a GPU-hour in any currency; without it, ``cost`` is null.
        """
        return {
            "namespace": self.namespace,
            "name": self.name,
            "key": self.key,
            "phase": str(self.phase),
            "attempts": self.attempts,
            "missing_attempts": list(self.missing),
            "start": _text(self.segments[0].start) if self.segments else None,
            "end": _text(self.segments[-1].end) if self.segments else None,
            **sums(self.seconds, self.gpu_hours, price),
            "sources": {
                str(activity): {str(source): round(seconds, 3) for source, seconds in known.items()}
                for activity, known in self.sources.items()
            },
            "segments": [
                {
                    "activity": str(each.activity),
                    "start": _text(each.start),
                    "end": _text(each.end),
                    "attempt": each.attempt,
                    "source": str(each.source),
                    "gpus": each.gpus,
                }
                for each in self.segments
            ],
        }

    def summary(self) -> dict[str, Any]:
        """``ratio``, ``seconds`` and ``gpu_hours`` for JSON; the latter two have all activities. Empty without time.

        ``gpu_hours`` is left out if it is unknown: `kfp.local` (2.17) refuses a null in an output.
        """
        if self.ratio is None:
            return {}
        of_all = sums(self.seconds, self.gpu_hours)
        hours = {"gpu_hours": of_all["gpu_hours"]} if of_all["gpu_hours"] is not None else {}
        return {"ratio": round(self.ratio, 6), "seconds": of_all["seconds"], **hours}

    def _of(self, activity: Activity) -> Iterator[Segment]:
        return (segment for segment in self.segments if segment.activity is activity)


def ratio_of(seconds: Mapping[Activity, float]) -> float | None:
    """Goodput, 0 to 1: training that counted, divided by all `seconds`; None without any."""
    wall = math.fsum(seconds.values())
    return seconds[Activity.TRAINING] / wall if wall > 0 else None


def sums(
    seconds: Mapping[Activity, float], gpu_hours: Mapping[Activity, float] | None, price: float | None = None
) -> dict[str, Any]:
    """The sums of one or many pieces of work for JSON: seconds, goodput, GPU-hours, and cost if they have a `price`."""
    hours = cost = None
    if gpu_hours is not None:
        hours = {str(name): round(each, 6) for name, each in gpu_hours.items()}
        cost = None if price is None else {str(name): round(each * price, 6) for name, each in gpu_hours.items()}
    return {
        "wall_seconds": round(math.fsum(seconds.values()), 3),
        "seconds": {str(name): round(each, 3) for name, each in seconds.items()},
        "goodput": ratio_of(seconds),
        "gpu_hours": hours,
        "cost": cost,
    }


def total(found: Iterable[Goodput]) -> tuple[dict[Activity, float], dict[Activity, float], int]:
    """Seconds and GPU-hours of many pieces of work by activity, and the number of those whose GPUs are unknown."""
    seconds, hours, unknown = dict.fromkeys(Activity, 0.0), dict.fromkeys(Activity, 0.0), 0
    for each in found:
        of_each = each.gpu_hours
        unknown += of_each is None
        for activity, spent in each.seconds.items():
            seconds[activity] += spent
            hours[activity] += of_each[activity] if of_each is not None else 0.0
    return seconds, hours, unknown


def pieces_of_work(jobs: Iterable[Evidence]) -> list[list[Evidence]]:
    """Group jobs by the result that they worked for, the attempts of each in their order, the latest work first.

    The attempts of a key work for the same result until one is complete; the next one is other work, see
    `trainjob.manifest.DELIVERED`.
    A job without a key is a piece of work by itself.
    """
    by_key: dict[tuple[str, ...], list[Evidence]] = {}
    for job in jobs:
        if job.trainjob is not None and _created(job) is not None:
            metadata = mapping(job.trainjob, "metadata")
            key = mapping(metadata, "annotations").get(KEY)
            work = ("key", str(key)) if key else ("job", str(metadata.get("name")))
            by_key.setdefault((str(metadata.get("namespace")), *work), []).append(job)
    found: list[list[Evidence]] = []
    for attempts in by_key.values():
        piece: list[Evidence] = []
        for job in sorted(attempts, key=_ordinal):
            piece.append(job)
            if observe(job.trainjob).phase is Phase.COMPLETE:
                found.append(piece)
                piece = []
        if piece:
            found.append(piece)
    return sorted(found, key=lambda piece: _created(piece[-1]) or 0.0, reverse=True)


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
    * An interval that took `STALL_SECONDS` longer than its steps and pauses usually take, and twice as long, has a
      stall. So has the time after the last report, unless the job is complete or the reports were cut.

    Clocks of nodes, waiters and the API server may disagree. The times of the TrainJobs, by the API server, are the
    frame. Times of containers are clamped into it; the reports of a process are shifted by the smallest offset that
    moves them into its container's run, and those of a waiter into the attempt. No segment is negative.

    Args:
        attempts: The attempts of one piece of work, see `pieces_of_work`; those without a creation time are left out.
        now: End of a piece of work that has not ended.
    """
    known = [each for each in attempts if _created(each.evidence) is not None]
    known.sort(key=lambda each: _ordinal(each.evidence))
    if not known:
        return Goodput("", "", "", Phase.DELETED)
    segments: list[Segment] = []
    steps = _Steps()
    at, waited = _created(known[0].evidence) or 0.0, Activity.RESTARTING
    for attempt, following in zip(known, [*known[1:], None], strict=True):
        start = max(at, _created(attempt.evidence) or at)
        if segments and start > at:
            segments.append(Segment(waited, at, start, segments[-1].attempt, Source.CONDITIONS, 0.0))
        next_start = _created(following.evidence) if following is not None else None
        end = _ended(attempt.evidence)
        if end is None:
            end = now.timestamp() if next_start is None else next_start
        elif next_start is not None:
            end = min(end, next_start)
        at = max(start, end)
        gpus, ordinal = gpus_of(attempt.evidence), _ordinal(attempt.evidence)[0]
        for span in _spans_of(attempt, start, at, steps):
            held = 0.0 if span.activity in _IDLE else gpus
            segments.append(Segment(span.activity, span.start, span.end, ordinal, span.source, held))
        cancelled = observe(attempt.evidence.trainjob).phase is Phase.CANCELLED
        waited = Activity.STOPPED if cancelled else Activity.RESTARTING
    last = known[-1].evidence.trainjob
    metadata, ordinals = mapping(last, "metadata"), {_ordinal(each.evidence)[0] for each in known}
    return Goodput(
        str(metadata.get("namespace", "")),
        str(metadata.get("name", "")),
        str(mapping(metadata, "annotations").get(KEY, "")),
        observe(last).phase,
        segments,
        [each for each in range(min(ordinals), max(ordinals)) if each not in ordinals],
    )


def gpus_of(evidence: Evidence) -> float | None:
    """Number of GPUs of a job: nodes times GPUs of a node by its spec, else by its pods; None if neither tells.

    A GPU is a resource named ``<domain>/gpu`` or ``gpu.<domain>/<name>``, and a slice of one, ``<domain>/mig-<size>``.
    """
    trainer = mapping(evidence.trainjob, "spec", "trainer")
    pods = {rank_of(pod): pod for pod in evidence.pods}
    resources, nodes = mapping(trainer, "resourcesPerNode"), trainer.get("numNodes") or len(_training(pods.values()))
    if resources and isinstance(nodes, int) and 0 < nodes < 2**31:
        return nodes * _gpus(resources)
    containers = [each for pod in pods.values() for each in mappings(pod, "spec", "containers")]
    given = [mapping(each, "resources") for each in containers if "resources" in each]
    return math.fsum(map(_gpus, given)) if given else None


def _gpus(resources: Mapping[str, Any]) -> float:
    amounts = mapping(resources, "limits") or mapping(resources, "requests")
    return math.fsum(_amount(amount) for name, amount in amounts.items() if _is_gpu(str(name)))


def _is_gpu(resource: str) -> bool:
    domain, _, name = resource.partition("/")
    return name == "gpu" or name.startswith("mig-") or domain.startswith("gpu.")


def _amount(quantity: object) -> float:
    text = str(quantity)
    return float(text) if text.isdecimal() and len(text) < 20 else 0.0  # extended resources are whole numbers: int64


def _text(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---------------------------------------------------------------- one attempt


class _Span(NamedTuple):
    start: float
    end: float
    activity: Activity
    source: Source


def _created(evidence: Evidence) -> float | None:
    return _seconds(mapping(evidence.trainjob, "metadata").get("creationTimestamp"))


def _ordinal(evidence: Evidence) -> tuple[int, float]:
    text = str(mapping(evidence.trainjob, "metadata", "labels").get(ATTEMPT, "1"))
    return int(text) if text.isdecimal() else 1, _created(evidence) or 0.0


def _seconds(time: object) -> float | None:
    parsed = parse_time(time)
    return parsed.timestamp() if parsed is not None else None


def _condition(evidence: Evidence, kind: str) -> tuple[bool, float] | None:
    """Whether a condition holds, and since when; None if there is none with a time."""
    for condition in mappings(evidence.trainjob, "status", "conditions"):
        since = _seconds(condition.get("lastTransitionTime"))
        if condition.get("type") == kind and since is not None:
            return condition.get("status") == "True", since
    return None


def _ended(evidence: Evidence) -> float | None:
    """When the job ended; None if it has not. A job that was given up has ended with its suspension."""
    observation = observe(evidence.trainjob)
    if observation.finished is not None:
        return observation.finished.timestamp()
    suspended = _condition(evidence, "Suspended")
    if GIVEN_UP in mapping(evidence.trainjob, "metadata", "annotations") and suspended is not None and suspended[0]:
        return suspended[1]
    return None


def _spans_of(attempt: Attempt, start: float, end: float, steps: _Steps) -> list[_Span]:
    """What an attempt did from `start` to `end`; each source replaces what the ones before it know less well."""
    if end <= start:
        return []
    spans = _over(_by_conditions(attempt, start, end), _by_phases(attempt.phases, start, end))
    runs = _runs_of(attempt.evidence)
    spans = _over(spans, _by_pods(attempt.evidence, runs, spans))
    return steps.divide(attempt, spans, [run for run in runs if run.rank in _RANK_0])


def _by_conditions(attempt: Attempt, start: float, end: float) -> list[_Span]:
    trainjob = attempt.evidence.trainjob
    observation = observe(trainjob)
    waiting = Activity.QUEUED if QUEUE_LABEL in mapping(trainjob, "metadata", "labels") else Activity.STOPPED
    active = _Span(start, end, Activity.TRAINING, Source.ASSUMED)
    first = min(attempt.phases, key=lambda each: each[0])[1] if attempt.phases else observation.phase
    if _OF_PHASE.get(first) is Activity.STARTING:  # no rank has run until then
        active = active._replace(activity=Activity.STARTING, source=Source.CONDITIONS)
    suspended = _condition(attempt.evidence, "Suspended")
    begin, until = end, end  # of the suspension that the condition tells
    if suspended is not None:
        holds, since = suspended
        begin, until = (since, end) if holds else (start, since)
        if begin - start <= _AT_ONCE_SECONDS:
            begin = start
    elif mapping(trainjob, "spec").get("suspend") is True and not observation.phase.terminal:
        begin = start
    return _over([active], _clipped([_Span(begin, until, waiting, Source.CONDITIONS)], start, end))


def _by_phases(phases: Sequence[tuple[float, Phase]], start: float, end: float) -> list[_Span]:
    known = [(time, phase) for time, phase in sorted(phases, key=lambda each: each[0]) if phase in _OF_PHASE]
    spans = [
        _Span(time, after, _OF_PHASE[phase], Source.OBSERVATIONS)
        for (time, phase), after in zip(known, [*(time for time, _ in known[1:]), end], strict=False)
    ]
    return _clipped(spans, start, end)


class _Run(NamedTuple):
    """A run of the training container of a pod."""

    pod: str
    rank: str
    start: float
    end: float  # infinite while it runs
    failed: bool
    message: str


def _training(pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [pod for pod in pods if not rank_of(pod).startswith(INITIALIZERS)]


def _runs_of(evidence: Evidence) -> list[_Run]:
    """The runs that the pods record, the earlier one of each pod first."""
    found = []
    for pod in _training(evidence.pods):
        status = _status(pod)
        for state in ("lastState", "state"):
            for kind in ("running", "terminated"):
                run = mapping(status, state, kind)
                begin, end = _seconds(run.get("startedAt")), _seconds(run.get("finishedAt"))
                if begin is None or (kind == "terminated" and end is None):
                    continue
                failed = kind == "terminated" and run.get("exitCode") != 0
                ends = math.inf if end is None else max(begin, end)
                found.append(_Run(name_of(pod), rank_of(pod), begin, ends, failed, str(run.get("message") or "")))
    return found


def _by_pods(evidence: Evidence, runs: Sequence[_Run], spans: Sequence[_Span]) -> list[_Span]:
    """When all ranks ran, and when one was down; the pods are those of the latest time without suspension."""
    pods = {name_of(pod): pod for pod in _training(evidence.pods)}
    active = _stretches(span for span in spans if span.activity not in _IDLE)
    if not pods or not active:
        return []
    start, end = active[-1]
    ran_before = any(span.activity is Activity.TRAINING and span.end < start for span in spans)
    down: list[_Span] = []
    first: float | None = start  # when all ranks ran; None if the earlier runs of one are forgotten
    ends = []
    of_pods: dict[str, list[_Run]] = {}
    for run in runs:
        of_pods.setdefault(run.pod, []).append(run)
    for name, pod in pods.items():
        own = of_pods.get(name, [])
        status = _status(pod)
        count = status.get("restartCount")
        # Without times: a container that was lost with its node, ``ContainerStatusUnknown``.
        lost = not own and any(mapping(status, state, "terminated") for state in ("state", "lastState"))
        begun = own[0].start if own else end
        created = start
        if job_restarts(pod):
            created = _seconds(mapping(pod, "metadata").get("creationTimestamp")) or begun
        if len(own) > (count if isinstance(count, int) else 0) or not (own or count or lost):
            again = job_restarts(pod) or ran_before
            down.append(_Span(created, begun, Activity.RESTARTING if again else Activity.STARTING, Source.PODS))
            first = None if first is None else max(first, begun)
        else:
            first = None
        for run, after in zip(own, [*(each.start for each in own[1:]), end], strict=False):
            if run.failed:
                down.append(_Span(run.end, after, Activity.RESTARTING, Source.PODS))
        ends.append(own[-1].end if own and not own[-1].failed else math.inf)
    found = [] if first is None else _clipped([_Span(first, end, Activity.TRAINING, Source.PODS)], start, end)
    for span in sorted(down, key=lambda each: each.end - each.start):
        found = _over(found, _clipped([span], start, end))
    return _over(found, _clipped([_Span(max(ends), end, Activity.STOPPED, Source.PODS)], start, end))


def _status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the training container."""
    name = training_container(pod)
    return next((each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == name), {})


def _clipped(spans: Iterable[_Span], start: float, end: float) -> list[_Span]:
    """The parts of spans within `start` and `end`, without overlap: a later one begins where the earlier one ends."""
    found: list[_Span] = []
    at = start
    for span in spans:
        begin, until = max(at, span.start), min(end, span.end)
        if until > begin:
            found.append(span._replace(start=begin, end=until))
            at = until
    return found


def _over(below: Sequence[_Span], above: Sequence[_Span]) -> list[_Span]:
    """Both, each in order and without overlap; where they overlap, `above`."""
    cuts = sorted({time for span in (*below, *above) for time in (span.start, span.end)})
    found: list[_Span] = []
    i = j = 0
    for start, end in pairwise(cuts):
        while i < len(below) and below[i].end <= start:
            i += 1
        while j < len(above) and above[j].end <= start:
            j += 1
        if j < len(above) and above[j].start <= start:
            span = above[j]
        elif i < len(below) and below[i].start <= start:
            span = below[i]
        else:
            continue
        if found and found[-1].end == start and found[-1][2:] == span[2:]:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(span._replace(start=start, end=end))
    return found


# ---------------------------------------------------------------- steps


class _Step(NamedTuple):
    time: float
    step: float
    activity: Activity | None = None  # which this report ends


class _Steps:
    """Divides the time in which attempts ran, by the steps that they reported. Call `divide` in their order.

    Attributes:
        highest: The highest step of all runs so far; None before the first one.
        checkpoint: The step of the latest checkpoint.
        usual: The usual time of a step, and the usual number of steps between two reports, of the latest attempt.
        pauses: Activity -> its usual duration, of evaluations and checkpoints of the latest attempt that had several.
    """

    def __init__(self) -> None:
        self.highest: float | None = None
        self.checkpoint: float | None = None
        self.usual: tuple[float, float] | None = None
        self.pauses: dict[Activity, float] = {}

    def divide(self, attempt: Attempt, spans: list[_Span], runs: Sequence[_Run]) -> list[_Span]:
        """`spans` of an attempt with their training divided; `runs` are those of rank 0."""
        reports = _reports_of(attempt, runs, _stretches(_of_training(spans)), spans[-1].end)
        collected = _collected(attempt, reports, spans)
        spans = _over(spans, _unknown_training(collected, spans))
        stretches = _stretches(_of_training(spans))
        series = [_series(reports, collected, *stretch) for stretch in stretches]
        self._learn([points for parts in series for points in parts])
        complete = observe(attempt.evidence.trainjob).phase is Phase.COMPLETE
        latest = _last_report(attempt)
        heard = math.inf if latest is None else latest - _LATE_SECONDS
        heard = min([heard, *(points[-1].time for points in reports if points)])
        found: list[_Span] = []
        for (begin, end), parts in zip(stretches, series, strict=True):
            restarted = any(span.activity in _RAN and span.end <= begin for span in spans)
            start, at = Activity.RESTARTING if restarted else Activity.STARTING, begin
            for number, points in enumerate(parts, 1):
                last = number == len(parts)
                until = end if last else points[-1].time
                # A history that was cut tells nothing of the time after it.
                alive = bool(attempt.phases) and attempt.phases[-1][0] >= end
                stalls = last and (points[-1].time >= heard or alive) and not (complete and end == spans[-1].end)
                found += self._run(points, at, until, start, stalls=stalls)
                start, at = Activity.RESTARTING, until
        return _over(spans, _clipped(found, spans[0].start, spans[-1].end))

    def _learn(self, series: Sequence[Sequence[_Step]]) -> None:
        clean = [
            ((after.time - before.time) / (after.step - before.step), after.step - before.step)
            for points in series
            for before, after in pairwise(points)
            if after.activity is None and after.step > before.step and after.time > before.time
        ]
        if clean:
            self.usual = median(each[0] for each in clean), median(each[1] for each in clean)
        pace = self.usual[0] if self.usual is not None else 0.0
        for activity in (Activity.EVALUATING, Activity.CHECKPOINTING):
            pauses = [
                after.time - before.time - (after.step - before.step) * pace
                for points in series
                for before, after in pairwise(points)
                if after.activity is activity
            ]
            if len(pauses) >= _SEVERAL:
                self.pauses[activity] = max(0.0, median(pauses))

    def _run(
        self, points: Sequence[_Step], begin: float, end: float, start: Activity, *, stalls: bool
    ) -> Iterator[_Span]:
        """What one process did from `begin` to `end`: its start, its steps, and what followed the last report."""
        first = points[0]
        if self.usual is not None:
            at = _Step(max(begin, first.time - (first.step - self._begins(first)) * self.usual[0]), self._begins(first))
            yield _Span(begin, at.time, start, Source.STEPS)
        else:
            yield _Span(begin, first.time, Activity.TRAINING, Source.ASSUMED)
            at = first
        for point in points:
            yield from self._interval(at, point)
            at = point
        tail = end
        pace = self.usual[0] if self.usual is not None else None
        if stalls and self.usual is not None:
            expected = self.usual[0] * self.usual[1]
            if _is_stall(end - at.time - expected, expected):
                tail = at.time + expected
        if self.highest is not None and pace is not None and at.step < self.highest:
            again = min(tail, at.time + (self.highest - at.step) * pace)
            yield _Span(at.time, again, Activity.REPEATED, Source.STEPS)
            at = at._replace(time=again)
        yield _Span(at.time, tail, Activity.TRAINING, Source.ASSUMED)
        yield _Span(tail, end, Activity.STALLED, Source.STEPS)
        self.highest = max(self.highest or 0.0, *(point.step for point in points))
        saved = [point.step for point in points if point.activity is Activity.CHECKPOINTING]
        self.checkpoint = saved[-1] if saved else self.checkpoint

    def _begins(self, first: _Step) -> float:
        """The step with which a run begins whose first report is `first`: it does not report that."""
        if self.highest is None:
            return 0.0
        if self.checkpoint is not None and self.checkpoint <= first.step:
            return self.checkpoint
        return max(0.0, first.step - (self.usual[1] if self.usual is not None else 0.0))

    def _interval(self, before: _Step, after: _Step) -> Iterator[_Span]:
        took, steps = after.time - before.time, after.step - before.step
        expected = steps * self.usual[0] if self.usual is not None else took if steps else 0.0
        excess = max(0.0, took - expected)
        pause = 0.0
        if after.activity is not None and excess > _NOISE * expected:
            usual = self.pauses.get(after.activity)
            pause = usual if usual is not None and _is_stall(excess - usual, expected + usual) else excess
        stalled = excess - pause if _is_stall(excess - pause, expected + pause) else 0.0
        until = after.time - pause - stalled
        again = before.time
        if self.highest is not None and before.step < self.highest:
            share = (self.highest - before.step) / steps if steps else 1.0
            again = min(until, before.time + share * (until - before.time))
        yield _Span(before.time, again, Activity.REPEATED, Source.STEPS)
        yield _Span(again, until, Activity.TRAINING, Source.STEPS)
        yield _Span(until, until + stalled, Activity.STALLED, Source.STEPS)
        if after.activity is not None:
            yield _Span(after.time - pause, after.time, after.activity, Source.STEPS)


def _is_stall(excess: float, expected: float) -> bool:
    """Whether a time that was expected to last `expected` seconds was a stall if it took `excess` longer."""
    return excess > max(STALL_SECONDS, expected)


def _of_training(spans: Iterable[_Span]) -> Iterator[_Span]:
    return (span for span in spans if span.activity is Activity.TRAINING)


def _stretches(spans: Iterable[_Span]) -> list[tuple[float, float]]:
    """The times that spans cover without a gap."""
    found: list[tuple[float, float]] = []
    for span in spans:
        if found and found[-1][1] == span.start:
            found[-1] = (found[-1][0], span.end)
        else:
            found.append((span.start, span.end))
    return found


def _steps_in(history: Points) -> list[_Step]:
    """The reports that have a step, in the order of their times."""
    found: dict[tuple[float, float], Activity | None] = {}
    for name, points in history.items():
        activity = None
        if name == CHECKPOINT:
            activity = Activity.CHECKPOINTING
        elif name.startswith(_EVALUATIONS):
            activity = Activity.EVALUATING
        for step, time, _ in points:
            if step is not None and time is not None and math.isfinite(step) and math.isfinite(time):
                known = found.get((time, step))
                found[time, step] = known if known is Activity.EVALUATING else activity or known
    return [_Step(time, step, activity) for (time, step), activity in sorted(found.items(), key=lambda each: each[0])]


def _fitted(points: Sequence[_Step], start: float, end: float) -> list[_Step]:
    """`points` within `start` and `end`: shifted by the smallest offset, and clamped if they last longer."""
    if not points:
        return []
    first, last = points[0].time, points[-1].time
    offset = start - first if first < start else min(0.0, max(start - first, end - last))
    return [point._replace(time=min(end, max(start, point.time + offset))) for point in points]


def _counted_on(points: Iterable[_Step]) -> list[_Step]:
    """The reports of one process, whose counter continues where it went backwards."""
    found: list[_Step] = []
    offset = latest = 0.0
    for point in points:
        if point.step < latest:
            offset += latest
        latest = point.step
        found.append(point._replace(step=point.step + offset))
    return found


def _reports_of(
    attempt: Attempt, runs: Sequence[_Run], stretches: Sequence[tuple[float, float]], end: float
) -> list[list[_Step]]:
    """The reports that each run of rank 0 left in its termination message, fitted into the time in which it trained."""
    found: list[list[_Step]] = []
    messages = [(run, run.message) for run in runs]
    if runs and not any(run.message for run in runs) and attempt.evidence.reported:
        messages = [(runs[-1], attempt.evidence.reported)]
    for run, message in messages:
        report = progress.read(message) if message else None
        parts = [(max(run.start, a), min(run.end, b, end)) for a, b in stretches]
        longest = max(parts, key=lambda part: part[1] - part[0], default=(0.0, 0.0))
        if report is None or longest[1] <= longest[0]:
            found.append([])
            continue
        found.append(_fitted(_counted_on(_steps_in(report.history)), *longest))
    return found


def _collected(attempt: Attempt, reports: Sequence[Sequence[_Step]], spans: Sequence[_Span]) -> list[_Step]:
    """The reports that a waiter has collected, and the latest one of the object, without those that a message has."""
    points = _steps_in(attempt.history)
    said, observation = _last_report(attempt), observe(attempt.evidence.trainjob)
    if said is not None and observation.step is not None and (not points or said > points[-1].time):
        points.append(_Step(said, float(observation.step)))
    points = _fitted(points, spans[0].start, spans[-1].end)
    covered = [(each[0].time - _LATE_SECONDS, each[-1].time + _LATE_SECONDS) for each in reports if each]
    return [point for point in points if not any(a <= point.time <= b for a, b in covered)]


def _last_report(attempt: Attempt) -> float | None:
    """The time of the latest report in the object."""
    return _seconds(mapping(attempt.evidence.trainjob, "status", "trainerStatus").get("lastUpdatedTime"))


def _unknown_training(points: Sequence[_Step], spans: Sequence[_Span]) -> list[_Span]:
    """Training while the job was suspended according to its condition, which tells the latest change only."""
    found = []
    for span in spans:
        if span.activity in _IDLE and span.source is Source.CONDITIONS:
            own = [point.time for point in points if span.start < point.time < span.end - _LATE_SECONDS]
            if len(own) > 1:
                found.append(_Span(own[0], own[-1], Activity.TRAINING, Source.STEPS))
    return found


def _series(
    reports: Iterable[Sequence[_Step]], collected: Iterable[_Step], start: float, end: float
) -> list[list[_Step]]:
    """The reports from `start` to `end`, those of each process apart.

    A report that a waiter saw a moment after the end belongs to the end. A counter of a waiter's reports that goes
    backwards shows a restart.
    """
    found = [list(points) for points in reports if points and start <= points[0].time <= end]
    own = [
        point._replace(time=min(point.time, end)) for point in collected if start <= point.time <= end + _LATE_SECONDS
    ]
    found += _between_restarts(own)
    return sorted(found, key=lambda points: points[0].time)


def _between_restarts(points: Sequence[_Step]) -> list[list[_Step]]:
    """The points in parts: a counter that goes backwards was restarted."""
    found: list[list[_Step]] = []
    for point in points:
        if found and point.step >= found[-1][-1].step:
            found[-1].append(point)
        else:
            found.append([point])
    return found
