"""The retraining workflow on the real node, from Airflow and from KFP: the same files as on one machine.

What differs is the environment: a connection or ``TRAINJOB_BACKEND``, and where storage, registry and scripts are. The
launchers have the rights of Trainer's own role for users and no key of the storage; the pods have those by a Secret.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
from moto.server import ThreadedMotoServer
from tests.cluster import step_image as steps
from tests.cluster.access import TRAINER, Access
from tests.cluster.control_plane import Cluster
from tests.cluster.launchers import launcher_environment, run
from tests.cluster.real_node import NAME

from trainjob.registry import ModelVersion, Registry, connect

pytestmark = pytest.mark.timeout(1000)

ROOT = Path(__file__).parents[2]
STORAGE = "trainjob-storage"
KEYS = {"AWS_ACCESS_KEY_ID": "pods", "AWS_SECRET_ACCESS_KEY": "of-the-bucket"}


@dataclass
class Platform:
    """A cluster as a team would have it set up, with storage and a registry.

    Attributes:
        cluster: With the real node, the step image and the runtimes.
        settings: What pods need to reach the storage, without the keys.
        registry: Its URI.
        bucket: URI of the storage.
    """

    cluster: Access
    settings: dict[str, str]
    registry: str
    bucket: str

    def admit(self, namespace: str) -> None:
        """Let the pods of a namespace reach the storage."""
        metadata = {"name": STORAGE, "namespace": namespace}
        objects = [("ConfigMap", {"data": self.settings}), ("Secret", {"stringData": KEYS})]
        for kind, content in objects:
            self.cluster.api.create({"apiVersion": "v1", "kind": kind, "metadata": metadata, **content})

    def environment(self, namespace: str, directory: Path) -> dict[str, str]:
        """Of a launcher: everything but the backend."""
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

    def check_jobs(self, namespace: str, runs: int, directory: Path) -> None:
        """Four TrainJobs a run, all of them complete, on the real node, and nothing that still runs anywhere."""
        jobs = self.cluster.api.find(TRAINER, "TrainJob", namespace)
        assert len(jobs) == 4 * runs
        assert KEYS["AWS_SECRET_ACCESS_KEY"] not in json.dumps(jobs)
        pods = self.cluster.api.find("v1", "Pod", namespace)
        where = [(pod["spec"].get("nodeName"), pod["status"]["phase"]) for pod in pods]
        assert where == [(NAME, "Succeeded")] * (5 * runs), "one pod a step, two of the training"
        assert not (directory / "home" / "jobs").exists(), "jobs of the local backend"


@pytest.fixture(scope="module")
def platform(own_cluster: Cluster, step_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    for file in (steps.STEP_RUNTIME, ROOT / "dags_examples" / "cluster" / "digits-jax.yaml"):
        own_cluster.add_runtime(steps.runtime(file, step_image))

    gateway = own_cluster.layout.gateway  # this machine, for pods and for launchers
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    s3 = ThreadedMotoServer(ip_address=gateway, port=0, verbose=False)
    s3.start()
    endpoint = f"http://{gateway}:{s3.get_host_and_port()[1]}"
    anybody = {"aws_access_key_id": "any", "aws_secret_access_key": "body"}
    boto3.client("s3", region_name="us-east-1", endpoint_url=endpoint, **anybody).create_bucket(Bucket="digits")
    settings = {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    server, url = _mlflow(gateway, tmp_path_factory.mktemp("mlflow"))
    yield Platform(own_cluster, settings, f"mlflow+{url}", "s3://digits")
    os.killpg(server.pid, signal.SIGTERM)
    server.wait(30)
    s3.stop()


def _mlflow(host: str, directory: Path) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"),
                *("--backend-store-uri", f"sqlite:///{directory}/mlflow.db"),
                *("--default-artifact-root", str(directory / "artifacts")),
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"},
        )
    url = f"http://{host}:{port}"
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return server, url
        except OSError:
            time.sleep(0.2)
    os.killpg(server.pid, signal.SIGKILL)
    pytest.fail(f"no MLflow server: {(directory / 'log').read_text()[-2000:]}")


@pytest.fixture
def namespace(platform: Platform) -> Iterator[str]:
    with platform.cluster.namespace("work", real=True) as name:
        platform.admit(name)
        yield name


@pytest.fixture
def airflow(platform: Platform, airflow_home: Path, namespace: str, tmp_path: Path) -> dict[str, str]:
    """Environment of an Airflow whose connection leads to the cluster."""
    connection = {"conn_type": "trainjob", "extra": {"backend": "kubernetes", "namespace": namespace}}
    return {
        **platform.environment(namespace, tmp_path),
        "AIRFLOW_HOME": str(airflow_home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags_examples" / "airflow"),
        "AIRFLOW_CONN_TRAINJOB_DEFAULT": json.dumps(connection),
        "NO_COLOR": "1",
    }


def champion(registry: Registry) -> ModelVersion | None:
    return next((version for version in registry.list("digits") if "champion" in version.aliases), None)


def check_version(registry: Registry, known: set[str], before: ModelVersion | None) -> ModelVersion:
    """The one version that is not among `known`: trained from `before`, and champion if it is better."""
    (new,) = [version for version in registry.list("digits") if version.version not in known]
    known.add(new.version)
    assert 0.5 < new.metrics["accuracy"] <= 1
    assert new.uri.startswith("s3://digits/models/digits/")
    origin = new.tags.get("trainjob.provenance.base_model", "")
    assert before.digest in origin if before else not origin
    better = before is None or new.metrics["accuracy"] > before.metrics["accuracy"]
    assert ("champion" in new.aliases) is better
    return new


def test_airflow_in_a_worker_and_then_deferred(
    platform: Platform, airflow: dict[str, str], namespace: str, tmp_path: Path
) -> None:
    registry = connect(platform.registry)
    known = {version.version for version in registry.list("digits")}
    command = ("airflow", "dags", "test", "retrain_digits", "--conf")

    before = champion(registry)
    log = run(airflow, tmp_path, *command, '{"epochs": 1}')
    assert "rank 1 of 2 starts" in log
    check_version(registry, known, before)

    before = champion(registry)
    deferring = {**airflow, "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True"}
    log = run(deferring, tmp_path, *command, '{"epochs": 6}')
    assert log.count("DEFERRED") >= 4
    check_version(registry, known, before)
    platform.check_jobs(namespace, 2, tmp_path)


def test_kfp(platform: Platform, namespace: str, tmp_path: Path) -> None:
    registry = connect(platform.registry)
    known = {version.version for version in registry.list("digits")}
    before = champion(registry)
    backend = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": namespace}
    example = ROOT / "dags_examples" / "kfp" / "retrain_digits.py"
    environment = {**platform.environment(namespace, tmp_path), **backend}
    log = run(environment, tmp_path, sys.executable, str(example), "--local", "--epochs", "3")
    assert "[node-0] epoch 3/3" in log
    check_version(registry, known, before)
    platform.check_jobs(namespace, 1, tmp_path)


FAILING = """
from airflow.sdk import DAG
from trainjob_airflow.operators.trainjob import TrainJobOperator

with DAG("failing"):
    TrainJobOperator(
        task_id="train",
        runtime="digits-jax",
        num_nodes=2,
        command=["python", "{examples}/training/digits_jax.py"],
        args=[
            *("--dataset={examples}/data", "--output=/tmp/model"),
            *("--fail-at-epoch=2", "--fail-rank=1", "--exit-code=7"),
        ],
        retries=2,
        retry_delay=1,
    )
"""


def test_a_training_that_fails_is_explained_in_airflow(
    platform: Platform, airflow: dict[str, str], namespace: str, tmp_path: Path
) -> None:
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "failing.py").write_text(FAILING.format(examples=steps.EXAMPLES))
    environment = {**airflow, "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags")}
    log = run(environment, tmp_path, "airflow", "dags", "test", "failing", code=1)
    assert "TrainJobFatal" in log
    assert "node-1 exited with code 7" in log, log[-6000:]
    assert "rank 1 fails at epoch 2 as asked, exit code 7" in log
    assert len(platform.cluster.api.find(TRAINER, "TrainJob", namespace)) == 1, "tried again in vain"
