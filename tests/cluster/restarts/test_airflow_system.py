"""A complete Airflow on the cluster: an outage of the API server, many tasks at once, and configuration errors."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import campaigns
from tests.airflow.system.airflow import Airflow
from tests.postgresql import PROGRAMS
from tests.processes import wait_until
from tests.testcluster.access import RULES, TRAINER
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

MESSAGES = {
    "no_connection": "connection 'nosuch' does not exist",
    "no_runtime": "there is no ClusterTrainingRuntime 'nosuch'",
    "forbidden": r'cannot list resource "trainjobs" in API group "trainer.kubeflow.org" in the namespace "{}"',
    "ended_token": "the credentials are refused, also after they were reloaded",
}
"""Message in the log, by task of the DAGs with configuration errors; ``{}`` is the namespace."""


@pytest.fixture(scope="module")
def ended_token(own_cluster: Cluster) -> str:
    """Token of a deleted service account."""
    token = own_cluster.token_for("leaver")
    own_cluster.api.delete("v1", "ServiceAccount", "default", "leaver")
    return token


@pytest.fixture(scope="module")
def airflow(own_cluster: Cluster, ended_token: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Airflow]:
    until_finished = copy.deepcopy(own_cluster.api.get(TRAINER, "ClusterTrainingRuntime", "", "torch-distributed"))
    assert until_finished is not None
    until_finished["metadata"] = {"name": "until-finished", "labels": until_finished["metadata"].get("labels", {})}
    (job,) = until_finished["spec"]["template"]["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]
    pod["metadata"] = {**pod.get("metadata", {}), "annotations": {variable("run"): "never"}}
    own_cluster.add_runtime(until_finished)

    directory = tmp_path_factory.mktemp("complete-airflow")
    authority = directory / "ca.crt"
    authority.write_bytes(own_cluster.api.authority)
    elsewhere = {"kube_config_path": str(own_cluster.kubeconfig_for(RULES))}
    ended = {"host": own_cluster.api.server, "password": ended_token, "extra": {"ca_file": str(authority)}}
    environment = {
        "TRAINJOB_BACKEND": "kubernetes",
        "TRAINJOB_TEST_MAPPED": str(MANY),
        "KUBECONFIG": str(own_cluster.kubeconfig),
        "AIRFLOW_CONN_ELSEWHERE": json.dumps({"conn_type": "trainjob", "extra": elsewhere}),
        "AIRFLOW_CONN_ENDED": json.dumps({"conn_type": "trainjob", **ended}),
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

    def log(self, task_id: str = "train") -> str:
        return self.airflow.log(self.dag, self.id, task_id)

    def until_logged(self, text: str) -> None:
        what = f"{text!r} is in the log of {self.dag}"
        wait_until(what, lambda: text in self.log(), 150, poll=0.5, ignore=httpx.HTTPError)

    def until_ended(self) -> str:
        wait_until(f"{self.dag} has ended", lambda: self.state in ENDED, 400, poll=0.5, ignore=httpx.HTTPError)
        return self.state


Runs = dict[str, list[Run]]


@pytest.fixture(scope="module")
def runs(airflow: Airflow, own_cluster: Cluster) -> Iterator[Runs]:
    """Case -> a run that waits in a worker, and one that waits in the triggerer; the short cases are started."""
    dags = {"misconfigured": "misconfigured", "cut off": "waits", "many": "mapped"}
    with ExitStack() as stack:
        runs = {
            case: [
                Run(airflow, own_cluster, f"{mode}_{dag}", stack.enter_context(own_cluster.namespace("airflow")))
                for mode in MODES
            ]
            for case, dag in dags.items()
        }
        for single, mapped in zip(runs["cut off"], runs["many"], strict=True):
            single.namespace = mapped.namespace
        for run in runs["misconfigured"]:
            run.begin()
        yield runs


def test_configuration_errors_are_not_retried(runs: Runs, ended_token: str) -> None:
    for run in runs["misconfigured"]:
        assert run.until_ended() == "failed"
        for task_id, message in MESSAGES.items():
            log = run.log(task_id)
            assert message.format(run.namespace) in log
            assert "TrainJobFatal: " in log
            assert run.airflow.task(run.dag, run.id, task_id)["try_number"] == 1, "a retry cannot help"
            assert ended_token not in str(run.airflow.log_entries(run.dag, run.id, task_id))
        assert run.jobs == []


def test_many_tasks_survive_an_outage_of_the_api_server(runs: Runs, own_cluster: Cluster) -> None:
    deferred, cut_off = runs["many"][1], runs["cut off"]
    for run in (*cut_off, *runs["many"]):
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
        return all(run.state in ENDED for run in (*cut_off, *runs["many"]))

    wait_until("all runs have ended", finished, 400, poll=2)
    for run in (*cut_off, *runs["many"]):
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
