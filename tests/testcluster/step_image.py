"""The step image for the real node: as from `components/trainjob/_install/Dockerfile`, without Docker or a registry.

Three layers: Debian with Python, the dependencies, and the source of this checkout. The dependencies are stored beside
the programs, by their pins; the source changes with every edit and is small. The image also contains JAX and the
scripts of the examples, so it runs both steps and trainings. KFP is installed without its dependencies, which a step's
process does not import.
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
from tests.testcluster.build import BuildError, cached

from trainjob import __version__

IMAGE = f"trainjob.test/trainjob-step:{__version__}"
EXAMPLES = "/opt/dags_examples"
"""Directory of the examples in the image."""

_ROOT = Path(__file__).parents[2]
STEP_RUNTIME = _ROOT / "components" / "trainjob" / "_install" / "trainjob-step.yaml"
_EXTRAS = ("hf", "kubernetes", "mlflow", "storage", "examples")
_SITE = "usr/local/lib/python3.11/dist-packages"  # where Debian's Python finds packages that are not Debian's
_PACKAGES = ("components/trainjob", "airflow_provider/trainjob_airflow", "kfp_components/trainjob_kfp")
_COMMAND = "#!/usr/bin/python3\nfrom trainjob.cli import main\n\nmain()\n"


def dependencies() -> Path:
    """The layer with the dependencies; built if missing (half a minute)."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    kfp = extras["kfp"][0]
    requirements = [project["dependencies"], *(extras[extra] for extra in _EXTRAS), kfp]
    pins = (_ROOT / "constraints" / "main.txt").read_text()
    key = hashlib.sha256(f"{requirements}{pins}".encode()).hexdigest()[:12]

    def make(unfinished: Path) -> None:
        for older in images.directory().glob("step-*"):
            older.unlink()
        with tempfile.TemporaryDirectory(dir=images.directory()) as scratch:
            site = Path(scratch) / "site"
            _install(site, "--requirements", "pyproject.toml", *(f"--extra={extra}" for extra in _EXTRAS))
            _install(site, "--no-deps", kfp)
            for tests in [each for each in site.rglob("tests") if each.is_dir()]:
                shutil.rmtree(tests, ignore_errors=True)
            _compile(site)
            images.write_layer(unfinished, site, _SITE)

    return cached(images.directory() / f"step-{key}.layer", "the step image's layer of dependencies", make)


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
    """Write the image's archive into the directory `target`, with the current source.

    Args:
        target: The directory.
        below: The lower layers, which the node has (`image_store.step_layers`).
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
        (programs / "python").symlink_to("/usr/bin/python3")  # its name in Python's images
        images.write_layer(Path(scratch) / "top.layer", top)
        archive = target / "trainjob-step.tar"
        # The base has no ca-certificates; `certifi` comes with MLflow's client.
        environment = [images.PATH, "PYTHONUNBUFFERED=1", f"SSL_CERT_FILE=/{_SITE}/certifi/cacert.pem"]
        images.write_image(archive, IMAGE, [Path(scratch) / "top.layer"], {"Env": environment}, below)
    return archive


def _compile(directory: Path) -> None:
    # Users without write permission could not cache bytecode, and without it MLflow takes 9 s to import. Imports do not
    # check the hash of the source: files of an image do not change.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(directory, quiet=2, workers=2, invalidation_mode=mode, stripdir=str(directory))
