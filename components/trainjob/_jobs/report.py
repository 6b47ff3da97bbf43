"""The state of a job at one moment, as one value: `trainjob status` and `diagnose` print it as text or JSON.

`trainjob._pages.document` makes the document of a page of it. It has only the names of environment variables, and all secrets
are masked.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from trainjob._backends.base import Backend, TrainJob
from trainjob._diagnosis import Category, Diagnosis, Evidence, blockers, diagnose as diagnosis_of
from trainjob._diagnosis.stragglers import Straggler, stragglers_of
from trainjob._jobs.results import history_as_json, result_of
from trainjob._manifest.attempts import given_up
from trainjob._manifest.render import KEY, JobRef
from trainjob._support.control_characters import one_line, plain
from trainjob._support.kube_objects import (
    job_restarts,
    mapping,
    mappings,
    name_of,
    parse_time,
    rank_of,
    training_container,
)
from trainjob._support.masking import MASK, masked_lines, names_a_secret, public
from trainjob.errors import NotFound
from trainjob.status import QUEUE_LABEL, Observation, Phase, observe

_LONGEST = 2000  # characters of a line of a log or of a message
_COMMAND = 300  # characters of a command, which may embed the source of a function
_EVENTS = 100  # latest Events
LAST_LINES = 20
"""Lines of a rank in `last_state`."""

_LAST_RANKS = 8  # in `last_state`
_OVERLAP = 60  # characters at the end by which one text is recognized in another


@dataclass(frozen=True)
class Rank:
    """A pod of the job.

    Attributes:
        rank: As ``node-1``.
        pod: Name of the pod.
        node: Its node; empty if it is not scheduled.
        state: State of its container or the reason why it does not run: ``Running``, ``CrashLoopBackOff``,
            ``Unschedulable``.
        exit_code: Exit code of the latest finished run of the container.
        restarts: Number of restarts of the container.
        started: First start of the container, if known.
        finished: End of its latest run.
    """

    rank: str
    pod: str
    node: str = ""
    state: str = ""
    exit_code: int | None = None
    restarts: int = 0
    started: datetime | None = None
    finished: datetime | None = None

    @property
    def bad(self) -> bool:
        """Whether the rank has a problem."""
        return bool(self.exit_code) or self.state not in ("Running", "Completed", "ContainerCreating", "Pending")


@dataclass(frozen=True)
class Event:
    """An Event of the job or of a related object.

    Attributes:
        time: Latest occurrence.
        kind: ``Normal`` or ``Warning``.
        reason: In CamelCase.
        about: The object, as ``Pod x``.
        message: The reason in words.
        count: Number of occurrences.
    """

    time: datetime | None
    kind: str
    reason: str
    about: str
    message: str
    count: int = 1


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
        history: Metric -> its values over time, see `trainjob._jobs.results.TrainJobResult`; empty until rank 0 has finished.
        ranks: Its pods.
        events: Its Events, the latest last.
        given_up: Whether the job was suspended at its first crash, see `trainjob._jobs.launching.give_up`.
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


def seconds_of(observation: Observation, now: datetime | None = None) -> dict[str, float]:
    """``age``, ``queued`` (from creation to admission) and ``active`` (from admission to the end), as far as known."""
    now = now or datetime.now(UTC)
    created, admitted, end = observation.created, observation.admitted, observation.finished or now
    spans = {"age": (created, now), "queued": (created, admitted), "active": (admitted, end)}
    return {name: max(0.0, (b - a).total_seconds()) for name, (a, b) in spans.items() if a and b}


def facts(ref: JobRef, key: str, observation: Observation, now: datetime | None = None) -> dict[str, Any]:
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
    return examine(ref, evidence, datetime.now(UTC))


def examine(ref: JobRef, evidence: Evidence, now: datetime) -> Report:
    """The report for the evidence. Pure; never raises because of the evidence."""
    trainjob = evidence.trainjob or {}
    observation = observe(evidence.trainjob)
    blocker = _blocker(evidence, observation.phase)
    observation = observe(evidence.trainjob, None, blocker)
    given_up_for = given_up(trainjob) if trainjob else None
    diagnosis = replace(given_up_for or diagnosis_of(evidence), job=str(ref), phase=observation.phase)
    result = result_of(ref, evidence, observation)
    return Report(
        ref,
        observation,
        _without_secrets(replace(diagnosis, unseen=tuple(evidence.unseen))),
        now,
        key=short_text(mapping(trainjob, "metadata", "annotations").get(KEY)),
        spec=dict(_spec(trainjob)),
        metrics=_public(result.metrics),
        outputs=_public(result.outputs),
        history={short_text(name): points for name, points in result.history.items()},
        ranks=sorted((_rank(pod) for pod in evidence.pods), key=_order),
        events=_events(evidence.events),
        given_up=given_up_for is not None,
        evidence=evidence,
        checkpoints=result.checkpoints,
        job_restarts=max((job_restarts(pod) for pod in evidence.pods), default=0),
        stragglers=stragglers_of(trainjob),
    )


def last_ranks(evidence: Evidence) -> list[str]:
    """The ranks whose last lines `last_state` has: the failed ones, else rank 0."""
    ranks = {rank_of(pod): pod for pod in evidence.pods}
    failed = sorted(rank for rank, pod in ranks.items() if _rank(pod).exit_code)[:_LAST_RANKS]
    return failed or sorted(ranks.keys() & {"launcher-0", "node-0"})[:1]


def log_of(evidence: Evidence, rank: str) -> Sequence[str]:
    """The last lines of a rank; empty if the evidence lacks them."""
    return next((evidence.logs.get(name_of(pod), ()) for pod in evidence.pods if rank_of(pod) == rank), ())


def last_state(evidence: Evidence, logs: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The state of a job before it is deleted, as JSON values.

    ``phase``, ``progress``, ``metrics`` and, in ``logs``, the last lines of each failed rank, else of rank 0.

    Args:
        evidence: Evidence of the job, which still exists.
        logs: Rank -> last lines, for ranks whose lines the evidence lacks.
    """
    observation = observe(evidence.trainjob)
    shown = {rank: log_of(evidence, rank) or logs.get(rank, ()) for rank in last_ranks(evidence)}
    return {
        "phase": str(observation.phase),
        "progress": observation.progress,
        "metrics": _public(observation.metrics),
        "logs": {rank: shown_lines(list(lines)[-LAST_LINES:]) for rank, lines in shown.items() if lines},
    }


def _blocker(evidence: Evidence, phase: Phase) -> Any:
    """The blocker of a job, as a waiter reports it."""
    if evidence.missing:
        return blockers.of_missing_runtime(evidence.missing[0]).blocker
    if phase is Phase.QUEUED:
        return blockers.in_workload(evidence.workload or {})
    if phase is Phase.SUSPENDED:
        return None
    finding = blockers.first(blockers.around(evidence.pods if evidence.pods_visible else None, evidence.events))
    return finding.blocker if finding else None


# ---------------------------------------------------------------- parts


def _spec(trainjob: TrainJob) -> Iterator[tuple[str, str]]:
    """The job's spec in short, with names of environment variables, but without their values."""
    spec, labels = mapping(trainjob, "spec"), mapping(trainjob, "metadata", "labels")
    trainer, runtime = mapping(spec, "trainer"), mapping(spec, "runtimeRef")
    kind = short_text(runtime.get("kind") or "ClusterTrainingRuntime")
    requested = mapping(trainer, "resourcesPerNode")
    amounts = mapping(requested, "limits") or mapping(requested, "requests")
    found = {
        "runtime": short_text(runtime.get("name")) + ("" if kind == "ClusterTrainingRuntime" else f" ({kind})"),
        "nodes": short_text(trainer.get("numNodes")),
        "processes": short_text(trainer.get("numProcPerNode")),
        "image": short_text(trainer.get("image")),
        "command": one_line(_command(trainer.get("command")), _COMMAND),
        "args": one_line(_command(trainer.get("args")), _COMMAND),
        "resources": ", ".join(f"{name} {short_text(amount)}" for name, amount in amounts.items()),
        "env": ", ".join(short_text(variable.get("name")) for variable in mappings(trainer, "env")),
        "dataset": short_text(mapping(spec, "initializer", "dataset").get("storageUri")),
        "model": short_text(mapping(spec, "initializer", "model").get("storageUri")),
        "patches": ", ".join(short_text(patch.get("manager")) for patch in mappings(spec, "runtimePatches")),
        "queue": short_text(labels.get(QUEUE_LABEL)),
        "deadline": f"{short_text(limit)} s" if (limit := spec.get("activeDeadlineSeconds")) else "",
    }
    return ((name, text) for name, text in found.items() if text)


def _command(words: object) -> str:
    """A command on one line, without the values of secret options."""
    shown, option = [], ""
    for word in words if isinstance(words, list | tuple) else ():
        text = str(word)
        name, equals, value = text.partition("=") if text.startswith("--") else (option, "", text)
        if name and names_a_secret(name.lstrip("-"), value):
            text = f"{name}={MASK}" if equals else MASK
        option = text if text.startswith("--") and not equals else ""
        shown.append(text if text.endswith(MASK) else shlex.quote(text))
    return public(" ".join(shown))


def _rank(pod: Mapping[str, Any]) -> Rank:
    trains = training_container(pod)
    found = [each for each in mappings(pod, "status", "containerStatuses") if each.get("name") == trains]
    status = found[0] if found else {}
    now, last = mapping(status, "state"), mapping(status, "lastState")
    ended = mapping(now, "terminated") or mapping(last, "terminated")
    starts = [mapping(state, kind).get("startedAt") for state in (last, now) for kind in ("running", "terminated")]
    code, restarts = ended.get("exitCode"), status.get("restartCount")
    return Rank(
        rank_of(pod),
        short_text(mapping(pod, "metadata").get("name")),
        short_text(mapping(pod, "spec").get("nodeName")),
        _state(pod, now),
        exit_code=code if isinstance(code, int) else None,
        restarts=restarts if isinstance(restarts, int) else 0,
        started=min((time for time in map(parse_time, starts) if time is not None), default=None),
        finished=parse_time(ended.get("finishedAt")),
    )


def _state(pod: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    phase = short_text(mapping(pod, "status").get("phase"))
    unscheduled = [
        short_text(each.get("reason"))
        for each in mappings(pod, "status", "conditions")
        if each.get("type") == "PodScheduled" and each.get("status") == "False"
    ]
    terminated = mapping(now, "terminated")
    return (
        short_text(mapping(pod, "status").get("reason"))
        or short_text(mapping(now, "waiting").get("reason"))
        or (short_text(terminated.get("reason")) or ("Error" if terminated.get("exitCode") else "Completed"))
        * bool(terminated)
        or ("Running" if "running" in now else "")
        or next(iter(unscheduled), "")
        or phase
    )


def _order(rank: Rank) -> tuple[str, int, str]:
    role, _, index = rank.rank.rpartition("-")
    return (role, int(index) if index.isdecimal() else 0, rank.pod)


def _events(events: Sequence[Mapping[str, Any]]) -> tuple[Event, ...]:
    made = []
    for event in sorted(events, key=blockers.event_time)[-_EVENTS:]:
        about = mapping(event, "involvedObject") or mapping(event, "regarding")
        count = event.get("count") or mapping(event, "series").get("count")
        made.append(
            Event(
                parse_time(blockers.event_time(event)),
                short_text(event.get("type")) or "Normal",
                short_text(event.get("reason")),
                f"{short_text(about.get('kind'))} {short_text(about.get('name'))}".strip(),
                short_text(" ".join(str(event.get("message") or event.get("note") or "").split())),
                count if isinstance(count, int) else 1,
            )
        )
    return tuple(made)


def shown_lines(log: Iterable[str]) -> list[str]:
    """The lines of one log without secrets and control sequences, each of at most 2,000 characters."""
    return [one_line(line, _LONGEST) for line in masked_lines(plain(line[: 2 * _LONGEST]) for line in log)]


def _without_secrets(diagnosis: Diagnosis) -> Diagnosis:
    """Mask a diagnosis that a person may have changed, since it can be an annotation of the job."""
    log = tuple(shown_lines(diagnosis.log))
    unseen = tuple(short_text(what) for what in diagnosis.unseen)
    return replace(
        diagnosis, log=log, unseen=unseen, summary=short_text(diagnosis.summary), advice=short_text(diagnosis.advice)
    )


def short_text(value: object) -> str:
    """The value as text of at most 2,000 characters on one line, without control sequences and secrets."""
    return "" if value is None else one_line(public(str(value)), _LONGEST)


def _public(values: Mapping[str, bool | float | str]) -> dict[str, bool | float | str]:
    """Metrics or outputs without secrets."""
    return {short_text(name): short_text(each) if isinstance(each, str) else each for name, each in values.items()}


def iso(time: datetime | None) -> str | None:
    """The time in RFC 3339, in UTC."""
    return time.isoformat().replace("+00:00", "Z") if time else None


def _times_as_text(values: dict[str, Any]) -> dict[str, Any]:
    return {name: iso(value) if isinstance(value, datetime) else value for name, value in values.items()}


def numeric(values: Mapping[str, Any]) -> dict[str, float]:
    """The metrics or outputs that are finite numbers."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def rounded(value: float | str) -> str:
    """A metric or an output for display: numbers with six digits, bools as in JSON."""
    if isinstance(value, bool | str):
        return str(value) if isinstance(value, str) else str(value).lower()
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def spent_text(spent: Mapping[str, Any]) -> str:
    """The goodput of a result or an error as text for a log; empty if it is unknown."""
    if not spent:
        return ""
    parts = [f"{activity} {short(seconds)}" for activity, seconds in spent["seconds"].items() if seconds]
    return f"goodput {100 * spent['ratio']:.1f}%: {', '.join(parts)}"


def short(seconds: float) -> str:
    """A duration in at most two units: ``0.4s``, ``12s``, ``1m20s``, ``2h05m``, ``3d04h``."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{int(seconds * 10) / 10:.1f}s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole:02}s" if minutes else f"{whole}s"
