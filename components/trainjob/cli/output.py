"""Prints all text for people: without control sequences, and with colors only on a terminal."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from typing import TextIO

import click

from trainjob._support.control_characters import colored, plain


def no_color() -> bool:
    """Whether colors are turned off (``NO_COLOR``) or unknown to the terminal (``TERM=dumb``)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def echo(text: object = "", *, err: bool = False) -> None:
    """Print `text`, which may quote a job's log or a server.

    Args:
        text: Lines; their colors are kept if colors are on.
        err: To stderr.
    """
    stream = sys.stderr if err else sys.stdout
    shown = colored if stream.isatty() and not no_color() else plain
    click.echo(shown(str(text)), err=err)


def redrawn(stream: TextIO) -> bool:
    """Whether `stream` is a terminal on which the cursor may be moved."""
    return stream.isatty() and bool(os.environ.get("TERM")) and not no_color()


def fitted(line: str) -> str:
    """Wrap an indented line to the width of the terminal, aligned with its start; words are not broken.

    The terminal wraps other lines and copies them as one line, which matters for commands in advice.
    """
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 1 << 20
    if len(click.unstyle(line)) <= width or not line.startswith(" "):
        return line
    # The start is the bar of a quoted log line, the name of a value, or the indentation.
    begin = re.match(r" *(\| |\S+ {2,})?", line)
    start = begin[0] if begin else ""
    below = start if start.endswith("| ") else " " * len(start)
    room = max(20, width - len(start))
    rest = textwrap.wrap(line[len(start) :], room, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"{below if i else start}{part}" for i, part in enumerate(rest))
