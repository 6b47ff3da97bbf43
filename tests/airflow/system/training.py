"""A run of a DAG that trains on the local backend."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.airflow.conftest import jobs
from tests.airflow.system.airflow import Airflow
from tests.processes import wait_until

from trainjob import Phase, TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob.status import observe

MODES = ("worker", "deferred")
_numbers = itertools.count()


@dataclass
class Training:
    """A run of one of the DAGs in `dags`; its jobs end once the flag file exists.

    Attributes:
        dag: ID of the DAG.
        home: ``TRAINJOB_HOME`` of all tasks.
        namespace: Namespace of its jobs, which has no other jobs.
        flag: The flag file.
        run: ID of the run.
    """

    airflow: Airflow
    dag: str
    home: Path
    namespace: str
    flag: Path
    run: str = ""

    @classmethod
    def of(cls, airflow: Airflow, dag: str, home: Path) -> Training:
        """Create one that has not started."""
        namespace = f"{dag.replace('_', '-')}-{next(_numbers)}"
        return cls(airflow, dag, home, namespace, home.parent / f"{home.name}-{namespace}")

    @property
    def conf(self) -> dict[str, str]:
        return {"flag": str(self.flag), "namespace": self.namespace}

    @property
    def jobs(self) -> list[str]:
        return jobs(self.home, self.namespace)

    @property
    def phases(self) -> dict[str, str]:
        with self.client() as client:
            found = {job["metadata"]["name"]: observe(job).phase for job in client.list()}
        return {name: str(phase) for name, phase in found.items() if phase is not Phase.CANCELLED}

    @property
    def task(self) -> dict[str, Any]:
        return self.airflow.task(self.dag, self.run)

    @property
    def state(self) -> str:
        return str(self.task["state"])

    @property
    def triggerer(self) -> int | None:
        """ID of the triggerer that runs the task's trigger."""
        found: int | None = (self.task["trigger"] or {}).get("triggerer_id")
        return found

    @property
    def delivered(self) -> str:
        """Name of the job whose result the task returned."""
        return str(self.airflow.xcom(self.dag, self.run)["name"])

    def client(self) -> TrainJobClient:
        return TrainJobClient(LocalBackend(home=self.home), self.namespace)

    def begin(self) -> None:
        self.run = self.airflow.run(self.dag, **self.conf)

    def until_logged(self, text: str, attempt: int | None = None) -> None:
        """Wait until the log of a try contains `text`; of the latest try by default."""

        def logged() -> bool:
            number = attempt or max(1, self.task["try_number"])
            return text in self.airflow.log(self.dag, self.run, attempt=number)

        with self.airflow.explained(self.dag, self.run):
            wait_until(f"{text!r} is in the log of {self.namespace}", logged, 240, poll=1, ignore=httpx.HTTPError)

    def until_up(self, attempt: int | None = None) -> None:
        """Wait until the job runs and the task waits for it."""
        self.until_logged("[node-0] up", attempt)

    def finish(self) -> None:
        """Let the job end, and the task with it."""
        self.flag.touch()
        self.airflow.until("success", self.dag, self.run, seconds=150)

    def mark(self, state: str) -> None:
        self.airflow.mark(state, self.dag, self.run)

    def clear(self) -> None:
        self.airflow.clear(self.dag, self.run)

    def processes(self) -> tuple[psutil.Process, psutil.Process]:
        """Supervisor and process of a running task."""
        task = psutil.Process(self.task["pid"])
        supervisor = task.parent()
        assert supervisor is not None
        return supervisor, task

    def clean(self) -> None:
        """End the task and remove its jobs."""
        if self.run and self.state not in ("success", "failed"):
            self.mark("failed")
        with self.client() as client:
            for ref in [client.find(name) for name in self.jobs]:
                client.cancel(ref)
                client.call(lambda ref=ref: client.backend.delete(ref))  # type: ignore[misc]
