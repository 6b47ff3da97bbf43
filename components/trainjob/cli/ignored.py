"""Refuses options that a command would ignore beside others."""

from __future__ import annotations

import click
from click.core import ParameterSource

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


def refuse_ignored(*names: str, because: str) -> None:
    """Refuse options that have no effect in this call of the current command. Defaults are not refused.

    Args:
        names: Parameters of the command.
        because: Why they have no effect, and what to do instead; the end of a sentence that begins with the option.

    Raises:
        click.UsageError: One of them is given.
    """
    context = click.get_current_context()
    for each in context.command.params:
        if each.name in names and context.get_parameter_source(each.name) in _GIVEN:
            raise click.UsageError(f"{max(each.opts, key=len)} {because}")
