"""The retraining workflow on the real node, from Airflow and from KFP: the same files as on one machine.

What differs is the environment: a connection or ``TRAINJOB_BACKEND``, and where storage, registry and scripts are. The
launchers have the permissions of Trainer's role for users and no storage keys; the pods get the keys from a Secret.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cluster.launchers import airflow_environment, launcher_environment, run
from tests.registry import mlflow_server
from tests.seaweedfs import SeaweedFS
from tests.testcluster import step_image as steps
from tests.testcluster.access import TRAINER, Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import NAME

from trainjob.registry import ModelVersion, Registry, connect

pytestmark = pytest.mark.timeout(1000)

ROOT = Path(__file__).parents[2]
STORAGE = "trainjob-storage"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@dataclass
class Platform:
    """A cluster with storage and a registry, as a team would set it up; both are URIs."""

    cluster: Access
    settings: dict[str, str]
    """With which pods reach the storage, without the keys."""
    keys: dict[str, str]
    registry: str
    bucket: str

    def admit(self, namespace: str) -> None:
        """Let the pods of a namespace reach the storage."""
        metadata = {"name": STORAGE, "namespace": namespace}
        objects = [("ConfigMap", {"data": self.settings}), ("Secret", {"stringData": self.keys})]
        for kind, content in objects:
            self.cluster.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata, **content})

    def environment(self, namespace: str, directory: Path) -> dict[str, str]:
        """Environment of a launcher, without the backend."""
        return {
            **launcher_environment(),
            "KUBECONFIG": str(self.cluster.kubeconfig_for(namespace=namespace)),
            "TRAINJOB_HOME": str(directory / "home"),
            "TRAINJOB_REGISTRY": self.registry,
            "TRAINJOB_WORKSPACE": f"{self.bucket}/work",
            "TRAINJOB_MODELS": f"{self.bucket}/models",
            "TRAINJOB_EXAMPLES": steps.EXAMPLES,
            "TRAINJOB_RUNTIME": "digits-jax",
        }

    def check_jobs(self, namespace: str, directory: Path) -> None:
        """Check that five TrainJobs completed on the real node, and none on the local backend."""
        jobs = self.cluster.api.find(TRAINER, "TrainJob", namespace)
        assert len(jobs) == 5
        assert self.keys["AWS_SECRET_ACCESS_KEY"] not in json.dumps(jobs)
        pods = self.cluster.api.find("v1", "Pod", namespace)
        where = [(pod["spec"].get("nodeName"), pod["status"]["phase"]) for pod in pods]
        assert where == [(NAME, "Succeeded")] * 6, "one pod for each step, two for the training"
        assert not (directory / "home" / "jobs").exists(), "no job ran on the local backend"


@pytest.fixture(scope="module")
def platform(own_cluster: Cluster, step_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    own_cluster.add_runtime(steps.runtime(ROOT / "dags_examples" / "cluster" / "digits-jax.yaml", step_image))

    gateway = own_cluster.layout.gateway  # this machine, for pods and for launchers
    with (
        SeaweedFS(tmp_path_factory.mktemp("seaweedfs"), bind=gateway, bucket="digits") as s3,
        mlflow_server.running(tmp_path_factory.mktemp("mlflow"), host=gateway) as url,
    ):
        keys = {name: value for name, value in s3.environment().items() if name in KEYS}
        settings = {name: value for name, value in s3.environment().items() if name not in KEYS}
        yield Platform(own_cluster, settings, keys, f"mlflow+{url}", "s3://digits")


@pytest.fixture
def namespace(platform: Platform) -> Iterator[str]:
    with platform.cluster.namespace("work", real=True) as name:
        platform.admit(name)
        yield name


@pytest.fixture
def airflow(platform: Platform, airflow_home: Path, namespace: str, tmp_path: Path) -> dict[str, str]:
    """Environment of an Airflow with a connection to the cluster."""
    connection = {"backend": "kubernetes", "namespace": namespace}
    settings = airflow_environment(airflow_home, ROOT / "dags_examples" / "airflow", trainjob_default=connection)
    return {**platform.environment(namespace, tmp_path), **settings}


def champion(registry: Registry) -> ModelVersion | None:
    return next((version for version in registry.list("digits") if "champion" in version.aliases), None)


def check_version(registry: Registry, known: set[str], before: ModelVersion | None) -> ModelVersion:
    """The new version: it was trained from `before`, and is the champion if it passes the gate."""
    (new,) = [version for version in registry.list("digits") if version.version not in known]
    known.add(new.version)
    assert 0.5 < new.metrics["accuracy"] <= 1
    assert new.uri.startswith("s3://digits/models/digits/")
    origin = new.tags.get("trainjob.provenance.base_model", "")
    assert before.digest in origin if before else not origin
    better = before is None or new.metrics["accuracy"] > before.metrics["accuracy"]
    passed = new.tags["trainjob.evaluation.passed"] == "true"
    assert ("champion" in new.aliases) is passed
    assert better or not passed
    return new


def test_airflow_deferred(platform: Platform, airflow: dict[str, str], namespace: str, tmp_path: Path) -> None:
    registry = connect(platform.registry)
    known = {version.version for version in registry.list("digits")}
    before = champion(registry)
    deferring = {**airflow, "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True"}
    log = run(deferring, tmp_path, "airflow", "dags", "test", "retrain_digits", "--conf", '{"epochs": 1}')
    assert "rank 1 of 2 starts" in log
    assert log.count("DEFERRED") >= 5
    check_version(registry, known, before)
    platform.check_jobs(namespace, tmp_path)


def test_kfp_starts_from_the_champion(platform: Platform, namespace: str, tmp_path: Path) -> None:
    registry = connect(platform.registry)
    known = {version.version for version in registry.list("digits")}
    before = champion(registry)
    backend = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": namespace}
    example = ROOT / "dags_examples" / "kfp" / "retrain_digits.py"
    environment = {**platform.environment(namespace, tmp_path), **backend}
    log = run(environment, tmp_path, sys.executable, str(example), "--local", "--epochs", "3")
    assert "[node-0] epoch 3/3" in log
    check_version(registry, known, before)
    platform.check_jobs(namespace, tmp_path)
