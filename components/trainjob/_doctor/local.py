"""The checks of this machine, for the local backend."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from trainjob._backends.local import permissions, runtimes
from trainjob._backends.local.backend import LocalBackend
from trainjob._doctor.findings import Finding, Level
from trainjob.errors import ConfigurationError

_ROOM = 1 << 30  # bytes; logs and models of a small training


def examine_home(home: Path, wanted: Sequence[str] = (), queue: str = "") -> Iterator[Finding]:
    """Check this machine, with the settings of this process and this directory of jobs; see `examine`."""
    return examine(LocalBackend(home), wanted, queue)


def examine(backend: LocalBackend, wanted: Sequence[str] = (), queue: str = "") -> Iterator[Finding]:
    """Check this machine.

    Args:
        backend: The backend with the settings to check.
        wanted: Runtimes that jobs are to use.
        queue: LocalQueue that jobs are to name.
    """
    yield from _home(backend.home)
    python = f"Python {platform.python_version()}"
    yield Finding("python", Level.OK, f"ranks run with {python} unless their runtime has its own environment")
    for runtime, environment in backend.environments.items():
        yield _environment(runtime, environment)
    for runtime in wanted:
        yield _runtime(backend, runtime)
    yield _mpi(backend, wanted)
    yield _extras()
    if gpus := runtimes.gpus_present():
        yield Finding("gpus", Level.OK, f"{len(gpus)} ({', '.join(gpus)})")
    else:
        yield Finding("gpus", Level.SKIPPED, "none: jobs that request one are rejected")
    if queue:
        yield Finding("queue", Level.SKIPPED, f"this machine has no queues: a job for {queue} starts at once")


def _home(home: Path) -> Iterator[Finding]:
    """Whether jobs can be stored. The first job creates a missing directory."""
    existing = next(each for each in (home, *home.parents) if each.exists())
    advice = "set TRAINJOB_HOME to a directory that you can write to"
    if not existing.is_dir():
        yield Finding("home", Level.FAILURE, f"{home}: {existing} is not a directory", advice)
        return
    if problem := permissions.refusal(home, link=True):
        yield Finding("home", Level.FAILURE, problem)
        return
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        yield Finding("home", Level.FAILURE, f"{home} cannot be written: {error.strerror}", advice)
    else:
        yield Finding("home", Level.OK, f"{home} can be written")
    free = shutil.disk_usage(existing).free
    level = Level.OK if free >= _ROOM else Level.WARNING
    advice = "" if level is Level.OK else "free space, or set TRAINJOB_HOME to a directory on a larger disk"
    yield Finding("space", level, f"{free / 2**30:.1f} GiB are free in {existing}", advice)


def _environment(runtime: str, environment: Path) -> Finding:
    if runtime not in runtimes.FRAMEWORKS:
        known = ", ".join(sorted(runtimes.FRAMEWORKS))
        message = f"TRAINJOB_LOCAL_ENVIRONMENTS names {runtime}, which is not a runtime of this machine"
        return Finding("python", Level.WARNING, message, f"use one of: {known}")
    python = environment.expanduser() / "bin" / "python"
    if not os.access(python, os.X_OK):
        message = f"TRAINJOB_LOCAL_ENVIRONMENTS: {environment}, the environment of {runtime}, has no Python"
        return Finding(
            "python", Level.FAILURE, message, f"create it (python3 -m venv {environment}), or correct its path"
        )
    return Finding("python", Level.OK, f"{runtime} runs with {python}")


def _runtime(backend: LocalBackend, runtime: str) -> Finding:
    """Whether the ranks of a runtime find its programs and modules."""
    if runtime not in runtimes.FRAMEWORKS:
        known = ", ".join(sorted(runtimes.FRAMEWORKS))
        return Finding(
            "runtime", Level.FAILURE, f"runtime {runtime} does not exist on this machine", f"use one of: {known}"
        )
    try:
        path = backend.path_of(runtime)
    except ConfigurationError as error:
        return Finding("runtime", Level.FAILURE, f"{runtime} cannot start: {error}")
    programs = {name: shutil.which(name, path=path) for name in runtimes.PROGRAMS.get(runtime, ()) if name != "mpirun"}
    python = shutil.which("python", path=path) or ""
    modules = _modules(python, path, runtimes.MODULES.get(runtime, ()))
    lacking = [name for name, found in [*programs.items(), *modules.items()] if not found]
    where = backend.environments.get(runtime) or f"the environment of trainjob, {sys.prefix}"
    if not lacking:
        found = [f"{name} is {place}" for name, place in programs.items()]
        found += [f"{name} {version} is in {where}" for name, version in modules.items()]
        return Finding("runtime", Level.OK, f"{runtime}: {', '.join(found) or 'complete'}")
    packages = sorted(runtimes.MODULES.get(runtime, ()))
    # JSON in single quotes for a shell: names of runtimes have no quotes.
    advice = f"{python or 'python'} -m pip install {' '.join(packages)}"
    if runtime not in backend.environments:
        advice += f", or set an environment that has it: {_setting(backend, runtime)}"
    return Finding("runtime", Level.FAILURE, f"{runtime}: {where} has no {' and no '.join(lacking)}", advice)


def _setting(backend: LocalBackend, runtime: str) -> str:
    environments = {**{name: str(path) for name, path in backend.environments.items()}, runtime: "/path/of/environment"}
    return f"export TRAINJOB_LOCAL_ENVIRONMENTS='{json.dumps(environments)}'"


_ASK = """
import importlib.metadata, importlib.util, json, sys
found = {}
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is not None:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "of unknown version"
print(json.dumps(found))
"""


def _modules(python: str, path: str, names: Sequence[str]) -> dict[str, str]:
    """Module -> its version in the environment of a Python; empty if it is missing. Modules are not imported."""
    found: dict[str, str] = {}
    if names and python:
        environment = {**os.environ, "PATH": path}
        with suppress(OSError, subprocess.SubprocessError, ValueError):  # treated as missing
            answer = subprocess.run(
                [python, "-c", _ASK, *names], env=environment, capture_output=True, timeout=60, check=True
            )
            found = json.loads(answer.stdout)
    return {name: found.get(name, "") for name in names}


EXTRAS = {
    "in-cluster": (("httpx", "msgspec"), "jobs on a cluster"),
    "kubernetes": (("httpx", "kubernetes", "msgspec"), "kubeconfigs with an exec plugin or auth provider"),
    "storage": (("httpx", "obstore", "safetensors"), "s3://, gs://, az://, https:// and oci://"),
    "hf": (("httpx", "huggingface_hub"), "hf://"),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), "MLflow as the registry"),
    "model-registry": (("httpx",), "the Kubeflow Model Registry"),
    "sign": (("model_signing", "OpenSSL"), "signatures"),
    "tune": (("optuna",), "hyperparameter searches"),
    "airflow": (("airflow",), "DAGs and trainjob check"),
    "kfp": (("kfp",), "pipelines"),
}
"""Extra of this package -> its modules, and their use."""


def _extras() -> Finding:
    """Extras that are not installed, with what needs them. Jobs on this machine need none of them."""
    lacking = [extra for extra, (modules, _) in EXTRAS.items() if not all(map(find_spec, modules))]
    if not lacking:
        return Finding("extras", Level.OK, "all are installed")
    without = "; ".join(f"{extra} ({EXTRAS[extra][1]})" for extra in lacking)
    return Finding(
        "extras", Level.SKIPPED, f"not installed: {without}", f"in a checkout: pip install '.[{lacking[0]}]'"
    )


def _mpi(backend: LocalBackend, wanted: Sequence[str]) -> Finding:
    need = sorted(runtime for runtime, framework in runtimes.FRAMEWORKS.items() if framework == "mpi")
    asked = [runtime for runtime in need if runtime in wanted]
    with suppress(ConfigurationError):  # an environment without Python is a separate finding
        path = backend.path_of(asked[0]) if asked else None
        if program := shutil.which("mpirun", path=path):
            return Finding("mpi", Level.OK, f"mpirun is {program}")
    level = Level.FAILURE if asked else Level.SKIPPED
    message = f"mpirun is not installed: jobs of {' and '.join(need)} are rejected"
    return Finding(
        "mpi", level, message, "install it (Debian: apt install openmpi-bin)" if level is Level.FAILURE else ""
    )
