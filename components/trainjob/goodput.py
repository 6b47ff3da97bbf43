"""What is measured: activities, segments, and their sums as seconds, GPU-hours and cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainjob._support.display import iso
from trainjob.status import Phase


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
    """The steps paused for `STALL_SECONDS` or a shorter ``stall_timeout``, without a checkpoint or an evaluation."""
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


@dataclass(frozen=True)
class Segment:
    """A time with one activity.

    Attributes:
        activity: Its class.
        start: Begin in Unix time, seconds.
        end: End in Unix time, seconds; the start of the next segment.
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
            "start": iso(self.segments[0].start, "milliseconds") if self.segments else None,
            "end": iso(self.segments[-1].end, "milliseconds") if self.segments else None,
            **sums(self.seconds, self.gpu_hours, price),
            "sources": {
                str(activity): {str(source): round(seconds, 3) for source, seconds in known.items()}
                for activity, known in self.sources.items()
            },
            "segments": [
                {
                    "activity": str(each.activity),
                    "start": iso(each.start, "milliseconds"),
                    "end": iso(each.end, "milliseconds"),
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
