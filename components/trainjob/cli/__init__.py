"""The ``trainjob`` command.

::

    program.py    the commands with their options; what errors become (click)
    options.py    types of options, and options that several commands share (click)
    commands.py   what each command does (asyncio)
    views.py      what is seen while a job is waited for: plain lines, JSON
    live.py       the same on a terminal (rich)
    texts.py      tables, results, durations

Only click is imported before a command runs, so that ``trainjob --help`` and shell completion do not wait for pydantic.
"""

from trainjob.cli.program import main

__all__ = ["main"]
