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
from pathlib import Path

from trainjob._backends.local import permissions, runtimes
from trainjob._backends.local.backend import LocalBackend
from trainjob._doctor.findings import Finding, Level
from trainjob.errors import ConfigurationError

_KNOWN = f"use one of: {', '.join(sorted(runtimes.FRAMEWORKS))}"


def examine(backend: LocalBackend, wanted: Sequence[str] = (), queue: str = "") -> Iterator[Finding]:
    """Check this machine.

    Args:
        backend: The backend with the settings to check.
        wanted: Runtimes that jobs are to use.
        queue: LocalQueue that jobs are to name.
    """
    yield _home(backend.home)
    python = f"Python {platform.python_version()}"
    yield Finding("python", Level.OK, f"ranks run with {python} unless their runtime has its own environment")
    for runtime in sorted(backend.environments.keys() - runtimes.FRAMEWORKS.keys()):
        message = f"TRAINJOB_LOCAL_ENVIRONMENTS names {runtime}, which is not a runtime of this machine"
        yield Finding("python", Level.WARNING, message, _KNOWN)
    for runtime in wanted:
        yield from _runtime(backend, runtime)
    if queue:
        yield Finding("queue", Level.SKIPPED, f"this machine has no LocalQueues: a job for {queue} waits only for GPUs")


def _home(home: Path) -> Finding:
    """Whether jobs can be stored. The first job creates a missing directory."""
    existing = next(each for each in (home, *home.parents) if each.exists())
    advice = "set TRAINJOB_HOME to a directory that you can write to"
    if not existing.is_dir():
        return Finding("home", Level.FAILURE, f"{home}: {existing} is not a directory", advice)
    if problem := permissions.refusal(home):
        return Finding("home", Level.FAILURE, problem)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Finding("home", Level.FAILURE, f"{home} cannot be written: {error.strerror}", advice)
    return Finding("home", Level.OK, f"{home} can be written")


def _runtime(backend: LocalBackend, runtime: str) -> Iterator[Finding]:
    """Whether a launch accepts the runtime, and whether its ranks find its modules."""
    if runtime not in runtimes.FRAMEWORKS:
        yield Finding("runtime", Level.FAILURE, f"runtime {runtime} does not exist on this machine", _KNOWN)
        return
    try:
        path = backend.path_of(runtime)
    except ConfigurationError as error:
        yield Finding("runtime", Level.FAILURE, f"{runtime} cannot start: {error}")
        return
    if why := runtimes.refusal({"spec": {"runtimeRef": {"name": runtime}, "trainer": {"command": ["true"]}}}, path):
        yield Finding("runtime", Level.FAILURE, why)
    python, names = shutil.which("python", path=path) or "python", runtimes.MODULES.get(runtime, ())
    where = backend.environments.get(runtime) or f"the environment of trainjob, {sys.prefix}"
    if missing := _missing(python, path, names):
        advice = f"{python} -m pip install {' '.join(sorted(names))}"
        if runtime not in backend.environments:
            advice += f", or set an environment that has it: {_setting(backend, runtime)}"
        yield Finding("runtime", Level.FAILURE, f"{runtime}: {where} has no {' and no '.join(missing)}", advice)
    else:
        what = f"its ranks run with {python}, which has {' and '.join(names)}" if names else "it runs any command"
        yield Finding("runtime", Level.OK, f"{runtime}: {what}")


def _setting(backend: LocalBackend, runtime: str) -> str:
    environments = {**{name: str(path) for name, path in backend.environments.items()}, runtime: "/path/of/environment"}
    # JSON in single quotes for a shell: names of runtimes have no quotes.
    return f"export TRAINJOB_LOCAL_ENVIRONMENTS='{json.dumps(environments)}'"


_ASK = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if u.find_spec(name)))"


def _missing(python: str, path: str, names: Sequence[str]) -> list[str]:
    """The modules that the environment of a Python lacks. Modules are not imported."""
    if not names:
        return []
    found = ""
    with suppress(OSError, subprocess.SubprocessError):  # all are treated as missing
        command, environment = [python, "-c", _ASK, *names], {**os.environ, "PATH": path}
        found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    return [name for name in names if name not in found.split()]
