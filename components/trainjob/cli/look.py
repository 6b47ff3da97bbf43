"""``trainjob list``, ``status``, ``diagnose`` and ``logs``: look at jobs, and change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import click

from trainjob import names
from trainjob._jobs import report
from trainjob._support.kube_objects import rank_of
from trainjob._support.log_lines import Throttle
from trainjob.cli import texts
from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES, PIPE_CLOSED, USAGE, exit_code
from trainjob.cli.ignored import refuse_ignored
from trainjob.cli.options import JOB, key_option
from trainjob.cli.output import echo
from trainjob.cli.session import Interrupts, Session
from trainjob.cli.shown import Shown
from trainjob.errors import NotFound, TrainJobFailed
from trainjob.job import MANAGED_BY, JobRef, labels_of
from trainjob.status import Phase

_DETAILS = ("spec", "ranks", "events", "running")
"""Fields that `diagnose` prints and `status` does not."""

_RANKS = 20
"""Most ranks that an error names."""


@command(
    click.option(
        "--phase",
        "phases",
        multiple=True,
        type=click.Choice([str(phase) for phase in Phase if phase is not Phase.DELETED], case_sensitive=False),
        metavar="PHASE",
        help="List only jobs in this phase, e.g. Running; may be repeated.",
    ),
    key_option("List only the attempts of this key."),
    name="list",
    short_help="List jobs, the newest first.",
)
async def list_(session: Session, *, phases: Sequence[str], key: str | None) -> int:
    """List the jobs of the namespace that trainjob launched, the newest first."""
    found = await session.backend.find(session.namespace, labels_of(key) if key else {MANAGED_BY: "trainjob"})
    jobs = [texts.describe(trainjob, session.backend.now()) for trainjob in found]
    jobs = [job for job in jobs if not phases or job["phase"] in phases]
    jobs.sort(key=lambda job: job["created"] or "", reverse=True)
    if jobs or session.as_json:
        session.answer({"jobs": jobs}, lambda: texts.table(jobs))
    else:
        asked = "".join([f" with key {key!r}" if key else "", f" in phase {' or '.join(phases)}" if phases else ""])
        rest = f"; {len(found)} in other phases" if found else "; list all: trainjob list" if key else ""
        session.say(f"no jobs in namespace {session.namespace}{asked}{rest}")
    return 0


@command(JOB)
async def status(session: Session, *, name: tuple[str, str]) -> int:
    """Show the phase, progress and metrics of a job, and why it failed. Exits with 0 for a failed job, too."""
    found = await _examine(session, name)
    job = {each: value for each, value in found.as_dict().items() if each not in _DETAILS}
    session.answer(job, lambda: texts.status_text(found))
    return 0


@command(JOB, epilog=EXIT_CODES)
async def diagnose(session: Session, *, name: tuple[str, str]) -> int:
    """Show everything about any TrainJob: why it failed or what blocks it, its ranks and events.

    The exit code tells who has to act next: 0 if the job makes progress or is complete, 2 if it is blocked by something
    that only a person can fix, and that of `wait` if it has failed.
    """
    found = await _examine(session, name)
    session.answer(found.as_dict(), lambda: texts.report_text(found))
    if found.diagnosis.failed or found.given_up:
        return exit_code(TrainJobFailed(found.diagnosis))
    return USAGE if found.observation.stuck else 0


async def _examine(session: Session, name: tuple[str, str]) -> report.Report:
    """The report of a job; of one that is gone, what its pods and Events still show."""
    try:
        ref = JobRef.of(await session.find(name))
    except NotFound as missing:
        if not names.JOB.fullmatch(name[1]):
            raise
        try:
            return await report.diagnose(session.backend, name[0] or session.namespace, name[1])
        except NotFound:
            raise missing from None
    return await report.diagnose(session.backend, ref.namespace, ref.name)


@command(
    JOB,
    click.option("--follow", "-f", is_flag=True, help="Print new lines until the job has ended."),
    click.option(
        "--rank", "ranks", multiple=True, metavar="RANK", help="Print only this rank, e.g. node-1; may be repeated."
    ),
    click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Print only the last N lines of each rank."),
    click.option("--timestamps", is_flag=True, help="Print the time of each line."),
)
async def logs(
    session: Session, *, name: tuple[str, str], follow: bool, ranks: Sequence[str], tail: int | None, timestamps: bool
) -> int:
    """Print the log lines of a job's ranks."""
    if session.as_json:
        refuse_ignored("timestamps", because="has no effect with --json, whose objects have the time: leave it out")
    ref = JobRef.of(await session.find(name))
    shown = Shown(session, timestamps=timestamps)
    throttle = Throttle(shown.log, shown.state_seconds)
    written = False
    with Interrupts() as interrupts, interrupts.stage():
        async with aclosing(session.backend.logs(ref, ranks=ranks, follow=follow, tail=tail)) as lines:
            async for line in lines:
                throttle.line(line)
                written = True
                if session.closed:
                    return PIPE_CLOSED
    throttle.end()
    if not written and not interrupts.exit_code:
        await _check_ranks(session, ref, ranks)
        echo(f"no lines{' of ' + ', '.join(ranks) if ranks else ''} in the logs of {ref}", err=True)
    return interrupts.exit_code


async def _check_ranks(session: Session, ref: JobRef, ranks: Sequence[str]) -> None:
    """Refuse ranks that the job does not have."""
    if not ranks:
        return
    known = {rank_of(pod) for pod in (await session.backend.evidence(ref)).pods} - {""}
    if known and (unknown := [rank for rank in ranks if rank not in known]):
        shown = ", ".join(sorted(known)[:_RANKS]) + (", …" if len(known) > _RANKS else "")
        raise click.BadParameter(f"{ref} has no rank {' and no rank '.join(unknown)}; it has {shown}")
