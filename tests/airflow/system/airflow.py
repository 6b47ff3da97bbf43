"""A whole Airflow: PostgreSQL, API server, scheduler (whose LocalExecutor runs the tasks), DAG processor, triggerer."""

from __future__ import annotations

import json
import os
import secrets
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
from tests.airflow.forks import SERVER, TRIGGERER, Forked, Forks
from tests.airflow.templates import cached
from tests.airflow.versions import AIRFLOW
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import ComponentError, free_port, wait_until

_PARTS = ("api-server", "scheduler", "dag-processor", "triggerer")


class Airflow:
    """A context manager: everything runs in it, nothing after it.

    Args:
        directory: For all its files.
        dags: Folder of DAG files.
        environment: Variables of all its processes, and so of tasks and triggers.

    Attributes:
        database: Where it keeps everything.
        parts: Its processes, by the names of Airflow's commands.
        url: Of the API server and the user interface.
    """

    def __init__(self, directory: Path, dags: Path, environment: Mapping[str, str]) -> None:
        self.directory = directory
        self.database = PostgreSQL()
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
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": self.database.url,
            "AIRFLOW__API__PORT": str(port),
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__API__ENABLE_XCOM_DESERIALIZE_SUPPORT": "True",  # 3.0 lets nobody read results otherwise
            "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_hex(32),
            # Workers, triggerers and schedulers count as lost after a long silence: on a busy machine those that live
            # would be taken for lost. Tests let the time pass (`age`).
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "60",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__JOB_HEARTBEAT_SEC": "1",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "1",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "1",
            # On a busy machine the default of 5 s makes tasks repeat requests that are on their way, which never ends.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(directory / "logs"),
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
            # Not those of another Airflow of this machine.
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            "NO_COLOR": "1",
            **environment,
        }
        self._forks = Forks(self.environment, SERVER, TRIGGERER)
        self.parts = {name: self.program(name, name) for name in _PARTS}
        self.http = httpx.Client(base_url=self.url, timeout=120)  # on a busy machine
        self._left: set[int] = set()  # process groups
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
        self._running.enter_context(self.database)
        self._prepare()
        for part in self.parts.values():
            part.start()
        wait_until("Airflow is healthy", self._healthy, 300, among=list(self.parts.values()), ignore=httpx.HTTPError)
        token = self.http.get("/auth/token").raise_for_status().json()["access_token"]
        self.http.headers["Authorization"] = f"Bearer {token}"

    def _prepare(self) -> None:
        """Fill the database. Airflow's migrations take 6 s of CPU, so their result is kept as SQL."""
        kept = cached(f"airflow-{AIRFLOW}.sql")
        if kept.exists():
            self._postgres("psql", "--quiet", "--set=ON_ERROR_STOP=1", f"--file={kept}")
            return
        self.command("db", "migrate")
        kept.parent.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(self._postgres("pg_dump"))
        unfinished.replace(kept)

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
        return self.database.url.replace("+psycopg2", "")

    def command(self, *arguments: str) -> str:
        """Output of one of Airflow's commands."""
        command = self.program(f"command-{'-'.join(arguments[:2])}", *arguments)
        command.log.unlink(missing_ok=True)
        command.start()
        assert command.exit_status() == 0, command.tail()
        return command.log.read_text()

    def listed(self, *arguments: str) -> list[dict[str, Any]]:
        """What one of Airflow's commands lists."""
        text = self.command(*arguments, "--output", "json")
        found: list[dict[str, Any]] = json.JSONDecoder().raw_decode(text[text.index("[{") :])[0]
        return found

    def age(self, table: str, column: str, **where: Any) -> None:
        """Make the last heartbeat of what has stopped an hour older: nobody waits until it counts as lost."""
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
        """End the connections of a process that was killed, as their server would if its machine had gone.

        Its children have inherited them: a transaction that was open keeps its locks for as long as those live, and
        the next scheduler, which needs the row of a pool, schedules tasks and never starts one.
        """
        with psycopg2.connect(self._address) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE client_port = ANY(%s)", [ports]
            )
        connection.close()

    def until_healthy(self) -> None:
        """Wait for all parts. One that has ended is started again, as by a service manager or by Kubernetes.

        So is a scheduler that lives and does nothing: one whose database goes away in the middle of certain queries
        stops, and waits for its tasks to end. Kubernetes kills what fails its probe.
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

        ignored = (httpx.HTTPError, KeyError, TypeError)  # a part that has said nothing yet
        wait_until("Airflow is healthy again", healthy, 300, ignore=ignored, poll=0.5)

    def _healthy(self, since: datetime | None = None) -> bool:
        """Whether all parts say so, and have said so since: a scheduler that is dying counts as healthy for 30 s."""
        found = self._health()
        parts = ("scheduler", "triggerer", "dag_processor")
        said = {part: found[part][f"latest_{part}_heartbeat"] for part in parts if since}
        fresh = all(datetime.fromisoformat(beat) > since for beat in said.values()) if since else True
        return fresh and all(found[part]["status"] == "healthy" for part in ("metadatabase", *parts))

    def _health(self) -> Any:
        return self.http.get("/api/v2/monitor/health").json()

    def stop(self) -> None:
        """End all its processes."""
        self.http.close()
        for part in self.parts.values():
            part.kill()
        self._end_orphans()
        self._running.close()

    def _end_orphans(self) -> None:
        """End what parts left that were ended alone: a scheduler's idle workers, log servers."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, ProcessLookupError):
                # Ids are used again, for other programs.
                if os.getpgid(process.pid) in self._left and "airflow" in " ".join(process.cmdline()):
                    process.kill()

    def end(self, name: str, how: signal.Signals = signal.SIGKILL, *, alone: bool = False) -> None:
        """End one of its processes.

        Args:
            name: Of the part.
            how: The signal that ends it.
            alone: Its children get no signal; it ends them or leaves them.
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
        """End one of its processes as `end` does, and start it again."""
        self.end(name, how, alone=alone)
        self.parts[name].start()

    # ---------------------------------------------------------------- what a person does, by the REST API

    def get(self, path: str, **params: Any) -> Any:
        """What the API answers."""
        return self.http.get(f"/api/v2/{path}", params=params).raise_for_status().json()

    def run(self, dag_id: str, **conf: Any) -> str:
        """Start a run of a DAG, once it is known; returns its id."""
        wait_until(f"DAG {dag_id} is known", lambda: self._known(dag_id), 180, poll=0.5)
        body = {"logical_date": None, "conf": conf}
        answer = self.http.post(f"/api/v2/dags/{dag_id}/dagRuns", json=body).raise_for_status()
        return str(answer.json()["dag_run_id"])

    def backfill(self, dag_id: str, first: str, last: str, **conf: Any) -> None:
        """Start runs of a DAG for the dates from `first` to `last` (ISO 8601), once it is known."""
        wait_until(f"DAG {dag_id} is known", lambda: self._known(dag_id), 180, poll=0.5)
        body = {
            "dag_id": dag_id,
            "from_date": f"{first}T00:00:00Z",
            "to_date": f"{last}T00:00:00Z",
            "dag_run_conf": conf,
        }
        self.http.post("/api/v2/backfills", json=body).raise_for_status()

    def _known(self, dag_id: str) -> bool:
        return self.http.get(f"/api/v2/dags/{dag_id}").status_code == 200

    def task(self, dag_id: str, run_id: str, task_id: str = "train") -> dict[str, Any]:
        """A task instance as it stands."""
        found: dict[str, Any] = self.get(f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}")
        return found

    def until(
        self, state: str, dag_id: str, run_id: str, task_id: str = "train", seconds: float = 90
    ) -> dict[str, Any]:
        """Wait for a state of a task."""
        last: dict[str, Any] = {}

        def there() -> bool:
            last.update(self.task(dag_id, run_id, task_id))
            return bool(last["state"] == state)

        with self.explained(dag_id, run_id):
            wait_until(f"{dag_id}.{task_id} is {state}", there, seconds, poll=0.2, ignore=httpx.HTTPError)
        return last

    @contextmanager
    def explained(self, dag_id: str, run_id: str) -> Iterator[None]:
        """A wait for a run; if it takes too long, the error shows its unfinished and failed tasks with their logs."""
        try:
            yield
        except ComponentError as error:
            with suppress(httpx.HTTPError):
                for each in self.get(f"dags/{dag_id}/dagRuns/{run_id}/taskInstances")["task_instances"]:
                    if each["state"] not in ("success", "skipped"):
                        log = self.log(dag_id, run_id, each["task_id"], each["try_number"])
                        error.add_note(f"{each['task_id']}, try {each['try_number']}: {each['state']}\n{log[-2000:]}")
            lines = self.parts["scheduler"].log.read_text().splitlines()
            # Such as that it takes a task for lost ("state mismatch").
            error.add_note("\n".join([line for line in lines if run_id in line][-10:]))
            raise

    def until_left(self, dag_id: str, run_id: str, task_id: str = "train", attempt: int = 1) -> None:
        """Wait until the scheduler knows that the worker has left a task which deferred.

        Before, an end of the deferral looks to it as if the task had been lost (its "state mismatch"), and it starts
        the next try. So what a test ends by hand right after a deferral ends after this.
        """
        key = f"task_id='{task_id}', run_id='{run_id}', try_number={attempt},"
        told = f"Received executor event with state success for task instance TaskInstanceKey(dag_id='{dag_id}', {key}"
        wait_until(f"the scheduler knows of {task_id}", lambda: told in self.parts["scheduler"].log.read_text(), 120)

    def over(self, dag_id: str, run_id: str, seconds: float = 240) -> str:
        """Wait for the end of a run; its state then.

        Raises:
            ComponentError: It is not over in time; the error gives the tasks that are left and the ends of their logs.
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

        def marked() -> bool:  # 409: the scheduler has a lock on it
            answer = self.http.patch(path, json={"new_state": state})
            return answer.status_code != 409 and answer.raise_for_status().is_success

        wait_until(f"{dag_id}.{task_id} can be marked", marked, 30)

    def clear(self, dag_id: str, run_id: str, task_id: str = "train") -> None:
        """Clear a task: it runs again.

        Airflow reads the run's state before it clears, and starts the run again only if it was over: one that the
        scheduler ends in between stays over, with a task that nobody starts (`clear_task_instances`). So a run that is
        about to end ends first.
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
        """The log of a try as the user interface shows it: its lines, and types and texts of exceptions."""
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
        """What a task has left under a key."""
        path = f"dags/{dag_id}/dagRuns/{run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.get(path, deserialize="true", map_index=map_index)["value"]
