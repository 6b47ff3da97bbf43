"""The log of a task, in groups that Airflow's UI folds.

A group is written at once, with its end: the UI of Airflow 3.0 shows no line of a group without an end, that of 3.3
folds it with all lines that follow, and a process can end at any line. So the ranks' lines, which people watch while
they are written, are in no group. Groups are not nested either, which the UI of 3.0 does not support.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainjob import Observation
    from trainjob._jobs.progress_log import ProgressLogger
    from trainjob.tuning import Trial


class Log(Protocol):
    """A logger of the standard library, or of Airflow, which uses structlog."""

    def info(self, event: str, /, *args: Any) -> Any:
        """Log an event."""

    def warning(self, event: str, /, *args: Any) -> Any:
        """Log a warning."""


_TITLE = 4  # metrics in the title of the result
_COMMAND = re.compile(r"::(?=(?:end)?group::)")


def write_group(log: Log, title: str, lines: Iterable[str]) -> None:
    """Log `lines` as a folded group, or only `title` if there are none.

    Args:
        log: The log of a task.
        title: The line that shows while the group is folded.
        lines: The lines of the group.
    """
    shown = [*lines]
    if not shown:
        log.info("%s", _text(title))
        return
    log.info("::group::%s", _text(title))
    for line in shown:
        log.info("%s", _text(line))
    log.info("::endgroup::")


def progress_logger(log: Log) -> ProgressLogger:
    """Create a logger that writes a job's progress and its ranks' log lines to `log`, the log of a task."""
    from trainjob._jobs.progress_log import PROGRESS_SECONDS, LogSink, ProgressLogger, phase_text
    from trainjob._support.control_characters import plain

    class Sink(LogSink):
        """Writes a group for each phase."""

        shown: frozenset[str] = frozenset()

        def phase(self, observation: Observation) -> None:
            title = plain(f"TrainJob is {phase_text(observation)}")
            new = [each for each in _details(observation) if each not in self.shown]
            self.shown |= {*new}
            if len(new) == 1:
                title, new = f"{title} ({new[0]})", []
            write_group(log, title, new)

    sink = Sink(lambda line: log.info("%s", _text(line)), lambda line: log.warning("%s", _text(line)))
    return ProgressLogger(sink, progress_seconds=PROGRESS_SECONDS, limited=True)


def write_result(log: Log, result: Mapping[str, Any]) -> None:
    """Log the metrics, the outputs and the times of a job that completed.

    Args:
        log: The log of a task.
        result: What `trainjob.TrainJobResult.as_dict` returns.
    """
    from trainjob._support.control_characters import plain
    from trainjob._support.display import rounded, short

    values = {part: {name: rounded(value) for name, value in result[part].items()} for part in ("metrics", "outputs")}
    lines = [f"{name}: {text}" for texts in values.values() for name, text in texts.items()]
    lines += [f"{name}: {short(seconds)}" for name, seconds in result["seconds"].items()]
    shown = [f"{name} {text}" for name, text in values["metrics"].items()] or [*values["outputs"]]
    more = [f"{len(shown) - _TITLE} more"] if len(shown) > _TITLE else []
    title = ", ".join([*shown[:_TITLE], *more]) or "no metrics and no outputs"
    write_group(log, plain(f"Result: {title}"), map(plain, lines))


class StudyLog:
    """Writes a line for each trial that is launched or ends to the log of a task.

    Args:
        log: The log.
        metric: Metric of the study.
    """

    def __init__(self, log: Log, metric: str) -> None:
        self._log = log
        self._metric = metric
        self._states: dict[int, str] | None = None

    def change(self, trials: Sequence[Trial]) -> None:
        """Take all trials after a change."""
        if self._states is None:
            self._states = {each.number: each.state for each in trials if each.ended}
            if self._states:
                self._log.info("the study continues: %d trials have ended before", len(self._states))
        for trial in trials:
            if trial.job and self._states.get(trial.number) != trial.state:
                self._states[trial.number] = trial.state
                write = self._log.warning if trial.state == "failed" else self._log.info
                write("%s", _text(self._line(trial)))

    def _line(self, trial: Trial) -> str:
        from trainjob._support.control_characters import plain
        from trainjob._support.display import rounded

        parts = [f"trial {trial.number} is {trial.state}"]
        if trial.ended and trial.value is not None:
            parts.append(f"{self._metric} {rounded(trial.value)}")
        if trial.state == "failed":
            parts.append(trial.reason)
        parts += [f"{name} {rounded(value)}" for name, value in trial.parameters.items()]
        return plain(", ".join([*parts, f"job {trial.job}"]))


def write_study(log: Log, result: Mapping[str, Any]) -> None:
    """Log the best trial and the counts of a study that has ended.

    Args:
        log: The log of a task.
        result: What `trainjob.tuning.StudyResult.summary` returns.
    """
    from trainjob._support.control_characters import plain
    from trainjob._support.display import rounded

    best = result["best"]
    counts = ", ".join(f"{count} {state}" for state, count in result["counts"].items())
    importances = sorted(result["importances"].items(), key=lambda pair: -pair[1])
    lines = [
        f"ended: {result['reason']}",
        f"trials: {counts}",
        *(f"{name}: {rounded(value)}" for name, value in best["parameters"].items()),
        *(f"output {name}: {value}" for name, value in best["outputs"].items()),
        *(f"importance of {name}: {share:.0%}" for name, share in importances),
        f"job of the best trial: {best['job']}",
    ]
    title = f"Result: {result['metric']} {rounded(best['value'])} of trial {best['number']}"
    write_group(log, plain(title), map(plain, lines))


def _details(observation: Observation) -> list[str]:
    """What is known about a phase besides its name and message."""
    from trainjob._support.control_characters import plain

    known: dict[str, object] = {
        "reason": observation.reason,
        "what to do": observation.advice,
        "created": observation.created,
        "waiting since": observation.waiting_since,
        "admitted": observation.admitted,
        "ended": observation.finished,
    }
    texts = {name: f"{at:%Y-%m-%d %H:%M:%S} UTC" if isinstance(at, datetime) else at for name, at in known.items()}
    return [plain(f"{name}: {text}") for name, text in texts.items() if text]


def _text(line: str) -> str:
    """`line` without Airflow's commands for groups: a rank that prints one would fold the lines of the others."""
    return _COMMAND.sub(": :", line)
