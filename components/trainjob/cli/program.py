"""The commands with their options, and what errors become. What commands do is in `trainjob.cli.commands`."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import click

from trainjob.cli import completion
from trainjob.cli.data import data
from trainjob.cli.options import (
    WithCommand,
    common_options,
    duration,
    fields_of,
    global_options,
    image_name,
    job_name,
    live_options,
    output_file,
    pinned_image,
    require_crash_option,
    require_work,
    service_account,
    spec_options,
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
from trainjob.sanitizing import one_line
from trainjob.status import Phase
from trainjob.verdicts import RetryVerdict
from trainjob.version import __version__

if TYPE_CHECKING:
    from trainjob.install import Part
    from trainjob.lifecycle import CrashAction
    from trainjob.wait_options import WaitOptions

_LASTING = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
)
"""What a retry finds again: a path that is not there, is of another kind, or may not be used."""

USER, USAGE, INFRASTRUCTURE, BUDGET, NOT_FOUND, BUG, INTERRUPTED = 1, 2, 3, 4, 5, 70, 130

EXIT_CODES = """\
\b
Exit codes:
  0    success
  1    the training failed by itself
  2    usage, spec or configuration: a person has to change something
  3    infrastructure, preemption or quota: a retry may help
  4    a budget ran out; the job goes on
  5    no such job or model, or the job was cancelled or deleted while it was waited for
  70   a bug in trainjob
  130  interrupted (143 by SIGTERM)

Without a cluster, TRAINJOB_BACKEND=local or --backend local runs jobs on this machine."""


def exit_code(error: TrainJobError) -> int:
    """The exit code that tells a script who has to act next."""
    if isinstance(error, TimedOut) and not isinstance(error, Stuck):
        return BUDGET
    deleted = isinstance(error, TrainJobFailed) and error.diagnosis.category == "deleted"
    if deleted or isinstance(error, NotFound | ModelNotFound):
        return NOT_FOUND
    if error.retry in (RetryVerdict.USER, RetryVerdict.UNKNOWN):
        return USER
    return INFRASTRUCTURE if error.retry.retryable else USAGE


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; errors of this package become a message and an exit code, never a traceback."""
    if completion.VARIABLE in os.environ:
        completion.main(program)
    words = list(sys.argv[1:] if arguments is None else arguments)
    own = words[: words.index("--")] if "--" in words else words
    try:
        answer = program.main(words, prog_name="trainjob", standalone_mode=False, color=False if no_color() else None)
        code = answer if isinstance(answer, int) else 0
    except click.ClickException as error:
        error.show()
        code = USAGE
        _error_object(own, error.format_message(), code, type=type(error).__name__)
    except click.Abort:
        code = INTERRUPTED
    except TrainJobError as error:
        code = exit_code(error)
        first, *more = (one_line(line, 2000) for line in str(error).split("\n"))  # lines of logs are among them
        echo("\n".join([click.style(f"error: {first}", fg="red", bold=True), *map(fitted, more)]), err=True)
        _error_object(own, str(error), code, type=type(error).__name__, retry=error.retry, **_details(error))
    except OSError as error:
        code = USAGE if error.errno in _LASTING else INFRASTRUCTURE
        message = f"{error.filename}: {error.strerror}" if error.filename is not None else str(error)
        echo(f"error: {message}", err=True)
        _error_object(own, message, code, type=type(error).__name__)
    except Exception as error:  # noqa: BLE001 - a script must not take our bug for a failed training
        code = BUG
        traceback.print_exc()
        _error_object(own, str(error), code, type=type(error).__name__)
    sys.exit(code)


def _details(error: TrainJobError) -> dict[str, Any]:
    if isinstance(error, TrainJobFailed):
        return {"diagnosis": error.diagnosis.as_dict()}
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
    """Run Kubeflow TrainJobs exactly once, wait for them, and see what went wrong."""
    ctx.ensure_object(Target)
    ctx.color = False if no_color() else None


@program.command(cls=WithCommand, epilog=EXIT_CODES)
@spec_options
@click.option("--detach", "-d", is_flag=True, help="Launch only; print the job's name.")
@live_options
@click.option(
    "--on-interrupt",
    type=click.Choice(["cancel", "keep"]),
    default="cancel",
    show_default=True,
    help="What Ctrl-C does to the job. A second Ctrl-C leaves at once.",
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
    """Launch a job and wait for its end.

    With --key, a job that was launched under it and has not ended is adopted instead; after a failure, or once its
    result was shown here, the next attempt is made. Without it, the job gets a key of its own, which is printed.
    """
    work = fields_of(fields, command)
    require_work(spec, work)
    require_crash_option(on_crash, options)
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
@click.argument("name", type=job_name, required=False, shell_complete=completion.jobs)
@click.option(
    "--stdin",
    "many",
    is_flag=True,
    help="Wait for all jobs whose names stdin has, one a line, in one process; print NAME, a tab and the Unix time for"
    " each as soon as it has ended.",
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
    """Wait for the end of a job that is there. Ctrl-C leaves it running."""
    require_crash_option(on_crash, options)
    if many == (name is not None):
        raise click.UsageError("say what to wait for: the NAME of a job, or --stdin")
    if name is not None:
        return target.do(
            lambda commands: commands.wait(
                name, options=options, on_crash=on_crash or "keep", plain=plain, logs=not no_logs
            )
        )
    if options.fail_on_first_crash:
        raise click.UsageError("--fail-on-first-crash watches the ranks of one job: give its NAME")
    from trainjob.cli.many import ManyWaits  # noqa: PLC0415 - not before it is needed, see `trainjob.cli`

    names = [job_name(word) for word in sys.stdin.read().split()]
    return target.do(lambda commands: ManyWaits(commands, names, options).run())


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@common_options
@click.pass_obj
def status(target: Target, /, *, name: tuple[str, str]) -> int:
    """Say where a job stands, and why it failed. Exits with 0 whatever the answer is."""
    return target.do(lambda commands: commands.status(name))


@program.command(epilog=EXIT_CODES)
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@click.option(
    "--html",
    "page",
    type=output_file,
    metavar="FILE",
    help="Write one HTML page, too, that needs nothing else.",
)
@common_options
@click.pass_obj
def diagnose(target: Target, /, *, name: tuple[str, str], page: Path | None) -> int:
    """Say everything about a job, whoever started it: why it failed, or what is in its way; its ranks and events.

    The exit code says who has to act next: 0 while the job gets on or is complete, 2 where only a person can get it
    on, and that of `wait` where it has failed.
    """
    return target.do(lambda commands: commands.diagnose(name, page, exit_code))


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@click.option("--follow", "-f", is_flag=True, help="Go on until the job has ended.")
@click.option("--rank", "ranks", multiple=True, metavar="RANK", help="Only this rank, e.g. node-1; may be repeated.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each rank.")
@click.option("--timestamps", is_flag=True, help="When each line was written.")
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
    """Print what the ranks of a job wrote."""
    return target.do(lambda commands: commands.logs(name, follow=follow, ranks=ranks, tail=tail, timestamps=timestamps))


@program.command("list", short_help="List jobs, the newest first.")
@click.option(
    "--phase",
    "phases",
    multiple=True,
    type=click.Choice([str(phase) for phase in Phase if phase is not Phase.DELETED], case_sensitive=False),
    metavar="PHASE",
    help="Only jobs in this phase, e.g. Running; may be repeated.",
)
@click.option(
    "--key", type=work_key, metavar="KEY", shell_complete=completion.keys, help="Only the attempts of this key."
)
@common_options
@click.pass_obj
def list_(target: Target, /, *, phases: tuple[str, ...], key: str | None) -> int:
    """List jobs, the newest first: those of the namespace that were launched with trainjob."""
    return target.do(lambda commands: commands.list(phases, key))


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@click.option("--suspend", is_flag=True, help="Keep the job, stopped; `trainjob resume` starts its ranks anew.")
@common_options
@click.pass_obj
def cancel(target: Target, /, *, name: tuple[str, str], suspend: bool) -> int:
    """Stop a job, and wait until nothing of it is left running.

    On this machine its logs and metrics are kept, and `trainjob gc` removes them later. On a cluster the job is deleted
    with its pods and logs; its phase, metrics and last log lines are printed.
    """
    return target.do(lambda commands: commands.cancel(name, suspend=suspend))


@program.command()
@click.argument("name", type=job_name, shell_complete=completion.jobs)
@common_options
@click.pass_obj
def resume(target: Target, /, *, name: tuple[str, str]) -> int:
    """Start a suspended job again."""
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
    help="Only jobs that ended longer ago, e.g. 12h.",
)
@click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing.")
@common_options
@click.pass_obj
def gc(target: Target, /, *, older_than: timedelta, dry_run: bool) -> int:
    """Remove the jobs of this machine that have ended, with their logs. Jobs that run are left alone."""
    return target.do(lambda commands: commands.gc(older_than, dry_run=dry_run))


@program.command(cls=WithCommand)
@spec_options
@click.option("--dry-run", is_flag=True, help="Have the server check it, and print what it would store.")
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
    """Print the TrainJob that `run` would create, as YAML. Needs no cluster, unless with --dry-run."""
    fields = fields_of(options, command)
    require_work(spec, fields)
    return target.do(lambda commands: commands.render(spec, fields, key, dry_run=dry_run))


@program.command()
@click.option(
    "--only",
    type=click.Choice(["runtimes", "rbac", "reaper", "kfp", "policy"]),
    help="Only the runtimes, which a cluster needs once; only the rights or the reaper, which each namespace needs. "
    "Never printed otherwise: a change of KFP's workflowDefaults; an admission policy for a namespace's TrainJobs.",
)
@click.option(
    "--service-account",
    "service_accounts",
    type=service_account,
    multiple=True,
    metavar="[NAMESPACE:]NAME",
    help="Who gets the rights, e.g. airflow:airflow-worker; may be repeated.",
)
@click.option("--image", type=image_name, help="The step image, with its registry and, best, its digest.")
@click.option(
    "--pin",
    "pins",
    type=pinned_image,
    multiple=True,
    metavar="NAME:TAG@sha256:DIGEST",
    help="Write the digest of an image into the objects that run NAME:TAG; may be repeated.",
)
@click.option("--storage-config", metavar="NAME", help="ConfigMap with the settings of storage and registry.")
@click.option("--storage-secret", metavar="NAME", help="Secret with their keys.")
@click.option(
    "--trainer",
    type=click.Choice(["2.1", "2.2", "2.3"]),
    help="Kubeflow Trainer of the cluster, 2.3 for any newer one too: leaves out what it does not know.",
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
    **names: str | None,
) -> int:
    """Print what a cluster must have, as YAML for `kubectl apply --server-side -f -`. Needs no cluster.

    The rights are for the namespace of --namespace or TRAINJOB_NAMESPACE, else for that of kubectl. `--only kfp` is for
    `kubectl patch`, since KFP has other keys in its ConfigMap; its output says how.
    """
    from trainjob.cli import clusters  # noqa: PLC0415 - not before it is needed, see `trainjob.cli`

    return target.do(lambda _: clusters.install(target, only, service_accounts, pins, names))


@program.command(epilog=EXIT_CODES)
@common_options
@click.pass_obj
def reap(target: Target, /) -> int:
    """End the jobs of a namespace that nobody waits for, as their specs say: `unattended`, `unattended_after`.

    One run: it returns at once where there are none, else after two minutes or so. `trainjob install --only reaper`
    prints a CronJob that runs it. The local backend needs none: there each job does it by itself.
    """
    from trainjob.cli import clusters  # noqa: PLC0415 - not before it is needed, see `trainjob.cli`

    return target.do(clusters.reap)


@program.command(epilog=EXIT_CODES)
@click.option(
    "--runtime",
    "runtimes",
    multiple=True,
    metavar="NAME",
    shell_complete=completion.runtimes,
    help="A runtime that has to be there.",
)
@click.option("--queue", default="", metavar="NAME", help="LocalQueue of Kueue that jobs are to name.")
@common_options
@click.pass_obj
def doctor(target: Target, /, *, runtimes: tuple[str, ...], queue: str) -> int:
    """Check the cluster and namespace, or this machine, before there are jobs: what is missing, and what to do.

    Nothing is created or changed. A line for each finding: ok, warning, failure, or skipped if it could not be found
    out. Exits with 0 if nothing fails.
    """
    from trainjob.cli import clusters  # noqa: PLC0415 - not before it is needed, see `trainjob.cli`

    return target.do(lambda commands: clusters.doctor(commands, runtimes, queue))


@program.command(epilog=EXIT_CODES)
@click.argument("dags", type=click.Path(exists=True, path_type=Path))
@click.option("--cluster", is_flag=True, help="Check also what each task needs on its cluster. Nothing is created.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
def check(*, dags: Path, cluster: bool, as_json: bool) -> int:
    """Check the TrainJob tasks in the DAG files of DAGS, a folder or a file, without running them.

    Renders each task's templates with sample values and checks its spec. Needs no cluster. Arguments that only a run
    knows (XComs, variables, the conf of a run) are listed and not checked. Exits with 2 if a task is wrong.

    With --cluster, checks also that each task's runtime, LocalQueue and Secrets exist in its namespace, and that you
    may launch and wait there. Secrets are checked by name, and their content is never read. The cluster is that of
    the task's connection (AIRFLOW_CONN_<ID>), else of KUBECONFIG and TRAINJOB_NAMESPACE. Exits with 3 if nothing is
    wrong but a cluster could not be reached.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - not before it is needed, see `trainjob.cli`
    from importlib.util import find_spec  # noqa: PLC0415 - the same

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
            note = f" (decided in the run: {', '.join(each.open)})" if each.open else ""
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
    """Inside a job: run COMMAND on local copies of the job's inputs and outputs.

    Inputs that are elsewhere (s3://, models:/, ...) are brought first, on every node. COMMAND finds the copies where
    its arguments, TRAINJOB_INPUT_<NAME> and TRAINJOB_OUTPUT_<NAME> name URIs. After its success node 0 takes the
    outputs to where they belong. The exit code is that of COMMAND.
    """
    from trainjob.data import staging  # noqa: PLC0415 - needs nothing that a training image may lack

    if not command:
        raise click.UsageError("say what to run: trainjob exec -- COMMAND [ARG]...")
    return staging.run(command, echo)


program.add_command(data)
program.add_command(export)
program.add_command(registry)
