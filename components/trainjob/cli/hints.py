"""What exists in place of a command or an option that users of kubectl type."""

from __future__ import annotations

import click

_COMMANDS = {
    "apply": "trainjob run SPEC",
    "create": "trainjob run SPEC",
    "describe": "trainjob diagnose NAME",
    "events": "trainjob diagnose NAME",
    "get": "trainjob list, or trainjob status NAME",
    "kill": "trainjob cancel NAME",
    "ls": "trainjob list",
    "ps": "trainjob list",
    "start": "trainjob run, or trainjob resume NAME",
    "stop": "trainjob cancel NAME",
    "submit": "trainjob run",
    "suspend": "trainjob cancel --suspend NAME",
    "version": "trainjob --version",
}
_OPTIONS = {
    "--all-namespaces": "-n NAMESPACE for one namespace",
    "--file": "the file as an argument: trainjob run FILE",
    "--filename": "the file as an argument: trainjob run FILE",
    "--follow": "trainjob logs --follow NAME, or trainjob wait NAME",
    "--gpus": "--resources-per-node gpu=NUMBER",
    "--cpus": "--resources-per-node cpu=NUMBER",
    "--memory": "--resources-per-node memory=AMOUNT",
    "--nnodes": "--num-nodes NUMBER",
    "--nodes": "--num-nodes NUMBER",
    "--nproc-per-node": "--num-proc-per-node NUMBER",
    "--output": "--json",
    "--replicas": "--num-nodes NUMBER",
    "--stdin": "trainjob wait NAME...",
    "--watch": "trainjob wait NAME",
    "-A": "-n NAMESPACE for one namespace",
    "-f": "the file as an argument: trainjob run FILE",
    "-o": "--json",
    "-w": "trainjob wait NAME",
}


def hint(error: click.UsageError) -> str:
    """What to type in place of an unknown command or option; empty if nothing is known."""
    found = None
    if isinstance(error, click.NoSuchOption):
        found = _OPTIONS.get(error.option_name)
    elif error.message.startswith("No such command "):
        found = _COMMANDS.get(error.message.removeprefix("No such command ").rstrip(".").strip("'\""))
    return f" Use {found}." if found else ""
