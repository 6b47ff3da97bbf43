"""Where all text for people leaves the command: without control sequences, with colors only on a terminal."""

from __future__ import annotations

import os
import sys

import click

from trainjob.sanitizing import colored, plain


def no_color() -> bool:
    """Whether colors are not wanted (``NO_COLOR``) or not known to the terminal (``TERM=dumb``)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def echo(text: object = "", *, err: bool = False) -> None:
    """Print `text`, which may quote a job's log or a server.

    Args:
        text: Lines; their own colors stay where there are colors.
        err: To stderr.
    """
    stream = sys.stderr if err else sys.stdout
    shown = colored if stream.isatty() and not no_color() else plain
    click.echo(shown(str(text)), err=err)
