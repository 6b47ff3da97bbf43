"""Shell completion of jobs and keys. Each lookup takes one second at most and prints no message.

Click does the rest: ``_TRAINJOB_COMPLETE=bash_source trainjob`` prints the code that a shell has to evaluate.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem

from trainjob import names

if TYPE_CHECKING:
    from trainjob._backends.base import TrainJob

VARIABLE = "_TRAINJOB_COMPLETE"
"""Environment variable that a shell sets for completion."""

SECONDS = 1.0
"""How long a shell waits for names: the cluster may be unreachable or missing."""


def main(program: click.Command) -> NoReturn:
    """Answer a shell and end this process at once, with requests still open. Prints nothing on stderr."""
    code = 1
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 2):  # a credential plugin could ask for a password
        os.dup2(nowhere, stream)
    with suppress(Exception):
        try:
            program.main([], prog_name="trainjob", complete_var=VARIABLE)
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 1
        sys.stdout.flush()
    os._exit(code)


def jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of jobs, the newest first; after ``NAMESPACE/``, those of that namespace."""
    del param
    namespace, slash, _ = incomplete.rpartition("/")
    if slash and not names.NAMESPACE.fullmatch(namespace):
        return []
    found = _found(ctx, namespace)
    found.sort(key=lambda job: str(job["metadata"].get("creationTimestamp")), reverse=True)
    return _items([namespace + slash + job["metadata"]["name"] for job in found], incomplete)


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of jobs."""
    from trainjob.job import KEY

    del param
    return _items([(job["metadata"].get("annotations") or {}).get(KEY, "") for job in _found(ctx)], incomplete)


def _found(ctx: click.Context, namespace: str = "") -> list[TrainJob]:
    """The jobs of a namespace that arrive within `SECONDS`; none after an error, which a completion cannot show."""
    answers: list[TrainJob] = []

    def ask() -> None:
        with suppress(Exception):
            from trainjob.cli.session import Session

            async def find(session: Session) -> int:
                answers.extend(await session.backend.find(namespace or session.namespace, {}))
                return 0

            Session(**ctx.ensure_object(dict)).run(find, {})

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return [*answers]


def _items(found: list[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in dict.fromkeys(found) if name and name.startswith(incomplete)]
