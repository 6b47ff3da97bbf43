"""``trainjob install``, ``trainjob reap`` and ``trainjob doctor``."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any

import click

from trainjob import _install as package
from trainjob._doctor import Finding, Level, examine
from trainjob._jobs.leftovers import KEEP_FOR, Leftover, remove_leftovers
from trainjob.cli import texts
from trainjob.cli.commands import Commands
from trainjob.cli.output import echo
from trainjob.cli.target import Target
from trainjob.errors import ConfigurationError
from trainjob.settings import Settings
from trainjob.version import __version__

_CHANGE, _RETRY = 2, 3  # exit codes, see `trainjob.cli.program`
_COLORS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red", Level.SKIPPED: "bright_black"}
_INDENT = " " * 22  # width of level and check


async def install(
    target: Target,
    only: package.Part | None,
    service_accounts: Sequence[tuple[str, str]],
    pins: Sequence[str],
    names: Mapping[str, str | None],
    *,
    keep_for: timedelta | None,
) -> int:
    """Print the objects that a cluster needs: YAML documents, or one List with ``--json``."""
    # TRAINJOB_NAMESPACE is the namespace of jobs; KFP's controller runs in another one.
    namespace = target.namespace or (Settings().namespace if only != "kfp" else None)
    if only == "reaper" and not namespace:
        raise click.UsageError("--only reaper needs the namespace whose jobs it checks: --namespace")
    if only == "policy" and not namespace:
        raise click.UsageError("--only policy needs the namespace whose TrainJobs it checks: --namespace")
    accounts = [(where or namespace or "", name) for where, name in service_accounts]
    if unplaced := [name for where, name in accounts if not where]:
        raise click.UsageError(f"service account {unplaced[0]} has no namespace: give NAMESPACE:{unplaced[0]}")
    given = {field: name for field, name in names.items() if name}
    found = package.objects(
        only, namespace=namespace, service_accounts=accounts, pins=pins, keep_for=keep_for or KEEP_FOR, **given
    )
    images = package.images(found)
    if unused := [pin for pin in pins if pin not in images]:
        name = unused[0].partition("@")[0]
        raise click.UsageError(f"--pin {unused[0]}: no object runs image {name}; images: {', '.join(images) or 'none'}")
    if only is None and not namespace:
        echo("left out: the reaper, which needs --namespace", err=True)
    for name, since in package.SINCE.items() if only in (None, "runtimes") else ():
        if since > given.get("trainer", since):
            echo(f"left out: {name}, which needs Kubeflow Trainer {since}", err=True)
    for image in images:
        if "@" not in image:
            echo(f"not pinned: {image}, whose tag can be moved; --pin {image}@sha256:<digest>", err=True)
    if target.as_json:
        echo(texts.as_json({"apiVersion": "v1", "kind": "List", "items": found}))
        return 0
    echo(_heading(only, found))
    for each in found:
        echo(f"---\n{texts.as_yaml(each)}")
    return 0


def _heading(only: package.Part | None, found: Sequence[Mapping[str, Any]]) -> str:
    """The first line of the YAML: its purpose, and the command that applies it."""
    if only == "kfp":
        metadata = found[0]["metadata"]
        patch = f"configmap {metadata['name']} -n {metadata['namespace']} --type merge --patch-file /dev/stdin"
        return f"# Replaces one key of KFP's own ConfigMap: kubectl patch {patch}"
    if only == "policy":
        return "# Edit the lists in the ConfigMap, one entry a line, then: kubectl apply --server-side -f policy.yaml"
    return f"# What trainjob {__version__} needs on a cluster: kubectl apply --server-side -f -"


async def reap(commands: Commands, keep_for: timedelta | None) -> int:
    """Print each job that is suspended or deleted because nobody waits for it, or removed after `keep_for`."""
    cluster = commands.backend.cluster
    if cluster is None:
        raise click.UsageError("on this machine each job ends by itself when nobody waits for it")
    from trainjob._jobs import reaper

    def show(reaped: reaper.Reaped | Leftover) -> None:
        echo(json.dumps(reaped.as_dict()) if commands.as_json else str(reaped))

    await reaper.reap(cluster, commands.namespace, on_reaped=show)
    if keep_for is not None:
        await remove_leftovers(cluster, commands.namespace, keep_for, on_removed=show)
    return 0


async def doctor(commands: Commands, runtimes: Sequence[str], queue: str) -> int:
    """Print each finding as soon as it is known; 0 if nothing fails."""
    findings: list[Finding] = []
    async with aclosing(_examined(commands, runtimes, queue)) as found:
        async for finding in found:
            if not commands.as_json:
                echo(_text(finding, findings[-1].advice if findings else ""))
            findings.append(finding)
    failures = [finding for finding in findings if finding.level is Level.FAILURE]
    if commands.as_json:
        echo(texts.as_json({"ok": not failures, "findings": [_fields(finding) for finding in findings]}))
    else:
        counted = Counter(finding.level for finding in findings)
        echo("\n" + ", ".join(f"{counted[level]} {level}" for level in Level if counted[level]))
    if not failures:
        return 0
    return _RETRY if all(finding.retry.retryable for finding in failures) else _CHANGE


async def _examined(commands: Commands, runtimes: Sequence[str], queue: str) -> AsyncGenerator[Finding]:
    try:
        backend, namespace = commands.backend, commands.namespace
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
