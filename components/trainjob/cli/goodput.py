"""`goodput`: how the time of jobs was spent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import click

from trainjob._diagnosis.evidence import Evidence
from trainjob._goodput import Attempt, measure, pieces_of_work, ratio_of, sums, total
from trainjob._support.control_characters import one_line
from trainjob._support.display import short
from trainjob._support.kube_objects import mapping
from trainjob.cli import completion, texts
from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES
from trainjob.cli.options import gpu_price, job_name, key_option, pair
from trainjob.cli.output import columns, echo
from trainjob.cli.session import Session
from trainjob.goodput import Activity, Goodput
from trainjob.job import KEY, MANAGED_BY, JobRef, labels_of

_KEY = 100  # characters
_BAR = 30  # characters of the bar of all time
_LOSSES = 2  # largest of a job that the table names


@command(
    click.argument("name", type=job_name, required=False, metavar="[JOB]", shell_complete=completion.jobs),
    key_option("Show only the attempts of this key."),
    click.option(
        "--label",
        "-l",
        "given_labels",
        type=pair,
        multiple=True,
        metavar="NAME=VALUE",
        help="Show only jobs with this label; may be repeated.",
    ),
    click.option(
        "--price-per-gpu-hour",
        "price",
        type=gpu_price,
        metavar="NUMBER",
        help="Show the cost of each activity, in the currency of this price.",
    ),
    epilog=EXIT_CODES,
)
async def goodput(
    session: Session,
    *,
    name: tuple[str, str] | None,
    key: str | None,
    given_labels: Sequence[tuple[str, str]],
    price: float | None,
) -> int:
    """Show how the time of jobs was spent: the share of training that counted (goodput), and what the rest was lost to.

    Shows the work of JOB with all its attempts, else all jobs of the namespace that trainjob launched. Each second is
    queued, starting, training, evaluating, checkpointing, repeated, stalled, restarting or stopped. Time that cannot be
    told apart counts as training.
    """
    labels = dict(given_labels)
    if name is not None and (key or labels):
        raise click.UsageError("give either the name of a JOB, or --key and --label")
    jobs, uid = await _read(session, name, key, labels)
    for unseen in dict.fromkeys(text for job in jobs for text in job.unseen):
        echo(f"less is known without the {unseen}", err=True)
    now = session.backend.now()
    pieces = pieces_of_work(jobs)
    if name is not None:
        pieces = [piece for piece in pieces if any(_uid(job) == uid for job in piece)]
    found = [measure([Attempt(job) for job in piece], now) for piece in pieces]
    seconds, hours, unknown = total(found)
    if session.as_json:
        # Unlike the sum of the known GPU-hours, which the text shows with its number, null cannot be misread.
        together = sums(seconds, None if unknown else hours, price)
        answer = {"jobs": [each.as_dict(price) for each in found], "total": together, "gpus_unknown": unknown}
        session.answer(answer, "")
    elif not found:
        asked = f" with key {key!r}" if key else f" with labels {_pairs(labels)}" if labels else ""
        echo(f"no jobs in namespace {session.namespace}{asked}; list all: {session.command('list')}", err=True)
    else:
        echo(_table(found, price) if len(found) > 1 else _header(found[0]))
        echo()
        echo(_activities(seconds, hours if unknown < len(found) else None, price, found))
        if 0 < unknown < len(found):
            echo(f"GPU-hours without {unknown} of {len(found)} jobs, whose number of GPUs is unknown", err=True)
    return 0


async def _read(
    session: Session, name: tuple[str, str] | None, key: str | None, labels: Mapping[str, str]
) -> tuple[Sequence[Evidence], str]:
    """The jobs, and the UID of the named one; by one list each of TrainJobs, pods and, for queues, Workloads."""
    if name is None:
        selected = {**labels, **(labels_of(key) if key else {MANAGED_BY: "trainjob"})}
        return await session.backend.states(session.namespace, selected), ""
    trainjob = await session.find(name)
    namespace, uid = trainjob["metadata"]["namespace"], trainjob["metadata"]["uid"]
    if work := mapping(trainjob, "metadata", "annotations").get(KEY):
        return await session.backend.states(namespace, labels_of(str(work))), uid
    return [await session.backend.state(JobRef.of(trainjob))], uid


def _uid(job: Evidence) -> object:
    return mapping(job.trainjob, "metadata").get("uid")


def _pairs(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _header(found: Goodput) -> str:
    count = found.attempts
    title = click.style(f"{found.namespace}/{found.name}", bold=True)
    lines = [f"{title}  {texts.phase_styled(found.phase)}  {count} attempt{'' if count == 1 else 's'}"]
    if found.key:
        lines.append(f"key {one_line(found.key, _KEY)}")
    if found.missing:
        lines.append(f"attempts that do not exist any more: {', '.join(map(str, found.missing))}")
    return "\n".join(lines)


def _table(found: Sequence[Goodput], price: float | None) -> str:
    """A line for each piece of work, with what took most of the time that was no training."""
    rows = [["JOB", "PHASE", "ATTEMPTS", "TIME", "GOODPUT", "GPU-HOURS", "COST", "LOST MOST TO", "KEY"]]
    for each in found:
        wall, spent, hours = each.wall_seconds, each.seconds, each.gpu_hours
        held = math.fsum(hours.values()) if hours is not None else None
        lost = sorted((spent[activity], activity) for activity in spent if activity is not Activity.TRAINING)
        largest = [f"{activity} {_percent(part / wall)}" for part, activity in reversed(lost[-_LOSSES:]) if part > 0]
        rows.append(
            [
                each.name,
                str(each.phase),
                str(each.attempts),
                short(wall),
                _percent(each.ratio),
                "" if held is None else f"{held:.2f}",
                "" if held is None or price is None else f"{held * price:.2f}",
                ", ".join(largest),
                one_line(each.key, _KEY),
            ]
        )
    if price is None:
        rows = [row[:6] + row[7:] for row in rows]
    return "\n".join(columns(rows))


def _activities(
    seconds: Mapping[Activity, float],
    hours: Mapping[Activity, float] | None,
    price: float | None,
    found: Sequence[Goodput],
) -> str:
    """Goodput, and a line for each activity: time, share, GPU-hours, cost, and how it is known."""
    wall = math.fsum(seconds.values())
    known: dict[Activity, set[str]] = {}
    for each in found:
        for activity, sources in each.sources.items():
            known.setdefault(activity, set()).update(map(str, sources))
    rows = [["ACTIVITY", "TIME", "SHARE", "", "GPU-HOURS", "COST", "KNOWN FROM"]]
    for activity, spent in seconds.items():
        if spent:
            held = hours[activity] if hours is not None else None
            rows.append(
                [
                    str(activity),
                    short(spent),
                    _percent(spent / wall),
                    "█" * round(_BAR * spent / wall),
                    "" if held is None else f"{held:.2f}",
                    "" if held is None or price is None else f"{held * price:.2f}",
                    ", ".join(sorted(known.get(activity, ()))),
                ]
            )
    if price is None:
        rows = [row[:5] + row[6:] for row in rows]
    title = f"goodput {_percent(ratio_of(seconds)) or 'unknown'} of {short(wall)}"
    return "\n".join([click.style(title, bold=True), *columns(rows)])
