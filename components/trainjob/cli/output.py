"""Prints all text for people: without control sequences, and with colors only on a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

import click

from trainjob._support.control_characters import colored, escaped_json, plain
from trainjob._support.numbers import json_values

above: Callable[[str], None] | None = None
"""Prints a line above a progress bar, while there is one (`trainjob.cli.bars`)."""


class OutputClosed(Exception):
    """The reader of stdout has closed it."""


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
    if above is not None and stream.isatty():
        above(shown(str(text)))
        return
    try:
        click.echo(shown(str(text)), err=err)
    except BrokenPipeError:
        if not err:  # without a reader of stderr, stdout may still have one
            raise OutputClosed from None


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


def as_json(value: Any) -> str:
    """`value` as JSON on one line; NaN and infinity as text, since JSON has neither."""
    return escaped_json(json.dumps(json_values(value), ensure_ascii=False, allow_nan=False))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns, as wide as needed: names must not be cut in a pipe."""
    widths = [max(len(click.unstyle(cell)) for cell in column) for column in zip(*rows, strict=True)]
    padded = (
        (cell + " " * (width - len(click.unstyle(cell))) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
    return ["   ".join(row).rstrip() for row in padded]


def aligned(values: Mapping[str, str], width: int = 8) -> list[str]:
    """A line for each value that is not empty, behind its name, which takes at least so many characters."""
    width = max(width, *map(len, values)) if values else 0
    return [fitted(f"  {name:<{width}}  {text}") for name, text in values.items() if text]
