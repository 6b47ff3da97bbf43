"""A complete Airflow: database, API server, scheduler (LocalExecutor runs the tasks), DAG processor, triggerer."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import psutil
import psycopg2
from tests.airflow.forks import SERVER, TRIGGERER, airflow_forks
from tests.airflow.templates import cached
from tests.airflow.versions import AIRFLOW
from tests.forks import Forked
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import ComponentError, free_port, wait_until

_PARTS = ("api-server", "scheduler", "dag-processor", "triggerer")


class Airflow:
    """A context manager: all processes of an Airflow run inside it, and none after it.

    Args:
        directory: Directory of all files.
        dags: Folder of DAG files.
        environment: Variables of all processes, and so of tasks and triggers.
        database: The metadata database; SQLite if None, as with ``airflow standalone``.

    Attributes:
        database: The database, unless it is SQLite.
        parts: The processes, by the names of Airflow's commands.
        url: URL of the API server and the user interface.
    """

    def __init__(
        self, directory: Path, dags: Path, environment: Mapping[str, str], database: PostgreSQL | None = None
    ) -> None:
        self.directory = directory
        self.database = database
        self._file = directory / "airflow.db"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AIRFLOW_HOME": str(directory),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__PARALLELISM": "16",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self._file}" if database is None else database.url,
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__ENABLE_XCOM_DESERIALIZE_SUPPORT": "True",  # otherwise results cannot be read in 3.0
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            # A process is lost after a long time without a heartbeat: with a short time, a busy machine would lose live
            # ones. Tests make heartbeats older instead (`age`).
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "1",
            # On a busy machine the default of 5 s makes tasks repeat unanswered requests endlessly.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(directory / "logs"),
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
            # Not the ports of another Airflow on this machine.
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            "NO_COLOR": "1",
            **environment,
        }
        self._forks = airflow_forks(self.environment, SERVER, TRIGGERER)
        self.parts = {name: self.program(name, name) for name in _PARTS}
        self.http = httpx.Client(base_url=self.url, timeout=120)  # on a busy machine
        self._left: set[int] = set()  # process groups whose main process was ended alone
        self._running = ExitStack()

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self._running.enter_context(self._forks)
        if self.database is not None:
            self._running.enter_context(self.database)
        self._prepare()
        for part in self.parts.values():
            part.start()
        wait_until("Airflow is healthy", self._healthy, 300, among=list(self.parts.values()), ignore=httpx.HTTPError)
        token = self.http.get("/auth/token").raise_for_status().json()["access_token"]
        self.http.headers["Authorization"] = f"Bearer {token}"

    def _prepare(self) -> None:
        """Fill the database. Airflow's migrations take 6 s of CPU, so their result is stored."""
        stored = cached(f"airflow-{AIRFLOW}.{'db' if self.database is None else 'sql'}")
        if not stored.exists():
            self.command("db", "migrate")
            stored.parent.mkdir(parents=True, exist_ok=True)
            unfinished = stored.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(self._file.read_bytes() if self.database is None else self._postgres("pg_dump"))
            unfinished.replace(stored)
        elif self.database is None:
            shutil.copy(stored, self._file)
        else:
            self._postgres("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={stored}")

    def program(self, name: str, *arguments: str) -> Forked:
        """One of Airflow's commands, not started; its log is ``<name>.log``."""
        command = [sys.executable, "-m", "airflow", *arguments]
        return Forked(self._forks, name, command, self.directory, self.environment)

    def _postgres(self, name: str, *arguments: str) -> bytes:
        """Output of one of PostgreSQL's programs."""
        command = [str(PROGRAMS[-1] / name), *arguments, "--dbname", self._address]
        return subprocess.run(command, capture_output=True, check=True, timeout=120).stdout

    @property
    def _address(self) -> str:
        assert self.database is not None, "this Airflow has no PostgreSQL"
        return self.database.url.replace("+psycopg2", "")

    def command(self, *arguments: str) -> str:
        """Output of one of Airflow's commands."""
        command = self.program(f"command-{'-'.join(arguments[:2])}", *arguments)
        command.log.unlink(missing_ok=True)
        command.start()
        assert command.exit_status() == 0, command.tail()
        return command.log.read_text()

    def age(self, table: str, column: str, **where: Any) -> None:
        """Make the last heartbeat of a stopped process an hour older, so that it counts as lost at once."""
        conditions = " AND ".join(f"{name} = %s" for name in where)
        with psycopg2.connect(self._address) as connection, connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE {table} SET {column} = {column} - interval '1 hour' WHERE {conditions}", [*where.values()]
            )
            assert cursor.rowcount, (table, where)
        connection.close()

    def _connections(self, pid: int) -> list[int]:
        """Local ports of the connections from a process to the database."""
        port = urlsplit(self._address).port
        connections = psutil.Process(pid).net_connections("tcp")
        return [each.laddr.port for each in connections if each.raddr and each.raddr.port == port]

    def _disconnect(self, ports: list[int]) -> None:
        """Close the database connections of a killed process, as after the loss of its machine.

        Its children have inherited the connections: while they live, an open transaction keeps its locks, and the next
        scheduler, which needs the row of a pool, schedules tasks and never starts one.
        """
        with psycopg2.connect(self._address) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE client_port = ANY(%s)", [ports]
            )
        connection.close()

    def until_healthy(self) -> None:
        """Wait until all parts are healthy. A part that has ended is restarted, as by Kubernetes.

        A scheduler whose database disappears during certain queries keeps running but only waits for its tasks; it is
        restarted too, as Kubernetes does after a failed probe.
        """

        since, probed = datetime.now(UTC), time.monotonic()

        def healthy() -> bool:
            nonlocal probed
            for part in self.parts.values():
                if not part.alive:
                    part.start()
            if time.monotonic() > probed + 60 and self._health()["scheduler"]["status"] == "unhealthy":
                self.parts["scheduler"].kill()
                probed = time.monotonic()
            return self._healthy(since)

        ignored = (httpx.HTTPError, KeyError, TypeError)  # a part that has not reported yet
        wait_until("Airflow is healthy again", healthy, 300, ignore=ignored, poll=0.5)

    def _healthy(self, since: datetime | None = None) -> bool:
        """Whether all parts report healthy, with a heartbeat after `since`: a dying scheduler is healthy for 30 s."""
        found = self._health()
        parts = ("scheduler", "triggerer", "dag_processor")
        heartbeats = {part: found[part][f"latest_{part}_heartbeat"] for part in parts if since}
        fresh = all(datetime.fromisoformat(beat) > since for beat in heartbeats.values()) if since else True
        return fresh and all(found[part]["status"] == "healthy" for part in ("metadatabase", *parts))

    def _health(self) -> Any:
        return self.http.get("/api/v2/monitor/health").json()

    def stop(self) -> None:
        """End all processes."""
        self.http.close()
        for part in self.parts.values():
            part.kill()
        self._end_orphans()
        self._running.close()

    def _end_orphans(self) -> None:
        """End processes that a part ended alone has left: a scheduler's idle workers, log servers."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                # Process IDs are reused by other programs.
                if os.getpgid(process.pid) in self._left and "airflow" in " ".join(process.cmdline()):
                    process.kill()

    def end(self, name: str, how: signal.Signals = signal.SIGKILL, *, alone: bool = False) -> None:
        """End one of the processes.

        Args:
            name: Name of the part.
            how: The signal that ends it.
            alone: Send no signal to its children; the process ends them or leaves them.
        """
        part = self.parts[name]
        if alone and part.pid is not None:
            self._left.add(part.pid)
            ports = self._connections(part.pid)
            os.kill(part.pid, how)
            wait_until(f"{name} ends", lambda: not part.alive, 60)
            self._disconnect(ports)
        else:
            part.kill(how)

    def restart(self, name: str, how: signal.Signals = signal.SIGKILL, *, alone: bool = False) -> None:
        """End a process as `end` does, and start it again."""
        self.end(name, how, alone=alone)
        self.parts[name].start()

    # ---------------------------------------------------------------- actions of a person, by the REST API

    def get(self, path: str, **params: Any) -> Any:
        """The API's response."""
        return self.http.get(f"/api/v2/{path}", params=params).raise_for_status().json()

    def run(self, dag_id: str, **conf: Any) -> str:
        """Start a run of a DAG, once it is known; returns its id."""
        wait_until(f"DAG {dag_id} is known", lambda: self._known(dag_id), 180, poll=0.5)
        body = {"logical_date": None, "conf": conf}
        answer = self.http.post(f"/api/v2/dags/{dag_id}/dagRuns", json=body).raise_for_status()
        return str(answer.json()["dag_run_id"])

    def _known(self, dag_id: str) -> bool:
        return self.http.get(f"/api/v2/dags/{dag_id}").status_code == 200

    def task(self, dag_id: str, run_id: str, task_id: str = "train") -> dict[str, Any]:
        """The current state of a task instance."""
        found: dict[str, Any] = self.get(f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}")
        return found

    def until(
        self, state: str, dag_id: str, run_id: str, task_id: str = "train", seconds: float = 90
    ) -> dict[str, Any]:
        """Wait for a state of a task."""
        last: dict[str, Any] = {}

        def reached() -> bool:
            last.update(self.task(dag_id, run_id, task_id))
            return bool(last["state"] == state)

        with self.explained(dag_id, run_id):
            wait_until(f"{dag_id}.{task_id} is {state}", reached, seconds, poll=0.2, ignore=httpx.HTTPError)
        return last

    @contextmanager
    def explained(self, dag_id: str, run_id: str) -> Iterator[None]:
        """Add logs of unfinished and failed tasks to the error of a wait for a run that takes too long."""
        try:
            yield
        except ComponentError as error:
            with suppress(httpx.HTTPError):
                for each in self.get(f"dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]:
                    if each["state"] not in ("success", "skipped"):
                        log = self.log(dag_id, run_id, each["task_id"], each["try_number"])
                        error.add_note(f"{each['task_id']}, try {each['try_number']}: {each['state']}\n{log[-2000:]}")
            lines = self.parts["scheduler"].log.read_text().splitlines()
            # For example that the scheduler considers a task lost ("state mismatch").
            error.add_note("\n".join([line for line in lines if run_id in line][-10:]))
            raise

    def over(self, dag_id: str, run_id: str, seconds: float = 240) -> str:
        """Wait for the end of a run; return its state.

        Raises:
            ComponentError: The run does not end in time; the error has its unfinished tasks and their last log lines.
        """

        def state() -> str:
            return str(self.get(f"dags/{dag_id}/dagRuns/{run_id}")["state"])

        with self.explained(dag_id, run_id):
            wait_until(
                f"{dag_id} is over", lambda: state() in ("success", "failed"), seconds, poll=0.5, ignore=httpx.HTTPError
            )
        return state()

    def mark(self, state: str, dag_id: str, run_id: str, task_id: str = "train") -> None:
        """Mark a task as failed or as successful."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}"

        def marked() -> bool:  # 409: the scheduler holds a lock on the task
            answer = self.http.patch(path, json={"new_state": state})
            return answer.status_code != 409 and answer.raise_for_status().is_success

        wait_until(f"{dag_id}.{task_id} can be marked", marked, 30)

    def clear(self, dag_id: str, run_id: str, task_id: str = "train") -> None:
        """Clear a task: it runs again.

        Airflow reads the run's state before it clears, and restarts the run only if it had ended. If the scheduler ends
        the run in between, the cleared task is never started (`clear_task_instances`). So a run whose tasks have ended
        must end first.
        """
        tasks = self.get(f"dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]
        if all(each["state"] in ("success", "failed", "skipped") for each in tasks):
            self.over(dag_id, run_id)
        body = {
            "dag_run_id": run_id,
            "task_ids": [task_id],
            "dry_run": False,
            "only_failed": False,
            "reset_dag_runs": True,
        }
        self.http.post(f"/api/v2/dags/{dag_id}/clearTaskInstances", json=body).raise_for_status()

    def log(self, dag_id: str, run_id: str, task_id: str = "train", attempt: int = 1) -> str:
        """The log of a try as in the user interface: lines, and types and messages of exceptions."""
        lines = []
        for each in self.log_entries(dag_id, run_id, task_id, attempt):
            errors = each.get("error_detail") or ()
            lines += [str(each["event"]), *(f"{error['exc_type']}: {error['exc_value']}" for error in errors)]
        return "\n".join(lines)

    def log_entries(self, dag_id: str, run_id: str, task_id: str = "train", attempt: int = 1) -> list[dict[str, Any]]:
        """The log of a try, with all fields."""
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/logs/{attempt}"
        answer = self.http.get(path, params={"full_content": "true"}, headers={"Accept": "application/json"})
        found: list[dict[str, Any]] = answer.raise_for_status().json()["content"]
        return found

    def xcom(
        self, dag_id: str, run_id: str, task_id: str = "train", key: str = "return_value", map_index: int = -1
    ) -> Any:
        """The XCom of a task under a key."""
        path = f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.get(path, deserialize="true", map_index=map_index)["value"]
