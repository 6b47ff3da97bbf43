"""Makes commands: options and body stand together, and each gets a session."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from trainjob.cli.options import common_options
from trainjob.cli.session import Body, Session


def command(
    *parameters: Callable[[Any], Any],
    name: str = "",
    shared: Callable[[Any], Any] = common_options,
    cls: type[click.Command] = click.Command,
    **attributes: Any,
) -> Callable[[Body], click.Command]:
    """Make a command of a function or a coroutine, which gets the session and its options.

    Args:
        parameters: Its arguments and options.
        name: Its name, by default that of the function.
        shared: Options that it has in common with others.
        cls: Class of the command.
        attributes: Others of the command, such as ``epilog``.
    """

    def decorate(body: Body) -> click.Command:
        @functools.wraps(body)
        def run(**given: Any) -> int:
            context = click.get_current_context()
            noted = context.ensure_object(dict)
            # A global option may stand before the name of any command.
            for unused in noted.keys() - {each.name for each in context.command.params}:
                raise click.UsageError(f"{context.command_path} does not use --{unused}: leave it out")
            return Session(**noted).run(body, given)

        for each in (shared, *reversed(parameters)):
            run = each(run)
        return click.command(name or body.__name__, cls=cls, **attributes)(run)

    return decorate
