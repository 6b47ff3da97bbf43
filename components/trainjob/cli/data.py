"""``trainjob data``: copies datasets and models as the steps before and after a training do."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from trainjob.cli.options import json_option
from trainjob.cli.output import echo, redrawn
from trainjob.cli.target import Target

if TYPE_CHECKING:
    from trainjob.data import ContentManifest
    from trainjob.data.meter import Notify

# Nothing but click is imported before a command runs, see `trainjob.cli`.


@click.group()
def data() -> None:
    """Copy datasets and models between stores, as the steps before and after a training do."""


@data.command(short_help="Copy a dataset or model, verified and resumable.")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Copy only paths that match, e.g. '*.csv'; may be repeated."
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Leave out paths that match, also of --include; may be repeated.",
)
@click.option("--digest", help="Require this digest: SHA-256 of the one file, or sha256:<root digest>.")
@click.option("--quiet", "-q", is_flag=True, help="Print nothing before the end.")
@json_option
@click.pass_obj
def copy(
    target_: Target,
    /,
    *,
    source: str,
    target: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    digest: str | None,
    quiet: bool,
) -> int:
    """Copy FROM, a file or a directory, into the directory TO.

    Both are locations: local paths, s3://, gs://, az://, abfss://, hf://, oci://, or https:// to read one file. Every
    byte is hashed, and checked against the MANIFEST.json in FROM if there is one. The MANIFEST.json in TO is written
    last. The same command again copies only what is missing; after a kill, it resumes.
    """
    from trainjob.cli import texts
    from trainjob.data import transfer

    with interruptible(), _shown(quiet, target_.as_json) as shown:
        manifest = transfer.copy(source, target, include=include, exclude=exclude, digest=digest, **shown)
    fields = _fields(target, manifest)
    echo(texts.as_json(fields) if target_.as_json else f"{fields['digest']}  {fields['uri']}")
    return 0


def _fields(target: str, manifest: ContentManifest) -> dict[str, Any]:
    from trainjob.data.locations import parse_store

    uri = parse_store(target).uri
    return {"uri": uri, "digest": manifest.digest, "files": len(manifest.files), "bytes": manifest.size}


@contextmanager
def _shown(quiet: bool, as_json: bool) -> Iterator[dict[str, Any]]:
    """Arguments of `transfer.copy` that show its progress on stderr: a bar on a terminal, else lines."""
    if quiet:
        yield {}
        return
    if as_json or not redrawn(sys.stderr):
        yield {"progress": lines(quiet)}
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield {"moved": lambda done, total: bar.update(task, completed=done, total=total)}


def lines(quiet: bool) -> Notify | None:
    """A function that prints lines about progress on stderr."""
    return None if quiet else lambda line: echo(line, err=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT and SIGTERM raise SystemExit, so that an upload cleans up."""

    def end(number: int, frame: object) -> NoReturn:
        del frame
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)
