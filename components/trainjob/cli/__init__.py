"""The ``trainjob`` command.

May import `_pages` and `_doctor`, and the layers below.

::

    program.py     the commands with their options; exit codes of errors (click)
    options.py     types of options, and options that several commands share (click)
    target.py      the values of the global options
    commands.py    the commands about jobs (asyncio)
    many.py        `wait --stdin`
    clusters.py    `install`, `reap` and `doctor`
    data.py        `data copy`: datasets and models
    registry.py    `registry`: versions of models; `export`: models that jobs wrote
    goodput.py     `goodput`: how the time of jobs was spent
    pages.py       `report` and `ui`: pages of jobs
    completion.py  names for shell completion
    views.py       output of commands that wait: plain lines, JSON
    live.py        the same on a terminal (rich)
    sparklines.py  metrics over time, in a line of text
    texts.py       tables, results, durations
    output.py      printing without control sequences

Only click is imported before a command runs, so that ``trainjob --help`` and shell completion do not wait for pydantic.
"""

import signal
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit.

    Before and after a command that handles Ctrl-C (`trainjob.cli.commands.Interrupts`), Ctrl-C ends the process at
    once: an exception in the middle of an import would get lost (pydantic turns it into a RuntimeError).
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # a shell may have set it to be ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from trainjob.cli import program

        program.main(arguments)
    finally:
        signal.signal(signal.SIGINT, before)
