"""The live view: a job on a terminal, redrawn in place until it ends."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import NamedTuple, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from trainjob._diagnosis import serialization
from trainjob._goodput.history import MetricHistory, Points
from trainjob._jobs.results import TrainJobResult
from trainjob._support.control_characters import colored, one_line, plain
from trainjob._support.display import rounded, short
from trainjob._support.log_lines import LogLine
from trainjob.cli.output import echo
from trainjob.cli.sparklines import BLOCKS, levels_of, sparkline
from trainjob.cli.texts import PHASE_COLORS, color_of, joined, left_text, result_text
from trainjob.cli.views import View
from trainjob.job import JobRef
from trainjob.status import Observation, Phase
from trainjob.verdicts import Diagnosis

LOG_LINES = 10
_FRAMES_PER_SECOND = 8
_BRIEF = 0.1  # seconds; shorter phases are not shown
_BAR = 40
_OTHER_LINES = 8  # lines of a frame that are neither metrics nor log lines
_FEW_LOG_LINES = 4  # that stay if there are many metrics
_NAME, _CURVE = 24, 40  # characters of a metric's name and of its sparkline
_POINTS = 512  # of all metrics: a sparkline has 40 characters
_LONGEST = 400  # characters of a log line that can be on a screen


class _Marks(NamedTuple):
    spinner: str
    good: str
    bad: str
    over: str
    arrow: str


_MARKS = _Marks("dots", "✓", "✗", "•", "→")
_ASCII_MARKS = _Marks("line", "+", "x", "*", "->")
"""For terminals whose encoding lacks the others."""


class Timeline:
    """The phases of a job and when each began, as far as known also before the first observation."""

    def __init__(self) -> None:
        self.phases: list[tuple[Phase, datetime]] = []
        self.ended: datetime | None = None

    def add(self, observation: Observation, now: datetime) -> None:
        """Add what was observed at `now`."""
        phase, created, admitted = observation.phase, observation.created, observation.admitted
        if not self.phases:
            if created and admitted and (admitted - created).total_seconds() > _BRIEF:
                self.phases.append((Phase.QUEUED, created))
            if phase.terminal:
                self.phases.append((Phase.RUNNING, admitted or created or now))
            else:
                self.phases.append((phase, min(admitted or created or now, now)))
        elif phase is not self.phases[-1][0] and not phase.terminal:
            self.phases.append((phase, now))
        if phase.terminal and self.ended is None:
            self.ended = max(observation.finished or now, self.phases[-1][1])

    def spans(self, now: datetime) -> Iterator[tuple[Phase, float]]:
        """Each phase with its seconds."""
        phases = [*self.phases]  # another thread adds to the list
        for i, (phase, start) in enumerate(phases):
            end = phases[i + 1][1] if i + 1 < len(phases) else self.ended or now
            yield phase, (end - start).total_seconds()

    def total(self, now: datetime) -> float:
        """Seconds since the job was created."""
        return ((self.ended or now) - self.phases[0][1]).total_seconds() if self.phases else 0.0


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


class LiveView(View):
    """Shows the job in a few lines that are redrawn.

    Args:
        hint: Text about what Ctrl-C does.
        logs: Whether log lines are shown.
    """

    state_seconds = 0.0  # each state, since it is drawn in place

    def __init__(self, hint: str, *, logs: bool = True) -> None:
        super().__init__(logs=logs)
        self._hint = hint
        self._console = Console(highlight=False)
        self._levels = levels_of(self._console.encoding)
        self._marks = _MARKS if self._levels == BLOCKS else _ASCII_MARKS
        if self._marks is _ASCII_MARKS and isinstance(sys.stdout, TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a job's lines can have any characters
        self._spinner = Spinner(self._marks.spinner, style="cyan")
        self._job = ""
        self._timeline = Timeline()
        self._reported: tuple[Observation, datetime] | None = None
        self._history = MetricHistory(_POINTS)
        self._points: Points = {}
        self._lines: deque[LogLine] = deque(maxlen=LOG_LINES)
        self._notice = ""
        self._over = False
        # A thread draws, so that the clocks run while the event loop is idle. Draws the first frame at once.
        self._live = Live(console=self._console, get_renderable=self._frame, refresh_per_second=_FRAMES_PER_SECOND)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def watching(self, ref: JobRef) -> None:
        """Begin to draw `ref`."""
        self._job = str(ref)
        self._live.start()

    def _stop(self) -> None:
        self._over = True
        self._live.stop()

    def follow(self, before: JobRef, ref: JobRef) -> None:
        """Draw `ref` from now on, with a timeline and separate curves."""
        hint = self._hint
        super().follow(before, ref)
        self._console.print(Text(self._notice, style="yellow"))  # above the redrawn lines, where it stays
        self._notice, self._hint = "", hint
        self._timeline, self._reported = Timeline(), None
        self._history, self._points = MetricHistory(_POINTS), {}
        self._lines.clear()

    def change(self, observation: Observation, notice: str) -> None:
        """Take a new observation and its notice."""
        self._notice = plain(notice)
        now = datetime.now(UTC)
        self._timeline.add(observation, now)
        if self._history.observe(observation, now.timestamp()):
            self._points = self._history.points()
        if observation.progress is not None or observation.metrics:
            last = self._reported[0] if self._reported else None
            if last is None or (last.progress, last.remaining_seconds) != (
                observation.progress,
                observation.remaining_seconds,
            ):
                self._reported = (observation, now)
        super().change(observation, "")

    def log(self, line: LogLine) -> None:
        """Add a line; a new state of a progress bar replaces the last one."""
        for i in reversed(range(len(self._lines))):
            if self._lines[i].rank == line.rank:
                if self._lines[i].transient:  # a progress bar moves in place
                    self._lines[i] = line
                    return
                break
        self._lines.append(line)

    def notice(self, text: str) -> None:
        """Show the notice below the log, instead of the hint."""
        self._notice = plain(text)
        self._hint = ""

    def crash(self, diagnosis: Diagnosis) -> None:
        """Print the crash above the redrawn lines, where it stays."""
        self._console.print(Text("\n".join(serialization.warning(diagnosis)), style="yellow"))

    def result(self, result: TrainJobResult) -> None:
        """Stop drawing, and print metrics and outputs."""
        self._stop()
        if text := result_text(result).partition("\n")[2]:  # the last frame shows the rest
            self.write(text)

    def interrupted(self, text: str) -> None:
        """Stop drawing, and print the message."""
        self._notice = ""
        self._stop()
        echo(text, err=True)

    # --- one frame

    def _frame(self) -> RenderableType:
        now = datetime.now(UTC)
        metrics = [*self._metrics()]
        parts: list[RenderableType] = [self._header(now), *self._phases(now), *self._progress(now), *metrics]
        ended = self._latest is not None and self._latest.phase in (Phase.FAILED, Phase.CANCELLED, Phase.DELETED)
        if self._lines and not ended:  # the diagnosis shows the relevant lines
            parts += ["", *self._log(len(metrics))]
        if self._notice:
            parts += ["", Text(self._notice, style="yellow")]
        if not self._over and self._hint:
            parts += ["", Text(self._hint, style="dim")]
        return Group(*parts, *([""] if self._over else []))

    def _header(self, now: datetime) -> RenderableType:
        phase = self._latest.phase if self._latest else None
        color = PHASE_COLORS.get(phase, "blue") if phase else "blue"
        mark: RenderableType = self._spinner
        if phase is Phase.COMPLETE:
            mark = Text(self._marks.good, style="bold green")
        elif phase and phase.terminal:
            mark = Text(self._marks.bad, style="bold red")
        elif self._over:
            mark = Text(self._marks.over, style="yellow")
        line = Text.assemble((self._job, "bold"), "  ", (str(phase or "…"), f"bold {color}"))
        because = (self._latest.message or self._latest.reason) if self._latest else ""
        if because and phase and not phase.terminal:
            line.append(f"  {because}", style="dim")
        line.truncate(max(20, self._console.width - 12), overflow="ellipsis")
        header = Table.grid(padding=(0, 1), expand=True)
        header.add_column(width=1)
        header.add_column(no_wrap=True, ratio=1)
        header.add_column(justify="right", no_wrap=True)
        header.add_row(mark, line, Text(short(self._timeline.total(now)), style="bold"))
        return header

    def _phases(self, now: datetime) -> Iterator[RenderableType]:
        spans = [(phase, seconds) for phase, seconds in self._timeline.spans(now) if seconds >= _BRIEF]
        if spans:
            parts = [Text(f"{phase} {short(seconds)}", PHASE_COLORS.get(phase, "blue")) for phase, seconds in spans]
            yield Text("  ") + Text(f" {self._marks.arrow} ").join(parts)

    def _progress(self, now: datetime) -> Iterator[RenderableType]:
        if self._reported is None or self._latest is None:
            return
        observation, reported = self._reported
        done, remaining = observation.progress, observation.remaining_seconds
        if done is not None:
            row = Table.grid(padding=(0, 2))
            width = min(_BAR, self._console.width // 2)
            bar = ProgressBar(total=100, completed=done, width=width, complete_style="cyan", finished_style="green")
            left = ""
            if remaining is not None and done < 100 and not self._latest.phase.terminal:
                left = left_text(remaining - (now - reported).total_seconds())
            row.add_row("", bar, f"{done:.0f}%", left)
            yield row

    def _metrics(self) -> Iterator[RenderableType]:
        """A line with a sparkline for each numeric metric that fits the height, and one line for all others."""
        if self._latest is None:
            return
        metrics, ended = self._latest.metrics, self._latest.phase.terminal
        room = max(1, self._console.height - _OTHER_LINES - (_FEW_LOG_LINES if self.logs else 0) - 1)
        curves = [name for name in metrics if len(self._points.get(name, ())) > 1]
        shown = curves if len(curves) <= room else curves[:room]
        labels = {name: _cut(one_line(name, 2 * _NAME), _NAME) for name in shown}
        latest = {name: _cut(plain(rounded(metrics[name])), _NAME) for name in shown}
        widths = [max(map(len, each.values()), default=0) for each in (labels, latest)]
        width = max(1, min(_CURVE, self._console.width // 3))
        for name in shown:
            values = [value for _, _, value in self._points[name] if value is not None]
            yield Text.assemble(
                f"  {labels[name]:<{widths[0]}}  ",
                (f"{latest[name]:>{widths[1]}}", "bold"),
                "  ",
                (sparkline(self._points[name], width, self._levels), "cyan"),
                (f"  {rounded(min(values))} to {rounded(max(values))}", "dim"),
                no_wrap=True,
                overflow="ellipsis",
            )
        left = [name for name in metrics if name not in curves] + curves[len(shown) :]
        rest = {name: metrics[name] for name in left}
        if rest and not ended:  # the result shows them in full
            yield Text(f"  {plain(joined(rest))}", no_wrap=True, overflow="ellipsis")

    def _log(self, metrics: int) -> Iterator[RenderableType]:
        fitting = max(1, min(LOG_LINES, self._console.height - _OTHER_LINES - metrics))
        for line in list(self._lines)[-fitting:]:
            text = Text.from_ansi(colored(line.text[:_LONGEST]).expandtabs(4))
            label = (f"[{line.rank}]", color_of(line.rank))
            yield Text.assemble("  ", label, " ", text, no_wrap=True, overflow="ellipsis")
