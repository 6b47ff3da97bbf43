"""What the commands print: durations, numbers, tables, results, YAML and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click
import yaml

from trainjob.backends.base import TrainJob
from trainjob.manifest import ATTEMPT, KEY
from trainjob.status import Observation, Phase, observe
from trainjob.waiting import TrainJobResult

PHASE_COLOURS = {
    Phase.COMPLETE: "green",
    Phase.FAILED: "red",
    Phase.DELETED: "red",
    Phase.RUNNING: "cyan",
    Phase.QUEUED: "yellow",
    Phase.SUSPENDED: "yellow",
    Phase.RESTARTING: "magenta",
}
_RANK_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def short(seconds: float) -> str:
    """A duration in at most two units: ``0.4s``, ``12s``, ``1m20s``, ``2h05m``, ``3d04h``."""
    seconds = max(0.0, seconds)
    if seconds < 1:
        return f"{math.floor(seconds * 10) / 10:.1f}s"
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{whole:02}s" if minutes else f"{whole}s"


def number(value: float | str) -> str:
    """A metric as people write it."""
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def seconds_of(observation: Observation, now: datetime | None = None) -> dict[str, float]:
    """``age``, ``queued`` (from creation to admission) and ``active`` (from admission to the end), as far as known."""
    now = now or datetime.now(UTC)
    created, admitted, end = observation.created, observation.admitted, observation.finished or now
    spans = {"age": (created, now), "queued": (created, admitted), "active": (admitted, end)}
    return {name: max(0.0, (b - a).total_seconds()) for name, (a, b) in spans.items() if a and b}


def describe(trainjob: TrainJob) -> dict[str, Any]:
    """What `status` and `list` say of a job, for JSON."""
    metadata, observation = trainjob["metadata"], observe(trainjob)
    times = {name: getattr(observation, name) for name in ("created", "admitted", "finished")}
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "uid": metadata["uid"],
        "attempt": int((metadata.get("labels") or {}).get(ATTEMPT, 1)),
        "key": (metadata.get("annotations") or {}).get(KEY, ""),
        "phase": str(observation.phase),
        "reason": observation.reason,
        "message": observation.message,
        **{name: time.isoformat().replace("+00:00", "Z") if time else None for name, time in times.items()},
        "seconds": seconds_of(observation),
        "progress": observation.progress,
        "remaining_seconds": observation.remaining_seconds,
        "metrics": dict(observation.metrics),
    }


def phase_styled(phase: Phase | str, width: int = 0) -> str:
    """The phase, in its colour where there are colours."""
    return click.style(f"{phase:<{width}}", fg=PHASE_COLOURS.get(Phase(phase), "blue"))


def table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """One line for each of `describe`'s jobs, as wide as they need: a pipe must not cut names off."""
    rows = [["NAME", "PHASE", "ATTEMPT", "AGE", "DURATION", "PROGRESS", "KEY"]]
    for job in jobs:
        seconds, progress = job["seconds"], job["progress"]
        age, active = (short(seconds[name]) if name in seconds else "" for name in ("age", "active"))
        done = "" if progress is None else f"{progress:.0f}%"
        rows.append([job["name"], job["phase"], str(job["attempt"]), age, active, done, job["key"]])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)]
        if row is not rows[0]:
            cells[1] = phase_styled(row[1], widths[1])
        lines.append("   ".join(cells).rstrip())
    return "\n".join(lines)


def status_text(job: Mapping[str, Any], trainjob: TrainJob) -> str:
    """`describe`'s answer for people."""
    spec, seconds = trainjob["spec"], job["seconds"]
    nodes = (spec.get("trainer") or {}).get("numNodes") or 1
    because = ": ".join(filter(None, (job["reason"], job["message"])))
    facts = {
        "phase": phase_styled(job["phase"]) + (f"  {because}" if because else ""),
        "progress": progress_text(job["progress"], job["remaining_seconds"]),
        "metrics": joined(job["metrics"]),
        "outputs": joined(job.get("outputs") or {}),
        "runtime": f"{spec['runtimeRef']['name']}, {nodes} node{'s' if nodes > 1 else ''}",
        "key": job["key"],
        "attempt": str(job["attempt"]),
        "created": f"{job['created']} ({short(seconds['age'])} ago)" if job["created"] else "",
        "queued": short(seconds["queued"]) if seconds.get("queued") else "",
        "active": short(seconds["active"]) if "active" in seconds else "",
    }
    lines = [f"  {name:<9} {text}" for name, text in facts.items() if text]
    return "\n".join([click.style(f"{job['namespace']}/{job['name']}", bold=True), *lines])


def progress_text(progress: float | None, remaining: float | None) -> str:
    """``42%  ETA 1m10s``, as far as known."""
    done = "" if progress is None else f"{progress:.0f}%"
    eta = "" if remaining is None or progress == 100 else f"ETA {short(remaining)}"
    return "  ".join(filter(None, (done, eta)))


def joined(values: Mapping[str, float | str]) -> str:
    """``loss 0.31  accuracy 0.9``."""
    return "  ".join(f"{name} {number(value)}" for name, value in values.items())


def result_text(result: TrainJobResult) -> str:
    """A good result for people."""
    seconds = result.seconds
    took = f" in {short(seconds['total'])}" if "total" in seconds else ""
    queued = f" ({short(seconds['queued'])} queued)" if seconds.get("queued") else ""
    lines = [f"{click.style('Complete', fg='green', bold=True)}{took}{queued}"]
    for title, values in (("metrics", result.metrics), ("outputs", result.outputs)):
        width = max(map(len, values), default=0)
        lines += [f"{title}:"] if values else []
        lines += [f"  {name:<{width}}  {number(value)}" for name, value in values.items()]
    return "\n".join(lines)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that a function's source can be read."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def as_yaml(manifest: Mapping[str, Any]) -> str:
    """`manifest` in its own order."""
    return yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100).rstrip("\n")


def as_json(value: Any) -> str:
    """`value` on one line; NaN and infinity as text, since JSON has neither."""
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def colour_of(rank: str) -> str:
    """The colour of ``node-1``; the same wherever that rank is shown."""
    index = rank.rpartition("-")[2]
    return _RANK_COLOURS[int(index) % len(_RANK_COLOURS) if index.isdigit() else 0]
