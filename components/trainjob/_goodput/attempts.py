"""What conditions, observations and pods tell of one attempt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput.history import Points
from trainjob._goodput.spans import IDLE, Span, clipped, over, stretches_of
from trainjob._support.kube_objects import (
    INITIALIZERS,
    annotated,
    job_restarts,
    mapping,
    mappings,
    name_of,
    parse_time,
    rank_of,
    training_container,
)
from trainjob._support.numbers import count_of
from trainjob.errors import Category
from trainjob.goodput import Activity, Source
from trainjob.job import ATTEMPT
from trainjob.status import ADMITTED, GIVEN_UP, QUEUE_LABEL, WAITING, Phase, observe

_AT_ONCE_SECONDS = 2.0  # Trainer writes the condition some 10 ms after the creation; times are whole seconds
_LEAST_QUEUED_SECONDS = 1.0  # times are whole seconds
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
        history: Metrics that a waiter has collected, see `trainjob._goodput.history`.
        hangs: Whether a waiter has just found that the job hangs.
    """

    evidence: Evidence
    phases: Sequence[tuple[float, Phase]] = ()
    history: Points = field(default_factory=dict)
    hangs: bool = False


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


def created_at(evidence: Evidence) -> float | None:
    """When the job was created, in Unix time; None if that is unknown."""
    return unix_time(mapping(evidence.trainjob, "metadata").get("creationTimestamp"))


def ordinal_of(evidence: Evidence) -> tuple[int, float]:
    """Ordinal of the attempt and its creation, by which attempts are sorted."""
    number = count_of(mapping(evidence.trainjob, "metadata", "labels").get(ATTEMPT))
    return 1 if number is None else number, created_at(evidence) or 0.0


def ended_at(evidence: Evidence) -> float | None:
    """When the job ended; None if it has not. A job that was given up has ended with its suspension."""
    observation = observe(evidence.trainjob)
    if observation.finished is not None:
        return observation.finished.timestamp()
    suspended = _condition(evidence, "Suspended")
    if GIVEN_UP in mapping(evidence.trainjob, "metadata", "annotations") and suspended is not None and suspended[0]:
        return suspended[1]
    return None


def hung_seconds(attempt: Attempt) -> float:
    """How long at least no rank made progress before the end of a job that hangs, or was given up for that; else 0."""
    why = mapping(annotated(attempt.evidence.trainjob, GIVEN_UP))
    hangs = attempt.hangs or why.get("category") == Category.HANG
    return (observe(attempt.evidence.trainjob).stall_timeout or 0.0) if hangs else 0.0


def _condition(evidence: Evidence, kind: str) -> tuple[bool, float] | None:
    """Whether a condition holds, and since when; None if there is none with a time."""
    for condition in mappings(evidence.trainjob, "status", "conditions"):
        since = unix_time(condition.get("lastTransitionTime"))
        if condition.get("type") == kind and since is not None:
            return condition.get("status") == "True", since
    return None


def unix_time(time: object) -> float | None:
    """A time of the API in Unix time; None for anything else."""
    parsed = parse_time(time)
    return parsed.timestamp() if parsed is not None else None


def by_conditions(attempt: Attempt, start: float, end: float) -> list[Span]:
    """What the conditions of the TrainJob tell of the time from `start` to `end`, all of it."""
    trainjob = attempt.evidence.trainjob
    observation = observe(trainjob)
    reasons = {each.get("reason") for each in mappings(trainjob, "status", "conditions")}
    in_queue = QUEUE_LABEL in mapping(trainjob, "metadata", "labels") or not reasons.isdisjoint((WAITING, ADMITTED))
    waiting = Activity.QUEUED if in_queue else Activity.STOPPED
    active = Span(start, end, Activity.TRAINING, Source.ASSUMED)
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
    return over([active], clipped([Span(begin, until, waiting, Source.CONDITIONS)], start, end))


def by_admissions(attempt: Attempt, spans: list[Span]) -> list[Span]:
    """Correct what the conditions tell of the time before the latest suspension of a job that Kueue preempted.

    A condition has the time of its latest change only, and Kueue counts the seconds for which the job was admitted
    before: ``accumulatedPastExecutionTimeSeconds`` of its Workload (KEP-3125). As far as no waiter has observed them,
    they are assumed to be the last ones before a suspension that lasts, otherwise the first ones of the job.
    """
    admitted = mapping(attempt.evidence.workload, "status").get("accumulatedPastExecutionTimeSeconds")
    suspended = _condition(attempt.evidence, "Suspended")
    if not isinstance(admitted, int) or admitted <= 0 or suspended is None:
        return spans
    holds, since = suspended
    start, until = spans[0].start, min([since, *(time for time, _ in attempt.phases)])
    observed = math.fsum(each.end - each.start for each in clipped(spans, until, since) if each.activity not in IDLE)
    # Between an eviction and the next admission the job waits: its pods are those of the latter.
    room = until - start - (0.0 if holds else _LEAST_QUEUED_SECONDS)
    if room <= 0:
        return spans
    seconds = min(max(0.0, admitted - observed), room)
    begin = until - seconds if holds else start
    queued = Span(start, until, Activity.QUEUED, Source.CONDITIONS)
    trained = Span(begin, begin + seconds, Activity.TRAINING, Source.ASSUMED)
    return over(over(spans, [queued]), [trained])


def by_phases(phases: Sequence[tuple[float, Phase]], start: float, end: float) -> list[Span]:
    """What the observations of a waiter tell of that time."""
    known = [(time, phase) for time, phase in sorted(phases, key=lambda each: each[0]) if phase in _OF_PHASE]
    spans = [
        Span(time, after, _OF_PHASE[phase], Source.OBSERVATIONS)
        for (time, phase), after in zip(known, [*(time for time, _ in known[1:]), end], strict=False)
    ]
    return clipped(spans, start, end)


class Run(NamedTuple):
    """A run of the training container of a pod."""

    pod: str
    rank: str
    start: float
    end: float  # infinite while it runs
    failed: bool
    message: str


def runs_of(evidence: Evidence) -> list[Run]:
    """The runs that the pods record, the earlier one of each pod first."""
    found = []
    for pod in _training(evidence.pods):
        status = _status(pod)
        for state in ("lastState", "state"):
            for kind in ("running", "terminated"):
                run = mapping(status, state, kind)
                begin, end = unix_time(run.get("startedAt")), unix_time(run.get("finishedAt"))
                if begin is None or (kind == "terminated" and end is None):
                    continue
                failed = kind == "terminated" and run.get("exitCode") != 0
                ends = math.inf if end is None else max(begin, end)
                found.append(Run(name_of(pod), rank_of(pod), begin, ends, failed, str(run.get("message") or "")))
    return found


def by_pods(evidence: Evidence, runs: Sequence[Run], spans: Sequence[Span]) -> list[Span]:
    """When all ranks ran, and when one was down; the pods are those of the latest time without suspension."""
    pods = {name_of(pod): pod for pod in _training(evidence.pods)}
    active = stretches_of(span for span in spans if span.activity not in IDLE)
    if not pods or not active:
        return []
    start, end = active[-1]
    ran_before = any(span.activity is Activity.TRAINING and span.end < start for span in spans)
    down: list[Span] = []
    first: float | None = start  # when all ranks ran; None if the earlier runs of one are forgotten
    ends = []
    of_pods: dict[str, list[Run]] = {}
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
            created = unix_time(mapping(pod, "metadata").get("creationTimestamp")) or begun
        if len(own) > (count if isinstance(count, int) else 0) or not (own or count or lost):
            again = job_restarts(pod) or ran_before
            down.append(Span(created, begun, Activity.RESTARTING if again else Activity.STARTING, Source.PODS))
            first = None if first is None else max(first, begun)
        else:
            first = None
        for run, after in zip(own, [*(each.start for each in own[1:]), end], strict=False):
            if run.failed:
                down.append(Span(run.end, after, Activity.RESTARTING, Source.PODS))
        ends.append(own[-1].end if own and not own[-1].failed else math.inf)
    found = [] if first is None else clipped([Span(first, end, Activity.TRAINING, Source.PODS)], start, end)
    for span in sorted(down, key=lambda each: each.end - each.start):
        found = over(found, clipped([span], start, end))
    return over(found, clipped([Span(max(ends), end, Activity.STOPPED, Source.PODS)], start, end))


def _training(pods: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [pod for pod in pods if not rank_of(pod).startswith(INITIALIZERS)]


def _status(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status of the training container."""
    name = training_container(pod)
    return next((each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == name), {})
