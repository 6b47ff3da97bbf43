"""A Docker daemon, the images, the servers of compose.yaml, and components run by kfp.local in containers."""

from __future__ import annotations

import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import docker
import pytest
from kfp import components, local
from tests.containers import builds
from tests.containers.daemon import Daemon, answers, why_unsupported

HERE = Path(__file__).parent
BUCKET = "digits"
_COMPOSE = "com.docker.compose"
KEYS = {"AWS_ACCESS_KEY_ID": "containers", "AWS_SECRET_ACCESS_KEY": "of-the-bucket", "AWS_REGION": "us-east-1"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # Long, because the first tests build all images.
            item.add_marker(pytest.mark.timeout(1500), append=False)
            # docker-py does not close the sockets of logs; the garbage collector does.
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"))
            # kfp.local warns about every image without "python" in its name.
            item.add_marker(pytest.mark.filterwarnings("ignore:.*non-Python base image:RuntimeWarning"))


@pytest.fixture(scope="session")
def docker_client() -> Iterator[docker.DockerClient]:
    """A client of the daemon that answers on this machine, otherwise of a separate one for the tests."""
    if answers():
        client = docker.from_env()
        yield client
        client.close()
        return
    if why := why_unsupported():
        pytest.skip(why)
    with Daemon() as daemon, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", daemon.host)  # for kfp.local, pytest-docker and the builds
        client = docker.from_env()
        yield client
        client.close()


@pytest.fixture(scope="session")
def step_image(docker_client: docker.DockerClient) -> str:
    return builds.step()


@pytest.fixture(scope="session")
def step_image_with_optuna(docker_client: docker.DockerClient) -> str:
    return builds.step_with_optuna()


@pytest.fixture(scope="session")
def digits_image(docker_client: docker.DockerClient) -> str:
    return builds.digits()


# ------------------------------------------------------------------ the servers


@pytest.fixture(scope="session")
def docker_compose_command(docker_client: docker.DockerClient) -> str:
    return "docker-compose" if builds.which("docker-compose") else "docker compose"


@pytest.fixture(scope="session")
def docker_compose_file(docker_client: docker.DockerClient) -> str:
    builds.services()
    return str(HERE / "compose.yaml")


@pytest.fixture(scope="session")
def docker_setup() -> list[str]:
    return ["up --detach"]


@dataclass
class Servers:
    """Addresses of the servers of compose.yaml, for this machine and for containers.

    Attributes:
        network: The network of the servers, which other containers must join.
        s3: Address for this machine; the next two likewise.
        environment: Environment of containers, with the addresses of storage and registry.
    """

    network: str
    s3: str
    mlflow: str
    registry: str
    environment: Mapping[str, str]
    registry_in_network: str = "mlflow+http://mlflow:5000"

    @property
    def bucket(self) -> Any:
        keys = {
            "aws_access_key_id": KEYS["AWS_ACCESS_KEY_ID"],
            "aws_secret_access_key": KEYS["AWS_SECRET_ACCESS_KEY"],
        }
        return boto3.resource("s3", endpoint_url=self.s3, region_name=KEYS["AWS_REGION"], **keys).Bucket(BUCKET)


@pytest.fixture(scope="session")
def servers(
    docker_client: docker.DockerClient, docker_services: Any, docker_ip: str, docker_compose_project_name: str
) -> Servers:
    """Start the servers and wait until all of them answer."""
    address = {
        name: f"{docker_ip}:{docker_services.port_for(name, port)}"
        for name, port in {"s3": 8333, "mlflow": 5000, "registry": 5000}.items()
    }
    for name, path in {"s3": "/", "registry": "/v2/", "mlflow": "/health"}.items():
        labels = [f"{_COMPOSE}.project={docker_compose_project_name}", f"{_COMPOSE}.service={name}"]
        (container,) = docker_client.containers.list(all=True, filters={"label": labels})
        deadline = time.monotonic() + 120
        while not _answers(f"http://{address[name]}{path}"):
            container.reload()
            if container.status != "running" or time.monotonic() > deadline:
                pytest.fail(f"{name} does not answer; its log: {container.logs().decode()[-4000:]}")
            time.sleep(0.2)
    made = Servers(
        f"{docker_compose_project_name}_default",
        f"http://{address['s3']}",
        f"http://{address['mlflow']}",
        address["registry"],
        {**KEYS, "AWS_ENDPOINT_URL": "http://s3:8333", "AWS_ALLOW_HTTP": "true"},
    )
    made.bucket.create()
    return made


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status) < 500
    except urllib.error.HTTPError as error:
        error.close()
        return error.code < 500  # it answers, with 403: the request has no credentials
    except OSError:
        return False


# ------------------------------------------------------------------ kfp.local

Run = Callable[..., Any]


@pytest.fixture
def in_containers(servers: Servers, tmp_path: Path) -> Run:
    """Runs a compiled component or pipeline with kfp.local's DockerRunner, its jobs on the local backend inside."""
    root = tmp_path / "pipeline-root"
    root.mkdir()
    root.chmod(0o777)  # it is mounted, and the image has another user
    own_user = {"user": f"{os.getuid()}:0"} if os.getuid() else {}

    def run(compiled: str, **parameters: Any) -> Any:
        environment = {
            "TRAINJOB_BACKEND": "local",
            "TRAINJOB_REGISTRY": servers.registry_in_network,
            "TRAINJOB_EXAMPLES": "/opt/dags_examples",
            **servers.environment,
        }
        runner = local.DockerRunner(network=servers.network, environment=environment, init=True, **own_user)
        local.init(runner, pipeline_root=str(root), workspace_root=str(tmp_path / "workspace"))
        return components.load_component_from_text(compiled)(**parameters)

    return run
