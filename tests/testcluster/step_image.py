"""The step image for the real node: what `components/trainjob/install/Dockerfile` builds, without Docker or a registry.

Three layers: Debian with Python, the dependencies, and this checkout's own source. The dependencies are kept beside the
programs, by their pins; the source changes with every edit and is small. One image serves the steps and the example's
training: JAX and the example's scripts are in it, too. KFP comes without its dependencies: what of it a step's process
imports needs none.
"""

from __future__ import annotations

import compileall
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tests.testcluster import images
from tests.testcluster.build import BuildError, lock, say

from trainjob import __version__

IMAGE = f"trainjob.test/trainjob-step:{__version__}"
EXAMPLES = "/opt/dags_examples"
"""Where the image has them."""

_ROOT = Path(__file__).parents[2]
STEP_RUNTIME = _ROOT / "components" / "trainjob" / "install" / "trainjob-step.yaml"
_EXTRAS = ("hf", "in-cluster", "mlflow", "storage", "examples")
_SITE = "usr/local/lib/python3.11/dist-packages"  # where Debian's Python looks for what is not Debian's
_PACKAGES = ("components/trainjob", "airflow_provider/trainjob_airflow", "kfp_components/trainjob_kfp")
_COMMAND = "#!/usr/bin/python3\nfrom trainjob.cli import main\n\nmain()\n"


def dependencies() -> Path:
    """The layer with the dependencies; made if it is not there (half a minute)."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    kfp = extras["kfp"][0]
    asked = [project["dependencies"], *(extras[extra] for extra in _EXTRAS), kfp]
    pins = (_ROOT / "constraints" / "main.txt").read_text()
    key = hashlib.sha256(f"{asked}{pins}".encode()).hexdigest()[:12]
    layer = images.directory() / f"step-{key}.layer"
    if layer.exists():
        return layer
    with lock():
        if layer.exists():
            return layer
        say("making the step image's layer of dependencies")
        images.directory().mkdir(parents=True, exist_ok=True)
        for older in images.directory().glob("step-*"):
            older.unlink()
        with tempfile.TemporaryDirectory(dir=images.directory()) as scratch:
            site = Path(scratch) / "site"
            _install(site, "--requirements", "pyproject.toml", *(f"--extra={extra}" for extra in _EXTRAS))
            _install(site, "--no-deps", kfp)
            for tests in [each for each in site.rglob("tests") if each.is_dir()]:
                shutil.rmtree(tests, ignore_errors=True)
            _compile(site)
            unfinished = layer.with_suffix(".unfinished")
            images.write_layer(unfinished, site, _SITE)
            unfinished.replace(layer)
        say(f"made it, {layer.stat().st_size / 1e6:.0f} MB")
    return layer


def _install(site: Path, *what: str) -> None:
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is None:
        raise BuildError("uv is missing: pip install uv")
    how = ["--constraints=constraints/main.txt", "--python-version=3.11", "--only-binary=:all:", "--link-mode=copy"]
    command = [uv, "pip", "install", "--quiet", f"--python={sys.executable}", f"--target={site}", *how, *what]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}: {done.stderr[-2000:]}")


def runtime(file: Path, image: str) -> dict[str, Any]:
    """The ClusterTrainingRuntime in `file`, with another image."""
    loaded: dict[str, Any] = yaml.safe_load(file.read_text())
    for job in loaded["spec"]["template"]["spec"]["replicatedJobs"]:
        pod = job["template"]["spec"]["template"]["spec"]
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            container["image"] = image
    return loaded


def build(target: Path, below: Sequence[Mapping[str, Any]]) -> Path:
    """Write the image's archive into the directory `target`, with the source as it is now.

    Args:
        target: The directory.
        below: The layers below the source, which the node has (`image_store.step_layers`).
    """
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        top = Path(scratch) / "top"
        for package in _PACKAGES:
            destination = top / _SITE / Path(package).name
            shutil.copytree(_ROOT / package, destination, ignore=shutil.ignore_patterns("__pycache__"))
        _compile(top / _SITE)
        shutil.copytree(_ROOT / "dags_examples", top / EXAMPLES[1:], ignore=shutil.ignore_patterns("__pycache__"))
        programs = top / "usr/local/bin"
        programs.mkdir(parents=True)
        (programs / "trainjob").write_text(_COMMAND)
        (programs / "trainjob").chmod(0o755)
        (programs / "python").symlink_to("/usr/bin/python3")  # the name that it has in Python's own images
        images.write_layer(Path(scratch) / "top.layer", top)
        archive = target / "trainjob-step.tar"
        # The base has no ca-certificates; `certifi` comes with MLflow's client.
        environment = [images.PATH, "PYTHONUNBUFFERED=1", f"SSL_CERT_FILE=/{_SITE}/certifi/cacert.pem"]
        images.write_image(archive, IMAGE, [Path(scratch) / "top.layer"], {"Env": environment}, below)
    return archive


def _compile(directory: Path) -> None:
    # Read-only users of the image could not cache it, and MLflow takes 9 s to import without. The hash of the source
    # is not checked when it is imported: nothing changes in an image.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(directory, quiet=2, workers=2, invalidation_mode=mode, stripdir=str(directory))
