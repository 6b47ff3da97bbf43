"""Examples that need a scheduler and a triggerer, on a complete Airflow, with real trainings on the local backend."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from mlflow import MlflowClient
from tests import campaigns
from tests.airflow.conftest import ROOT
from tests.airflow.system.airflow import Airflow
from tests.processes import wait_until

from trainjob import TrainJobClient
from trainjob.errors import ModelNotFound
from trainjob.registry import Registry, connect

TIMEOUT = 500  # seconds; 160 at a load of 20

Object = dict[str, Any]


@pytest.fixture
def registry(trainings: Path) -> Registry:
    """The registry of all tasks and triggers."""
    return connect(f"mlflow+sqlite:///{trainings}/registry.db")


@contextmanager
def unpaused(airflow: Airflow, dag_id: str) -> Iterator[None]:
    """Unpause a DAG inside the context."""
    known = lambda: airflow.http.get(f"/api/v2/dags/{dag_id}").status_code == 200  # noqa: E731
    wait_until(f"DAG {dag_id} is known", known, 120, poll=0.5, ignore=httpx.HTTPError)
    path = f"/api/v2/dags/{dag_id}"
    airflow.http.patch(path, json={"is_paused": False}, timeout=TIMEOUT).raise_for_status()
    try:
        yield
    finally:
        airflow.http.patch(path, json={"is_paused": True}, timeout=TIMEOUT).raise_for_status()


def runs(airflow: Airflow, dag_id: str, kind: str = "") -> list[Object]:
    """All runs of a DAG, or those of one type."""
    found: list[Object] = airflow.get(f"dags/{dag_id}/dagRuns")["dag_runs"]
    return [run for run in found if kind in ("", run["run_type"])]


def succeed(airflow: Airflow, dag_id: str, count: int = 1, kind: str = "") -> list[Object]:
    """Wait for `count` runs of a DAG; all must have succeeded."""

    def ended() -> list[Object]:
        found = runs(airflow, dag_id, kind)
        over = [run for run in found if run["state"] in ("success", "failed")]
        return found if len(over) >= count and len(over) == len(found) else []

    found = wait_until(f"{dag_id} has run {count} times", ended, TIMEOUT, poll=1, ignore=httpx.HTTPError)
    states = {run["dag_run_id"]: run["state"] for run in found}
    assert set(states.values()) == {"success"}, states
    return found


def test_the_schedule_and_a_backfill(airflow: Airflow, trainings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A day in March is backfilled; yesterday is trained on by the schedule as soon as the DAG is unpaused."""
    monkeypatch.setenv("TRAINJOB_HOME", str(trainings))
    now = datetime.now(UTC)
    march = ["2026-03-01", "2026-03-02"] if campaigns.FULL else ["2026-03-01"]
    for day in (*march, *((now - timedelta(days=ago)).date().isoformat() for ago in (0, 1))):
        directory = trainings / "digits-by-day" / day
        directory.mkdir(parents=True)
        shutil.copy(ROOT / "dags_examples" / "data" / "digits.csv.gz", directory)
    with unpaused(airflow, "retrain_daily"):
        backfill = {
            "dag_id": "retrain_daily",
            "from_date": f"{march[0]}T00:00:00Z",
            "to_date": f"{march[-1]}T00:00:00Z",
        }
        airflow.http.post("/api/v2/backfills", json=backfill, timeout=TIMEOUT).raise_for_status()
        backfilled = succeed(airflow, "retrain_daily", len(march), "backfill")
        succeed(airflow, "retrain_daily", 1, "scheduled")
    assert [run["data_interval_start"][:10] for run in sorted(backfilled, key=lambda run: run["run_after"])] == march
    with TrainJobClient("local") as client:
        days = {
            job["metadata"]["labels"]["digits.example/day"]: env(job)["TRAINJOB_INPUT_DATASET"]
            for job in client.list()
            if "digits.example/day" in job["metadata"]["labels"]
        }
    assert set(march) < set(days)
    assert all(dataset.endswith(f"/{day}/digits.csv.gz") for day, dataset in days.items())


def env(job: Mapping[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in job["spec"]["trainer"]["env"]}


def test_an_approval_and_new_models_start_dags(airflow: Airflow, registry: Registry, trainings: Path) -> None:
    """One of two challengers is rejected. The event of a release starts the evaluation. The watcher of the registry
    notices the new champion and starts the deployment."""
    # The champion of an earlier test may be better than challengers of so few epochs.
    with suppress(ModelNotFound):
        champion = registry.resolve("digits", "champion")
        MlflowClient(f"sqlite:///{trainings}/registry.db").delete_registered_model_alias(champion.name, "champion")
    with ExitStack() as stack:
        for dag_id in ("champion_challenger", "release_digits", "evaluate_digits", "deploy_digits"):
            stack.enter_context(unpaused(airflow, dag_id))
        refused, approved = (airflow.run("champion_challenger", epochs=epochs) for epochs in (1, 3))
        released = airflow.run("release_digits", epochs=2)

        answer(airflow, refused, "Reject")
        airflow.until("skipped", "champion_challenger", refused, "export_model", seconds=TIMEOUT)
        succeed(airflow, "release_digits")
        made_by = [version.tags["trainjob.provenance.run"] for version in registry.list("digits")]
        assert [run in " ".join(made_by) for run in (released, refused, approved)] == [True, False, False]

        (asset,) = airflow.get("assets", name_pattern="digits_champion")["assets"]
        watches = lambda: airflow.get(f"assets/{asset['id']}/state-store")["asset_state_store"]  # noqa: E731
        wait_until("the registry is watched", watches, 120, poll=0.5, ignore=httpx.HTTPError)
        answer(airflow, approved, "Approve")
        airflow.until("success", "champion_challenger", approved, "export_model", seconds=TIMEOUT)

        (evaluation,) = succeed(airflow, "evaluate_digits")
        (deployment,) = succeed(airflow, "deploy_digits")

    champion = registry.resolve("digits", "champion")
    accuracy = airflow.xcom("champion_challenger", approved, "evaluate_model")["metrics"]["accuracy"]
    assert champion.metrics["accuracy"] == accuracy
    assert champion.tags["trainjob.evaluation.passed"] == "true"
    answered = airflow.xcom("champion_challenger", approved, "approve")
    assert champion.tags["trainjob.provenance.approved_by"] == answered["responded_by_user"]["name"]
    deployed = airflow.xcom("deploy_digits", deployment["dag_run_id"], "deploy")
    assert (deployed["version"], deployed["digest"]) == (champion.version, champion.digest)

    # The event that started the evaluation, and its extra.
    exported = airflow.xcom("release_digits", released, "export_model")["outputs"]
    path = f"dags/evaluate_digits/dagRuns/{evaluation['dag_run_id']}"
    (event,) = airflow.get(f"{path}/upstreamAssetEvents")["asset_events"]
    assert event["extra"]["uri"] == exported["uri"]
    xcom = f"{path}/taskInstances/evaluate/xcomEntries/return_value"
    measured = [airflow.get(xcom, map_index=index, deserialize="true") for index in (0, 1)]
    clear, noisy = (each["value"]["metrics"]["accuracy"] for each in measured)
    assert clear > noisy
    assert evaluation["run_type"] == deployment["run_type"] == "asset_triggered"


def answer(airflow: Airflow, run: str, choice: str) -> None:
    """Approve or reject once the approval is requested, with the accuracy of the challenger."""
    airflow.until("awaiting_input", "champion_challenger", run, "approve", seconds=TIMEOUT)
    # A response before the scheduler knows that the worker has ended fails the task (Airflow 3.3.2).
    key = f"TaskInstanceKey(dag_id='champion_challenger', task_id='approve', run_id='{run}'"
    gone = f"Received executor event with state success for task instance {key}"
    wait_until("the scheduler knows", lambda: gone in airflow.parts["scheduler"].log.read_text(), TIMEOUT)
    path = f"dags/champion_challenger/dagRuns/{run}/taskInstances/approve/-1/hitlDetails"
    request = airflow.get(path)
    accuracy = airflow.xcom("champion_challenger", run, "evaluate_model")["metrics"]["accuracy"]
    assert run in request["subject"]
    assert f"| challenger | {accuracy:.3f} |" in request["body"]
    answered = {"chosen_options": [choice], "params_input": {}}
    airflow.http.patch(f"/api/v2/{path}", json=answered, timeout=TIMEOUT).raise_for_status()
