"""Forks commands from a process that has already imported their modules; MLflow or Airflow take long to import.

On the PATH of `Warm.environment`, a small program replaces a program such as ``trainjob``. It passes its arguments,
environment, directory and standard streams to that process, and exits with the code of the fork. Use it only where the
start of a command is not under test: signals to the small program do not reach the fork.
"""

from __future__ import annotations

import atexit
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
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

_PROGRAM = """#!{python} -IS
import marshal, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    request = marshal.dumps(({program!r}, sys.argv, os.getcwd(), dict(os.environ)))
    socket.send_fds(server, [len(request).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(request)
    code = server.recv(4)
sys.exit(int.from_bytes(code, "big") if code else "the process of {program} was killed")
"""

PYTHON = "warm-python"
"""The name of a command that runs a script, as ``python`` does."""


class Warm:
    """Context manager that runs the process.

    Args:
        programs: ``module:function`` by the name of the command; any value for `PYTHON`.
        preload: Modules that the commands import.
        environment: Environment of the imports; each command has the environment that it is started with.
        python: The interpreter; it does not need the packages of the tests.

    Attributes:
        bin: The folder with the commands.
    """

    def __init__(
        self,
        programs: Mapping[str, str],
        preload: Sequence[str],
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._python = python
        self._programs, self._preload = dict(programs), list(preload)
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="trainjob-warm-")
        self.bin = Path(self._folder.name, "bin")
        self.bin.mkdir()
        address = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(64)
            # It ends when its standard input closes, and so with this process.
            self._server = subprocess.Popen(
                [self._python, "-m", "tests.warm", str(listener.fileno()), repr(self._programs), *self._preload],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                cwd=Path(__file__).parents[1],
                env=self._environment,
            )
        for program in self._programs:
            path = self.bin / program
            path.write_text(_PROGRAM.format(python=self._python, address=address, program=program))
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


# ------------------------------------------------------------ the process that forks


def _serve(listener: socket.socket, programs: Mapping[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            code = 1
            try:
                code = _run(connection, programs)
            finally:
                with suppress(OSError):
                    connection.sendall(code.to_bytes(4, "big"))
                os._exit(code)
        connection.close()


def _run(connection: socket.socket, programs: Mapping[str, str]) -> int:
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    size, request = int.from_bytes(head, "big"), b""
    while len(request) < size:
        request += connection.recv(size - len(request))
    program, argv, directory, environment = marshal.loads(request)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    try:
        return _ended(lambda: _call(program, programs[program], argv))
    finally:
        atexit._run_exitfuncs()
        for output in (sys.stdout, sys.stderr):
            with suppress(OSError):
                output.flush()


def _call(program: str, target: str, argv: list[str]) -> Any:
    if program == PYTHON:
        sys.argv, sys.path[0] = argv[1:], str(Path(argv[1]).parent.resolve())
        runpy.run_path(argv[1], run_name="__main__")
        return 0
    sys.argv = argv
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)()


def _ended(call: Any) -> int:
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
    _serve(socket.socket(fileno=int(sys.argv[1])), eval(sys.argv[2]))
