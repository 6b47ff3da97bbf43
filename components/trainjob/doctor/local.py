"""The checks of this machine, for the local backend."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainjob.backends.local import private, runtimes
from trainjob.backends.local.backend import LocalBackend
from trainjob.doctor.findings import Finding, Level

_ROOM = 1 << 30  # bytes; logs and models of a small training


def examine(backend: LocalBackend, wanted: Sequence[str] = (), queue: str = "") -> Iterator[Finding]:
    """What is to be said about this machine.

    Args:
        backend: Whose settings count.
        wanted: Runtimes that have to be there.
        queue: LocalQueue that jobs are to name.
    """
    yield from _home(backend.home)
    python = f"Python {platform.python_version()}"
    yield Finding("python", Level.OK, f"ranks run with {python} unless their runtime has an environment of its own")
    for runtime, environment in backend.environments.items():
        yield _environment(runtime, environment)
    for runtime in wanted:
        if runtime not in runtimes.FRAMEWORKS:
            known = ", ".join(sorted(runtimes.FRAMEWORKS))
            yield Finding("runtime", Level.FAILURE, f"there is no runtime {runtime} here", f"use one of {known}")
    yield _mpi(wanted)
    gpus = runtimes.gpus_present()
    yield Finding(
        "gpus", Level.OK, f"{len(gpus)} ({', '.join(gpus)})" if gpus else "none: jobs that ask for one are refused"
    )
    if queue:
        yield Finding("queue", Level.SKIPPED, f"there are no queues on this machine: a job for {queue} starts at once")


def _home(home: Path) -> Iterator[Finding]:
    """Whether jobs can be kept. A directory that is not there yet is made by the first job."""
    there = next(each for each in (home, *home.parents) if each.exists())
    advice = "set TRAINJOB_HOME to a directory that you may write to"
    if not there.is_dir():
        yield Finding("home", Level.FAILURE, f"{home}: {there} is no directory", advice)
        return
    if problem := private.refusal(home, link=True):
        yield Finding("home", Level.FAILURE, problem)
        return
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        yield Finding("home", Level.FAILURE, f"{home} cannot be written: {error.strerror}", advice)
    else:
        yield Finding("home", Level.OK, f"{home} can be written")
    free = shutil.disk_usage(there).free
    level = Level.OK if free >= _ROOM else Level.WARNING
    advice = "" if level is Level.OK else "make room, or set TRAINJOB_HOME to a larger disk"
    yield Finding("space", level, f"{free / 2**30:.1f} GiB are free in {there}", advice)


def _environment(runtime: str, environment: Path) -> Finding:
    if runtime not in runtimes.FRAMEWORKS:
        known = ", ".join(sorted(runtimes.FRAMEWORKS))
        message = f"TRAINJOB_LOCAL_ENVIRONMENTS is for {runtime}, which is no runtime of this machine"
        return Finding("python", Level.WARNING, message, f"name one of {known}")
    python = environment.expanduser() / "bin" / "python"
    if not os.access(python, os.X_OK):
        message = f"{runtime} has the environment {environment}, in which there is no Python"
        return Finding("python", Level.FAILURE, message, f"python -m venv {environment}, or correct its path")
    return Finding("python", Level.OK, f"{runtime} runs with {python}")


def _mpi(wanted: Sequence[str]) -> Finding:
    program = shutil.which("mpirun")
    if program:
        return Finding("mpi", Level.OK, f"mpirun is {program}")
    need = sorted(runtime for runtime, framework in runtimes.FRAMEWORKS.items() if framework == "mpi")
    level = Level.FAILURE if set(need) & set(wanted) else Level.OK
    message = f"there is no mpirun: jobs of {' and '.join(need)} are refused"
    return Finding("mpi", level, message, "Debian: apt install openmpi-bin" if level is Level.FAILURE else "")
