"""The ``trainjob`` command.

May import `_pages` and `_doctor`, and the layers below.

::

    program.py     the commands by name; how errors end the program
    exits.py       exit codes
    options.py     types of options, and options that several commands share (click)
    job_options.py options of commands that launch or wait, from the table of arguments
    command.py     makes commands of functions
    session.py     what each command gets: backend, namespace, output; Ctrl-C
    run.py         `run`, `wait`, `render`; many.py: `wait` for several jobs
    stop.py        `cancel`, `resume`, `delete`
    look.py        `list`, `status`, `diagnose`, `logs`
    goodput.py     `goodput`
    pages.py       `report`, `ui`
    tune.py        `tune`
    cluster.py     `install`, `doctor`, `reap`, `gc`
    check.py       `check`
    data.py        `data copy`, `exec`
    models.py      `registry`, `export`
    spec_files.py  specs from files and options
    shown.py       what happens to a job that a command waits for
    bars.py        a progress bar on a terminal (rich)
    texts.py       jobs and results as text
    output.py      printing without control sequences; tables, JSON
    completion.py  names for shell completion
    hints.py       what exists in place of what users of kubectl type

A command's module is imported when it is used, so that ``trainjob --help`` does not wait for pydantic.
"""

import signal
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit.

    Before and after a command that handles Ctrl-C (`trainjob.cli.session.Interrupts`), Ctrl-C ends the process at
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
