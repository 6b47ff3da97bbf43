"""Forks programs from a process that has already imported their modules; MLflow or Airflow take long to import.

`Warm` puts small programs on a PATH. Each passes its arguments, environment, directory and standard streams to that
process, and exits with the code of the fork. Use it only where the start of a command is not under test: signals to the
small program do not reach the fork. `Forked` is a component whose process is the fork itself.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from tests.processes import Component, ComponentError

ROOT = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1

_PROGRAM = """#!{python} -IS
import marshal, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = marshal.dumps(({target!r}, sys.argv, os.getcwd(), dict(os.environ), False))
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    server.recv(4)  # its process ID
    code = int.from_bytes(server.recv(4), "big", signed=True)
sys.exit(code if code >= 0 else "the process of {program} was killed")
"""

PYTHON = "warm-python"
"""The name of a command that runs a script, a module or code, as ``python`` does."""


class Warm:
    """Context manager that runs the process.

    Args:
        programs: ``module:function`` by the name of the command; any value for `PYTHON`.
        preload: Modules that the commands import.
        environment: Environment of the imports, besides that of this process; each command has the environment that it
            is started with.
        python: The interpreter; it does not need the packages of the tests.
        prepare: ``module:function``, called after the imports.
        inherit: Whether the imports have the environment of this process.

    Attributes:
        bin: The folder with the commands.
        address: Path of the server's socket.
    """

    def __init__(
        self,
        programs: Mapping[str, str],
        preload: Sequence[str],
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
        *,
        prepare: str = "",
        inherit: bool = True,
    ) -> None:
        self._python, self._prepare = python, prepare
        self._programs, self._preload = dict(programs), list(preload)
        self._environment = {**(os.environ if inherit else {}), **(environment or {})}

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="trainjob-forks-")
        self.bin = Path(self._folder.name, "bin")
        self.bin.mkdir()
        self.address = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen(64)
            # It ends when its standard input closes, and so with this process.
            self._server = subprocess.Popen(
                [self._python, "-m", "tests.forks", str(listener.fileno()), self._prepare, *self._preload],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                cwd=ROOT,
                env=self._environment,
            )
        for program, target in self._programs.items():
            path = self.bin / program
            names = {"program": program, "target": PYTHON if program == PYTHON else target}
            path.write_text(_PROGRAM.format(python=self._python, address=self.address, **names))
            path.chmod(0o755)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)
        self._folder.cleanup()

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        """The environment with these commands first on PATH."""
        return {**given, "PATH": f"{self.bin}{os.pathsep}{given['PATH']}"}


class Forked(Component):
    """A program with its own session, directory, environment and log that is started by fork.

    Args:
        forks: The process that forks.
        name: Name in logs and errors.
        command: ``(…, "-m", module, …)`` or ``(…, "-c", code, …)``.
        directory: Directory of its log.
        environment: All its variables, besides PATH and HOME.
    """

    def __init__(
        self, forks: Warm, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(name, command, directory, environment)
        self._forks = forks
        self._started: int | None = None
        self._status: int | None = None

    def start(self) -> None:
        """Start the process; its log is appended to."""
        request = marshal.dumps((PYTHON, [*self.command], str(self.log.parent), dict(self.environment), True))
        self._server = socket.socket(socket.AF_UNIX)
        self._server.settimeout(300)
        self._server.connect(self._forks.address)
        with self.log.open("ab") as log, Path(os.devnull).open() as nothing:
            streams = [nothing.fileno(), log.fileno(), log.fileno()]
            socket.send_fds(self._server, [len(request).to_bytes(8, "big")], streams)
        self._server.sendall(request)
        pid = self._server.recv(4)
        if not pid:
            raise ComponentError(f"{self.name} cannot be started: the process that forks has ended")
        self._started, self._status = int.from_bytes(pid, "big"), None

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        return None if self._started is None or self._has_ended(0) else self._started

    def wait(self) -> None:
        """Wait for the end of the process."""
        if self._started is not None and not self._has_ended(90):
            raise ComponentError(f"{self.name} has not ended")

    def exit_status(self) -> int:
        """Wait for its end; return its exit status, or the negative number of a signal."""
        self._has_ended(120)
        assert self._status is not None, f"{self.name} has not ended"
        return self._status

    def _has_ended(self, seconds: float) -> bool:
        """Whether the process that forks reports its end within so many seconds."""
        if self._status is None and select.select([self._server], [], [], seconds)[0]:
            self._status = int.from_bytes(self._server.recv(4), "big", signed=True)
            self._server.close()
        return self._status is not None


# ------------------------------------------------------------ the process that forks


def _serve(listener: socket.socket) -> None:
    gc.collect()
    gc.freeze()  # otherwise each collection in a fork copies all pages
    forks: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([listener, sys.stdin, *forks], [], [])
        if sys.stdin in ready:
            return
        for ended in forks.keys() & ready:
            pid, connection = forks.pop(ended)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with connection, suppress(OSError):
                connection.sendall(code.to_bytes(4, "big", signed=True))
        if listener in ready:
            connection, _ = listener.accept()
            if (pid := os.fork()) == 0:
                listener.close()
                _become(connection)
            with suppress(OSError):
                connection.sendall(pid.to_bytes(4, "big"))
            forks[os.pidfd_open(pid)] = pid, connection


def _become(connection: socket.socket) -> None:
    """Run the program that is requested, and exit."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        target, argv, directory, environment, session = _request(connection)
        if session:
            os.setsid()
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        code = _ended(lambda: _call(target, argv))
    finally:
        # As an interpreter does before the exit functions, which wait for the processes of pools.
        threading._shutdown()  # type: ignore[attr-defined]  # private, and so not in the stubs
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            with suppress(OSError):
                output.flush()
        os._exit(code)


def _request(connection: socket.socket) -> tuple[str, list[str], str, dict[str, str], bool]:
    """Read a request, and take the standard streams that come with it."""
    with connection:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        size, request = int.from_bytes(head, "big"), b""
        while len(request) < size:
            request += connection.recv(size - len(request))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    found: tuple[str, list[str], str, dict[str, str], bool] = marshal.loads(request)
    return found


def _call(target: str, argv: list[str]) -> Any:
    if target != PYTHON:
        sys.argv = argv
        return _function(target)()
    if argv[1] not in ("-m", "-c"):
        sys.argv, sys.path[0] = argv[1:], str(Path(argv[1]).parent.resolve())
        return runpy.run_path(argv[1], run_name="__main__") and 0
    _, option, what, *arguments = argv
    if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep) and option == "-m":
        sys.path.remove(str(ROOT))
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    return 0


def _function(target: str) -> Callable[[], Any]:
    module, _, function = target.partition(":")
    found: Callable[[], Any] = getattr(importlib.import_module(module), function)
    return found


def _ended(call: Callable[[], Any]) -> int:
    """Run `call`; return its exit code as the interpreter would."""
    try:
        code = call()
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:
        return 130
    except BaseException:  # noqa: BLE001 - the fork stands for an interpreter, which prints any exception and exits with 1
        traceback.print_exc()
        return 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
        return 1
    return int(code or 0) & 0xFF


if __name__ == "__main__":
    for _module in sys.argv[3:]:
        importlib.import_module(_module)
    if sys.argv[2]:
        _function(sys.argv[2])()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    os._exit(0)  # threads of imported modules do not matter
