"""A progress bar for long work on a terminal, below the lines that are printed meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from trainjob._support.control_characters import one_line
from trainjob.cli import output

_LONGEST = 1000  # characters of the text behind a bar, of which those are shown that fit

Update = Callable[[float, float | None, str], None]
"""Takes how much is done, of how much (None if unknown), and a text behind the bar."""


@contextmanager
def bar(*, of_bytes: bool = False, shown: bool = True) -> Iterator[Update | None]:
    """Show a progress bar on stderr from its first update on; it disappears at the end.

    Args:
        of_bytes: Show numbers as bytes, with speed and remaining time; else a percentage and the text.
        shown: Show it if stderr is a terminal that can be redrawn.

    Yields:
        What updates it; None without a bar.
    """
    if not shown or not output.redrawn(sys.stderr):
        yield None
        return
    # Waiters without a terminal do without its 5 MB.
    from rich import progress as rich
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    console = Console(file=sys.stderr, highlight=False)
    rest = Column(no_wrap=True, overflow="ellipsis" if console.encoding.startswith("utf") else "crop", ratio=1)
    columns: list[Any] = [rich.BarColumn(bar_width=30)]
    if of_bytes:
        columns += [rich.DownloadColumn(), rich.TransferSpeedColumn(), rich.TimeRemainingColumn()]
    else:
        columns += [rich.TaskProgressColumn(), rich.TextColumn("{task.fields[text]}", markup=False, table_column=rest)]
    drawn = rich.Progress(
        *columns, console=console, transient=True, expand=True, redirect_stdout=False, redirect_stderr=False
    )
    task = drawn.add_task("", total=None, text="")

    def update(done: float, total: float | None, text: str) -> None:
        if not drawn.live.is_started:
            drawn.start()
            output.above = lambda line: console.print(Text.from_ansi(line), soft_wrap=True)
        shown = one_line(text, _LONGEST).encode(console.encoding, "replace").decode(console.encoding)
        drawn.update(task, completed=done, total=total, text=shown)

    try:
        yield update
    finally:
        if drawn.live.is_started:
            output.above = None
            with suppress(OSError):  # the terminal may be gone
                drawn.stop()
