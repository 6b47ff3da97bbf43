"""What is seen while a job is waited for: plain lines, or JSON. On a terminal it is `trainjob.cli.live`."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Self

import click

from trainjob import serialization
from trainjob.cli.output import echo
from trainjob.cli.texts import as_json, colour_of, joined, phase_styled, progress_text, result_text
from trainjob.diagnosis import Diagnosis
from trainjob.logs import STATE_SECONDS, LogLine
from trainjob.manifest import JobRef
from trainjob.progress_log import ProgressLogger
from trainjob.status import Observation, Phase
from trainjob.waiting import TrainJobResult


def drop_stdout() -> None:
    """Send the rest of stdout nowhere: its reader is gone, and Python would complain about that at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class View:
    """What all views have in common.

    Args:
        logs: Whether log lines are shown.

    Attributes:
        closed: Whether the reader of stdout is gone (``| head``). The job is waited for all the same.
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
        """A line on stdout."""
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
        """A job was launched or adopted."""
        done = "adopted" if adopted else "launched"
        echo(f"{done} {ref} (attempt {ref.attempt}, key {key})\nto wait for it elsewhere: {attach}", err=True)
        self.watching(ref)

    def watching(self, ref: JobRef) -> None:
        """From now on, it is about `ref`."""

    def change(self, observation: Observation, notice: str) -> None:
        """There is news of the job."""
        self._latest = observation
        self._logger.change(observation, notice)

    def phase(self, observation: Observation) -> None:
        """Another phase, or another reason for it."""

    def progress(self, observation: Observation) -> None:
        """The script reported progress or metrics."""

    def log(self, line: LogLine) -> None:
        """A rank wrote a line."""

    def notice(self, text: str) -> None:
        """Something that a person should know."""

    def crash(self, diagnosis: Diagnosis) -> None:
        """A rank crashed, and the job goes on."""
        self.notice("\n".join(serialization.warning(diagnosis)))

    def result(self, result: TrainJobResult) -> None:
        """The job ended well."""

    def interrupted(self, text: str) -> None:
        """It is over because of Ctrl-C."""
        echo(text, err=True)


class PlainView(View):
    """A line for each thing that happens: ``<time> <phase>``, ``[node-0] text``.

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
        """See `View.phase`. That the job has ended is said after what its ranks wrote last."""
        message = f": {observation.message}" if observation.message else ""
        line = f"{_now()} {phase_styled(observation.phase)}{message}"
        if observation.phase.terminal:
            self._last = line
        else:
            self.write(line)

    def progress(self, observation: Observation) -> None:
        """See `View.progress`."""
        text = progress_text(observation.progress, observation.remaining_seconds)
        self.write("  ".join(filter(None, (f"{_now()} progress {text}", joined(observation.metrics)))))

    def log(self, line: LogLine) -> None:
        """See `View.log`."""
        time = f"{line.time} " if self._timestamps else ""
        self.write(f"{time}{click.style(f'[{line.rank}]', fg=colour_of(line.rank))} {line.text}")

    def notice(self, text: str) -> None:
        """See `View.notice`."""
        echo(f"{_now()} {text}", err=True)

    def result(self, result: TrainJobResult) -> None:
        """See `View.result`."""
        self._last = ""
        self.write(f"{_now()} {result_text(result)}")


class JsonView(View):
    """One JSON object a line, each with its kind in ``event``."""

    def _write(self, event: str, **fields: Any) -> None:
        self.write(as_json({"event": event, **fields}))

    def launched(self, ref: JobRef, key: str, *, adopted: bool, attach: str) -> None:  # noqa: ARG002
        """See `View.launched`."""
        self._write("launched", **vars(ref), key=key, adopted=adopted)

    def phase(self, observation: Observation) -> None:
        """See `View.phase`."""
        now = observation
        self._write("phase", time=_now(), phase=str(now.phase), reason=now.reason, message=now.message)

    def progress(self, observation: Observation) -> None:
        """See `View.progress`."""
        now = observation
        self._write(
            "progress", time=_now(), progress=now.progress, remaining_seconds=now.remaining_seconds, metrics=now.metrics
        )

    def log(self, line: LogLine) -> None:
        """See `View.log`."""
        state = {"transient": True} if line.transient else {}
        self._write("log", time=line.time, rank=line.rank, text=line.text, **state)

    def notice(self, text: str) -> None:
        """See `View.notice`."""
        self._write("notice", time=_now(), message=text)

    def crash(self, diagnosis: Diagnosis) -> None:
        """See `View.crash`."""
        self._write("crash", time=_now(), **serialization.pack_diagnosis(diagnosis))

    def result(self, result: TrainJobResult) -> None:
        """See `View.result`."""
        self._write("result", phase=str(Phase.COMPLETE), **result.as_dict())

    def interrupted(self, text: str) -> None:
        """See `View.interrupted`."""
        self._write("interrupted", message=text)
