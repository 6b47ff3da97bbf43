"""What each command gets: where it works, how it answers, and how Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import anyio

from trainjob._backends import connect
from trainjob._jobs.named import find_written
from trainjob._support.display import iso
from trainjob.cli.exits import PIPE_CLOSED
from trainjob.cli.output import OutputClosed, as_json, echo
from trainjob.errors import ConfigurationError
from trainjob.settings import Settings

if TYPE_CHECKING:
    from trainjob._backends.base import Backend, TrainJob
    from trainjob.job import JobRef

Body = Callable[..., int | Awaitable[int]]
"""What a command does: takes the session, then its options by name, and returns the exit code."""


class Session:
    """The backend and the namespace of a command, and its output.

    Args:
        backend: Name of the backend; ``TRAINJOB_BACKEND`` if left out.
        namespace: Namespace; ``TRAINJOB_NAMESPACE`` if left out.
        as_json: Whether the output is JSON.

    Attributes:
        shared: Whether all jobs of a namespace are watched; set it before the first use of `backend`.
        closed: Whether the reader of stdout has closed it (``| head``). A command that waits continues.
    """

    def __init__(self, backend: str | None = None, namespace: str | None = None, *, as_json: bool = False) -> None:
        self.given_backend = backend
        self.given_namespace = namespace
        self.as_json = as_json
        self.shared = False
        self.closed = False

    def run(self, body: Body, given: Mapping[str, Any]) -> int:
        """Run the body of a command; the exit code."""

        async def finished(code: Awaitable[int]) -> int:
            try:
                return await code
            finally:
                if "backend" in vars(self):
                    await self.backend.aclose()

        try:
            code = body(self, **given)
            return code if isinstance(code, int) else anyio.run(finished, code)
        except OutputClosed:  # the reader of stdout has closed it, as in `trainjob logs NAME | head`
            drop_stdout()
            return PIPE_CLOSED

    # --- where it works

    @cached_property
    def backend(self) -> Backend:
        """The backend, opened at the first use. Makes no request."""
        return connect(self.given_backend, shared=self.shared)

    @cached_property
    def namespace(self) -> str:
        """Namespace of jobs that are named without one."""
        return self.given_namespace or self._default_namespace

    @cached_property
    def _default_namespace(self) -> str:
        return Settings().namespace or self.backend.default_namespace

    def namespace_without_cluster(self) -> str:
        """The namespace, also without the packages that read a kubeconfig."""
        try:
            return self.namespace
        except ConfigurationError as error:
            if isinstance(error.__cause__, ImportError):
                return "default"
            raise

    async def find(self, name: tuple[str, str]) -> TrainJob:
        """The job of a name or a key, as `trainjob.cli.options.job_name` has read it.

        Raises:
            NotFound: there is none.
            InvalidSpec: a name and a key fit.
        """
        return await find_written(self.backend, self.namespace, *name)

    def argument(self, ref: JobRef) -> str:
        """`ref` as the argument of the next command."""
        return ref.name if ref.namespace == self._default_namespace else str(ref)

    def command(self, *words: str) -> str:
        """A command for the same backend, to be pasted."""
        backend = ["--backend", self.given_backend] if self.given_backend else []
        return shlex.join(["trainjob", *backend, *words])

    # --- how it answers

    def answer(self, document: Mapping[str, Any], text: str | Callable[[], str]) -> None:
        """Print the only answer of a command: the JSON object, or the text for people."""
        echo(as_json(document) if self.as_json else text if isinstance(text, str) else text())

    def event(self, kind: str, text: str = "", /, *, err: bool = False, **fields: Any) -> None:
        """Print one of several answers: a JSON object with its kind in ``event``, or the text for people, if any.

        Args:
            kind: What it tells, as ``phase``.
            text: Lines for people.
            err: Print the lines to stderr. JSON is always printed to stdout.
            fields: What the JSON object tells.
        """
        if self.as_json:
            text, err = as_json({"event": kind, **fields}), False
        if text and (err or not self.closed):
            try:
                echo(text, err=err)
            except OutputClosed:
                self.closed = True
                drop_stdout()

    def say(self, *lines: str) -> None:
        """Print lines for people to stderr; nothing beside JSON."""
        if lines and not self.as_json:
            echo("\n".join(lines), err=True)


def now() -> str:
    """The time for a line or an event."""
    return iso(time.time(), "seconds")


def drop_stdout() -> None:
    """Redirect stdout to /dev/null: its reader has closed it, which Python would report at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Interrupts:
    """Ctrl-C and SIGTERM while a command runs: the first one ends its first stage, the second one its second stage.

    Raises nothing: the command continues after the stage. A signal between two stages ends the next one.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._stages: list[anyio.CancelScope] = []

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in self._before:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, handler)

    def _receive(self, number: int) -> None:
        self._received.append(number)
        for stage in self._stages[: len(self._received)]:
            stage.cancel()

    def stage(self) -> anyio.CancelScope:
        """The next stage, as a context manager."""
        self._stages.append(anyio.CancelScope())
        if len(self._received) >= len(self._stages):
            self._stages[-1].cancel()
        return self._stages[-1]

    @property
    def exit_code(self) -> int:
        """Exit code that a shell reports for a program ended by the first signal; 0 without a signal."""
        return 128 + self._received[0] if self._received else 0
