"""Starts Airflow's programs by fork of a process that has imported Airflow already.

An import costs each program 2 to 6 s of CPU. A forked program has its own session, directory, environment, log and
command line, like a new one. Only its imported modules differ.
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NoReturn, Self

from tests.processes import Component, identity, pid_of, wait_until

ROOT = Path(__file__).parents[2]
READY = "ready"
_PR_SET_PDEATHSIG = 1

MODULES = (
    "airflow.__main__",
    *(f"airflow.cli.commands.{name}_command" for name in ("api_server", "dag_processor", "scheduler", "triggerer")),
    *("airflow.cli.commands.dag_command", "airflow.cli.commands.provider_command"),
    *("airflow.utils.db", "alembic.runtime.environment"),
    *(
        "airflow.jobs.scheduler_job_runner",
        "airflow.jobs.triggerer_job_runner",
        "airflow.jobs.dag_processor_job_runner",
    ),
    *("airflow.executors.local_executor", "airflow.dag_processing.manager", "airflow.dag_processing.processor"),
    *("airflow.dag_processing.dagbag", "airflow.providers_manager", "airflow.plugins_manager"),
    *("airflow.api_fastapi.app", "airflow.api_fastapi.execution_api.app", "airflow.sdk.execution_time.supervisor"),
    *("airflow.api_fastapi.execution_api.routes", "airflow.api_fastapi.execution_api.versions"),
    *("airflow.sdk.execution_time.task_runner", "airflow.sdk.execution_time.execute_workload"),
    *("airflow.providers.standard.operators.hitl", "airflow.providers.standard.operators.python"),
    *("airflow.serialization.serialized_objects", "airflow.providers.openlineage.utils.selective_enable"),
    *(f"trainjob_airflow.operators.{name}" for name in ("data", "trainjob")),
    *("trainjob_airflow.decorators.trainjob", "trainjob_airflow.sensors.trainjob", "trainjob_airflow.links"),
    *("trainjob_airflow.triggers.trainjob", "trainjob_airflow.triggers.assets", "trainjob_airflow.lineage"),
    *(
        "trainjob",
        "trainjob._jobs.waiting",
        "trainjob._jobs.launching",
        "trainjob._diagnosis",
        "trainjob._backends.local.backend",
    ),
    *("trainjob._backends.kubernetes.backend", "psycopg2", "httpx", "uvicorn", "a2wsgi"),
)
SERVER_MODULES = (
    *("airflow.api_fastapi.core_api.app", "airflow.api_fastapi.auth.managers.simple.simple_auth_manager"),
    *("airflow.api_fastapi.core_api.routes.public", "airflow.api_fastapi.core_api.routes.ui"),
)
"""Modules that the programs import, and those of an API server. No version of Airflow has all of them."""


class Forks:
    """A context manager: programs can be started inside it, and are killed at its end.

    Args:
        environment: Variables that Airflow reads at its import: its home and settings.
        apis: Modules from which the programs serve Airflow's execution API.

    Attributes:
        socket: Path of the server's socket.
    """

    def __init__(self, environment: dict[str, str], *apis: str) -> None:
        self._environment = environment
        self._apis = apis

    def __enter__(self) -> Self:
        self._directory = tempfile.TemporaryDirectory(prefix="trainjob-forks-")
        home = Path(self._directory.name)
        self.socket = home / "socket"
        path = os.pathsep.join(filter(None, [str(ROOT), self._environment.get("PYTHONPATH", "")]))
        self._server = Component(
            "forks",
            [sys.executable, "-m", "tests.airflow.forks", str(self.socket), *self._apis],
            home,
            {**self._environment, "PYTHONPATH": path},
        )
        self._server.start()
        wait_until("Airflow is imported", (home / READY).exists, 300, among=[self._server])
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()
        self._directory.cleanup()


SERVER = "airflow.api_fastapi.app"
TRIGGERER = "airflow.jobs.triggerer_job_runner"
WORKER = "airflow.sdk.execution_time.supervisor"
"""Modules that serve the execution API: of an API server, inside of a triggerer, and inside of ``dag.test()``."""


class Forked(Component):
    """A program that is started by fork.

    Args:
        forks: The server that forks.
        name: Name in logs and errors.
        command: ``(…, "-m", module, …)`` or ``(…, "-c", code, …)``.
        directory: Directory of its log, process ID and exit status.
        environment: All its variables, besides PATH and HOME.
    """

    def __init__(
        self, forks: Forks, name: str, command: Sequence[str], directory: Path, environment: Mapping[str, str]
    ) -> None:
        super().__init__(name, command, directory, environment)
        self._forks = forks

    def start(self) -> None:
        """Start the process; its log is appended to."""
        self.log.touch()
        with Client(str(self._forks.socket)) as server:
            server.send(Program([*self.command], dict(self.environment), self.log))
            server.recv()

    @property
    def pid(self) -> int | None:
        """Process id; None if it does not run."""
        with suppress(FileNotFoundError):
            return pid_of(pid_file(self.log).read_text())
        return None

    def wait(self) -> None:
        """Wait for the end of the process."""
        wait_until(f"{self.name} has ended", lambda: not self.alive, 90)

    def exit_status(self) -> int:
        """Wait for its end; return its exit status, or the negative number of a signal."""
        file = status_file(self.log)
        wait_until(f"{self.name} has ended", file.exists, 120)
        return int(file.read_text())


@dataclass(frozen=True)
class Program:
    """A program to start, as sent to the process that forks."""

    command: list[str]
    environment: dict[str, str]
    log: Path


def status_file(log: Path) -> Path:
    return log.with_suffix(".status")


def pid_file(log: Path) -> Path:
    """File with the `identity` of the process."""
    return log.with_suffix(".pid")


# ---------------------------------------------------------------- in the process that forks


def _serve(socket: str, *apis: str) -> None:
    for name in (*MODULES, *(SERVER_MODULES if SERVER in apis else ())):
        with suppress(
            Exception
        ):  # not only ImportError: Airflow raises other classes for a module that a version lacks
            import_module(name)
    for name in apis:
        _make_api(import_module(name))
    gc.collect()
    gc.freeze()  # otherwise each collection in a child copies all pages
    started: dict[int, Program] = {}

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _write(status_file(started.pop(ended[0]).log), os.waitstatus_to_exitcode(ended[1]))

    signal.signal(signal.SIGCHLD, reap)
    with Listener(socket) as listener:
        Path(socket).with_name(READY).touch()
        while True:
            with suppress(EOFError):
                connection = listener.accept()
                program: Program = connection.recv()
                status_file(program.log).unlink(missing_ok=True)
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
                pid = os.fork()
                if not pid:
                    _become(program, connection)
                started[pid] = program
                _write(pid_file(program.log), identity(pid))
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                connection.send("")
                connection.close()


def _make_api(module: Any) -> None:
    """Create what a program creates at the first request: models and routes of all versions of the API, 4 s of CPU.

    Airflow itself caches the API of a server; for the other programs it is cached here.
    """
    apps: list[Any]
    if module.__name__ == SERVER:
        apps = [getattr(route, "app", None) for route in module.cached_app(apps="all").routes]
    else:
        module.in_process_api_server = cache(module.in_process_api_server)
        apps = [module.in_process_api_server().app]
    for app in apps:
        if hasattr(app, "_cadwyn_initialize"):  # older versions have created them already
            app._cadwyn_initialize()


def _write(file: Path, content: object) -> None:
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(str(content))
    unfinished.replace(file)


def _become(program: Program, connection: Connection) -> NoReturn:
    """Run this program: ``python -m MODULE …`` or ``python -c CODE …``."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    connection.close()
    os.setsid()
    os.chdir(program.log.parent)
    for name, flags, targets in (
        (os.devnull, os.O_RDONLY, (0,)),
        (program.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, (1, 2)),
    ):
        file = os.open(name, flags, 0o644)
        for target in targets:
            os.dup2(file, target)
        os.close(file)
    os.environ.clear()
    os.environ.update(program.environment)
    _, option, what, *arguments = program.command
    if str(ROOT) not in os.environ.get("PYTHONPATH", "").split(os.pathsep) and option == "-m":
        sys.path.remove(str(ROOT))
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    sys.exit()


if __name__ == "__main__":
    import_module("tests.airflow.forks")._serve(*sys.argv[1:])  # in __main__, its classes could not be unpickled
