"""Many tasks of one DAG at once, each with its own job, in a worker and deferred; on the local backend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from tests import campaigns
from tests.airflow.system.airflow import Airflow
from tests.airflow.system.training import MODES, Training
from tests.processes import wait_until

DATES = 2
MAPPED = 50 if campaigns.FULL else 3
"""As in dags/trainings.py. On a cluster, tests/cluster/restarts/test_airflow_system.py runs fifty at once."""


@pytest.fixture
def runs(airflow: Airflow, trainings: Path) -> Iterator[dict[str, list[Training]]]:
    """Kind of DAG -> a training in each mode; not started."""
    kinds = ("mapped", "daily")
    runs = {kind: [Training.of(airflow, f"{mode}_{kind}", trainings) for mode in MODES] for kind in kinds}
    for both in runs.values():
        for it in both:
            it.flag.touch()
    yield runs
    for both in runs.values():
        for it in both:
            with it.client() as client:
                for name in it.jobs:
                    client.cancel(client.find(name))


@pytest.mark.timeout(1800)
def test_mapped_and_backfilled(runs: dict[str, list[Training]], airflow: Airflow) -> None:
    for it in runs["daily"]:
        airflow.backfill(it.dag, "2026-01-05", f"2026-01-{4 + DATES:02}", **it.conf)
    for it in runs["mapped"]:
        it.begin()

    for it in runs["daily"]:
        wait_until(f"all runs of {it.dag} exist", partial(all_exist, it), 900, poll=1)
        assert [airflow.over(it.dag, run, 900) for run in backfilled(it)] == ["success"] * DATES
        results = [airflow.xcom(it.dag, run) for run in backfilled(it)]
        assert sorted(each["name"] for each in results) == it.jobs
        assert list(it.phases.values()) == ["Complete"] * DATES

    for it in runs["mapped"]:
        assert airflow.over(it.dag, it.run, 1500) == "success"
        results = [airflow.xcom(it.dag, it.run, map_index=index) for index in range(MAPPED)]
        assert sorted(each["name"] for each in results) == it.jobs
        assert list(it.phases.values()) == ["Complete"] * MAPPED


def all_exist(it: Training) -> bool:
    return len(backfilled(it)) == DATES


def backfilled(it: Training) -> list[str]:
    """IDs of the runs."""
    runs = it.airflow.get(f"dags/{it.dag}/dagRuns", run_type="backfill")["dag_runs"]
    return [run["dag_run_id"] for run in runs]
