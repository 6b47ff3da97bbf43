"""Which changes of a job are shown while a waiter waits, and in which words: for Airflow, KFP and the command line.

`ProgressLogger` decides what is shown; a sink shows it. `LogSink` writes lines of text to a log.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from trainjob._diagnosis.serialization import warning
from trainjob._support.control_characters import plain
from trainjob._support.display import rounded, short

if TYPE_CHECKING:
    from trainjob._support.log_lines import LogLine
    from trainjob.errors import Diagnosis
    from trainjob.status import Observation

# Limit of the ranks' lines, and its interval: writing lines blocks the event loop that all triggers of an Airflow
# triggerer share, and logs of gigabytes fill its memory (apache/airflow#73044).
MAX_LINES, MAX_LINES_SECONDS = 2000, 10.0
PROGRESS_SECONDS = 5.0
"""Between two lines about progress; the job's status has what is left out."""

_METRICS = 8


class Sink(Protocol):
    """Shows what a `ProgressLogger` has chosen."""

    def phase(self, observation: Observation) -> None:
        """The job is in another phase, or the reason for its phase has changed."""

    def progress(self, observation: Observation) -> None:
        """The training script reported progress or metrics."""

    def notice(self, text: str) -> None:
        """Something that a person should know, such as an outage."""

    def crash(self, diagnosis: Diagnosis) -> None:
        """A rank crashed, and the job keeps running."""

    def log(self, line: LogLine) -> None:
        """A rank wrote a line."""


class ProgressLogger:
    """Passes on each change of a job once, progress at intervals, and the ranks' lines.

    Args:
        sink: Shows them.
        progress_seconds: Shortest time between two reports of progress; the last one is always shown.
        progress_step: Smallest difference between two reports of progress, in percentage points; 100 % is always shown.
        limited: Drop lines of the ranks beyond `MAX_LINES` in `MAX_LINES_SECONDS`, and show how many were dropped.
    """

    def __init__(
        self, sink: Sink, *, progress_seconds: float = 0.0, progress_step: float = 0.0, limited: bool = False
    ) -> None:
        self._sink = sink
        self._progress_seconds, self._progress_step = progress_seconds, progress_step
        self._phase: tuple[str, str] | None = None
        self._progress: object = None
        self._progress_time, self._percent = -math.inf, -math.inf
        self._limited = limited
        self._window, self._lines, self._dropped = time.monotonic(), 0, 0

    def change(self, observation: Observation, notice: str = "") -> None:
        """Take a new observation, and the notice that came with it."""
        if notice:
            self._sink.notice(notice)
        phase = (str(observation.phase), observation.message)
        if phase != self._phase:
            self._phase = phase
            self._sink.phase(observation)
        if (observation.progress is not None or observation.metrics) and self._progress_is_due(observation):
            self._sink.progress(observation)

    def _progress_is_due(self, observation: Observation) -> bool:
        reported = (observation.progress, observation.remaining_seconds, {**observation.metrics})
        now, percent = time.monotonic(), observation.progress
        if reported == self._progress:
            return False
        if not observation.phase.terminal and now < self._progress_time + self._progress_seconds:
            return False
        if self._progress_step:
            next_step = self._percent + self._progress_step
            if percent is None or not (percent >= next_step or percent == 100 != self._percent):
                return False
            self._percent = percent
        self._progress, self._progress_time = reported, now
        return True

    def crash(self, diagnosis: Diagnosis) -> None:
        """Take the diagnosis of a rank that crashed while the job keeps running."""
        self._sink.crash(diagnosis)

    def line(self, line: LogLine) -> None:
        """Take a line that a rank wrote."""
        if self._limited:
            now = time.monotonic()
            if now - self._window >= MAX_LINES_SECONDS:
                self.end()
                self._window, self._lines = now, 0
            if self._lines >= MAX_LINES:
                self._dropped += 1
                return
            self._lines += 1
        self._sink.log(line)

    def end(self) -> None:
        """Show how many lines were dropped; no more lines will come, or a new interval begins."""
        if self._dropped:
            limit = f"more than {MAX_LINES} in {MAX_LINES_SECONDS:.0f} s"
            self._sink.notice(f"({self._dropped} lines were left out: {limit})")
            self._dropped = 0


class LogSink:
    """Writes lines of text, without control sequences, to a log such as that of an Airflow task or a KFP step.

    Args:
        info: Writes one line.
        warn: Writes one line about a crash; `info` if left out.
        job: What the lines call the job; they do not name it if left out.
    """

    def __init__(
        self, info: Callable[[str], object], warn: Callable[[str], object] | None = None, *, job: str = ""
    ) -> None:
        self._info, self._warn = info, warn or info
        self._job, self._prefix = job or "TrainJob", f"{job}: " if job else ""

    def phase(self, observation: Observation) -> None:
        """Write ``TrainJob is Running``, with the reason if one is known."""
        self._info(plain(f"{self._job} is {phase_text(observation)}"))

    def progress(self, observation: Observation) -> None:
        """Write ``progress: 42 %, about 1m10s left, loss 0.31``."""
        self._info(plain(f"{self._prefix}{progress_text(observation)}"))

    def notice(self, text: str) -> None:
        """Write the notice."""
        self._info(plain(f"{self._prefix}{text}"))

    def crash(self, diagnosis: Diagnosis) -> None:
        """Write which rank crashed and why, with its last lines."""
        for line in warning(diagnosis):
            self._warn(plain(line))

    def log(self, line: LogLine) -> None:
        """Write ``[node-0] text``."""
        self._info(plain(str(line)))


def phase_text(observation: Observation) -> str:
    """``Queued: waiting for admission``: the phase, and the reason if one is known."""
    return f"{observation.phase}" + (f": {observation.message}" if observation.message else "")


def progress_text(observation: Observation) -> str:
    """``progress: 42 %, about 1m10s left, loss 0.31``; without a percentage ``metrics: loss 0.31``."""
    metrics = [f"{name} {rounded(value)}" for name, value in list(observation.metrics.items())[:_METRICS]]
    if observation.progress is None:
        return f"metrics: {', '.join(metrics)}"
    remaining = observation.remaining_seconds
    left = [f"about {short(remaining)} left"] if remaining else []
    return ", ".join([f"progress: {observation.progress:g} %", *left, *metrics])
