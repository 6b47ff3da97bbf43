"""Starts the supervisor of a job, and ends a job whose supervisor is lost or never started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

from trainjob._backends.local import permissions
from trainjob._backends.local.conditions import record_loss
from trainjob._backends.local.ranks import MARKER
from trainjob._backends.local.store import JobFiles
from trainjob._support.kube_objects import mapping
from trainjob.errors import BackendUnavailable

_STARTS = 3  # attempts to start a supervisor that ends before its job has begun
_LAUNCH_SECONDS = 30.0  # from the storing of a job to its begin; 0.2 on an idle machine


def start(files: JobFiles) -> None:
    """Start a supervisor, unless the job has begun or does not exist; return once a supervisor has the lock.

    Raises:
        BackendUnavailable: No supervisor can be started.
    """
    # A rank that launches a job does not pass its marker on: the supervisor would be killed at the end of the rank.
    environment = {name: value for name, value in os.environ.items() if name != MARKER}
    log = files.directory / "supervisor.log"
    for _ in range(_STARTS):
        if files.begun() or not files.object.exists():
            return
        with suppress(FileNotFoundError), open(log, "ab", opener=permissions.opener) as output:
            subprocess.run(
                # -P: the working directory, which may be another user's, is not searched for modules.
                [sys.executable, "-P", "-m", "trainjob._backends.local.supervisor", str(files.directory)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
                check=False,
            )
    if not files.begun() and files.object.exists():
        raise BackendUnavailable(
            f"TrainJob {files.directory.parent.name}/{files.directory.name} was stored, but its supervisor ended "
            f"{_STARTS} times before the job began: read {log}, then launch the same key again to start the job"
        )


def end_if_lost(files: JobFiles) -> None:
    """End a job without a supervisor that has begun, or is to end. Starts nothing: a read must not run a program."""
    if files.finished():
        return
    if files.begun() or "deletionTimestamp" in mapping(files.read() or {}, "metadata"):
        end(files)


def end(files: JobFiles) -> None:
    """Finish a job without a supervisor: by its requested cancellation or deletion, else as failed."""
    lock = files.supervise()
    if lock is not None:
        record_loss(files)
        os.close(lock)


def remove(files: JobFiles) -> None:
    """Remove the files of a job without a supervisor, whose lock the caller holds; its ranks are ended first."""
    record_loss(files)
    files.remove()


def abandoned(files: JobFiles) -> list[dict[str, Any]]:
    """A Warning Event if the launching process ended before the job began; empty for any other job."""
    if files.begun():
        return []
    stored = files.stored()
    if stored is None or time.time() < stored + _LAUNCH_SECONDS:
        return []
    message = "the process that launched the job ended before the job began"
    return [{"type": "Warning", "reason": "LauncherLost", "message": message, "count": 1}]
