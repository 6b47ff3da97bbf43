"""A complete Airflow on the cluster: an outage of the API server while many tasks wait, in workers and deferred."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import campaigns
from tests.airflow.system.airflow import Airflow
from tests.postgresql import PROGRAMS
from tests.processes import wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import variable

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PROGRAMS, reason="PostgreSQL is not installed (Debian: apt-get install postgresql)"),
]

MODES = ("worker", "deferred")
ENDED = ("success", "failed")
OUTAGE = 120.0 if campaigns.FULL else 20.0  # seconds
MANY = 50 if campaigns.FULL else 12


@pytest.fixture(scope="module")
def airflow(own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    until_finished = copy.deepcopy(own_cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", "torch-distributed"))
    assert until_finished is not None
    until_finished["metadata"] = {"name": "until-finished", "labels": until_finished["metadata"].get("labels", {})}
    (job,) = until_finished["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]
    pod["metadata"] = {**pod.get("metadata", {}), "annotations": {variable("run"): "never"}}
    own_cluster.add_runtime(until_finished)

    directory = tmp_path_factory.mktemp("complete-airflow")
    environment = {
        "TRAINJOB_BACKEND": "kubernetes",
        "TRAINJOB_TEST_MAPPED": str(MANY),
        "KUBECONFIG": str(own_cluster.kubeconfig),
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with Airflow(directory, Path(__file__).parents[1] / "dags", environment) as airflow:
        yield airflow


@dataclass
class Run:
    """A run of one of the DAGs."""

    airflow: Airflow
    cluster: Cluster
    dag: str
    namespace: str
    id: str = ""

    @property
    def jobs(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.cluster.api.find(TRAINER, "TrainJob", self.namespace)]

    @property
    def task(self) -> dict[str, Any]:
        return self.airflow.task(self.dag, self.id)

    @property
    def state(self) -> str:
        return str(self.airflow.get(f"dags/{self.dag}/dagRuns/{self.id}")["state"])

    def begin(self) -> None:
        self.id = self.airflow.run(self.dag, namespace=self.namespace)

    def count(self, state: str) -> int:
        path = f"dags/{self.dag}/dagRuns/{self.id}/taskInstances"
        return int(self.airflow.get(path, state=state, limit=1)["total_entries"])

    def until_logged(self, text: str) -> None:
        def logged() -> bool:
            return text in self.airflow.log(self.dag, self.id, "train")

        wait_until(f"{text!r} is in the log of {self.dag}", logged, 150, poll=0.5, ignore=httpx.HTTPError)


@pytest.fixture
def runs(airflow: Airflow, own_cluster: Cluster) -> Iterator[tuple[list[Run], list[Run]]]:
    """Runs of one task and of many, each in a worker and in the triggerer."""
    with own_cluster.namespace("airflow") as one, own_cluster.namespace("airflow") as two:
        places = list(zip(MODES, (one, two), strict=True))
        cut_off = [Run(airflow, own_cluster, f"{mode}_waits", namespace) for mode, namespace in places]
        yield cut_off, [Run(airflow, own_cluster, f"{mode}_mapped", namespace) for mode, namespace in places]


def test_many_tasks_survive_an_outage_of_the_api_server(
    runs: tuple[list[Run], list[Run]], own_cluster: Cluster
) -> None:
    cut_off, many = runs
    deferred = many[1]
    for run in (*cut_off, *many):
        run.begin()
    wait_until("all are deferred", lambda: deferred.count("deferred") == MANY, 600, poll=0.5)
    for run in cut_off:
        run.until_logged("TrainJob is Running")
    wait_until("one watch is enough", lambda: watches(own_cluster) == 1, 60, poll=0.5)

    own_cluster.kill("kube-apiserver")
    killed = time.monotonic()
    try:
        for run in cut_off:
            run.until_logged("API server unavailable, retrying")
        wait_until("the outage is over", lambda: time.monotonic() > killed + OUTAGE, OUTAGE + 10)
    finally:
        own_cluster.start_component("kube-apiserver")
    assert [run.task["state"] for run in cut_off] == ["running", "deferred"]
    assert deferred.count("deferred") == MANY
    assert len(deferred.jobs) == MANY + 1

    def finished() -> bool:  # ends the running jobs at each call, since some start later
        for run in cut_off:
            own_cluster.finish(run.namespace)
        return all(run.state in ENDED for run in (*cut_off, *many))

    wait_until("all runs have ended", finished, 400, poll=2)
    for run in (*cut_off, *many):
        assert run.state == "success"
        assert len(run.jobs) == MANY + 1, "one job for each task"
    assert [run.task["try_number"] for run in cut_off] == [1, 1]


def watches(cluster: Cluster) -> int:
    """Number of open watches of all TrainJobs of a namespace. The workers' watches of one job have another scope."""
    opened = re.findall(
        r'^apiserver_longrunning_requests\{.*resource="trainjobs",scope="namespace",.*verb="WATCH".*\} (\d+)$',
        cluster.api.request("GET", "/metrics"),
        re.MULTILINE,
    )
    return sum(map(int, opened))
