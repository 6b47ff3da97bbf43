"""``trainjob data copy`` and ``exec``: copies datasets and models as the steps before and after a training do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import click

from trainjob._support.signals import exiting, handled
from trainjob.cli.bars import bar
from trainjob.cli.command import command
from trainjob.cli.options import WithCommand, all_of, json_option
from trainjob.cli.output import echo
from trainjob.cli.session import Session
from trainjob.data import staging, transfer
from trainjob.data.locations import parse_store
from trainjob.data.meter import Notify
from trainjob.data.options import Copy


@click.group()
def data() -> None:
    """Copy datasets and models between stores, as the steps before and after a training do."""


_TEXTS = {each.name: f"{each.metadata['help'][0].upper()}{each.metadata['help'][1:]}." for each in fields(Copy)}


@command(
    click.argument("source", metavar="FROM"),
    click.argument("target", metavar="TO"),
    click.option("--include", multiple=True, metavar="PATTERN", help=_TEXTS["include"]),
    click.option("--exclude", multiple=True, metavar="PATTERN", help=_TEXTS["exclude"]),
    click.option("--digest", help=_TEXTS["digest"]),
    click.option("--quiet", "-q", is_flag=True, help="Print nothing before the end."),
    shared=json_option,
    short_help="Copy a dataset or model, verified and resumable.",
)
def copy(session: Session, *, quiet: bool, **given: Any) -> int:
    """Copy FROM, a file or a directory, into the directory TO.

    Both are locations: local paths, s3://, gs://, az://, abfss://, hf://, oci://, or https:// to read one file. Every
    byte is hashed, and checked against the MANIFEST.json in FROM if there is one. The MANIFEST.json in TO is written
    last. The same command again copies only what is missing; after a kill, it resumes.
    """
    Copy(**given).check()
    with handled(exiting), bar(of_bytes=True, shown=not quiet and not session.as_json) as update:
        if update is not None:
            manifest = transfer.copy(**given, moved=lambda done, total: update(done, total, ""))
        else:
            manifest = transfer.copy(**given, progress=lines(quiet))
    uri = parse_store(given["target"]).uri
    answer = {"uri": uri, "digest": manifest.digest, "files": len(manifest.files), "bytes": manifest.size}
    session.answer(answer, f"{manifest.digest}  {uri}")
    return 0


data.add_command(copy)


@command(shared=all_of(), name="exec", cls=WithCommand)
def exec_(session: Session, *, command: Sequence[str]) -> int:
    """Run COMMAND inside a job, on local copies of the job's inputs and outputs.

    Downloads remote inputs (s3://, models:/, ...) on every node first. In the arguments of COMMAND and in
    TRAINJOB_INPUT_<NAME> and TRAINJOB_OUTPUT_<NAME>, the paths of the copies replace the URIs. If COMMAND succeeds,
    node 0 uploads the outputs. The exit code is that of COMMAND.
    """
    del session
    if not command:
        raise click.UsageError("give the command to run: trainjob exec -- COMMAND [ARG]...")
    return staging.run(command, echo)


def lines(quiet: bool) -> Notify | None:
    """A function that prints lines about progress on stderr."""
    return None if quiet else lambda line: echo(line, err=True)
