"""What a job that has ended gave: its result, or its diagnosis, and how its time was spent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

import anyio

from trainjob._backends.base import Backend
from trainjob._diagnosis import ON_RETRY, diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.stragglers import stragglers_of
from trainjob._goodput import Attempt, measure
from trainjob._goodput.history import CHECKPOINT, MetricHistory, thinned
from trainjob._jobs import telemetry
from trainjob._jobs.records import record_failure
from trainjob._support import volumes
from trainjob._support.display import short
from trainjob._support.formats import wrong_format
from trainjob._support.kube_objects import mapping, mappings, rank_of
from trainjob._support.numbers import json_values
from trainjob._support.threads import JUDGING
from trainjob.errors import ConfigurationError, TrainJobFailed
from trainjob.goodput import Goodput
from trainjob.job import ATTEMPT, JobRef
from trainjob.progress import Report, read
from trainjob.progress.message import MAX_POINTS, RESERVED, VERSION
from trainjob.progress.reading import newer_version
from trainjob.status import Observation, Phase, observe

_log = logging.getLogger(__name__)

_MEASURE_SECONDS = 5.0  # for reading a job whose wait has failed: the reason is known and must not be delayed for long


@dataclass(frozen=True)
class TrainJobResult:
    """The result of a job that completed.

    Attributes:
        namespace: Namespace of the job.
        name: Name of the job.
        uid: UID of the job.
        attempt: Ordinal of the attempt.
        metrics: Metrics of the training script: booleans, numbers, text.
        outputs: Outputs of the training script: name -> URI, other text, a number or a boolean.
        seconds: ``queued``, from creation to admission, and ``total``, from creation to the end.
        returned: Value that a function trainer (`TrainJobSpec.func`) returned on rank 0, as JSON; None if it returned
            nothing.
        history: Metric -> its values over time, oldest first: step, Unix time in seconds, value. At most 256 points of
            all metrics together; `trainjob.progress` documents how they are chosen.
        checkpoints: Steps and Unix times of the checkpoints that the training reported, oldest first.
        goodput: How the time of this attempt was spent, see `trainjob.goodput`: ``ratio``, 0 to 1; ``seconds`` by
            activity; ``gpu_hours`` by activity, if the number of GPUs is known. Empty if the job was deleted
            before its end was read, unless its waiter observed its phases. ``trainjob goodput`` shows all attempts
            together.
        stragglers: Ranks that the waiters of a job with a ``stall_timeout`` found to be slower than the others:
            ``rank``, ``number``, ``name``, ``node``, ``seconds`` of work per step and its ``median`` of all ranks,
            ``step_seconds``, ``loading`` and a ``summary``.
    """

    namespace: str
    name: str
    uid: str
    attempt: int
    metrics: Mapping[str, bool | float | str] = field(default_factory=dict)
    outputs: Mapping[str, bool | float | str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    returned: Any = None
    history: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)
    checkpoints: Sequence[tuple[int, float]] = ()
    goodput: Mapping[str, Any] = field(default_factory=dict)
    stragglers: Sequence[Mapping[str, Any]] = ()

    def as_dict(self) -> dict[str, Any]:
        """The result as a dict for JSON and XCom. NaN and infinity become text, since JSON has neither.

        ``returned``, ``history``, ``checkpoints``, ``goodput`` and ``stragglers`` are left out if they are empty. A
        point of the history is a list.
        """
        values = {**asdict(self), "metrics": json_values(self.metrics), "history": history_as_json(self.history)}
        if self.returned is None:
            del values["returned"]
        if not self.history:
            del values["history"]
        if self.checkpoints:
            values["checkpoints"] = [list(each) for each in self.checkpoints]
        else:
            del values["checkpoints"]
        if not self.goodput:
            del values["goodput"]
        if not self.stragglers:
            del values["stragglers"]
        return values


def history_as_json(history: Mapping[str, Sequence[tuple[int, float, float]]]) -> dict[str, list[list[float]]]:
    """A history as lists, which JSON and XCom do not change: ``{"loss": [[step, time, value], ...]}``."""
    return {name: [list(point) for point in points] for name, points in history.items()}


async def conclude(
    backend: Backend,
    ref: JobRef,
    final: Observation | None = None,
    earlier: Evidence | None = None,
    history: MetricHistory | None = None,
    *,
    on_evidence: Callable[[Evidence], None] | None = None,
) -> TrainJobResult:
    """The result of a job that has ended.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        final: Final observation of a waiter. It counts even if the job was deleted since.
        earlier: Evidence of the first crashes, taken while the job was running: the pods may be gone.
        history: Metrics and phases that a waiter has collected: the result has the metrics that the training did not
            keep itself.
        on_evidence: Called with the evidence of the result or of the diagnosis.

    Raises:
        TrainJobFailed: the job failed or was deleted; has the diagnosis.
        ConfigurationError: A newer trainjob in the image of the job wrote its outputs.
    """
    evidence = await backend.evidence(ref)
    observation = observe(evidence.trainjob, final)
    if observation.phase is not Phase.COMPLETE and earlier is not None:
        evidence = evidence.with_earlier(earlier)
    if on_evidence is not None:
        on_evidence(evidence)
    now = backend.now()
    spent = measured(ref, evidence, history, now, observation)
    telemetry.record_goodput(ref, spent)
    if observation.phase is not Phase.COMPLETE:
        diagnosis = replace(await JUDGING.call(diagnosis_of, evidence, final), job=str(ref))
        if observation.phase is Phase.FAILED and ON_RETRY in mapping(evidence.trainjob, "metadata", "annotations"):
            await record_failure(backend, ref, diagnosis)
        raise TrainJobFailed(diagnosis, spent.summary())
    check_report(ref, evidence)
    return result_of(ref, evidence, observation, now, history, spent)


def result_of(
    ref: JobRef,
    evidence: Evidence,
    observation: Observation,
    now: datetime,
    collected: MetricHistory | None = None,
    spent: Goodput | None = None,
) -> TrainJobResult:
    """The result of a job as far as it is known.

    Args:
        ref: The job.
        evidence: Evidence of the job.
        observation: Its state.
        now: The current time, as `Backend.now` has it.
        collected: Completes what the training and its pods have kept.
        spent: How its time was spent; measured if left out.
    """
    if spent is None and observation.phase.terminal:
        spent = measured(ref, evidence, collected, now, observation)
    report = _report(evidence)
    history = {name: points for name, points in report.history.items() if not name.startswith(RESERVED)}
    if collected:
        missing = {
            name: points
            for name, points in collected.points().items()
            if name not in report.history and len(points) > 1
        }
        room = MAX_POINTS - sum(map(len, history.values()))
        for name, points in thinned(missing, room).items() if room >= 4 * len(missing) else ():
            steps = [number if step is None else int(step) for number, (step, _, _) in enumerate(points, 1)]
            history[name] = [(step, point[1], point[2]) for step, point in zip(steps, points, strict=True)]
    created = observation.created
    times = {"queued": (created, observation.admitted), "total": (created, observation.finished)}
    return TrainJobResult(
        ref.namespace,
        ref.name,
        ref.uid,
        ref.attempt,
        metrics={**observation.metrics, **report.metrics},
        outputs={
            name: volumes.as_claim(value) if isinstance(value, str) else value for name, value in report.outputs.items()
        },
        seconds={name: (end - begin).total_seconds() for name, (begin, end) in times.items() if begin and end},
        returned=report.returned,
        history={name: points for name, points in history.items() if not name.startswith(RESERVED)},
        checkpoints=[(step, time) for step, time, _ in report.history.get(CHECKPOINT, ())],
        goodput=spent.summary() if spent is not None else {},
        stragglers=[each.as_dict() for each in stragglers_of(evidence.trainjob)],
    )


async def spent_so_far(
    backend: Backend,
    ref: JobRef,
    history: MetricHistory | None = None,
    *,
    hangs: bool = False,
    on_evidence: Callable[[Evidence], None] | None = None,
) -> Goodput:
    """How the time of a job was spent until now, with what a waiter has collected, and whether it found that it hangs.

    Never raises, and takes at most 5 s: nothing is known of a job that cannot be read in that time.

    Args:
        backend: Backend that runs the job.
        ref: The job.
        history: Metrics and phases that a waiter has collected.
        hangs: Whether the waiter has found that the job hangs.
        on_evidence: Called with the evidence of the job, which then has the last lines of its ranks, too.
    """
    try:
        with anyio.move_on_after(_MEASURE_SECONDS):
            evidence = await (backend.state(ref) if on_evidence is None else backend.evidence(ref))
            if on_evidence is not None:
                on_evidence(evidence)
            return measured(ref, evidence, history, backend.now(), hangs=hangs)
    except Exception as error:  # noqa: BLE001 - of any backend: the reason why the wait has ended is more important
        _log.warning("the goodput of TrainJob %s cannot be measured: %s: %s", ref, type(error).__name__, error)
    return measure([], backend.now())


def measured(
    ref: JobRef,
    evidence: Evidence,
    collected: MetricHistory | None,
    now: datetime,
    final: Observation | None = None,
    *,
    hangs: bool = False,
) -> Goodput:
    """How the time of an attempt was spent until now; of a deleted job, by the phases that its waiter has observed."""
    collected = collected if collected is not None else MetricHistory()
    if evidence.trainjob is not None or final is None or final.created is None or not collected.phases:
        return measure([Attempt(evidence, collected.phases, collected.points(), hangs)], now)
    metadata = {
        "namespace": ref.namespace,
        "name": ref.name,
        "labels": {ATTEMPT: str(ref.attempt)},
        "creationTimestamp": final.created.isoformat(),
    }
    end = now if final.finished is None else final.finished
    seen = Evidence({"metadata": metadata}, evidence.pods, reported=evidence.reported)
    return replace(measure([Attempt(seen, collected.phases, collected.points())], end), phase=final.phase)


def check_report(ref: JobRef, evidence: Evidence) -> None:
    """Refuse a result without the outputs that the training has reported.

    Raises:
        ConfigurationError: A newer trainjob in the image of the job wrote its termination message.
    """
    for message in _messages(evidence):
        if read(message):
            return
        if (number := newer_version(message)) is not None:
            raise ConfigurationError(wrong_format(f"the termination message of TrainJob {ref}", number, VERSION))


def _report(evidence: Evidence) -> Report:
    """The report in the latest termination message of rank 0; with MPI, of the launcher."""
    return next((report for message in _messages(evidence) if (report := read(message))), None) or Report()


def _messages(evidence: Evidence) -> Iterator[str]:
    """Termination messages of rank 0, the latest first; with MPI, those of the launcher come first."""
    latest = sorted(evidence.pods, key=lambda pod: str(mapping(pod, "metadata").get("creationTimestamp")), reverse=True)
    for rank in ("launcher-0", "node-0"):
        for pod in latest:
            for status in mappings(pod, "status", "containerStatuses") if rank_of(pod) == rank else ():
                yield str(mapping(status, "state", "terminated").get("message"))
    yield evidence.reported


def spent_text(spent: Mapping[str, Any]) -> str:
    """The goodput of a result or an error as text for a log; empty if it is unknown."""
    if not spent:
        return ""
    parts = [f"{activity} {short(seconds)}" for activity, seconds in spent["seconds"].items() if seconds]
    return f"goodput {100 * spent['ratio']:.1f}%: {', '.join(parts)}"
