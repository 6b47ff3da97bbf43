"""The state of a job at one moment, as one value: `trainjob status` and `diagnose` print it as text or JSON.

`trainjob._pages.documents` makes the document of a page of it. It has only the names of environment variables, and all
secrets are masked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any

from trainjob._backends.base import Backend, TrainJob
from trainjob._diagnosis import blockers, diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._diagnosis.stragglers import Straggler, stragglers_of
from trainjob._jobs.report_parts import Event, Rank, events_of, ranks_of, spec_in_short
from trainjob._jobs.results import history_as_json, result_of
from trainjob._manifest.attempts import given_up
from trainjob._support.display import iso, public_values, short_text, shown_lines
from trainjob._support.kube_objects import job_restarts, mapping
from trainjob.errors import Category, Diagnosis, NotFound
from trainjob.job import KEY, JobRef
from trainjob.status import Observation, Phase, observe

_OVERLAP = 60  # characters at the end by which one text is recognized in another


@dataclass(frozen=True)
class Report:
    """The state of a job at one moment.

    Attributes:
        ref: The job; its UID is empty if the TrainJob was deleted and only related objects are left.
        observation: Its state, with its blocker.
        diagnosis: Why it failed or makes no progress; its category is ``none`` if there is nothing to explain.
        taken: Time of the report.
        key: Key of the job; empty if it was not launched with trainjob.
        spec: Its spec in short.
        metrics: Metrics that the training reported.
        outputs: Name -> URI, other text, a number or a bool.
        history: Metric -> its values over time, see `TrainJobResult`; empty until rank 0 has finished.
        ranks: Its pods.
        events: Its Events, the latest last.
        given_up: Whether the job was suspended at its first crash, see `trainjob._jobs.cancellation.give_up`.
        job_restarts: Restarts of all ranks together, by JobSet.
        evidence: What was read of the job.
        checkpoints: Steps and Unix times of the checkpoints that the training reported; empty as `history`.
        stragglers: Ranks that waiters have found to be slower than the others, see `trainjob._diagnosis.stragglers`.
    """

    ref: JobRef
    observation: Observation
    diagnosis: Diagnosis
    taken: datetime
    key: str = ""
    spec: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, bool | float | str] = field(default_factory=dict)
    outputs: Mapping[str, bool | float | str] = field(default_factory=dict)
    history: Mapping[str, Sequence[tuple[int, float, float]]] = field(default_factory=dict)
    ranks: Sequence[Rank] = ()
    events: Sequence[Event] = ()
    given_up: bool = False
    evidence: Evidence = field(default_factory=lambda: Evidence(None))
    checkpoints: Sequence[tuple[int, float]] = ()
    job_restarts: int = 0
    stragglers: Sequence[Straggler] = ()

    @property
    def trainjob(self) -> TrainJob:
        """The object; empty if the TrainJob was deleted."""
        return self.evidence.trainjob or {}

    @property
    def restarts(self) -> int:
        """How often the job was restarted: as a whole by JobSet, and in place by the rank that was restarted most."""
        return self.job_restarts + max((rank.restarts for rank in self.ranks), default=0)

    @property
    def troubled(self) -> bool:
        """Whether there is something to explain."""
        return self.diagnosis.category is not Category.NONE

    @property
    def running_since(self) -> datetime | None:
        """When the first rank started to run; None if no rank has, or the pods are gone."""
        return min((rank.started for rank in self.ranks if rank.started is not None), default=None)

    @property
    def phases(self) -> list[tuple[str, datetime, datetime]]:
        """Its phases with begin and end: ``queued``, ``starting``, ``running`` (``active`` if that is unknown)."""
        now, begun = self.observation, self.running_since
        end = now.finished or self.taken
        spans = [("queued", now.created, now.admitted or end)]
        if now.admitted is not None:
            begins = begun or (end if now.phase.idle else now.admitted)
            spans += [("starting", now.admitted, begins), ("running" if begun else "active", begins, end)]
        return [(name, a, max(a, b)) for name, a, b in spans if a is not None and (b - a).total_seconds() >= 1]

    @property
    def besides(self) -> str:
        """What the job's condition or blocker adds to the diagnosis; may be empty."""
        message, summary = self.observation.message, self.diagnosis.summary
        # Texts of the same finding have the same end; a long summary is cut off.
        same = message.endswith(summary[-_OVERLAP:]) or summary.removesuffix("…")[-_OVERLAP:] in message
        return "" if self.troubled and (same or message in summary) else message

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return facts(self.ref, self.key, self.observation, self.taken) | {
            "running": iso(self.running_since),
            "metrics": dict(self.metrics),
            "outputs": dict(self.outputs),
            "history": history_as_json(self.history),
            "diagnosis": self.diagnosis.as_dict() if self.troubled else None,
            "spec": dict(self.spec),
            "ranks": [_times_as_text(asdict(rank)) for rank in self.ranks],
            "events": [_times_as_text(asdict(event)) for event in self.events],
            "unseen": list(self.diagnosis.unseen),
            "stragglers": [each.as_dict() for each in self.stragglers],
        }


def seconds_of(observation: Observation, now: datetime) -> dict[str, float]:
    """``age``, ``queued`` (from creation to admission) and ``active`` (from admission to the end), as far as known."""
    created, admitted, end = observation.created, observation.admitted, observation.finished or now
    spans = {"age": (created, now), "queued": (created, admitted), "active": (admitted, end)}
    return {name: max(0.0, (b - a).total_seconds()) for name, (a, b) in spans.items() if a and b}


def facts(ref: JobRef, key: str, observation: Observation, now: datetime) -> dict[str, Any]:
    """The state of a TrainJob from its object alone, as JSON values."""
    times = {name: iso(getattr(observation, name)) for name in ("created", "admitted", "finished")}
    return {
        "namespace": ref.namespace,
        "name": ref.name,
        "uid": ref.uid,
        "attempt": ref.attempt,
        "key": key,
        "phase": str(observation.phase),
        "reason": observation.reason,
        "message": observation.message,
        **times,
        "seconds": seconds_of(observation, now),
        "progress": observation.progress,
        "remaining_seconds": observation.remaining_seconds,
        "metrics": dict(observation.metrics),
    }


async def diagnose(backend: Backend, namespace: str, name: str) -> Report:
    """Diagnose any TrainJob, also one that trainjob did not launch: its state, what blocks it, why it failed.

    Raises:
        NotFound: The job and its related objects do not exist.
    """
    trainjob = await backend.get(namespace, name)
    ref = JobRef.of(trainjob) if trainjob is not None else JobRef(namespace, name, "")
    evidence = await backend.evidence(ref)
    if trainjob is None and not (evidence.pods or evidence.events):
        raise NotFound(f"there is no TrainJob {namespace}/{name}")
    return examine(ref, evidence, backend.now())


def examine(ref: JobRef, evidence: Evidence, now: datetime, known: Diagnosis | None = None) -> Report:
    """The report for the evidence. Pure; never raises because of the evidence.

    Args:
        ref: The job.
        evidence: Of the job.
        now: The current time, by `Backend.now`.
        known: The diagnosis, if it was made before.
    """
    trainjob = evidence.trainjob or {}
    observation = observe(evidence.trainjob)
    blocker = _blocker(evidence, observation.phase)
    observation = observe(evidence.trainjob, None, blocker)
    given_up_for = given_up(trainjob) if trainjob else None
    diagnosis = replace(known or given_up_for or diagnosis_of(evidence), job=str(ref), phase=observation.phase)
    result = result_of(ref, evidence, observation, now)
    return Report(
        ref,
        observation,
        _without_secrets(replace(diagnosis, unseen=tuple(evidence.unseen))),
        now,
        key=short_text(mapping(trainjob, "metadata", "annotations").get(KEY)),
        spec=dict(spec_in_short(trainjob)),
        metrics=public_values(result.metrics),
        outputs=public_values(result.outputs),
        history={short_text(name): points for name, points in result.history.items()},
        ranks=ranks_of(evidence.pods),
        events=events_of(evidence.events),
        given_up=given_up_for is not None,
        evidence=evidence,
        checkpoints=result.checkpoints,
        job_restarts=max((job_restarts(pod) for pod in evidence.pods), default=0),
        stragglers=stragglers_of(trainjob),
    )


def _blocker(evidence: Evidence, phase: Phase) -> Any:
    """The blocker of a job, as a waiter reports it."""
    if evidence.missing:
        return blockers.of_missing(evidence.missing[0]).blocker
    if phase is Phase.QUEUED:
        return blockers.in_workload(evidence.workload or {}, evidence.related)
    if phase is Phase.SUSPENDED:
        return None
    finding = blockers.first(blockers.around(evidence.pods if evidence.pods_visible else None, evidence.events))
    return finding.blocker if finding else None


def _without_secrets(diagnosis: Diagnosis) -> Diagnosis:
    """Mask a diagnosis that a person may have changed, since it can be an annotation of the job."""
    log = tuple(shown_lines(diagnosis.log))
    unseen = tuple(short_text(what) for what in diagnosis.unseen)
    return replace(
        diagnosis, log=log, unseen=unseen, summary=short_text(diagnosis.summary), advice=short_text(diagnosis.advice)
    )


def _times_as_text(values: dict[str, Any]) -> dict[str, Any]:
    return {name: iso(value) if isinstance(value, datetime) else value for name, value in values.items()}
