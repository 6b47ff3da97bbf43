"""Builds images from packages that this machine's package managers can reach."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import docker
from tests.testcluster import images

from trainjob import __version__

ROOT = Path(__file__).parents[2]
STEP = f"trainjob.test/trainjob-step:{__version__}"
STEP_WITH_OPTUNA = f"{STEP}-tune"
DIGITS = "trainjob.test/digits:1"
SERVICES = "trainjob.test/services"

_DEBIAN = f"trainjob.test/debian:{images.directory().name}"
PYTHON = "trainjob.test/python"
# pip settings for access to packages. Caches, wheel folders and constraints of this machine must not affect an image.
_ACCESS_SETTINGS = ("index-url", "extra-index-url", "trusted-host", "proxy", "timeout", "default-timeout", "retries")


def step() -> str:
    """Build the step image from its Dockerfile, on Debian's Python."""
    return _build(STEP, "components/trainjob/_install/Dockerfile", BASE=_python())


def step_with_optuna() -> str:
    """Build the step image for the component ``tune``."""
    return _build(
        STEP_WITH_OPTUNA, "components/trainjob/_install/Dockerfile", BASE=_python(), PACKAGES="step-image-tune"
    )


def digits() -> str:
    """Build the training image of the example on top of the step image."""
    return _build(DIGITS, "dags_examples/cluster/Dockerfile", BASE=step())


def services() -> str:
    """Build the image of all servers of compose.yaml."""
    return _build(SERVICES, "tests/containers/Dockerfile", BASE=_debian())


def _python() -> str:
    return _build(PYTHON, "tests/containers/Dockerfile", "--target=python", BASE=_debian())


def _debian() -> str:
    client = docker.from_env()
    try:
        if client.images.list(_DEBIAN):
            return _DEBIAN
    finally:
        client.close()
    with tempfile.TemporaryDirectory() as scratch:
        (layer,) = images.layers_of(images.python(), Path(scratch))
        _run(_client(), "import", str(layer), _DEBIAN)
    return _DEBIAN


def _build(tag: str, dockerfile: str, *options: str, **arguments: str) -> str:
    """Build `dockerfile` in this checkout.

    The pip settings of this machine are secrets of the build, so no layer and no history of an image contains them.
    """
    with tempfile.TemporaryDirectory() as secrets:
        pip, authority = Path(secrets, "pip.conf"), Path(secrets, "ca.crt")
        settings = pip_settings()
        if certificate := settings.pop("cert", ""):
            shutil.copy(certificate, authority)
            settings["cert"] = f"/run/secrets/{authority.name}"
        pip.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        given = [f"--secret=id={file.name},src={file}" for file in (pip, authority) if file.exists()]
        given += [f"--build-arg={name}={value}" for name, value in arguments.items()]
        _run(_client(), "build", "--network=host", f"--tag={tag}", f"--file={dockerfile}", *given, *options, ".")
    return tag


def pip_settings() -> dict[str, str]:
    """Settings of this machine's pip for access to packages, from its files and its environment."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    pairs = [line.partition("=")[::2] for line in lines]
    settings = {name.rpartition(".")[2]: str(ast.literal_eval(value)) for name, value in pairs}
    return {name: "\n    ".join(settings[name].split()) for name in (*_ACCESS_SETTINGS, "cert") if name in settings}


def which(program: str) -> str | None:
    """Path of `program`; Debian's takes precedence."""
    return shutil.which(program, path=f"/usr/bin{os.pathsep}{os.environ.get('PATH', '')}")


def _client() -> str:
    # Debian's client contains BuildKit. A client without BuildKit or its plugin cannot pass secrets to a build.
    return which("docker") or "docker"


def _run(*command: str) -> None:
    environment = {**os.environ, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}:\n{done.stdout[-6000:]}")
