"""``trainjob tune``: a hyperparameter search, with a live table of its trials."""

from __future__ import annotations

import secrets
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, Self

from trainjob._manifest import unattended
from trainjob._spec import TrainJobSpec
from trainjob._spec.reading import load_spec
from trainjob._support.control_characters import one_line
from trainjob._support.display import rounded, short
from trainjob.cli import texts
from trainjob.cli.commands import Interrupts, name_of, slug_of
from trainjob.cli.output import echo, redrawn
from trainjob.cli.views import drop_stdout
from trainjob.errors import InvalidSpec, InvalidStudy, Problem
from trainjob.job import key_hash
from trainjob.tuning import Study, StudyResult, Trial, cancel_trials, tune
from trainjob.tuning.journal import journal_location, open_journal
from trainjob.tuning.template import unused

if TYPE_CHECKING:
    from trainjob.cli.commands import Commands
    from trainjob.wait_options import WaitOptions

_ROWS = 12  # of the live table
_CELL = 60  # characters


def read(source: IO[bytes]) -> tuple[Study, TrainJobSpec]:
    """The study and the template in a file.

    Raises:
        InvalidStudy: One of them is invalid; has the problems of both.
    """
    fields = load_spec(source, name_of(source))
    problems: list[Problem] = []
    study = template = None
    given = fields.pop("template", None)
    if given is None:
        problems.append(Problem("template", "is missing", "write the fields of the TrainJob of a trial below it"))
    else:
        try:
            template = TrainJobSpec.parse(given)
        except InvalidSpec as error:
            problems += [
                Problem(f"template.{p.path}" if p.path else "template", p.message, p.instead) for p in error.problems
            ]
    try:
        study = Study.read(fields)
    except InvalidStudy as error:
        problems += error.problems
    if problems or study is None or template is None:
        raise InvalidStudy(problems)
    return study, template


async def run(
    commands: Commands,
    source: IO[bytes],
    key: str | None,
    workspace: str | None,
    *,
    options: WaitOptions,
    plain: bool,
    cancels: bool,
) -> int:
    """Run a study, or continue it."""
    study, template = read(source)
    if not commands.as_json and (left := unused(study, template)):
        echo(left, err=True)
    key = key or f"cli-{secrets.token_hex(6)}/{slug_of(source, [])}"
    where = journal_location(key_hash(key), workspace)
    commands.many = True
    words = ["tune", name_of(source), "--key", key, *(["--workspace", workspace] if workspace else [])]
    again = commands.command(*words)
    hint = "Ctrl-C cancels the running trials" if cancels else "Ctrl-C leaves the trials running"
    show = _view(commands, study, hint, plain=plain)
    with show, Interrupts() as interrupts:
        with interrupts.stage():
            show.began(key, where, again)
            with open_journal(where) as journal:
                result = await tune(
                    commands.backend,
                    study,
                    template,
                    key,
                    journal,
                    namespace=commands.namespace,
                    origin=unattended.SUSPEND if cancels else {},
                    options=options,
                    on_change=show.change,
                )
            show.result(result)
            report = commands.command("report", key)
            lines = [f"report: {report}", f"job of the best trial: {commands.command('status', result.best.job)}"]
            show.next_steps([*lines, f"more trials: raise max_trials, then {again}"])
            return 0
        message = "the trials keep running"
        if cancels:
            show.notice("cancelling the running trials; a second Ctrl-C exits without waiting")
            message = "exited before the end: trials may still be running"
            with interrupts.stage():
                count = await cancel_trials(
                    commands.backend, key, namespace=commands.namespace, launching=show.launching
                )
                message = f"cancelled {count} trial{'' if count == 1 else 's'}"
        show.interrupted(f"{message}; continue the study: {again}")
    return interrupts.exit_code


def _view(commands: Commands, study: Study, hint: str, *, plain: bool) -> StudyView:
    if commands.as_json:
        return _JsonView(study)
    if plain or not redrawn(sys.stdout):
        return _PlainView(study)
    return _LiveView(study, hint)


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """The parameters of a trial on one line."""
    return "  ".join(f"{name} {_short(value)}" for name, value in parameters.items())


def _short(value: object) -> str:
    return one_line(rounded(value) if isinstance(value, bool | int | float | str) else str(value), _CELL)


def _launching(trials: Sequence[Trial]) -> set[int]:
    return {trial.number for trial in trials if not trial.job and not trial.ended}


class StudyView:
    """Base of the views of a study.

    Args:
        study: The study.

    Attributes:
        launching: Numbers of the trials that are being launched.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        self.launching: set[int] = set()
        self._shown: dict[int, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, text: str) -> None:
        """Write a line to stdout."""
        try:
            echo(text)
        except BrokenPipeError:  # the study continues
            drop_stdout()

    def began(self, key: str, where: str, again: str) -> None:
        """Show the key of the study."""
        echo(f"study {key}, journal {where}\nto continue it after an interruption: {again}", err=True)

    def change(self, trials: Sequence[Trial]) -> None:
        """Take the trials after a change; shows those whose state is new."""
        self.launching = _launching(trials)
        for trial in trials:
            if trial.job and self._shown.get(trial.number) != trial.state:
                self._shown[trial.number] = trial.state
                self.trial(trial, trials)

    def trial(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """Show a trial that was launched or has ended."""

    def notice(self, text: str) -> None:
        """Show a notice for people."""
        echo(text, err=True)

    def result(self, result: StudyResult) -> None:
        """Show the result."""

    def next_steps(self, lines: Sequence[str]) -> None:
        """Print commands for more about the study."""
        echo("\n".join(lines), err=True)

    def interrupted(self, text: str) -> None:
        """Show how the command ends after Ctrl-C."""
        echo(text, err=True)

    def best(self, trials: Sequence[Trial]) -> Trial | None:
        """The best complete trial so far."""
        found: Trial | None = None
        for each in trials:
            if each.state != "complete" or each.value is None:
                continue
            if found is None or found.value is None or self.study.better(each.value, found.value):
                found = each
        return found

    def result_text(self, result: StudyResult) -> str:
        """The result in lines."""
        best, counts = result.best, Counter(trial.state for trial in result.trials)
        lines = [
            f"{len(result.trials)} trials: " + ", ".join(f"{count} {state}" for state, count in counts.most_common()),
            f"ended: {result.reason}",
            f"best: trial {best.number}, {result.metric} {_short(best.value)}, job {best.job}",
            *(f"  {name}: {best.parameters[name]}" for name in best.parameters),
            *(f"output {name}: {value}" for name, value in best.outputs.items()),
        ]
        if result.importances:
            shares = sorted(result.importances.items(), key=lambda pair: -pair[1])
            lines.append("importance: " + ", ".join(f"{name} {share:.0%}" for name, share in shares))
        return "\n".join(one_line(line, 2000) for line in lines)


class _PlainView(StudyView):
    """A line for each trial that was launched or has ended."""

    def trial(self, trial: Trial, trials: Sequence[Trial]) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        value = f"  {self.study.metric} {_short(trial.value)}" if trial.ended and trial.value is not None else ""
        best = "  best" if trial.ended and self.best(trials) is trial else ""
        reason = f"  {one_line(trial.reason, 200)}" if trial.reason and trial.state == "failed" else ""
        self.write(
            f"{now} trial {trial.number} {trial.state}{value}{best}{reason}  {parameters_text(trial.parameters)}"
        )

    def result(self, result: StudyResult) -> None:
        self.write(self.result_text(result))


class _JsonView(StudyView):
    """One JSON object per line, with its kind in ``event``."""

    def began(self, key: str, where: str, again: str) -> None:  # noqa: ARG002 - for people
        self.write(texts.as_json({"event": "study", "key": key, "journal": where}))

    def trial(self, trial: Trial, trials: Sequence[Trial]) -> None:  # noqa: ARG002 - a line has one trial
        self.write(texts.as_json({"event": "trial", **trial.as_dict()}))

    def result(self, result: StudyResult) -> None:
        self.write(texts.as_json({"event": "result", **result.as_dict()}))

    def notice(self, text: str) -> None:
        self.write(texts.as_json({"event": "notice", "message": text}))

    def next_steps(self, lines: Sequence[str]) -> None:
        pass

    def interrupted(self, text: str) -> None:
        self.write(texts.as_json({"event": "interrupted", "message": text}))


class _LiveView(StudyView):
    """A table that is redrawn: counts, the best trial, the running and the latest trials."""

    def __init__(self, study: Study, hint: str) -> None:
        super().__init__(study)
        from rich.console import Console
        from rich.live import Live

        self._hint, self._key, self._start = hint, "", time.monotonic()
        self._trials: Sequence[Trial] = ()
        self._console = Console(highlight=False)
        self._live = Live(console=self._console, get_renderable=self._frame, refresh_per_second=4)

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._hint = ""
        self._live.stop()

    def began(self, key: str, where: str, again: str) -> None:
        super().began(key, where, again)
        self._key = key
        self._live.start()

    def change(self, trials: Sequence[Trial]) -> None:
        self.launching = _launching(trials)
        self._trials = trials

    def notice(self, text: str) -> None:
        self._hint = text

    def result(self, result: StudyResult) -> None:
        self._trials = result.trials
        self._stop()
        self.write(self.result_text(result))

    def interrupted(self, text: str) -> None:
        self._stop()
        super().interrupted(text)

    def _frame(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        trials = self._trials  # the event loop replaces it
        counts, best = Counter(trial.state for trial in trials), self.best(trials)
        shares = ", ".join(f"{counts[state]} {state}" for state in _COLORS if counts[state])
        passed = short(time.monotonic() - self._start)
        head = Text.assemble(
            (one_line(self._key, 60), "bold"), f"  {len(trials)}/{self.study.max_trials} trials: {shares}  {passed}"
        )
        parts: list[Any] = [head]
        if best is not None:
            value = f"{self.study.metric} {_short(best.value)}"
            line = f"best: trial {best.number}  {value}  {parameters_text(best.parameters)}"
            parts.append(Text(line, style="green"))
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        names = list(self.study.space)[:8]
        for name in ("trial", "state", self.study.metric, *names):
            table.add_column(one_line(name, 20), no_wrap=True, justify="right" if name == "trial" else "left")
        room = max(3, min(_ROWS, self._console.height - 6))
        running = [trial for trial in trials if not trial.ended]
        ended = [trial for trial in trials if trial.ended]
        shown = [*ended[-max(1, room - len(running)) :], *running][-room:]
        for trial in shown:
            value = "" if trial.value is None else _short(trial.value)
            cells = [_short(trial.parameters[name]) if name in trial.parameters else "" for name in names]
            state = Text(trial.state, style=_COLORS.get(trial.state, ""))
            table.add_row(str(trial.number), state, Text(value), *(Text(cell) for cell in cells))
        parts.append(table)
        if self._hint:
            parts.append(Text(self._hint, style="dim"))
        return Group(*parts)


_COLORS = {"running": "cyan", "complete": "green", "pruned": "yellow", "failed": "red", "stopped": "dim"}
