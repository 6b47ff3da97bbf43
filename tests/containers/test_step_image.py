"""The step image that its Dockerfile builds."""

from __future__ import annotations

import json
import re

import docker
import pytest
from tests.containers import builds

from trainjob import __version__


def _run(client: docker.DockerClient, image: str, *command: str, user: str | None = None) -> str:
    # `containers.run` alone follows the log, which can end before a last line without a newline.
    container = client.containers.run(image, command, detach=True, network_mode="none", user=user)
    try:
        status = container.wait(timeout=120)["StatusCode"]
        output = str(container.logs().decode()).strip()
    finally:
        container.remove(force=True)
    assert status == 0, f"{command} exited with code {status}: {output[-2000:]}"
    return output


def test_the_image_is_small_and_does_not_run_as_root(docker_client: docker.DockerClient, step_image: str) -> None:
    image = docker_client.images.get(step_image)
    below = sum(layer["Size"] for layer in docker_client.images.get(builds.PYTHON).history())
    ours = image.attrs["Size"] - below
    print(f"{step_image}: {image.attrs['Size'] / 1e6:.0f} MB, of which {ours / 1e6:.0f} MB are not its base's")
    assert image.attrs["Size"] <= 300e6
    assert ours < 180e6, "python:3.11-slim has 125 MB"
    assert image.attrs["Config"]["User"] == "65532"
    who = "id -u; id -g; touch ~/mine; touch /opt/trainjob/mine 2>/dev/null || echo refused"
    assert _run(docker_client, step_image, "sh", "-c", who).split() == ["65532", "0", "refused"]


COMPILED = """
import os, sys
import huggingface_hub.hf_api, kfp.dsl.executor_main, mlflow.tracking, obstore.store, rich.progress
import trainjob.cli.run, trainjob._backends.kubernetes.backend, trainjob.data.options
import trainjob.registry.kubeflow, trainjob.registry.mlflow, trainjob.registry.sqlite, trainjob_kfp.runtime
for module in [*sys.modules.values()]:
    compiled, source = getattr(module, "__cached__", None), getattr(module, "__file__", None) or ""
    if source.startswith("/opt/trainjob/") and source.endswith(".py") and not os.path.exists(compiled or ""):
        print(module.__name__)
"""


def test_what_steps_import_is_compiled(docker_client: docker.DockerClient, step_image: str) -> None:
    """Their user may not write bytecode: what has none is compiled at each start."""
    command = ("env", "_KFP_RUNTIME=true", "python", "-c", COMPILED)
    assert _run(docker_client, step_image, *command).splitlines() == []


INSTALLED = """
import json
from importlib.metadata import distributions
print(json.dumps([[each.name, each.version] for each in distributions()]))
"""


def test_the_sbom_lists_the_installed_packages(docker_client: docker.DockerClient, step_image: str) -> None:
    """These are the packages with hashes in the constraints, this package, and pip of the virtual environment."""
    sbom = json.loads(_run(docker_client, step_image, "cat", "/opt/trainjob/sbom.cdx.json"))
    root = sbom["metadata"]["component"]
    assert (sbom["bomFormat"], root["name"], root["version"]) == ("CycloneDX", "trainjob", __version__)
    listed = {(_normal(each["name"]), each["version"]) for each in sbom["components"]}
    assert {each["ref"] for each in sbom["dependencies"]} >= {each["bom-ref"] for each in sbom["components"]}
    found = json.loads(_run(docker_client, step_image, "python", "-c", INSTALLED))
    assert listed == {(_normal(name), version) for name, version in found if name != "trainjob"}
    lines = (builds.ROOT / "constraints" / "step-image.txt").read_text().splitlines()
    pinned = {pin.groups() for line in lines if (pin := re.match(r"([a-z0-9-]+)==([^ ;]+)", line))}
    assert {name for name, _ in listed - pinned} <= {"pip", "setuptools"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("user", [None, "1000660000:0"], ids=["own user", "a random user of OpenShift"])
def test_the_programs_of_the_image_run(docker_client: docker.DockerClient, step_image: str, user: str | None) -> None:
    assert __version__ in _run(docker_client, step_image, "trainjob", "--version", user=user)
    assert "initialize-model" in _run(docker_client, step_image, "python", "-m", "trainjob.data", "--help", user=user)
    job = ("trainjob", "run", "--backend=local", "--runtime=trainjob-step", "--", "id", "-u")
    assert f"[node-0] {(user or '65532').partition(':')[0]}" in _run(docker_client, step_image, *job, user=user)


def test_the_image_does_not_contain_package_index_settings(docker_client: docker.DockerClient, step_image: str) -> None:
    settings = builds.pip_settings()
    print(f"secrets of the build: {', '.join(settings) or 'none'}")
    kept = _run(docker_client, step_image, "sh", "-c", "ls -A /run/secrets /etc/pip.conf 2>/dev/null; env")
    lines = [layer["CreatedBy"] for layer in docker_client.images.get(step_image).history()]
    for secret in ("pip.conf", "ca.crt", *(value for value in settings.values() if "/" in value)):
        assert secret not in kept
        assert not [line for line in lines if secret in line]
