"""``trainjob tune``: a hyperparameter search."""

from __future__ import annotations

import secrets
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import IO, Any

import click

from trainjob._manifest import unattended
from trainjob._spec import TrainJobSpec
from trainjob._spec.reading import load_spec
from trainjob._support.control_characters import one_line
from trainjob._support.display import rounded
from trainjob.cli.bars import Update, bar
from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES
from trainjob.cli.job_options import chosen, wait_options
from trainjob.cli.options import key_option
from trainjob.cli.output import redrawn
from trainjob.cli.session import Interrupts, Session, now
from trainjob.cli.spec_files import name_of, slug_of
from trainjob.errors import InvalidSpec, InvalidStudy, Problem
from trainjob.job import key_hash
from trainjob.tuning import Study, StudyResult, Trial, cancel_trials, open_journal, tune as search
from trainjob.tuning.journal import journal_location
from trainjob.tuning.template import unused

_CELL = 60  # characters


@command(
    click.argument("study", type=click.File("rb"), metavar="STUDY.yaml|-"),
    key_option("Identify the study: the same key again continues it."),
    click.option(
        "--workspace",
        metavar="URI",
        help="Keep the state of the study below this directory or object store, or in this Optuna storage;"
        " $TRAINJOB_WORKSPACE if left out, else $TRAINJOB_HOME of this machine.",
    ),
    wait_options,
    epilog=EXIT_CODES,
)
async def tune(session: Session, *, study: IO[bytes], key: str | None, workspace: str | None, **given: Any) -> int:
    """Search hyperparameters: each trial is a job. Prints the best parameters.

    STUDY.yaml has the fields of a study and, below template, those of the trials' TrainJob. With --key, continues the
    study where it was interrupted, or with more trials if max_trials is larger. A trial that times out is cancelled and
    counts as failed. Ctrl-C cancels the running trials. `trainjob report KEY` writes the page of the study.
    """
    asked, template = read_study_file(study)
    if left := unused(asked, template):
        session.say(left)
    key = key or f"cli-{secrets.token_hex(6)}/{slug_of(study, [])}"
    where = journal_location(key_hash(key), workspace)
    session.shared = True
    words = ["tune", name_of(study), "--key", key, *(["--workspace", workspace] if workspace else [])]
    again = session.command(*words)
    with bar(shown=redrawn(sys.stdout) and not session.as_json) as update, Interrupts() as interrupts:
        shown = _Shown(session, asked, update)
        with interrupts.stage():
            text = f"study {key}, journal {where}\nCtrl-C cancels the running trials; "
            text += f"to continue it after an interruption: {again}"
            session.event("study", text, err=True, key=key, journal=where)
            with open_journal(where) as journal:
                result = await search(
                    session.backend,
                    asked,
                    template,
                    key,
                    journal,
                    namespace=session.namespace,
                    origin=unattended.SUSPEND,
                    options=chosen(given),
                    on_change=shown.change,
                )
            session.event("result", result_text(result), **result.as_dict())
            session.say(
                f"report: {session.command('report', key)}",
                f"job of the best trial: {session.command('status', result.best.job)}",
                f"more trials: raise max_trials, then {again}",
            )
            return 0
        notice = "cancelling the running trials; a second Ctrl-C exits without waiting"
        session.event("notice", notice, err=True, message=notice)
        message = "exited before the end: trials may still be running"
        with interrupts.stage():
            count = await cancel_trials(session.backend, key, namespace=session.namespace, launching=shown.launching)
            message = f"cancelled {count} trial{'' if count == 1 else 's'}"
        message = f"{message}; continue the study: {again}"
        session.event("interrupted", message, err=True, message=message)
    return interrupts.exit_code


def read_study_file(source: IO[bytes]) -> tuple[Study, TrainJobSpec]:
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


class _Shown:
    """Prints each trial that was launched or has ended; the number of ended trials is a bar on a terminal.

    Attributes:
        launching: Numbers of the trials that are being launched.
    """

    def __init__(self, session: Session, study: Study, update: Update | None) -> None:
        self._session, self._study, self._bar = session, study, update
        self.launching: set[int] = set()
        self._states: dict[int, str] = {}

    def change(self, trials: Sequence[Trial]) -> None:
        """Take the trials after a change; prints those whose state is new."""
        self.launching = {trial.number for trial in trials if not trial.job and not trial.ended}
        for trial in trials:
            if trial.job and self._states.get(trial.number) != trial.state:
                self._states[trial.number] = trial.state
                self._session.event("trial", self._text(trial, trials), **trial.as_dict())
        if self._bar is not None:
            counts = Counter(trial.state for trial in trials)
            states = ", ".join(f"{count} {state}" for state, count in counts.most_common())
            self._bar(sum(trial.ended for trial in trials), self._study.max_trials, states)

    def _text(self, trial: Trial, trials: Sequence[Trial]) -> str:
        metric = self._study.metric
        value = f"  {metric} {_short(trial.value)}" if trial.ended and trial.value is not None else ""
        best = "  best" if trial.ended and self._best(trials) is trial else ""
        reason = f"  {one_line(trial.reason, 200)}" if trial.reason and trial.state == "failed" else ""
        parameters = parameters_text(trial.parameters)
        return f"{now()} trial {trial.number} {trial.state}{value}{best}{reason}  {parameters}"

    def _best(self, trials: Sequence[Trial]) -> Trial | None:
        """The best complete trial so far."""
        found: Trial | None = None
        for each in trials:
            if each.state != "complete" or each.value is None:
                continue
            if found is None or found.value is None or self._study.better(each.value, found.value):
                found = each
        return found


def parameters_text(parameters: Mapping[str, Any]) -> str:
    """The parameters of a trial on one line."""
    return "  ".join(f"{name} {_short(value)}" for name, value in parameters.items())


def _short(value: object) -> str:
    return one_line(rounded(value) if isinstance(value, bool | int | float | str) else str(value), _CELL)


def result_text(result: StudyResult) -> str:
    """The result of a study in lines."""
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
