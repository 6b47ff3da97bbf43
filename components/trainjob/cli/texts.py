"""Texts that the commands print: durations, numbers, tables, results, YAML and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import click
import yaml

from trainjob._backends.base import TrainJob
from trainjob._jobs.report import Report, facts, seconds_of
from trainjob._jobs.report_parts import Event, Rank
from trainjob._jobs.results import TrainJobResult
from trainjob._support.control_characters import is_safe, one_line
from trainjob._support.display import iso, rounded, short
from trainjob._support.numbers import count_of
from trainjob.cli.output import aligned, columns, fitted
from trainjob.job import KEY, JobRef
from trainjob.status import Phase, observe

_RANKS, _EVENTS = 50, 20  # fit on one or two screens
_KEY = 500  # characters
_STRAGGLERS = 3  # `report --json` has more

PHASE_COLORS = {
    Phase.COMPLETE: "green",
    Phase.FAILED: "red",
    Phase.CANCELLED: "red",
    Phase.DELETED: "red",
    Phase.RUNNING: "cyan",
    Phase.QUEUED: "yellow",
    Phase.SUSPENDED: "yellow",
    Phase.RESTARTING: "magenta",
}
_RANK_COLORS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


def describe(trainjob: TrainJob, now: datetime) -> dict[str, Any]:
    """The fields of a job in `list`, for JSON: those that its TrainJob object has."""
    key = (trainjob["metadata"].get("annotations") or {}).get(KEY, "")
    return facts(JobRef.of(trainjob), key, observe(trainjob), now)


def phase_styled(phase: Phase | str) -> str:
    """The phase in its color."""
    return click.style(f"{phase}", fg=PHASE_COLORS.get(Phase(phase), "blue"))


def table(jobs: Sequence[Mapping[str, Any]]) -> str:
    """A table of jobs."""
    rows = [["NAME", "PHASE", "ATTEMPT", "AGE", "DURATION", "PROGRESS", "KEY"]]
    for job in jobs:
        seconds, progress = job["seconds"], job["progress"]
        age, active = (short(seconds[name]) if name in seconds else "" for name in ("age", "active"))
        done = "" if progress is None else f"{progress:.0f}%"
        rows.append([job["name"], job["phase"], str(job["attempt"]), age, active, done, job["key"]])
    styled = [[name, phase_styled(phase), *more] for name, phase, *more in rows[1:]]
    return "\n".join(columns([rows[0], *styled]))


def status_text(report: Report) -> str:
    """The state of a job, and why it failed or is blocked, for people."""
    now, spec = report.observation, report.spec
    seconds = seconds_of(now, report.taken)
    nodes = spec.get("nodes", "1")
    because = ": ".join(filter(None, (now.reason, now.message)))
    shown = {
        "phase": phase_styled(now.phase) + (f"  {one_line(because, 1000)}" if because else ""),
        "progress": progress_text(now.progress, now.remaining_seconds),
        "metrics": joined(report.metrics),
        "outputs": joined(report.outputs),
        "runtime": f"{spec['runtime']}, {nodes} node{'' if nodes == '1' else 's'}" if "runtime" in spec else "",
        "key": one_line(report.key, _KEY),
        "attempt": str(report.ref.attempt),
        "created": f"{iso(now.created, 'seconds')} ({short(seconds['age'])} ago)" if now.created else "",
        "queued": short(seconds["queued"]) if seconds.get("queued") else "",
        "active": short(seconds["active"]) if "active" in seconds else "",
    }
    slow = [fitted(f"  {'warning':<8}  {each}") for each in report.stragglers[:_STRAGGLERS]]
    text = "\n".join([click.style(str(report.ref), bold=True), *aligned(shown), *slow])
    return f"{text}\n\n{_explanation(report)}" if report.troubled else text


def report_text(report: Report) -> str:
    """Everything about a job, for people."""
    parts = [status_text(report)]
    if not report.troubled and report.diagnosis.summary:
        parts.append(_explanation(report))
    spec = {name: text for name, text in report.spec.items() if name not in ("runtime", "nodes")}
    parts += [_section("spec", aligned(spec)), _section("ranks", _rank_lines(report.ranks))]
    parts.append(_section("events", [_event_line(event, report.taken) for event in report.events[-_EVENTS:]]))
    return "\n\n".join(filter(None, parts))


def _explanation(report: Report) -> str:
    return "\n".join(map(fitted, report.diagnosis.text().split("\n")))


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([click.style(title, bold=True), *lines]) if lines else ""


def _rank_lines(ranks: Sequence[Rank]) -> list[str]:
    """A table of the ranks; of many, the failing ones first."""
    chosen = ranks if len(ranks) <= _RANKS else sorted(ranks, key=lambda rank: not rank.bad)[:_RANKS]
    rows = [["RANK", "STATE", "EXIT", "RESTARTS", "STARTED", "ENDED", "NODE", "POD"]] if chosen else []
    for rank in chosen:
        code = "" if rank.exit_code is None else str(rank.exit_code)
        times = [iso(time, "seconds")[11:] if time else "" for time in (rank.started, rank.finished)]
        rows.append([rank.rank, rank.state, code, str(rank.restarts or ""), *times, rank.node, rank.pod])
    bad = [None, *(rank.bad for rank in chosen)]
    lines = [click.style(line, fg="red") if is_bad else line for line, is_bad in zip(columns(rows), bad, strict=False)]
    more = len(ranks) - len(chosen)
    return [f"  {line}" for line in lines] + ([f"  and {more} more"] if more else [])


def _event_line(event: Event, now: datetime) -> str:
    age = f"{short(now - event.time)} ago" if event.time else ""
    often = f" ({event.count} times)" if event.count > 1 else ""
    reason = click.style(event.reason, fg="yellow") if event.kind == "Warning" else event.reason
    return fitted(f"  {age:<11} {reason}  {event.about}: {event.message}{often}")


def progress_text(progress: float | None, remaining: float | None) -> str:
    """``42%  about 1m10s left``, as far as it is known."""
    done = "" if progress is None else f"{progress:.0f}%"
    left = "" if remaining is None or progress == 100 else f"about {short(remaining)} left"
    return "  ".join(filter(None, (done, left)))


def joined(values: Mapping[str, float | str]) -> str:
    """``loss 0.31  accuracy 0.9``."""
    return "  ".join(f"{name} {rounded(value)}" for name, value in values.items())


def result_text(result: TrainJobResult) -> str:
    """The result of a job that completed, for people."""
    seconds = result.seconds
    took = f" in {short(seconds['total'])}" if "total" in seconds else ""
    queued = f" ({short(seconds['queued'])} queued)" if seconds.get("queued") else ""
    lines = [f"{click.style('Complete', fg='green', bold=True)}{took}{queued}"]
    for title, values in (("metrics", result.metrics), ("outputs", result.outputs)):
        width = max(map(len, values), default=0)
        lines += [f"{title}:"] if values else []
        lines += [f"  {name:<{width}}  {rounded(value)}" for name, value in values.items()]
    return "\n".join(lines)


def last_text(last: Mapping[str, Any]) -> str:
    """The last state of a job that was deleted, for people."""
    shown = {
        "phase": last["phase"],
        "progress": progress_text(last["progress"], None),
        "metrics": joined(last["metrics"]),
    }
    lines = aligned(shown)
    for rank, log in last["logs"].items():
        lines += [f"last lines of {rank}:", *(f"  | {line}" for line in log)]
    return "\n".join(lines)


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, so that a function's source is readable."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def as_yaml(manifest: Mapping[str, Any]) -> str:
    """`manifest` in its order of fields; escaped if it has characters that are unsafe on a terminal."""
    shown, escaped = (
        yaml.dump(dict(manifest), Dumper=_Dumper, sort_keys=False, allow_unicode=readable, width=100).rstrip("\n")
        for readable in (True, False)
    )
    return shown if is_safe(shown) else escaped


def color_of(rank: str) -> str:
    """The color of a rank such as ``node-1``, the same in all output."""
    index = rank.rpartition("-")[2]
    return _RANK_COLORS[(count_of(index) or 0) % len(_RANK_COLORS)]
