"""The examples of dags_examples/airflow: each can be parsed and serialized. Those without a scheduler or a cluster run
here, with real trainings; system/test_examples.py and tests/cluster/test_airflow_examples.py run the others."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import DAG
from tests.airflow.conftest import ROOT, Run, jobs
from tests.airflow.versions import dag_bag, dag_serialization, older_than

from trainjob import TrainJobClient
from trainjob.registry import connect
from trainjob_airflow.triggers.trainjob import TrainJobTrigger

EXAMPLES = ROOT / "dags_examples" / "airflow"
IDS = {
    "retrain_digits": {"retrain_digits"},
    "retrain_daily": {"retrain_daily"},
    "tune_digits": {"tune_digits"},
    "champion_challenger": {"champion_challenger"},
    "on_new_model": {"release_digits", "evaluate_digits", "deploy_digits"},
    "finetune_llm": {"finetune_llm"},
    "train_gang": {"train_gang"},
    "train_until_good": {"train_until_good"},
    "adopt_training": {"adopt_training"},
}
SINCE = {"champion_challenger": "3.1", "retrain_daily": "3.3", "train_gang": "3.3", "train_until_good": "3.4"}
"""The oldest Airflow that an example supports, as in docs/how-to/airflow.md."""

registry = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="the registry needs SQLAlchemy 2, Airflow 3.0 does not take it"
)


def examples() -> dict[str, DAG]:
    """DAG ID -> DAG, parsed with the environment of this test."""
    bag = dag_bag(EXAMPLES)
    assert {Path(file).stem for file in bag.import_errors} == {
        name for name, first in SINCE.items() if older_than(first)
    }
    return {dag_id: dag for dag_id, dag in bag.dags.items() if isinstance(dag, DAG)}


def test_each_can_be_parsed_and_serialized(airflow_home: Path) -> None:
    assert {file.stem for file in EXAMPLES.glob("*.py")} == set(IDS)
    for dag_id, dag in examples().items():
        assert dag_id in IDS[Path(dag.fileloc).stem]
        again = dag_serialization().from_dict(json.loads(json.dumps(dag_serialization().to_dict(dag))))
        assert {task.task_id: task.upstream_task_ids for task in again.tasks} == {
            task.task_id: task.upstream_task_ids for task in dag.tasks
        }


def test_the_documentation_links_all_of_them() -> None:
    linked = re.findall(
        r"\(\.\./\.\./dags_examples/airflow/(\w+)\.py\)", (ROOT / "docs" / "how-to" / "airflow.md").read_text()
    )
    assert set(linked) == set(IDS)


@pytest.mark.skipif(not older_than("3.4"), reason="this Airflow has loops of task groups")
def test_an_example_for_a_later_airflow_says_so() -> None:
    (error,) = dag_bag(EXAMPLES / "train_until_good.py").import_errors.values()
    assert "needs Airflow 3.4 or later: task groups of this one have no loops" in error


@pytest.mark.full
@registry
@pytest.mark.timeout(1000)
def test_the_best_of_several_trials_is_exported(run: Run, home: Path) -> None:
    done = run(examples()["tune_digits"], trials=3, epochs=2)
    assert done.state == "success", done.log[-6000:]
    found = done.xcoms["search"]
    assert sum(found["counts"].values()) == 3
    assert found["best"]["value"] == max(each["value"] for each in found["trials"]) > 0.5
    (version,) = connect().list("digits")
    assert version.metrics["accuracy"] == found["best"]["value"]
    assert found["best"]["job"] in version.tags["trainjob.provenance.trainjob"]
    assert version.aliases == ("champion",)


@pytest.mark.full
@registry
@pytest.mark.timeout(1000)
def test_the_model_of_an_adopted_job_is_exported_if_it_is_good(run: Run, tmp_path: Path) -> None:
    script, data = ROOT / "dags_examples" / "training" / "digits_jax.py", ROOT / "dags_examples" / "data"
    with TrainJobClient("local") as client:
        command = ["python", str(script), f"--dataset={data}", f"--output={tmp_path}/model"]
        job = client.launch({"runtime": "jax-distributed", "command": command}, "by-hand")
    dag = examples()["adopt_training"]
    done = run(dag, job=job.name)
    assert done.state == "success", done.log[-6000:]
    assert f"TrainJob default/{job.name} is Complete" in done.log
    (version,) = connect().list("digits")
    assert version.metrics["accuracy"] == done.xcoms["result"]["metrics"]["accuracy"] > 0.9
    assert job.uid in version.tags["trainjob.provenance.trainjob"]

    again = run(dag, job=job.name, accuracy=1.1)
    assert again.states["export_model"] == "skipped"
    assert len(connect().list("digits")) == 1


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
@registry
@pytest.mark.timeout(1000)
def test_each_run_of_retrain_digits_starts_from_the_champion(
    run: Run, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    """First in workers and with JAX; then deferred, by torchrun and DistributedDataParallel."""
    params = {"workspace": (tmp_path / "w").as_uri(), "models": (tmp_path / "m").as_uri()}
    first = run(examples()["retrain_digits"], **params, epochs=1)
    assert first.state == "success", first.log[-6000:]
    assert first.xcoms["initialize_model"]["outputs"]["fresh"] is True
    assert first.xcoms["export_model"]["outputs"] | {"uri": "", "digest": "", "reason": ""} == {
        "name": "digits", "version": "1", "promoted": True, "uri": "", "digest": "", "reason": "",
    }  # fmt: skip
    assert "rank 1 of 2 starts" in first.log

    dag = examples()["retrain_digits"]
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
