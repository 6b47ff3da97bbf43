"""Shell completion of jobs, keys and runtimes. Each lookup takes one second at most and prints no message.

Click does the rest: ``_TRAINJOB_COMPLETE=bash_source trainjob`` prints the code that a shell has to evaluate.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import CompletionItem

from trainjob.cli.target import Target

if TYPE_CHECKING:
    from trainjob.cli.commands import Commands

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
    """Names of jobs; after ``NAMESPACE/``, those of that namespace."""
    del param
    namespace, slash, _ = incomplete.rpartition("/")
    prefix = namespace + slash
    if slash and not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", namespace):
        return []

    async def names(commands: Commands) -> list[str]:
        found = await commands.backend.find(namespace or commands.namespace, {})
        found.sort(key=lambda job: str(job["metadata"].get("creationTimestamp")), reverse=True)
        return [prefix + job["metadata"]["name"] for job in found]

    return _items(_answers(ctx, names), incomplete)


def keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of jobs."""
    del param

    async def names(commands: Commands) -> list[str]:
        from trainjob.job import KEY, MANAGED_BY

        found = await commands.backend.find(commands.namespace, {MANAGED_BY: "trainjob"})
        return [(job["metadata"].get("annotations") or {}).get(KEY, "") for job in found]

    return _items(_answers(ctx, names), incomplete)


def runtimes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of runtimes."""
    del param
    return _items(_answers(ctx, lambda commands: commands.backend.runtimes()), incomplete)


def _answers(ctx: click.Context, question: Callable[[Commands], Awaitable[Sequence[str]]]) -> list[str]:
    """The names that arrive within `SECONDS`; none after an error."""
    target = ctx.find_object(Target) or Target()
    answers: list[str] = []

    def ask() -> None:
        with suppress(Exception):  # a completion cannot show an error
            import anyio

            from trainjob.cli.commands import Commands

            commands = Commands(target.backend, target.namespace, as_json=False)

            async def session() -> None:
                answers.extend(await question(commands))

            anyio.run(session)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if thread.is_alive():
        _end_plugins()
    return [*answers]


def _end_plugins() -> None:
    """Terminate credential plugins that have not answered: they would outlive this process."""
    import psutil

    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            child.kill()


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in dict.fromkeys(names) if name and name.startswith(incomplete)]
