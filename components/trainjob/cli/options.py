"""How the command line is read: types of options, and the options that several commands share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

import click

from trainjob import names, wait_options
from trainjob.cli import completion
from trainjob.cli.target import Target
from trainjob.errors import ConfigurationError
from trainjob.wait_options import WaitOptions

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def duration(text: str) -> timedelta:
    """``90``, ``90s``, ``15m``, ``1h30m``, ``2d``; a number alone is seconds."""
    try:
        return wait_options.duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def pair(text: str) -> tuple[str, str]:
    """``NAME=VALUE``; the value may hold further ``=``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def work_key(text: str) -> str:
    """A key, which is not blank."""
    if not text.strip():
        raise click.BadParameter("is blank: name the piece of work, such as nightly/train, or leave --key out")
    return text


def output_file(text: str) -> Path:
    """The path of a file that can be written, as far as is known before."""
    path = Path(text)
    if path.is_dir():
        raise click.BadParameter(f"{text!r} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise click.BadParameter(f"{text!r} cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{text!r} cannot be written: permission denied")
    return path


def job_name(text: str) -> tuple[str, str]:
    """``NAME`` or ``NAMESPACE/NAME``: the namespace (empty: the default one) and the name."""
    where, slash, name = text.rpartition("/")
    if not names.JOB.fullmatch(name) or (slash and not names.NAMESPACE.fullmatch(where)):
        raise click.BadParameter(f"{text!r} is not the name of a TrainJob: NAME or NAMESPACE/NAME")
    return where, name


def namespace(text: str) -> str:
    """The name of a namespace."""
    try:
        return names.namespace(text)
    except ConfigurationError as error:
        raise click.BadParameter(str(error)) from None


def service_account(text: str) -> tuple[str, str]:
    """``NAMESPACE:NAME``, as kubectl has it, or ``NAME``: the namespace (empty: that of the rights) and the name."""
    if not re.fullmatch(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?:)?[a-z0-9]([-.a-z0-9]*[a-z0-9])?", text):
        raise click.BadParameter(f"{text!r} is not the name of a service account: NAMESPACE:NAME or NAME")
    where, _, name = text.rpartition(":")
    return where, name


def image_name(text: str) -> str:
    """The name of an image, as it is; a digest in it has to be complete."""
    if "@" in text and not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", text):
        raise click.BadParameter(f"{text!r} does not end in a digest: NAME:TAG@sha256:<64 hexadecimal digits>")
    return text


def pinned_image(text: str) -> str:
    """The name of an image with its digest."""
    return image_name(text if "@" in text else f"{text}@")


class WithCommand(click.Command):
    """A command that takes everything after ``--`` as the words of another one (parameter `command`)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at the first ``--``; click itself would count the words behind it as its own arguments."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.params["command"] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """What stands behind the command's name in its usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [ARG]...]"]


def _note(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value and param.name:
        setattr(ctx.ensure_object(Target), param.name, value)


def global_options(command: Decorated) -> Decorated:
    """The global options, which are taken before and after a command's name."""
    where = click.option("--backend", metavar="NAME", expose_value=False, callback=_note, help="kubernetes or local.")
    in_namespace = click.option(
        "-n",
        "--namespace",
        type=namespace,
        metavar="NAME",
        expose_value=False,
        callback=_note,
        help="Namespace of the jobs.",
    )
    return where(in_namespace(command))


def json_option(command: Decorated) -> Decorated:
    """The option that every command has."""
    text = "One JSON object on stdout, or one a line where there are many; messages go to stderr."
    as_json = click.option("--json", "as_json", is_flag=True, expose_value=False, callback=_note, help=text)
    return as_json(command)


def common_options(command: Decorated) -> Decorated:
    """Options of every command that is about jobs."""
    return json_option(global_options(command))


def _apply(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    def apply(command: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


def _pairs(option: str, text: str) -> Callable[[Any], Any]:
    return click.option(option, type=pair, multiple=True, metavar="NAME=VALUE", help=text)


# What to run: names are those of the spec's fields. They add to SPEC, or take the place of what it says.
spec_options = _apply(
    click.argument("spec", type=click.File("rb"), required=False, metavar="[SPEC.yaml|-]"),
    click.option(
        "--runtime", shell_complete=completion.runtimes, help="ClusterTrainingRuntime, e.g. torch-distributed."
    ),
    click.option("--image", help="Image of the nodes."),
    click.option("--num-nodes", type=click.IntRange(min=1), metavar="N", help="Number of nodes."),
    click.option("--num-proc-per-node", type=click.IntRange(min=1), metavar="N", help="Processes on each node."),
    _pairs("--resources-per-node", "cpu=4, memory=16Gi, gpu=1; may be repeated, as all of these."),
    _pairs("--env", "Environment of the nodes; secrets belong into SPEC, by secretKeyRef."),
    _pairs("--input", "URI that is read; $TRAINJOB_INPUT_<NAME> on the nodes."),
    _pairs("--output", "URI that is written; $TRAINJOB_OUTPUT_<NAME> on the nodes."),
    _pairs("--label", "Label of the job, e.g. kueue.x-k8s.io/queue-name=gpu."),
    click.option(
        "--key",
        type=work_key,
        metavar="KEY",
        shell_complete=completion.keys,
        help="Which piece of work this is: the same key again is the same job.",
    ),
)


def _collected(command: Callable[..., int]) -> Callable[..., int]:
    """Give `command` the options that are fields of `WaitOptions` as one argument, ``options``."""

    @functools.wraps(command)
    def call(*args: Any, **given: Any) -> int:
        chosen = {name: given.pop(name) for name in wait_options.option_names()}
        return command(*args, options=WaitOptions(**chosen), **given)

    return call


live_options = _apply(
    click.option("--queue-timeout", type=duration, help="Longest wait for admission, e.g. 30m."),
    click.option("--start-timeout", type=duration, help="Longest time from admission to the first running rank."),
    click.option("--run-timeout", type=duration, help="Longest time from admission to the end."),
    click.option("--fail-fast", is_flag=True, help="Do not wait for what only a person can change."),
    click.option("--fail-on-first-crash", is_flag=True, help="Do not wait for what becomes of a rank that crashed."),
    click.option(
        "--on-crash",
        type=click.Choice(["suspend", "cancel", "keep"]),
        help="What becomes of the job then: stopped and kept (default of run), deleted, or left alone (of wait).",
    ),
    click.option("--plain", is_flag=True, help="Plain lines on a terminal too."),
    click.option("--no-logs", is_flag=True, help="Without the ranks' log lines."),
    _collected,
)


def fields_of(options: dict[str, Any], command: tuple[str, ...]) -> dict[str, Any]:
    """The spec's fields that the options set."""
    renamed = {"input": "inputs", "output": "outputs", "label": "labels"}
    fields = {
        renamed.get(name, name): dict(value) if isinstance(value, tuple) else value for name, value in options.items()
    }
    return {name: value for name, value in {**fields, "command": list(command)}.items() if value}


def require_work(spec: IO[bytes] | None, fields: dict[str, Any]) -> None:
    """Refuse a command line that says nothing about what to run."""
    if spec is None and not fields:
        raise click.UsageError("say what to run: a SPEC file, or --runtime … -- COMMAND")


def require_crash_option(on_crash: str | None, options: WaitOptions) -> None:
    """Refuse to be told what becomes of a job that would not be given up."""
    if on_crash and not options.fail_on_first_crash:
        raise click.UsageError("--on-crash says what becomes of a job that --fail-on-first-crash gives up: give both")
