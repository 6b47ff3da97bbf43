"""Prints what happens to a job while a command waits for it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Self

import click

from trainjob._diagnosis import serialization
from trainjob._jobs.progress_log import ProgressLogger
from trainjob._jobs.results import TrainJobResult
from trainjob._support.log_lines import STATE_SECONDS, TERMINAL_SECONDS, LogLine
from trainjob.cli.bars import Update, bar
from trainjob.cli.output import redrawn
from trainjob.cli.session import Session, now
from trainjob.cli.texts import color_of, joined, phase_styled, progress_text, result_text
from trainjob.errors import Diagnosis
from trainjob.job import JobRef
from trainjob.status import Observation, Phase

_PROGRESS_STEP = 10.0  # percentage points between two lines


class Shown:
    """One line or event per change, ``<time> <phase>`` and ``[node-0] text``; progress as a bar on a terminal.

    The sink of a `ProgressLogger`, which chooses what is shown.

    Args:
        session: Prints it.
        timestamps: Whether log lines have their time.
    """

    def __init__(self, session: Session, *, timestamps: bool = False) -> None:
        self.session = session
        on_terminal = redrawn(sys.stdout) and redrawn(sys.stderr)
        self._has_bar = on_terminal and not session.as_json  # the reader of a pipe wants lines
        self.state_seconds = TERMINAL_SECONDS if on_terminal else STATE_SECONDS
        self._done: float | None = None
        self._timestamps = timestamps
        self._stack = ExitStack()
        self._bar: Update | None = None
        self._last = ""
        self._restart()

    def _restart(self) -> None:
        each = self.session.as_json or self._bar is not None
        self._logger = ProgressLogger(self, progress_step=0.0 if each else _PROGRESS_STEP)

    def change(self, observation: Observation, notice: str) -> None:
        """Take a new observation and its notice."""
        self._logger.change(observation, notice)

    def __enter__(self) -> Self:
        self._bar = self._stack.enter_context(bar(shown=self._has_bar))
        self._restart()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Print the final phase, which comes after the last lines of the ranks."""
        self._stack.close()
        if self._last and not self.session.as_json:
            self.session.event("phase", self._last)
        self._last = ""

    def follow(self, before: JobRef, ref: JobRef) -> None:
        """Show `ref` from now on, another attempt of the same key."""
        self.notice(f"TrainJob {before} was replaced by {ref}, which is waited for from now on")
        self._last, self._done = "", None
        self._restart()
        self.session.event("followed", **vars(ref), instead_of=before.name)

    def phase(self, observation: Observation) -> None:
        """Print the phase."""
        message = f": {observation.message}" if observation.message else ""
        line, time, phase = "", now(), observation.phase
        if phase.terminal:
            self._last = f"{time} {phase_styled(phase)}{message}"
        else:
            line = f"{time} {phase_styled(phase)}{message}"
        self.session.event(
            "phase", line, time=time, phase=str(phase), reason=observation.reason, message=observation.message
        )

    def progress(self, observation: Observation) -> None:
        """Print progress and metrics, or redraw the bar."""
        time, done, remaining = now(), observation.progress, observation.remaining_seconds
        metrics = joined(observation.metrics)
        if self._bar is not None:
            self._done = done
            left = progress_text(None, None if done == 100 else remaining)
            self._bar(done or 0, None if done is None else 100, "  ".join(filter(None, (left, metrics))))
            return
        line = "  ".join(filter(None, (f"{time} progress {progress_text(done, remaining)}", metrics)))
        self.session.event(
            "progress", line, time=time, progress=done, remaining_seconds=remaining, metrics=observation.metrics
        )

    def log(self, line: LogLine) -> None:
        """Print a line that a rank wrote; a state of a progress bar is shown behind the bar, if there is one."""
        if self._bar is not None and line.transient:
            self._bar(self._done or 0, None if self._done is None else 100, str(line))
            return
        time = f"{line.time} " if self._timestamps else ""
        state = {"transient": True} if line.transient else {}
        text = f"{time}{click.style(f'[{line.rank}]', fg=color_of(line.rank))} {line.text}"
        self.session.event("log", text, time=line.time, rank=line.rank, text=line.text, **state)

    def notice(self, text: str) -> None:
        """Print a notice on stderr."""
        time = now()
        self.session.event("notice", f"{time} {text}", err=True, time=time, message=text)

    def crash(self, diagnosis: Diagnosis) -> None:
        """Print which rank crashed, while the job keeps running."""
        time = now()
        text = f"{time} " + "\n".join(serialization.warning(diagnosis))
        self.session.event("crash", text, err=True, time=time, **serialization.pack_diagnosis(diagnosis))

    def result(self, result: TrainJobResult) -> None:
        """Print the result of a job that completed."""
        self._last = ""
        self.end()
        self.session.event("result", f"{now()} {result_text(result)}", phase=str(Phase.COMPLETE), **result.as_dict())
