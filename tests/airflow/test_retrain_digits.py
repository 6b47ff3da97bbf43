"""The complete example DAG: real initializers, two JAX processes, a real registry."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from tests.airflow.conftest import ROOT, Run, jobs
from tests.airflow.versions import dag_bag

from trainjob import TrainJobClient
from trainjob.registry import connect
from trainjob_airflow.triggers.trainjob import TrainJobTrigger


def example() -> DAG:
    dag = dag_bag(ROOT / "dags_examples" / "airflow").dags["retrain_digits"]
    assert isinstance(dag, DAG)
    return dag


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> str:
    """PyTorch for the second run, in a separate environment, like in an image on a cluster."""
    python = os.environ.get("TRAINJOB_TORCH_PYTHON")
    if not python:  # 5 GB, which `make test-airflow` installs and a person who runs pytest by hand may not have
        pytest.skip("TRAINJOB_TORCH_PYTHON does not name the Python of an environment with PyTorch")
    environments = {"torch-distributed": str(Path(python).parents[1])}
    monkeypatch.setenv("TRAINJOB_LOCAL_ENVIRONMENTS", json.dumps(environments))
    return "torch"


@pytest.mark.full
@pytest.mark.skipif(find_spec("mlflow") is None, reason="its registry needs SQLAlchemy 2, Airflow 3.0 does not take it")
@pytest.mark.timeout(1000)
def test_each_run_starts_from_the_champion(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    """First in workers and with JAX; then deferred, by torchrun and DistributedDataParallel."""
    params = {"workspace": (tmp_path / "w").as_uri(), "models": (tmp_path / "m").as_uri()}
    first = run(example(), **params, epochs=1)
    assert first.state == "success", first.log[-6000:]
    assert first.xcoms["initialize_model"]["outputs"]["fresh"] is True
    assert first.xcoms["export_model"]["outputs"] | {"uri": "", "digest": "", "reason": ""} == {
        "name": "digits", "version": "1", "promoted": True, "uri": "", "digest": "", "reason": "",
    }  # fmt: skip
    assert "rank 1 of 2 starts" in first.log

    dag = example()
    deferred: list[str] = []
    outcome = TrainJobTrigger.outcome

    async def counted(trigger: TrainJobTrigger) -> dict[str, Any]:
        deferred.append(trigger.name)
        return await outcome(trigger)

    monkeypatch.setattr(TrainJobTrigger, "outcome", counted)
    for task in dag.tasks:
        monkeypatch.setattr(task, "deferrable", True)
    second = run(dag, **params, framework=framework)
    assert second.state == "success", second.log[-6000:]
    assert "rank 1 of 2 starts" in second.log
    assert sorted(deferred) == sorted(second.xcoms[task.task_id]["name"] for task in dag.tasks)
    started_from = second.xcoms["initialize_model"]["outputs"]
    assert (started_from["fresh"], started_from["version"]) == (False, "1")
    assert started_from["digest"] == first.xcoms["export_model"]["outputs"]["digest"]

    one, two = connect().list("digits")
    assert two.metrics["accuracy"] == second.xcoms["evaluate_model"]["metrics"]["accuracy"] > one.metrics["accuracy"]
    assert "champion" in two.aliases
    assert two.digest == second.xcoms["export_model"]["outputs"]["digest"]
    assert second.xcoms["train"]["uid"] in two.tags["trainjob.provenance.trainjob"]
    assert one.digest in two.tags["trainjob.provenance.base_model"]
    assert second.run_id in two.tags["trainjob.provenance.run"]
    assert (two.aliases, two.tags["trainjob.evaluation.passed"]) == (("champion",), "true")
    assert two.tags["trainjob.evaluation.champion"] == "1"
    assert "the gate passed: metrics.accuracy.min_improvement" in second.log
    assert len(jobs(home)) == 10, "one TrainJob for each task of each run"

    with TrainJobClient("local") as client:
        (job,) = [job for job in client.list() if job["spec"]["runtimeRef"]["name"] == "torch-distributed"]
    assert job["spec"]["trainer"]["command"][:4] == ["trainjob", "exec", "--", "torchrun"]
    assert two.metrics["accuracy"] > 0.95
    assert two.aliases == ("champion",)
