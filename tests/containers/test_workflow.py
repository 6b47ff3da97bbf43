"""Runs the example pipeline in containers twice: data and models on S3, MLflow with PostgreSQL as the registry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import docker
import httpx
import pytest

from trainjob import registry

if TYPE_CHECKING:
    from tests.containers.conftest import Run, Servers

EXAMPLES = Path(__file__).parents[2] / "dags_examples"
MODELS = "s3://digits/models"
DATASET = "datasets/digits.csv.gz"


def _compiled(directory: Path, image: str, registry_uri: str, epochs: int) -> str:
    """Compile the pipeline of the example for a KFP backend."""
    target = directory / f"{epochs}.yaml"
    options = ["--compile", str(target), "--models", MODELS, "--registry", registry_uri, "--epochs", str(epochs)]
    environment = {**os.environ, "TRAINJOB_STEP_IMAGE": image, "TRAINJOB_EXAMPLES": "/opt/dags_examples"}
    command = [sys.executable, str(EXAMPLES / "kfp" / "retrain_digits.py"), *options]
    subprocess.run(command, env=environment, check=True, timeout=120)
    return target.read_text()


@pytest.fixture
def digits_in_registry(docker_client: docker.DockerClient, digits_image: str, servers: Servers) -> str:
    """Push the image to the registry; the daemon does not have it under this name, so it is pulled."""
    reference = f"{servers.registry}/digits:1"
    docker_client.images.get(digits_image).tag(reference)
    for line in docker_client.images.push(reference, stream=True, decode=True):
        assert "error" not in line, line
    docker_client.images.remove(reference)
    return reference


def test_the_second_run_starts_from_the_first_ones_champion(
    digits_in_registry: str,
    servers: Servers,
    in_containers: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    repositories = httpx.get(f"http://{servers.registry}/v2/_catalog").json()["repositories"]
    assert repositories == ["digits"]
    servers.bucket.upload_file(str(EXAMPLES / "data" / "digits.csv.gz"), DATASET)

    logs = []
    for epochs in (2, 4):
        compiled = _compiled(tmp_path, digits_in_registry, servers.registry_in_network, epochs)
        in_containers(compiled, dataset=f"s3://digits/{DATASET}")
        logs.append(capfd.readouterr().out)

    assert f"Pulling image '{digits_in_registry}'" in logs[0]
    assert "starting fresh, since if_missing is 'fresh'" in logs[0]
    assert "starting fresh" not in logs[1]
    assert "[node-0] epoch 2/2" in logs[0]
    assert "[node-0] epoch 4/4" in logs[1]

    records = registry.connect(f"mlflow+{servers.mlflow}")
    versions = {version.version: version for version in records.list("digits")}
    assert set(versions) == {"1", "2"}
    champion = records.resolve("digits", "champion")
    assert champion.metrics["accuracy"] == max(version.metrics["accuracy"] for version in versions.values())
    assert champion.metrics["accuracy"] > 0.9

    keys = [each.key for each in servers.bucket.objects.filter(Prefix="models/")]
    for version in versions.values():
        own = [key for key in keys if f"s3://digits/{key}".startswith(version.uri)]
        assert any(key.endswith(".safetensors") for key in own), (version.uri, keys)
