"""Processes that end with us, free ports, and waiting."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

# PR_SET_PDEATHSIG fires when the *thread* that started a child ends. A test may restart a component from a worker
# thread, so all are started from this one, which lives as long as the interpreter.
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cluster-spawner")

_PORTS = range(20_000, 30_000)  # below Linux' ephemeral ports (32768 on): no outgoing connection takes one meanwhile
_T = TypeVar("_T")
_given: set[int] = set()


class ClusterError(Exception):
    """The cluster did not do what it should; the text ends with the log of the component."""


class Component:
    """One program of the cluster.

    Args:
        name: For logs and errors.
        command: Program and arguments.
        directory: Where its log is written, as ``<name>.log``.
        environment: Variables besides PATH and HOME; nothing else of ours is inherited.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = command
        self.log = directory / f"{name}.log"
        self.environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), **environment}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id, None if it was never started."""
        return self._process.pid if self._process else None

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process; its log goes on where it was."""
        self._process = _SPAWNER.submit(self._spawn).result()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                # Killed by the kernel when we are, however that happens.
                ["setpriv", "--pdeathsig", "KILL", "--", *self.command],
                env=self.environment,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us: we stop the components in order
            )

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process group and wait for the process.

        SIGKILL unless a test is about something else: after SIGTERM the API server keeps its port for up to a minute,
        and nothing here has state worth an orderly end.
        """
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, how)
        self._process.wait(timeout=90)

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        try:
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(line[:500] for line in text.splitlines()[-lines:])


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on and that was not returned before."""
    for port in random.sample(_PORTS, k=200):
        if port in _given:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise ClusterError("no free port between 20000 and 30000")


def listens(port: int) -> bool:
    """Whether somebody does, on that port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(
    what: str,
    check: Callable[[], _T | None],
    timeout: float = 60.0,
    *,
    among: Sequence[Component] = (),
    ignore: type[Exception] | tuple[type[Exception], ...] = (),
    poll: float = 0.05,
) -> _T:
    """The first true result of `check`.

    Args:
        what: For the error, e.g. "the API server is ready".
        check: Called again and again.
        timeout: Seconds.
        among: Components that must stay alive meanwhile; the error shows the ends of their logs.
        ignore: Exceptions of `check` that mean "not yet".
        poll: Seconds between two calls.

    Raises:
        ClusterError: `timeout` is over, or one of `among` has ended.
    """
    deadline = time.monotonic() + timeout
    last: object = None
    while True:
        try:
            last = result = check()
            if result:
                return result
        except ignore as error:
            last = error
        dead = [each for each in among if not each.alive]
        if dead or time.monotonic() > deadline:
            why = f"{dead[0].name} has ended" if dead else f"not within {timeout:.0f} s"
            logs = "".join(f"\n--- {each.log}\n{each.tail()}" for each in dead or among)
            raise ClusterError(f"waiting until {what}: {why}; last: {last!r}{logs}")
        time.sleep(poll)
