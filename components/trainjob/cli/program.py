"""The commands with their options, and the exit code of each error. `trainjob.cli.commands` implements the commands."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import click

from trainjob._support.control_characters import one_line
from trainjob.cli import completion
from trainjob.cli.data import data
from trainjob.cli.hints import hint
from trainjob.cli.options import (
    WithCommand,
    champion_option,
    common_options,
    duration,
    fields_of,
    global_options,
    image_name,
    job_name,
    live_options,
    page_file,
    pair,
    pinned_image,
    price,
    require_crash_option,
    require_work,
    service_account,
    spec_options,
    strict_job_name,
    timeout_options,
    work_key,
)
from trainjob.cli.output import echo, fitted, no_color
from trainjob.cli.registry import export, registry
from trainjob.cli.target import Target
from trainjob.errors import (
    InvalidSpec,
    ModelNotFound,
    NotFound,
    Stuck,
    TimedOut,
    TrainJobError,
    TrainJobFailed,
    missing,
)
from trainjob.status import Phase
from trainjob.verdicts import RetryVerdict
from trainjob.version import __version__

if TYPE_CHECKING:
    from trainjob._install import Part
    from trainjob._jobs.cancellation import CrashAction
    from trainjob.wait_options import WaitOptions

_PERMANENT = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""Errors that a retry meets again: a path that does not exist, is of another kind, or may not be used."""

USER, USAGE, INFRASTRUCTURE, TIMEOUT, NOT_FOUND, BUG, INTERRUPTED = 1, 2, 3, 4, 5, 70, 130

EXIT_CODES = """\
\b
Exit codes:
  0    success
  1    the training failed by itself
  2    usage, spec or configuration: a person has to change something
  3    infrastructure, preemption or quota: a retry may help
  4    a timeout expired; the job keeps running
  5    no such job or model, or the job was cancelled or deleted during the wait
  70   a bug in trainjob
  130  interrupted (143 by SIGTERM)

Without a cluster, TRAINJOB_BACKEND=local or --backend local runs jobs on this machine."""


def exit_code(error: TrainJobError) -> int:
    """The exit code that tells a script who has to act next."""
    if isinstance(error, TimedOut) and not isinstance(error, Stuck):
        return TIMEOUT
    deleted = isinstance(error, TrainJobFailed) and error.diagnosis.category == "deleted"
    if deleted or isinstance(error, NotFound | ModelNotFound):
        return NOT_FOUND
    if error.retry in (RetryVerdict.USER, RetryVerdict.UNKNOWN):
        return USER
    return INFRASTRUCTURE if error.retry.retryable else USAGE


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
        code = USAGE if error.errno in _PERMANENT else INFRASTRUCTURE
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


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=EXIT_CODES,
)
@global_options
@click.version_option(__version__, "--version", prog_name="trainjob")
@click.pass_context
def program(ctx: click.Context) -> None:
    """Launch Kubeflow TrainJobs exactly once, wait for them, and diagnose their failures."""
    ctx.ensure_object(Target)
    ctx.color = False if no_color() else None


@program.command(cls=WithCommand, epilog=EXIT_CODES)
@spec_options
@click.option("--detach", "-d", is_flag=True, help="Launch the job and print its name; do not wait.")
@live_options
@click.option(
    "--on-interrupt",
    type=click.Choice(["cancel", "keep"]),
    default="cancel",
    show_default=True,
    help="Choose what the first Ctrl-C does to the job. A second one exits at once.",
)
@common_options
@click.pass_obj
def run(
    target: Target,
    /,
    *,
    spec: IO[bytes] | None,
    key: str | None,
    detach: bool,
    options: WaitOptions,
    on_crash: CrashAction | None,
    plain: bool,
    no_logs: bool,
    on_interrupt: Literal["cancel", "keep"],
    command: tuple[str, ...],
    **fields: Any,
) -> int:
    """Launch a job and wait until it ends.

    With --key, adopts the job of that key if it has not ended; after a failure, or once its result was shown, launches
    the next attempt. Without --key, the job gets a new key, which is printed.

    If this command is killed and no process waits for the job within an hour, the job is suspended, unless it was
    launched with --detach or --on-interrupt keep, or its spec says otherwise (`unattended`, `unattended_after`).
    """
    work = fields_of(fields, command)
    require_work(spec, work)
    require_crash_option(on_crash, options, may_hang=spec is not None or "stall_timeout" in work)
    return target.do(
        lambda commands: commands.run(
            spec,
            work,
            key,
            detach=detach,
            options=options,
            on_crash=on_crash or "suspend",
            plain=plain,
            logs=not no_logs,
            cancels=on_interrupt == "cancel",
        )
    )


@program.command(epilog=EXIT_CODES)
@click.argument("study", type=click.File("rb"), metavar="STUDY.yaml|-")
@click.option(
    "--key",
    type=work_key,
    metavar="KEY",
    shell_complete=completion.keys,
    help="Identify the study: the same key again continues it.",
)
@click.option(
    "--workspace",
    metavar="URI",
    help="Keep the state of the study below this directory or object store, or in this Optuna storage;"
    " $TRAINJOB_WORKSPACE if left out, else $TRAINJOB_HOME of this machine.",
)
@timeout_options
@click.option("--plain", is_flag=True, help="Print plain lines on a terminal, too.")
@click.option(
    "--on-interrupt",
    type=click.Choice(["cancel", "keep"]),
    default="cancel",
    show_default=True,
    help="Choose what the first Ctrl-C does to the running trials. A second one exits at once.",
)
@common_options
@click.pass_obj
def tune(
    target: Target,
    /,
    *,
    study: IO[bytes],
    key: str | None,
    workspace: str | None,
    options: WaitOptions,
    plain: bool,
    on_interrupt: Literal["cancel", "keep"],
) -> int:
    """Search hyperparameters: each trial is a job. Prints the best parameters.

    STUDY.yaml has the fields of a study and, below template, those of the trials' TrainJob. With --key, continues the
    study where it was interrupted, or with more trials if max_trials is larger. A trial that times out is cancelled and
    counts as failed. `trainjob report KEY` writes the page of the study.
    """
    from trainjob.cli import tune as command

    return target.do(
        lambda commands: command.run(
            commands, study, key, workspace, options=options, plain=plain, cancels=on_interrupt == "cancel"
        )
    )


@program.command(epilog=EXIT_CODES)
@click.argument("name", type=job_name, required=False, shell_complete=completion.jobs)
@click.option(
    "--stdin",
    "many",
    is_flag=True,
    help="Read names of jobs from stdin, one per line, and wait for all of them in one process; as soon as a job has"
    " ended, print its NAME, a tab and the Unix time.",
)
@live_options
@common_options
@click.pass_obj
def wait(
    target: Target,
    /,
    *,
    name: tuple[str, str] | None,
    many: bool,
    options: WaitOptions,
    on_crash: CrashAction | None,
    plain: bool,
    no_logs: bool,
) -> int:
    """Wait for an existing job to finish. Ctrl-C leaves it running."""
    require_crash_option(on_crash, options, may_hang=not many)
    if many == (name is not None):
        raise click.UsageError("give either the NAME of a job or --stdin")
    if name is not None:
        return target.do(
            lambda commands: commands.wait(
                name, options=options, on_crash=on_crash or "keep", plain=plain, logs=not no_logs
            )
        )
    if options.fail_on_first_crash:
        raise click.UsageError("--fail-on-first-crash cannot be combined with --stdin: give the NAME of one job")
    from trainjob.cli.many import ManyWaits

    names = [strict_job_name(word) for word in sys.stdin.read().split()]
    return target.do(lambda commands: ManyWaits(commands, names, options).run())


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@common_options
@click.pass_obj
def status(target: Target, /, *, name: tuple[str, str]) -> int:
    """Show the phase, progress and metrics of a job, and why it failed. Exits with 0 for a failed job, too."""
    return target.do(lambda commands: commands.status(name))


@program.command(epilog=EXIT_CODES)
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@common_options
@click.pass_obj
def diagnose(target: Target, /, *, name: tuple[str, str]) -> int:
    """Show everything about any TrainJob: why it failed or what blocks it, its ranks and events.

    The exit code tells who has to act next: 0 if the job makes progress or is complete, 2 if it is blocked by something
    that only a person can fix, and that of `wait` if it has failed.
    """
    return target.do(lambda commands: commands.diagnose(name, exit_code))


@program.command(epilog=EXIT_CODES)
@click.argument("what", shell_complete=completion.jobs)
@click.option(
    "--output",
    "-o",
    type=page_file,
    metavar="FILE",
    help="Write the page to this file, - for stdout; <name>.html in this directory if left out.",
)
@champion_option
@common_options
@click.pass_obj
def report(target: Target, /, *, what: str, output: str | None, champion: str | None) -> int:
    """Write the page of a job, of a key with all its attempts, or of a workflow, as one self-contained HTML file.

    WHAT is the name of a job; else a key; else the ID of a KFP or Airflow run, or DAG/RUN; else the first part of keys
    such as study/a and study/b. The page has curves of all metrics; that of a workflow compares its trainings. --json
    prints the document of the page, and writes a file only with -o.
    """
    from trainjob.cli import pages

    return target.do(lambda commands: pages.report(commands, what, output, champion))


@program.command(epilog=EXIT_CODES)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="Listen on this port; on a free one if left out."
)
@click.option("--no-browser", is_flag=True, help="Do not open the address in a browser.")
@champion_option
@common_options
@click.pass_obj
def ui(target: Target, /, *, port: int, no_browser: bool, champion: str | None) -> int:
    """Serve live pages of the jobs of the namespace on 127.0.0.1, until Ctrl-C.

    Prints an address with a random token: the list of jobs, a page for each job, and a page for each workflow that
    compares its trainings. Works for a cluster and for the jobs of this machine.
    """
    from trainjob.cli import pages

    return pages.ui(target, port, champion, browser=not no_browser)


@program.command(epilog=EXIT_CODES)
@click.argument("name", type=job_name, required=False, metavar="[JOB]", shell_complete=completion.jobs)
@click.option(
    "--key", type=work_key, metavar="KEY", shell_complete=completion.keys, help="Show only the attempts of this key."
)
@click.option(
    "--label",
    "-l",
    "labels",
    type=pair,
    multiple=True,
    metavar="NAME=VALUE",
    help="Show only jobs with this label; may be repeated.",
)
@click.option(
    "--price-per-gpu-hour",
    "price",
    type=price,
    metavar="NUMBER",
    help="Show the cost of each activity, in the currency of this price.",
)
@common_options
@click.pass_obj
def goodput(
    target: Target,
    /,
    *,
    name: tuple[str, str] | None,
    key: str | None,
    labels: tuple[tuple[str, str], ...],
    price: float | None,
) -> int:
    """Show how the time of jobs was spent: the share of training that counted (goodput), and what the rest was lost to.

    Shows the work of JOB with all its attempts, else all jobs of the namespace that trainjob launched. Each second is
    queued, starting, training, evaluating, checkpointing, repeated, stalled, restarting or stopped. Time that cannot be
    told apart counts as training.
    """
    if name is not None and (key or labels):
        raise click.UsageError("give either the name of a JOB, or --key and --label")
    from trainjob.cli import goodput as command

    return target.do(lambda commands: command.goodput(commands, name, key, dict(labels), price))


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@click.option("--follow", "-f", is_flag=True, help="Print new lines until the job has ended.")
@click.option(
    "--rank", "ranks", multiple=True, metavar="RANK", help="Print only this rank, e.g. node-1; may be repeated."
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each rank.")
@click.option("--timestamps", is_flag=True, help="Print the time of each line.")
@common_options
@click.pass_obj
def logs(
    target: Target,
    /,
    *,
    name: tuple[str, str],
    follow: bool,
    ranks: tuple[str, ...],
    tail: int | None,
    timestamps: bool,
) -> int:
    """Print the log lines of a job's ranks."""
    return target.do(lambda commands: commands.logs(name, follow=follow, ranks=ranks, tail=tail, timestamps=timestamps))


@program.command("list", short_help="List jobs, the newest first.")
@click.option(
    "--phase",
    "phases",
    multiple=True,
    type=click.Choice([str(phase) for phase in Phase if phase is not Phase.DELETED], case_sensitive=False),
    metavar="PHASE",
    help="List only jobs in this phase, e.g. Running; may be repeated.",
)
@click.option(
    "--key", type=work_key, metavar="KEY", shell_complete=completion.keys, help="List only the attempts of this key."
)
@common_options
@click.pass_obj
def list_(target: Target, /, *, phases: tuple[str, ...], key: str | None) -> int:
    """List the jobs of the namespace that trainjob launched, the newest first."""
    return target.do(lambda commands: commands.list(phases, key))


@program.command()
@click.argument("name", type=job_name, required=False, shell_complete=completion.jobs)
@click.option(
    "--key",
    type=work_key,
    metavar="KEY",
    shell_complete=completion.keys,
    help="Stop all attempts of this key instead, and a launch of it that is on its way.",
)
@click.option("--suspend", is_flag=True, help="Suspend the job instead; `trainjob resume` starts its ranks again.")
@common_options
@click.pass_obj
def cancel(target: Target, /, *, name: tuple[str, str] | None, key: str | None, suspend: bool) -> int:
    """Stop a job, or all attempts of a key, and wait until no rank is running.

    On this machine the job's logs and metrics are kept; `trainjob gc` removes them later. On a cluster the job is
    deleted with its pods and logs; its phase, metrics and last log lines are printed.
    """
    if key is not None and name is None:
        return target.do(lambda commands: commands.cancel_work(key, suspend=suspend))
    if name is None or key is not None:
        raise click.UsageError("give either the NAME of a job or --key")
    return target.do(lambda commands: commands.cancel(name, suspend=suspend))


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@common_options
@click.pass_obj
def resume(target: Target, /, *, name: tuple[str, str]) -> int:
    """Resume a suspended job: start its ranks again.

    Refuses to resume an attempt if another attempt of its key runs or has followed it: two of them would train at once.
    """
    return target.do(lambda commands: commands.resume(name))


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@common_options
@click.pass_obj
def delete(target: Target, /, *, name: tuple[str, str]) -> int:
    """Delete a job that has ended, with its logs."""
    return target.do(lambda commands: commands.delete(name))


@program.command()
@click.option(
    "--older-than",
    type=duration,
    metavar="AGE",
    default="7d",
    show_default=True,
    help="Remove only jobs that ended, or on a cluster were suspended, longer ago, e.g. 12h.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@common_options
@click.pass_obj
def gc(target: Target, /, *, older_than: timedelta, dry_run: bool) -> int:
    """Remove old jobs: those of this machine that have ended, or those of a cluster that trainjob has left suspended.

    On this machine, logs are removed with the jobs, and running jobs are kept. On a cluster, removes jobs that their
    step gave up or that were suspended by a cancel or by `trainjob reap`. Keeps jobs that a person suspended, that wait
    in a queue, that a process waits for, and jobs that trainjob did not launch.
    """
    return target.do(lambda commands: commands.gc(older_than, dry_run=dry_run))


def keep_for(text: str) -> timedelta:
    """A duration of at least an hour, as `duration` or ISO 8601 (``P30D``, ``PT12H``)."""
    iso = re.fullmatch(r"P(\d+D)?(?:T(\d+H)?(\d+M)?(\d+S)?)?", text)
    found = duration("".join(part or "" for part in iso.groups()).lower() or text if iso else text)
    if found < timedelta(hours=1):
        raise click.BadParameter(f"{text!r} is less than an hour: the next try of a step reads why its job failed")
    return found


@program.command(cls=WithCommand)
@spec_options
@click.option("--dry-run", is_flag=True, help="Let the API server check the TrainJob, and print what it would store.")
@common_options
@click.pass_obj
def render(
    target: Target,
    /,
    *,
    spec: IO[bytes] | None,
    key: str | None,
    dry_run: bool,
    command: tuple[str, ...],
    **options: Any,
) -> int:
    """Print the TrainJob that `run` would create, as YAML. Needs a cluster only with --dry-run."""
    fields = fields_of(options, command)
    require_work(spec, fields)
    return target.do(lambda commands: commands.render(spec, fields, key, dry_run=dry_run))


@program.command()
@click.option(
    "--only",
    type=click.Choice(["runtimes", "rbac", "reaper", "kfp", "policy"]),
    help="Print only the runtimes, which a cluster needs once, or only the Role or the reaper, which each namespace "
    "needs. Printed only on request: kfp, a change of KFP's workflowDefaults; policy, an admission policy for the "
    "TrainJobs of a namespace.",
)
@click.option(
    "--service-account",
    "service_accounts",
    type=service_account,
    multiple=True,
    metavar="[NAMESPACE:]NAME",
    help="Bind the Role to this service account, e.g. airflow:airflow-worker; may be repeated.",
)
@click.option("--image", type=image_name, help="Use this step image: with its registry and, preferably, its digest.")
@click.option(
    "--pin",
    "pins",
    type=pinned_image,
    multiple=True,
    metavar="NAME:TAG@sha256:DIGEST",
    help="Write the digest of an image into the objects that run NAME:TAG; may be repeated.",
)
@click.option("--storage-config", metavar="NAME", help="Name the ConfigMap with the settings of storage and registry.")
@click.option("--storage-secret", metavar="NAME", help="Name the Secret with the credentials of storage and registry.")
@click.option(
    "--trainer",
    type=click.Choice(["2.1", "2.2", "2.3"]),
    help="Print only what this Kubeflow Trainer supports; 2.3 for any newer one, too.",
)
@click.option(
    "--keep-for",
    "keeps",
    type=keep_for,
    metavar="AGE",
    help="Let the reaper remove jobs that trainjob has left suspended for longer, e.g. 12h or P90D; P30D if left out.",
)
@common_options
@click.pass_obj
def install(
    target: Target,
    /,
    *,
    only: Part | None,
    service_accounts: tuple[tuple[str, str], ...],
    pins: tuple[str, ...],
    keeps: timedelta | None,
    **names: str | None,
) -> int:
    """Print the objects that a cluster needs, as YAML for `kubectl apply --server-side -f -`. Needs no cluster.

    The Role is for the namespace of --namespace or TRAINJOB_NAMESPACE, else for that of kubectl. The output of
    `--only kfp` is for `kubectl patch`, since KFP has other keys in its ConfigMap; its first line has the command.
    """
    from trainjob.cli import clusters

    return target.do(lambda _: clusters.install(target, only, service_accounts, pins, names, keep_for=keeps))


@program.command(epilog=EXIT_CODES)
@click.option(
    "--keep-for",
    "keeps",
    type=keep_for,
    metavar="AGE",
    help="Also remove jobs that trainjob has left suspended for longer, e.g. 12h or P30D.",
)
@common_options
@click.pass_obj
def reap(target: Target, /, *, keeps: timedelta | None) -> int:
    """Suspend or delete the jobs that nobody waits for, by `unattended` and `unattended_after` of their specs.

    Checks the namespace once: returns at once if it has no such jobs, else after about two minutes. `trainjob install
    --only reaper` prints a CronJob that runs it. The local backend needs none: each job's supervisor does the same.

    With --keep-for, also removes what `trainjob gc` removes on a cluster.
    """
    from trainjob.cli import clusters

    return target.do(lambda commands: clusters.reap(commands, keeps))


@program.command(epilog=EXIT_CODES)
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.runtimes,
    help="Check this runtime, too; may be repeated.",
)
@click.option("--queue", default="", metavar="NAME", help="Check this LocalQueue of Kueue, too.")
@common_options
@click.pass_obj
def doctor(target: Target, /, *, runtimes: tuple[str, ...], queue: str) -> int:
    """Check whether the cluster and namespace, or this machine, can run jobs: what is missing, and how to fix it.

    Creates and changes nothing. Prints one line for each finding: ok, warning, failure, or skipped if it could not be
    checked. Exits with 0 if nothing fails.
    """
    from trainjob.cli import clusters

    return target.do(lambda commands: clusters.doctor(commands, runtimes, queue))


@program.command(epilog=EXIT_CODES)
@click.argument("dags", type=click.Path(exists=True, path_type=Path))
@click.option("--cluster", is_flag=True, help="Also check what each task needs on its cluster. Creates nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def check(*, dags: Path, cluster: bool, as_json: bool) -> int:
    """Check the TrainJob tasks in the DAG files of DAGS, a folder or a file, without running them.

    Renders each task's templates with sample values and checks its spec. Needs no cluster. Arguments that only a run
    knows (XComs, variables, the conf of a run) are listed and not checked. Exits with 2 if a task is wrong.

    With --cluster, also checks that each task's runtime, LocalQueue and Secrets exist in its namespace, and that you
    may launch and wait there. Secrets are checked by name; their content is never read. The cluster is that of the
    task's connection (AIRFLOW_CONN_<ID>), else of KUBECONFIG and TRAINJOB_NAMESPACE. Exits with 3 if no task is wrong
    but a cluster could not be reached.
    """
    from importlib.metadata import entry_points
    from importlib.util import find_spec

    found = [*entry_points(group="trainjob.check")]
    if not found or find_spec("airflow") is None:
        raise missing("trainjob check", "Airflow", "airflow")
    os.environ.setdefault("AIRFLOW__LOGGING__LOGGING_LEVEL", "WARNING")  # its log goes to stdout
    codes = set()
    for each in found[0].load()(dags, cluster=cluster):
        codes.add((INFRASTRUCTURE if each.retryable else USAGE) if each.problem else 0)
        if as_json:
            echo(json.dumps(_checked(each, cluster=cluster)))
            continue
        if each.problem:
            first, *more = each.problem.splitlines()
            echo("\n".join([f"{click.style('failure', fg='red')}  {each.where}: {first}", *more]))
        else:
            note = f" (known only at run time: {', '.join(each.open)})" if each.open else ""
            echo(f"{click.style('ok', fg='green')}       {each.where}{note}")
        for note in each.notes:
            echo(f"         {click.style('note', fg='yellow')}: {note}")
    if not codes:
        echo(f"no TrainJob tasks in {dags}", err=True)
    return USAGE if USAGE in codes else max(codes, default=0)


def _checked(each: Any, *, cluster: bool) -> dict[str, Any]:
    fields = {"where": each.where, "problem": each.problem, "open": each.open}
    return fields | ({"notes": each.notes, "retryable": each.retryable} if cluster else {})


@program.command("exec", cls=WithCommand)
def exec_(command: tuple[str, ...]) -> int:
    """Run COMMAND inside a job, on local copies of the job's inputs and outputs.

    Downloads remote inputs (s3://, models:/, ...) on every node first. In the arguments of COMMAND and in
    TRAINJOB_INPUT_<NAME> and TRAINJOB_OUTPUT_<NAME>, the paths of the copies replace the URIs. If COMMAND succeeds,
    node 0 uploads the outputs. The exit code is that of COMMAND.
    """
    from trainjob.data import staging

    if not command:
        raise click.UsageError("give the command to run: trainjob exec -- COMMAND [ARG]...")
    return staging.run(command, echo)


program.add_command(data)
program.add_command(export)
program.add_command(registry)
