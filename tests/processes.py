"""Processes that end with the process that started them, free ports, and waiting."""

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
_SPAWNER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")

_PORTS = range(20_000, 30_000)  # below Linux' ephemeral ports (from 32768), which outgoing connections use
_T = TypeVar("_T")
_given: set[int] = set()


class ComponentError(Exception):
    """A component failed, or a wait timed out; the message ends with the component's log."""


class Component:
    """A program that runs beside the tests: part of a cluster, an Airflow, a store.

    Args:
        name: For logs and errors.
        command: Program and arguments.
        directory: Where its log is written, as ``<name>.log``.
        environment: Variables besides PATH and HOME; no other variables are inherited.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = command
        self.log = directory / f"{name}.log"
        self.environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), **environment}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        if self._process is None or self._process.poll() is not None:
            return None
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.pid is not None

    def start(self) -> None:
        """Start the process; its log is appended to."""
        self._process = _SPAWNER.submit(self._spawn).result()

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                # Killed by the kernel when this process ends, however that happens.
                ["setpriv", "--pdeathsig", "KILL", "--", *self.command],
                env=self.environment,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: this process stops the components in order
            )

    def send(self, how: signal.Signals) -> None:
        """Send a signal to the process group, unless the process has ended."""
        if (pid := self.pid) is not None:
            with suppress(ProcessLookupError):
                os.killpg(pid, how)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process group and wait for the process.

        The default is SIGKILL: after SIGTERM the API server keeps its port for up to a minute, and no component has
        state that needs an orderly shutdown.
        """
        self.send(how)
        self.wait()

    def wait(self) -> None:
        """Wait for the end of the process."""
        if self._process is not None:
            self._process.wait(timeout=90)

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        try:
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(line[:500] for line in text.splitlines()[-lines:])


def identity(pid: int) -> str:
    """A process as text: its id and its start time, since the kernel gives an id again. Empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else f"{pid} {fields[19]}"


def pid_of(mark: str) -> int | None:
    """The process id in a text of `identity`; None if that process has ended."""
    pid = int(mark.partition(" ")[0] or 0)
    return pid if mark and identity(pid) == mark else None


def free_port() -> int:
    """A free port of 127.0.0.1 that was not returned before."""
    for port in random.sample(_PORTS, k=200):
        if port in _given:
            continue
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise ComponentError("no free port between 20000 and 30000")


def listens(port: int) -> bool:
    """Whether a server listens on that port of 127.0.0.1."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_until(
    what: str,
    check: Callable[[], _T | None],
    timeout: float = 180.0,
    *,
    among: Sequence[Component] = (),
    ignore: type[Exception] | tuple[type[Exception], ...] = (),
    poll: float = 0.05,
) -> _T:
    """Wait for the first true result of `check` and return it.

    Args:
        what: The condition, for the error message, e.g. "the API server is ready".
        check: Called repeatedly.
        timeout: Seconds.
        among: Components that must keep running meanwhile; the error shows the ends of their logs.
        ignore: Exceptions of `check` that mean "not yet".
        poll: Seconds between two calls.

    Raises:
        ComponentError: the timeout expired, or one of `among` has ended.
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
            raise ComponentError(f"waiting until {what}: {why}; last: {last!r}{logs}")
        time.sleep(poll)


def eventually(condition: Callable[[], _T | None], timeout: float = 180.0) -> _T:
    """`wait_until` with a default description, for a condition that the test's line explains."""
    return wait_until("the condition holds", condition, timeout, poll=0.02)


def rest_of(process: subprocess.Popen[str], seconds: float = 90) -> str:
    """What a process still writes to its stdout until it has ended.

    Raises:
        ComponentError: it does not end; has the stacks of its threads if it was started with ``PYTHONFAULTHANDLER``.
    """
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired as error:
        what = f"the process does not end (state {process.poll()}) or another one holds its stdout"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            what = f"{what}:\n{process.communicate(timeout=10)[0]}"
        raise ComponentError(what) from error


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read the output of a process up to the first line with `text`.

    Raises:
        ComponentError: the process ends without such a line.
    """
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise ComponentError(f"the process ended without {text!r}:\n{seen}\n{process.stderr and process.stderr.read()}")
