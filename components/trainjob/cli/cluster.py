"""``trainjob install``, ``doctor``, ``reap`` and ``gc``: prepare, check and clean up a cluster, or this machine."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from trainjob import _install as package
from trainjob._backends.base import TrainJob
from trainjob._backends.local.store import leftovers
from trainjob._doctor import Finding, Level, examine
from trainjob._jobs import reaper
from trainjob._jobs.controller import Controller
from trainjob._jobs.leftovers import KEEP_FOR, Leftover, remove_leftovers
from trainjob._support.display import short
from trainjob.cli import texts
from trainjob.cli.command import command
from trainjob.cli.exits import EXIT_CODES, INFRASTRUCTURE, USAGE
from trainjob.cli.ignored import refuse_ignored
from trainjob.cli.options import (
    all_of,
    duration,
    image_name,
    json_option,
    namespace_option,
    pinned_image,
    service_account,
)
from trainjob.cli.output import echo
from trainjob.cli.probes import served
from trainjob.cli.session import Session
from trainjob.errors import ConfigurationError
from trainjob.job import JobRef
from trainjob.settings import Settings
from trainjob.status import observe
from trainjob.version import __version__

_COLORS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red", Level.SKIPPED: "bright_black"}
_INDENT = " " * 22  # width of level and check


_USED_BY: dict[str, tuple[package.Part, ...]] = {
    "namespace": ("rbac", "controller", "reaper", "kfp", "policy"),
    "service_accounts": ("rbac",),
    "explain": ("rbac",),
    "image": ("runtimes", "controller", "reaper"),
    "pins": ("runtimes", "controller", "reaper"),
    "storage_secret": ("runtimes",),
    "trainer": ("runtimes",),
    "keeps": ("controller", "reaper"),
}
"""Option of `trainjob install` -> the parts whose objects depend on it."""


def keep_for(text: str) -> timedelta:
    """A duration of at least an hour."""
    found = duration(text)
    if found < timedelta(hours=1):
        raise click.BadParameter(f"{text!r} is less than an hour: the next try of a step reads why its job failed")
    return found


@command(
    click.option(
        "--only",
        type=click.Choice(["runtimes", "rbac", "controller", "reaper", "kfp", "policy"]),
        help="Print only the runtimes, which a cluster needs once, or only the Role or the controller, which each"
        " namespace needs. Printed only on request: reaper, a CronJob in place of the controller; kfp, a change of"
        " KFP's workflowDefaults; policy, an admission policy for the TrainJobs of a namespace.",
    ),
    click.option(
        "--service-account",
        "service_accounts",
        type=service_account,
        multiple=True,
        metavar="[NAMESPACE:]NAME",
        help="Bind the Role to this service account, e.g. airflow:airflow-worker; may be repeated.",
    ),
    click.option(
        "--explain",
        is_flag=True,
        help="Add a read-only ClusterRole, by which more reasons why a job does not start are known: of queues,"
        " flavors, nodes and priority classes.",
    ),
    click.option(
        "--image", type=image_name, help="Use this step image: with its registry and, preferably, its digest."
    ),
    click.option(
        "--pin",
        "pins",
        type=pinned_image,
        multiple=True,
        metavar="NAME:TAG@sha256:DIGEST",
        help="Write the digest of an image into the objects that run NAME:TAG; may be repeated.",
    ),
    click.option(
        "--storage-secret", metavar="NAME", help="Name the Secret with the credentials of storage and registry."
    ),
    click.option(
        "--trainer",
        type=click.Choice(["2.1", "2.2", "2.3"]),
        help="Print only what this Kubeflow Trainer supports; 2.3 for any newer one, too.",
    ),
    click.option(
        "--keep-for",
        "keeps",
        type=keep_for,
        metavar="AGE",
        help="Let the controller remove jobs that trainjob has left suspended for longer, e.g. 12h or P90D; P30D if"
        " left out.",
    ),
    shared=all_of(namespace_option, json_option),
)
def install(
    session: Session,
    *,
    only: package.Part | None,
    service_accounts: Sequence[tuple[str, str]],
    pins: Sequence[str],
    keeps: timedelta | None,
    explain: bool,
    **names: str | None,
) -> int:
    """Print the objects that a cluster needs, as YAML for `kubectl apply --server-side -f -`. Needs no cluster.

    The Role is for the namespace of --namespace or TRAINJOB_NAMESPACE, else for that of kubectl. The output of
    `--only kfp` is for `kubectl patch`, since KFP has other keys in its ConfigMap; its first line has the command.
    """
    # TRAINJOB_NAMESPACE is the namespace of jobs; KFP's controller runs in another one.
    namespace = session.given_namespace or (Settings().namespace if only != "kfp" else None)
    if only in ("controller", "reaper") and not namespace:
        raise click.UsageError(f"--only {only} needs the namespace whose jobs it checks: --namespace")
    if only == "policy" and not namespace:
        raise click.UsageError("--only policy needs the namespace whose TrainJobs it checks: --namespace")
    _refuse_ignored(only, namespace)
    accounts = [(where or namespace or "", name) for where, name in service_accounts]
    if unplaced := [name for where, name in accounts if not where]:
        raise click.UsageError(f"service account {unplaced[0]} has no namespace: give NAMESPACE:{unplaced[0]}")
    given = {field: name for field, name in names.items() if name}
    found = package.objects(
        only,
        namespace=namespace,
        service_accounts=accounts,
        pins=pins,
        keep_for=keeps or KEEP_FOR,
        explain=explain,
        **given,
    )
    images = package.images(found)
    if unused := [pin for pin in pins if pin not in images]:
        name = unused[0].partition("@")[0]
        raise click.UsageError(f"--pin {unused[0]}: no object runs image {name}; images: {', '.join(images) or 'none'}")
    if only is None and not namespace:
        echo("left out: the controller, which needs --namespace", err=True)
    for name, since in package.SINCE.items() if only in (None, "runtimes") else ():
        if since > given.get("trainer", since):
            echo(f"left out: {name}, which needs Kubeflow Trainer {since}", err=True)
    for image in images:
        if "@" not in image:
            echo(f"not pinned: {image}, whose tag can be moved; --pin {image}@sha256:<digest>", err=True)
    session.answer(
        {"apiVersion": "v1", "kind": "List", "items": found},
        lambda: "\n".join([_heading(only, found), *(f"---\n{texts.as_yaml(each)}" for each in found)]),
    )
    return 0


def _refuse_ignored(only: package.Part | None, namespace: str | None) -> None:
    """Refuse options that change none of the objects."""
    for field, parts in _USED_BY.items():
        if only is not None and only not in parts:
            others = " or ".join(f"--only {part}" for part in parts)
            refuse_ignored(field, because=f"has no effect with --only {only}: leave it out, or use {others}")
    if not namespace:
        refuse_ignored("keeps", because="has no effect without the controller, which needs --namespace")


def _heading(only: package.Part | None, found: Sequence[Mapping[str, Any]]) -> str:
    """The first line of the YAML: its purpose, and the command that applies it."""
    if only == "kfp":
        metadata = found[0]["metadata"]
        patch = f"configmap {metadata['name']} -n {metadata['namespace']} --type merge --patch-file /dev/stdin"
        return f"# Replaces one key of KFP's own ConfigMap: kubectl patch {patch}"
    if only == "policy":
        return "# Edit the lists in the ConfigMap, one entry a line, then: kubectl apply --server-side -f policy.yaml"
    return f"# What trainjob {__version__} needs on a cluster: kubectl apply --server-side -f -"


@command(
    click.option(
        "--keep-for",
        "keeps",
        type=keep_for,
        metavar="AGE",
        help="Also remove jobs that trainjob has left suspended for longer, e.g. 12h or P30D.",
    ),
    click.option(
        "--watch",
        is_flag=True,
        help="Keep watching, and end such jobs as soon as it is known; also the jobs of a pipeline's run that is "
        "terminated or deleted.",
    ),
    click.option(
        "--port", type=click.IntRange(1, 65535), help="With --watch, serve /healthz and /metrics on this port."
    ),
    epilog=EXIT_CODES,
)
async def reap(session: Session, *, keeps: timedelta | None, watch: bool, port: int | None) -> int:
    """Suspend or delete the jobs that nobody waits for, by `unattended` and `unattended_after` of their specs.

    Checks the namespace once: returns at once if it has no such jobs, else after about two minutes. With --watch it is
    the controller of the namespace, which `trainjob install --only controller` prints as a Deployment; `--only reaper`
    prints a CronJob. The local backend needs none: each job's supervisor does the same.

    With --keep-for, also removes what `trainjob gc` removes on a cluster.
    """
    cluster = session.backend.cluster
    if cluster is None:
        raise click.UsageError("on this machine each job ends by itself when nobody waits for it")

    def show(reaped: reaper.Reaped | Leftover) -> None:
        session.answer(reaped.as_dict(), str(reaped))

    if watch:
        controller = Controller(cluster, session.namespace, keep_for=keeps, on_done=show)
        async with AsyncExitStack() as stack:
            if port is not None:
                await stack.enter_async_context(served(controller.counters, port))
            await controller.run()
        return 0
    if port is not None:
        raise click.UsageError("--port needs --watch")
    await reaper.reap(cluster, session.namespace, on_reaped=show)
    if keeps is not None:
        await remove_leftovers(cluster, session.namespace, keeps, on_removed=show)
    return 0


@command(
    click.option(
        "--runtime", "runtimes", multiple=True, metavar="NAME", help="Check this runtime, too; may be repeated."
    ),
    click.option("--queue", default="", metavar="NAME", help="Check this LocalQueue of Kueue, too."),
    epilog=EXIT_CODES,
)
async def doctor(session: Session, *, runtimes: Sequence[str], queue: str) -> int:
    """Check whether the cluster and namespace, or this machine, can run jobs: what is missing, and how to fix it.

    Creates and changes nothing. Prints one line for each finding: ok, warning, failure, or skipped if the check could
    not be made, or found that something is absent which only some jobs need. Exits with 0 if nothing fails.
    """
    findings: list[Finding] = []
    async with aclosing(_examined(session, runtimes, queue)) as found:
        async for finding in found:
            _print(session, _text(finding, findings[-1].advice if findings else ""))
            findings.append(finding)
    failures = [finding for finding in findings if finding.level is Level.FAILURE]
    counted = Counter(finding.level for finding in findings)
    session.answer(
        {"ok": not failures, "findings": [_fields(finding) for finding in findings]},
        "\n" + ", ".join(f"{counted[level]} {level}" for level in Level if counted[level]),
    )
    if not failures:
        return 0
    return INFRASTRUCTURE if all(finding.retry.retryable for finding in failures) else USAGE


async def _examined(session: Session, runtimes: Sequence[str], queue: str) -> AsyncGenerator[Finding]:
    try:
        backend, namespace = session.backend, session.namespace
    except ConfigurationError as error:
        yield Finding("settings", Level.FAILURE, str(error))
        return
    async with aclosing(examine(backend, namespace, runtimes, queue)) as found:
        async for finding in found:
            yield finding


def _fields(finding: Finding) -> dict[str, Any]:
    fields = vars(finding)
    return fields if finding.level is Level.FAILURE else {name: fields[name] for name in fields if name != "retry"}


def _text(finding: Finding, previous: str) -> str:
    """One finding for people. Advice is not wrapped, since it can be a command to copy, nor printed twice in a row."""
    level = click.style(f"{finding.level:<9}", fg=_COLORS[finding.level])
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20
    room = max(40, width - len(_INDENT))
    message = textwrap.wrap(" ".join(finding.message.split()), room, break_long_words=False, break_on_hyphens=False)
    lines = [f"{level}{finding.check:<13}{message[0]}", *(_INDENT + line for line in message[1:])]
    if finding.advice and finding.advice != previous:
        lines.append(f"{_INDENT}{click.style('->', bold=True)} {finding.advice}")
    return "\n".join(lines)


@command(
    click.option(
        "--older-than",
        type=duration,
        metavar="AGE",
        default="7d",
        show_default=True,
        help="Remove only jobs that ended, or on a cluster were suspended, longer ago, e.g. 12h.",
    ),
    click.option("--dry-run", is_flag=True, help="List what would be removed, and remove nothing."),
)
async def gc(session: Session, *, older_than: timedelta, dry_run: bool) -> int:
    """Remove old jobs: those of this machine that have ended, or those of a cluster that trainjob has left suspended.

    On this machine, logs are removed with the jobs, and running jobs are kept. On a cluster, removes jobs that their
    step gave up or that were suspended by a cancel or by `trainjob reap`. Keeps jobs that a person suspended, that wait
    in a queue, that a process waits for, and jobs that trainjob did not launch.
    """
    done = "would remove" if dry_run else "removed"
    limit, now = short(older_than), session.backend.now()
    removed: list[TrainJob] = []
    left: list[Path] = []
    if (home := session.backend.home) is not None:
        for trainjob in await session.backend.find(session.namespace, {}):
            ref, latest = JobRef.of(trainjob), observe(trainjob)
            if not (latest.phase.terminal and latest.finished and now - latest.finished > older_than):
                continue
            if not dry_run:
                await session.backend.delete(ref)
            removed.append(trainjob)
            _print(session, f"{done} {ref}: {latest.phase}, ended {short(now - latest.finished)} ago")
        left = leftovers(home, session.namespace, (now - older_than).timestamp())
        for path in left:
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
            _print(session, f"{done} {path}, left by a launch or deletion that was killed")
        nothing = f"no job in namespace {session.namespace} ended more than {limit} ago"
    elif (cluster := session.backend.cluster) is not None:

        def show(found: Leftover) -> None:
            _print(session, f"{done} {found.ref}: {found.reason}, {short(found.age)} ago")

        found = await remove_leftovers(cluster, session.namespace, older_than, dry_run=dry_run, on_removed=show)
        removed = [each.trainjob for each in found]
        nothing = f"no job in namespace {session.namespace} was left suspended by trainjob for more than {limit}"
    else:
        raise click.UsageError("gc removes jobs of this machine (--backend local) or of a cluster")
    if session.as_json:
        jobs = [texts.describe(each, session.backend.now()) for each in removed]
        session.answer({"dry_run": dry_run, "removed": jobs, "leftovers": [str(path) for path in left]}, "")
    elif not removed and not left:
        session.say(nothing)
    return 0


def _print(session: Session, line: str) -> None:
    """Print a line as soon as it is known; JSON has one object at the end."""
    if not session.as_json:
        echo(line)
