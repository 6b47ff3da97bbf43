"""`TrainJobOperator` in a task that waits in its worker or is deferred, by ``dag.test()``."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.airflow.conftest import Run
from tests.integrations.integration import Ended, Fields, Integration


class AirflowTask(Integration):
    """
    Args:
        run: Runs a DAG.
        directory: Of the test; the DAG has its name.
        deferrable: Whether the task is deferred.
    """

    def __init__(self, run: Run, directory: Path, *, deferrable: bool) -> None:
        self.name = "deferred" if deferrable else "worker"
        self._run, self._deferrable = run, deferrable
        self._dag_id = directory.name.replace("[", "-").replace("]", "")

    def train(self, spec: Fields, tries: int = 1, **options: Any) -> Ended:
        from trainjob_airflow.operators.trainjob import TrainJobOperator

        return self.task(TrainJobOperator, tries, **spec, **options)

    def task(self, operator: type[Any], tries: int = 1, **arguments: Any) -> Ended:
        """Run a task of this operator in a DAG of its own; it has the same run in each call."""
        from airflow.sdk import DAG

        with DAG(self._dag_id) as dag:
            operator(
                task_id="work",
                deferrable=self._deferrable,
                retries=tries - 1,
                retry_delay=timedelta(0),
                **arguments,
            )
        ran = self._run(dag, same_run=True)
        error = ran.errors.get("work")
        if ran.states["work"] == "success":
            return Ended(0, result=ran.xcoms["work"], log=ran.log)
        return Ended(type(error), str(error), log=ran.log)

    def outcome(self, code: int) -> object:
        from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, TrainJobTimeout

        return {0: 0, 2: TrainJobFatal, 4: TrainJobTimeout, 5: TrainJobFatal}.get(code, TrainJobFailure)
