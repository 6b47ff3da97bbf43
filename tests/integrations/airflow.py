"""`TrainJobOperator` in a task that waits in its worker or is deferred, by ``dag.test()``."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.airflow.conftest import Run
from tests.integrations.integration import Ended, Fields, Integration

from trainjob import InvalidSpec


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

        return self._task(TrainJobOperator, tries, **spec, **options)

    def wait(self, job: str) -> Ended:
        from trainjob_airflow.sensors.trainjob import TrainJobSensor

        return self._task(TrainJobSensor, job=job, poke_interval=0.2, timeout=240)

    def export(self, trained: Fields, target: str, **options: Any) -> Ended:
        from trainjob_airflow.operators.data import ModelExportOperator

        source = trained["outputs"]["model"]
        ended = self._task(ModelExportOperator, source=source, target=target, metrics=trained, **options)
        return replace(ended, result=ended.result.get("outputs", {}))

    def tune(self, study: Fields, template: Fields) -> Ended:
        from trainjob_airflow.operators.tuning import TrainJobTuningOperator

        return self._task(TrainJobTuningOperator, study=study, **template)

    def _task(self, operator: type[Any], tries: int = 1, **arguments: Any) -> Ended:
        """Run a task of this operator in a separate DAG, in the same run in each call."""
        from airflow.sdk import DAG

        given = {"deferrable": self._deferrable, "retries": tries - 1, "retry_delay": timedelta(0), **arguments}
        try:
            with DAG(self._dag_id) as dag:
                operator(task_id="work", **given)
        except InvalidSpec as refused:  # a literal is refused when the DAG file is parsed
            return Ended(self.outcome(2), str(refused))
        ran = self._run(dag, same_run=True)
        error = ran.errors.get("work")
        if ran.states["work"] == "success":
            return Ended(0, result=ran.xcoms["work"], log=ran.log)
        return Ended(type(error), str(error), log=ran.log)

    def outcome(self, code: int, *, certain: bool = False) -> object:
        from trainjob_airflow.exceptions import TrainJobFailure, TrainJobFatal, TrainJobTimeout

        if certain or code in (2, 5):
            return TrainJobFatal
        return {0: 0, 4: TrainJobTimeout}.get(code, TrainJobFailure)
