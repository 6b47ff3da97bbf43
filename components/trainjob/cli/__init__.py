"""The ``trainjob`` command.

::

    program.py    the commands with their options; what errors become (click)
    options.py    types of options, and options that several commands share (click)
    commands.py   what each command does (asyncio)
    clusters.py   what `install` prints and `doctor` says
    data.py       `data copy`: datasets and models
    registry.py   `registry`: versions of models; `export`: models that jobs have made
    views.py      what is seen while a job is waited for: plain lines, JSON
    live.py       the same on a terminal (rich)
    texts.py      tables, results, durations

Only click is imported before a command runs, so that ``trainjob --help`` and shell completion do not wait for pydantic.
"""

import signal
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit.

    Until a command handles Ctrl-C itself (`trainjob.cli.commands.Interrupts`), and after it, Ctrl-C ends the process
    at once: as an exception in the middle of an import it would get lost (pydantic makes a RuntimeError of it).
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not where a shell has it ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from trainjob.cli import program  # noqa: PLC0415

        program.main(arguments)
    finally:
        signal.signal(signal.SIGINT, before)
