"""Processes that end with the process that started them, free ports, and waiting."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from threading import Thread
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
        directory: Where its log and its process id are written, as ``<name>.log`` and ``<name>.pid``.
        environment: Variables besides PATH and HOME; no other variables are inherited.

    Attributes:
        host: Socket of the `Host` that starts it; None if this process starts it.
    """

    def __init__(self, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = command
        self.log = directory / f"{name}.log"
        self.environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(directory), **environment}
        self.host: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_process": None}

    @property
    def pid(self) -> int | None:
        """Process id, None if it was never started. Read from its file: another process may have restarted it."""
        with suppress(FileNotFoundError):
            return int(self._pid_file.read_text())
        return None

    @property
    def _pid_file(self) -> Path:
        return self.log.with_suffix(".pid")

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        if self._process is not None:
            self._process.poll()  # removes a process that has ended from the table of processes
        pid = self.pid
        return pid is not None and runs(pid)

    def start(self) -> None:
        """Start the process; its log is appended to.

        Raises:
            ComponentError: the host cannot start it.
        """
        if self.host is None:
            self._process = _SPAWNER.submit(self._spawn).result()
            return
        if error := self._request(self):
            raise ComponentError(f"{self.name} cannot be started: {error}")

    def _request(self, what: Component | int) -> str:
        with Client(str(self.host)) as host:
            host.send(what)
            return str(host.recv())

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                # Killed by the kernel when this process ends, however that happens.
                ["setpriv", "--pdeathsig", "KILL", "--", *self.command],
                env=self.environment,
                cwd=self.log.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must not reach it: this process stops the components in order
            )
        unfinished = self._pid_file.with_suffix(".unfinished")
        unfinished.write_text(str(process.pid))
        unfinished.replace(self._pid_file)
        return process

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the process group and wait for the process.

        The default is SIGKILL: after SIGTERM the API server keeps its port for up to a minute, and no component has
        state that needs an orderly shutdown.
        """
        pid = self.pid
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(pid, how)
        if self.host is not None:
            self._request(pid)
        elif self._process is not None and self._process.pid == pid:
            self._process.wait(timeout=90)
        else:
            wait_until(f"{self.name} has ended", lambda: not self.alive, 90)

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        try:
            text = self.log.read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(line[:500] for line in text.splitlines()[-lines:])


class Host:
    """Starts and reaps components for other processes; the components end with this process.

    Args:
        socket: Path of the socket that it listens on.
        components: Components that this process has already started.
    """

    def __init__(self, socket: Path, components: Iterable[Component]) -> None:
        self._listener = Listener(str(socket))
        self._started = list(components)
        self._thread = Thread(target=self._serve, name="host")
        self._thread.start()

    def _serve(self) -> None:
        while True:
            with suppress(EOFError, BrokenPipeError), self._listener.accept() as request:
                match request.recv():
                    case None:
                        return
                    case Component() as component:
                        request.send(self._start(component))
                    case int(pid):
                        request.send(self._reap(pid))

    def _start(self, component: Component) -> str:
        component.host = None
        try:
            component.start()
        except OSError as error:
            return str(error)
        self._started.append(component)
        return ""

    def _reap(self, pid: int) -> str:
        for component in self._started:
            if component._process is not None and component._process.pid == pid:
                component._process.wait(timeout=90)
        return ""

    def close(self) -> None:
        """Stop accepting requests."""
        with Client(self._listener.address) as host:
            host.send(None)
        self._thread.join()
        self._listener.close()


def runs(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


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
