"""Types of options, and the options that several commands share."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import click

from trainjob import names
from trainjob._support.durations import parse_duration
from trainjob.cli import completion
from trainjob.errors import ConfigurationError

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def duration(text: str) -> timedelta:
    """A duration, see `parse_duration`."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def pair(text: str) -> tuple[str, str]:
    """``NAME=VALUE``; the value may have further ``=``."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def gpu_price(text: str) -> float:
    """A price: a finite number that is not negative."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise click.BadParameter(f"{text!r} is not a price: give a number, such as 2.5")
    return number


def work_key(text: str) -> str:
    """A key that is not blank."""
    if not text.strip():
        raise click.BadParameter("is blank: give a name for the work, such as nightly/train, or leave out --key")
    return text


def output_file(text: str) -> Path:
    """The path of a file that can be written, as far as that can be checked before."""
    path = Path(text)
    if path.is_dir():
        raise click.BadParameter(f"{text!r} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise click.BadParameter(f"{text!r} cannot be written: there is no directory {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{text!r} cannot be written: permission denied")
    return path


def page_file(text: str) -> str:
    """The path of a file that can be written, or ``-`` for stdout."""
    return text if text == "-" else str(output_file(text))


def job_name(text: str) -> tuple[str, str]:
    """``NAME`` or ``NAMESPACE/NAME``: the namespace (empty: the default one) and the name. Anything else is a key."""
    if not text.strip():
        raise click.BadParameter("is blank: write NAME, NAMESPACE/NAME or the key of a TrainJob")
    try:
        return strict_job_name(text)
    except click.BadParameter:
        return "", text


def strict_job_name(text: str) -> tuple[str, str]:
    """``NAME`` or ``NAMESPACE/NAME``."""
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
    """``NAMESPACE:NAME``, as in kubectl, or ``NAME``: the namespace (empty: that of the Role) and the name."""
    if not re.fullmatch(r"([a-z0-9]([-a-z0-9]*[a-z0-9])?:)?[a-z0-9]([-.a-z0-9]*[a-z0-9])?", text):
        raise click.BadParameter(f"{text!r} is not the name of a service account: NAMESPACE:NAME or NAME")
    where, _, name = text.rpartition(":")
    return where, name


def image_name(text: str) -> str:
    """The name of an image, unchanged; a digest in it must be complete."""
    if "@" in text and not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", text):
        raise click.BadParameter(f"{text!r} does not end in a digest: NAME:TAG@sha256:<64 hexadecimal digits>")
    return text


def pinned_image(text: str) -> str:
    """The name of an image with its digest."""
    return image_name(text if "@" in text else f"{text}@")


class WithCommand(click.Command):
    """A command that takes everything after ``--`` as another command (parameter `command`)."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split at the first ``--``: click itself would take the words behind it as its arguments."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.params["command"] = tuple(args[cut + 1 :])
        return super().parse_args(ctx, args[:cut])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """The arguments in the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND [ARG]...]"]


def _note(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Keep a value for the `trainjob.cli.session.Session` of the command."""
    if value and param.name:
        ctx.ensure_object(dict)[param.name] = value


_KEPT: dict[str, Any] = {"metavar": "NAME", "expose_value": False, "callback": _note}


def namespace_option(command: Decorated) -> Decorated:
    """The option of every command that works in a namespace."""
    return click.option("-n", "--namespace", type=namespace, help="Use this namespace.", **_KEPT)(command)


def global_options(command: Decorated) -> Decorated:
    """The global options, which may stand before and after a command's name."""
    where = click.option("--backend", help="Use this backend: kubernetes or local.", **_KEPT)
    return where(namespace_option(command))


def json_option(command: Decorated) -> Decorated:
    """The option of every command."""
    text = "Print one JSON object on stdout, or one per line for many; messages go to stderr."
    return click.option("--json", "as_json", is_flag=True, expose_value=False, callback=_note, help=text)(command)


def common_options(command: Decorated) -> Decorated:
    """Options of every command about jobs."""
    return json_option(global_options(command))


def all_of(*decorators: Callable[[Any], Any]) -> Callable[[Decorated], Decorated]:
    """Several arguments and options as one decorator, in their order."""

    def apply(command: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return apply


JOB = click.argument("name", type=job_name, shell_complete=completion.jobs)


def key_option(text: str) -> Callable[[Any], Any]:
    """``--key``, which does in a command what `text` says."""
    return click.option("--key", type=work_key, metavar="KEY", shell_complete=completion.keys, help=text)
