"""The program: its commands, of which a module is imported when it is used, and how each error ends it."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections import UserDict
from collections.abc import Sequence
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from trainjob._support.control_characters import one_line
from trainjob.cli import completion
from trainjob.cli.exits import BUG, EXIT_CODES, INTERRUPTED, USAGE, exit_code
from trainjob.cli.hints import hint
from trainjob.cli.options import global_options
from trainjob.cli.output import echo, fitted, no_color
from trainjob.errors import InvalidSpec, TimedOut, TrainJobError, TrainJobFailed
from trainjob.version import __version__

COMMANDS = {
    "cancel": ("stop", "Stop a job, or all attempts of a key."),
    "check": ("check", "Check the TrainJob tasks in DAG files."),
    "data": ("data", "Copy datasets and models between stores."),
    "delete": ("stop", "Delete a job that has ended, with its logs."),
    "diagnose": ("look", "Show why a job failed or what blocks it, its ranks and events."),
    "doctor": ("cluster", "Check whether a cluster, or this machine, can run jobs."),
    "exec": ("data", "Run a command inside a job, on local copies of its data."),
    "export": ("models", "Export a model that a job wrote, and register it."),
    "gc": ("cluster", "Remove old jobs."),
    "goodput": ("goodput", "Show how the time of jobs was spent."),
    "install": ("cluster", "Print the objects that a cluster needs, as YAML."),
    "list": ("look", "List jobs, the newest first."),
    "logs": ("look", "Print the log lines of a job's ranks."),
    "reap": ("cluster", "Suspend or delete the jobs that nobody waits for."),
    "registry": ("models", "List, show, promote and register model versions."),
    "render": ("run", "Print the TrainJob that `run` would create, as YAML."),
    "report": ("pages", "Write the page of a job, a key or a workflow, as HTML."),
    "resume": ("stop", "Resume a suspended job: start its ranks again."),
    "run": ("run", "Launch a job and wait until it ends."),
    "status": ("look", "Show the phase, progress and metrics of a job."),
    "tune": ("tune", "Search hyperparameters: each trial is a job."),
    "ui": ("pages", "Serve live pages of jobs on 127.0.0.1."),
    "wait": ("run", "Wait for existing jobs to finish."),
}
"""Name of each command -> the module of `trainjob.cli` that has it, and a line about it."""


class _Commands(UserDict[str, click.Command]):
    """The commands; the module of one is imported when it is looked up."""

    def __init__(self) -> None:
        data: dict[str, Any] = dict.fromkeys(COMMANDS)  # the commands take the place of None
        self.data = data

    def __getitem__(self, name: str) -> click.Command:
        found: click.Command | None = self.data[name]
        if found is None:
            module = importlib.import_module(f"trainjob.cli.{COMMANDS[name][0]}")
            found = self.data[name] = next(
                each for each in vars(module).values() if isinstance(each, click.Command) and each.name == name
            )
        return found


class _Group(click.Group):
    """A group whose help and whose names for shell completion import no command."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The names of commands, or the options of this group."""
        if incomplete[:1] == "-":
            return click.Command.shell_complete(self, ctx, incomplete)
        found = [name for name in COMMANDS if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name][1]) for name in found]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(
    cls=_Group,
    commands=_Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
)
@global_options
@click.version_option(__version__, "--version", prog_name="trainjob")
@click.pass_context
def program(ctx: click.Context) -> None:
    """Launch Kubeflow TrainJobs exactly once, wait for them, and diagnose their failures."""
    ctx.color = False if no_color() else None


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit. An error of this package becomes a message and an exit code, never a traceback."""
    if completion.VARIABLE in os.environ:
        completion.main(program)
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = words[: words.index("--")] if "--" in words else words  # the words behind "--" are another command
    try:
        answer = program.main(words, prog_name="trainjob", standalone_mode=False, color=False if no_color() else None)
        code = answer if isinstance(answer, int) else 0
    except click.ClickException as error:
        shown = error
        if isinstance(error, click.UsageError) and (instead := hint(error)):
            shown = click.UsageError(error.message + instead, error.ctx)
        shown.show()
        code = USAGE
        _error_object(options, shown.format_message(), code, type=type(error).__name__)
    except click.Abort:
        code = INTERRUPTED
    except TrainJobError as error:
        code = exit_code(error)
        first, *more = (one_line(line, 2000) for line in str(error).split("\n"))  # may have lines of logs
        echo("\n".join([click.style(f"error: {first}", fg="red", bold=True), *map(fitted, more)]), err=True)
        for note in getattr(error, "__notes__", ()):
            echo(note, err=True)
        _error_object(options, str(error), code, type=type(error).__name__, retry=error.retry, **_details(error))
    except OSError as error:
        code = exit_code(error)
        message = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        echo(f"error: {message}", err=True)
        _error_object(options, message, code, type=type(error).__name__)
    except Exception as error:  # noqa: BLE001 - a script must not take our bug for a failed training
        code = BUG
        traceback.print_exc()
        _error_object(options, str(error), code, type=type(error).__name__)
    sys.exit(code)


def _details(error: TrainJobError) -> dict[str, Any]:
    if isinstance(error, TrainJobFailed | TimedOut):
        spent = {"goodput": error.goodput} if error.goodput else {}
        return {"diagnosis": error.diagnosis.as_dict(), **spent} if isinstance(error, TrainJobFailed) else spent
    if isinstance(error, InvalidSpec):
        return {"problems": [vars(problem) for problem in error.problems]}
    return {}


def _error_object(words: Sequence[str], message: str, code: int, **fields: Any) -> None:
    if "--json" in words:
        echo(json.dumps({"error": {**fields, "message": message, "exit_code": code}}))
