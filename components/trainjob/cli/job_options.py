"""Options of the commands that launch jobs or wait for them, from the table of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from trainjob._spec.arguments import ARGUMENTS
from trainjob.cli.options import all_of, duration, key_option, pair
from trainjob.wait_options import WaitOptions, option_names

_MORE = {
    "resources_per_node": "May be repeated, like each NAME=VALUE.",
    "on_crash_action": "Default: suspend (run), keep (wait).",
    "stall_timeout": "E.g. 15m.",
}
"""How an option is written, behind the text of its row."""


def argument(name: str) -> Callable[[Any], Any]:
    """The option of a row of the table. Without it, the value is that of the spec, or the row's default."""
    row = ARGUMENTS[name]
    text = " ".join(filter(None, (row.text, _MORE.get(name, ""))))
    kinds: dict[str, dict[str, Any]] = {
        "text": {},
        "count": {"type": click.IntRange(min=1), "metavar": "N"},
        "mapping": {"type": pair, "multiple": True, "metavar": "NAME=VALUE"},
        "duration": {"type": duration},
        "switch": {"is_flag": True},
        "choice": {"type": click.Choice(row.choices)},
    }
    return click.option(row.flag, name, help=text, **kinds[row.kind])


def _arguments(*names: str) -> Callable[[Any], Any]:
    return all_of(*map(argument, names))


# They add to the values in SPEC, or replace them.
spec_options = all_of(
    click.argument("spec", type=click.File("rb"), required=False, metavar="[SPEC.yaml|-]"),
    _arguments("runtime", "image", "num_nodes", "num_proc_per_node", "resources_per_node"),
    _arguments("env", "inputs", "outputs", "checkpoints", "stall_timeout", "labels"),
    key_option("Identify the work: the same key again adopts the same job."),
)

wait_options = _arguments(*option_names())

# Of a command that shows one job.
shown_options = all_of(
    argument("on_crash_action"), click.option("--no-logs", is_flag=True, help="Do not print the ranks' log lines.")
)


def chosen(options: dict[str, Any]) -> WaitOptions:
    """Take the fields of `WaitOptions` out of the options of a command."""
    return WaitOptions(**{name: options.pop(name) for name in option_names()})
