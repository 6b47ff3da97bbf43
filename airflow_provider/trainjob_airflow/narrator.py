"""What a task's log says about its job while it goes on."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainjob import Diagnosis, LogLine, Observation

# At most so many lines in so many seconds: writing them blocks the event loop that all triggers of a triggerer share,
# and a task log of gigabytes helps nobody (apache/airflow#73044: logs that took a triggerer's memory).
_LINES, _SECONDS = 2000, 10.0
_METRICS = 8
_PROGRESS_SECONDS = 5.0  # between two lines about progress; what is between them is in the job's status


class Log(Protocol):
    """What is written to: the standard library's loggers, and Airflow's own, which are structlog's."""

    def info(self, event: str, /, *args: Any) -> Any:
        """Something happened."""

    def warning(self, event: str, /, *args: Any) -> Any:
        """Something bad happened."""


class ProgressLogger:
    """Tells a log what happens to a job: each change once, progress when it moved, lines within bounds.

    Args:
        log: The task's.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._phase, self._progress, self._progressed = "", "", -_PROGRESS_SECONDS
        self._window, self._lines, self._dropped = time.monotonic(), 0, 0

    def _tell(self, event: str, *args: Any) -> None:
        self._log.info(event, *map(_plain, args))

    def change(self, observation: Observation, notice: str = "") -> None:
        """An observation and its notice."""
        phase = f"{observation.phase}" + (f": {observation.message}" if observation.message else "")
        if phase != self._phase:
            self._phase = phase
            self._tell("TrainJob is %s", phase)
        if notice:
            self._tell("%s", notice)
        progress = _progress(observation)
        due = observation.phase.terminal or time.monotonic() >= self._progressed + _PROGRESS_SECONDS
        if progress and progress != self._progress and due:
            self._progress, self._progressed = progress, time.monotonic()
            self._tell("progress: %s", progress)

    def crash(self, diagnosis: Diagnosis) -> None:
        """A rank crashed, and the job goes on."""
        from trainjob.serialization import warning

        for line in warning(diagnosis):
            self._log.warning("%s", _plain(line))

    def line(self, line: LogLine) -> None:
        """A line that a rank wrote."""
        now = time.monotonic()
        if now - self._window >= _SECONDS:
            self.end()
            self._window, self._lines = now, 0
        if self._lines >= _LINES:
            self._dropped += 1
            return
        self._lines += 1
        self._tell("%s", line)

    def end(self) -> None:
        """No more lines will come."""
        if self._dropped:
            self._tell("(%d lines were left out: more than %d in %.0f s)", self._dropped, _LINES, _SECONDS)
            self._dropped = 0


def _plain(value: Any) -> Any:
    """A value for the log: text, also that of a rank, without control sequences."""
    from trainjob.sanitizing import plain

    return value if isinstance(value, int | float) else plain(str(value))


def _progress(observation: Observation) -> str:
    if observation.progress is None:
        return ""
    from trainjob.report import rounded

    metrics = list(observation.metrics.items())[:_METRICS]
    parts = [f"{observation.progress:g} %", *(f"{name} {rounded(value)}" for name, value in metrics)]
    if observation.remaining_seconds:
        parts.append(f"about {timedelta(seconds=round(observation.remaining_seconds))} left")
    return ", ".join(parts)
