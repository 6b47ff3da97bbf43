"""``trainjob check``: the TrainJob tasks in DAG files. Airflow's package has the check, as an entry point."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES, INFRASTRUCTURE, USAGE
from trainjob.cli.options import json_option
from trainjob.cli.output import echo
from trainjob.cli.session import Session
from trainjob.errors import missing


@command(
    click.argument("dags", type=click.Path(exists=True, path_type=Path)),
    click.option("--cluster", is_flag=True, help="Also check what each task needs on its cluster. Creates nothing."),
    shared=json_option,
    epilog=EXIT_CODES,
)
def check(session: Session, *, dags: Path, cluster: bool) -> int:
    """Check the TrainJob tasks in the DAG files of DAGS, a folder or a file, without running them.

    Renders each task's templates with sample values and checks its spec. Needs no cluster. Arguments that only a run
    knows (XComs, variables, the conf of a run) are listed and not checked. Exits with 2 if a task is wrong.

    With --cluster, also checks that each task's runtime, LocalQueue and Secrets exist in its namespace, and that you
    may launch and wait there. Secrets are checked by name; their content is never read. The cluster is that of the
    task's connection (AIRFLOW_CONN_<ID>), else of KUBECONFIG and TRAINJOB_NAMESPACE. Exits with 3 if no task is wrong
    but a cluster could not be reached.
    """
    found = [*entry_points(group="trainjob.check")]
    if not found or find_spec("airflow") is None:
        raise missing("trainjob check", "Airflow", "airflow")
    os.environ.setdefault("AIRFLOW__LOGGING__LOGGING_LEVEL", "WARNING")  # its log goes to stdout
    codes = set()
    for each in found[0].load()(dags, cluster=cluster):
        codes.add((INFRASTRUCTURE if each.retryable else USAGE) if each.problem else 0)
        session.answer(_checked(each, cluster=cluster), _text(each))
    if not codes:
        echo(f"no TrainJob tasks in {dags}", err=True)
    return USAGE if USAGE in codes else max(codes, default=0)


def _checked(each: Any, *, cluster: bool) -> dict[str, Any]:
    fields = {"where": each.where, "problem": each.problem, "open": each.open}
    return fields | ({"notes": each.notes, "retryable": each.retryable} if cluster else {})


def _text(each: Any) -> str:
    if each.problem:
        first, *more = each.problem.splitlines()
        lines = [f"{click.style('failure', fg='red')}  {each.where}: {first}", *more]
    else:
        open_ = f" (known only at run time: {', '.join(each.open)})" if each.open else ""
        lines = [f"{click.style('ok', fg='green')}       {each.where}{open_}"]
    return "\n".join([*lines, *(f"         {click.style('note', fg='yellow')}: {note}" for note in each.notes)])
