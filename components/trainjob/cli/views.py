"""Output of a command that waits: plain lines or JSON. `trainjob.cli.live` is the view on a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Self

import click

from trainjob._diagnosis import serialization
from trainjob._jobs.progress_log import ProgressLogger
from trainjob._jobs.results import TrainJobResult
from trainjob._support.log_lines import STATE_SECONDS, LogLine
from trainjob.cli.output import echo
from trainjob.cli.texts import as_json, color_of, joined, phase_styled, progress_text, result_text
from trainjob.job import JobRef
from trainjob.status import Observation, Phase
from trainjob.verdicts import Diagnosis


def drop_stdout() -> None:
    """Redirect stdout to /dev/null: its reader has closed it, which Python would report at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class View:
    """Base of all views. Shows what its `ProgressLogger` chooses.

    Args:
        logs: Whether log lines are shown.

    Attributes:
        closed: Whether the reader has closed stdout (``| head``). The command keeps waiting.
    """

    state_seconds = STATE_SECONDS
    """Seconds between two states of a progress bar."""
    progress_step = 0.0
    """Percentage points between two reports of progress."""

    def __init__(self, *, logs: bool = True) -> None:
        self.logs = logs
        self.closed = False
        self._latest: Observation | None = None
        self._logger = ProgressLogger(self, progress_step=self.progress_step)

    def write(self, text: str) -> None:
        """Write a line to stdout."""
        try:
            echo(text)
        except BrokenPipeError:
            self.closed = True
            drop_stdout()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def launched(self, ref: JobRef, key: str, *, adopted: bool, attach: str) -> None:
        """Show that a job was launched or adopted."""
        done = "adopted" if adopted else "launched"
        echo(f"{done} {ref} (attempt {ref.attempt}, key {key})\nto wait for it elsewhere: {attach}", err=True)
        self.watching(ref)

    def watching(self, ref: JobRef) -> None:
        """Begin to show `ref`."""

    def follow(self, before: JobRef, ref: JobRef) -> None:
        """Show `ref` from now on, another attempt of the same key."""
        self.notice(f"TrainJob {before} was replaced by {ref}, which is waited for from now on")
        self._latest = None
        self._logger = ProgressLogger(self, progress_step=self.progress_step)
        self.watching(ref)

    def change(self, observation: Observation, notice: str) -> None:
        """Take a new observation and its notice."""
        self._latest = observation
        self._logger.change(observation, notice)

    def phase(self, observation: Observation) -> None:
        """Show another phase, or another reason for it."""

    def progress(self, observation: Observation) -> None:
        """Show progress or metrics that the script reported."""

    def log(self, line: LogLine) -> None:
        """Show a line that a rank wrote."""

    def notice(self, text: str) -> None:
        """Show a notice for people."""

    def crash(self, diagnosis: Diagnosis) -> None:
        """Show that a rank crashed while the job keeps running."""
        self.notice("\n".join(serialization.warning(diagnosis)))

    def result(self, result: TrainJobResult) -> None:
        """Show the result of a job that completed."""

    def next_steps(self, lines: Sequence[str]) -> None:
        """Print commands for more about a job that has ended."""
        echo("\n".join(lines), err=True)

    def interrupted(self, text: str) -> None:
        """Show how the command ends after Ctrl-C."""
        echo(text, err=True)


class PlainView(View):
    """One line per change: ``<time> <phase>``, ``[node-0] text``.

    Args:
        logs: Whether log lines are shown.
        timestamps: Whether log lines begin with their time.
    """

    progress_step = 10.0

    def __init__(self, *, logs: bool = True, timestamps: bool = False) -> None:
        super().__init__(logs=logs)
        self._timestamps = timestamps
        self._last = ""

    def __exit__(self, *_: object) -> None:
        if self._last:
            self.write(self._last)

    def phase(self, observation: Observation) -> None:
        """Print the phase; a final phase is printed after the last lines of the ranks."""
        message = f": {observation.message}" if observation.message else ""
        line = f"{_now()} {phase_styled(observation.phase)}{message}"
        if observation.phase.terminal:
            self._last = line
        else:
            self.write(line)

    def progress(self, observation: Observation) -> None:
        """Print progress and metrics."""
        text = progress_text(observation.progress, observation.remaining_seconds)
        self.write("  ".join(filter(None, (f"{_now()} progress {text}", joined(observation.metrics)))))

    def log(self, line: LogLine) -> None:
        """Print the line with its rank."""
        time = f"{line.time} " if self._timestamps else ""
        self.write(f"{time}{click.style(f'[{line.rank}]', fg=color_of(line.rank))} {line.text}")

    def notice(self, text: str) -> None:
        """Print the notice on stderr."""
        echo(f"{_now()} {text}", err=True)

    def result(self, result: TrainJobResult) -> None:
        """Print the result."""
        self._last = ""
        self.write(f"{_now()} {result_text(result)}")


class JsonView(View):
    """One JSON object per line, with its kind in ``event``."""

    def _write(self, event: str, **fields: Any) -> None:
        self.write(as_json({"event": event, **fields}))

    def launched(self, ref: JobRef, key: str, *, adopted: bool, attach: str) -> None:  # noqa: ARG002
        """Print a ``launched`` event."""
        self._write("launched", **vars(ref), key=key, adopted=adopted)

    def follow(self, before: JobRef, ref: JobRef) -> None:
        """Print a ``followed`` event."""
        super().follow(before, ref)
        self._write("followed", **vars(ref), instead_of=before.name)

    def phase(self, observation: Observation) -> None:
        """Print a ``phase`` event."""
        now = observation
        self._write("phase", time=_now(), phase=str(now.phase), reason=now.reason, message=now.message)

    def progress(self, observation: Observation) -> None:
        """Print a ``progress`` event."""
        now = observation
        self._write(
            "progress", time=_now(), progress=now.progress, remaining_seconds=now.remaining_seconds, metrics=now.metrics
        )

    def log(self, line: LogLine) -> None:
        """Print a ``log`` event."""
        state = {"transient": True} if line.transient else {}
        self._write("log", time=line.time, rank=line.rank, text=line.text, **state)

    def notice(self, text: str) -> None:
        """Print a ``notice`` event."""
        self._write("notice", time=_now(), message=text)

    def crash(self, diagnosis: Diagnosis) -> None:
        """Print a ``crash`` event."""
        self._write("crash", time=_now(), **serialization.pack_diagnosis(diagnosis))

    def result(self, result: TrainJobResult) -> None:
        """Print a ``result`` event."""
        self._write("result", phase=str(Phase.COMPLETE), **result.as_dict())

    def next_steps(self, lines: Sequence[str]) -> None:
        """Print nothing."""

    def interrupted(self, text: str) -> None:
        """Print an ``interrupted`` event."""
        self._write("interrupted", message=text)
