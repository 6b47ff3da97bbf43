"""A whole Airflow: PostgreSQL, API server, scheduler (whose LocalExecutor runs the tasks), DAG processor, triggerer."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from tests.cluster.processes import Component, free_port, wait_until
from tests.postgresql import PostgreSQL

_PARTS = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler",),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer",),
}


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
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "AIRFLOW__SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "1",
            # What a lost worker costs: 300 s by default.
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
            "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_SEC": "2",
            # On a busy machine the default of 5 s makes tasks repeat requests that are on their way, which never ends.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(directory / "logs"),
            "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "1",
            # What a lost triggerer costs: 30 s by default.
            "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
            # Not those of another Airflow of this machine.
            "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
            "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
            "NO_COLOR": "1",
            **environment,
        }
        command = (sys.executable, "-m", "airflow")
        self.parts = {
            name: Component(name, [*command, *arguments], directory, self.environment)
            for name, arguments in _PARTS.items()
        }
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
        self._prepare()
        for part in self.parts.values():
            part.start()
        wait_until("Airflow is healthy", self._healthy, 300, among=list(self.parts.values()), ignore=httpx.HTTPError)
        token = self.http.get("/auth/token").raise_for_status().json()["access_token"]
        self.http.headers["Authorization"] = f"Bearer {token}"

    def _prepare(self) -> None:
        """Start the database, and fill it."""
        self._running.enter_context(self.database)
        migrate = Component(
            "migrate", [sys.executable, "-m", "airflow", "db", "migrate"], self.directory, self.environment
        )
        migrate.start()
        wait_until("the database is migrated", lambda: not migrate.alive, 300, among=[self.database.server])

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
                if os.getpgid(process.pid) in self._left and " ".join(process.cmdline()).startswith("airflow"):
                    process.kill()

    def restart(self, name: str, how: signal.Signals = signal.SIGKILL, *, alone: bool = False) -> None:
        """End one of its processes, and start it again.

        Args:
            name: Of the part.
            how: It is told to end.
            alone: Its children are not told; that is left to it.
        """
        part = self.parts[name]
        if alone and part.pid is not None:
            self._left.add(part.pid)
            os.kill(part.pid, how)
            wait_until(f"{name} ends", lambda: not part.alive, 60)
        else:
            part.kill(how)
        part.start()

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

        wait_until(f"{dag_id}.{task_id} is {state}", there, seconds, poll=0.2, ignore=httpx.HTTPError)
        return last

    def over(self, dag_id: str, run_id: str, seconds: float = 240) -> str:
        """Wait for the end of a run; its state then."""

        def state() -> str:
            return str(self.get(f"dags/{dag_id}/dagRuns/{run_id}")["state"])

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
