"""The local backend with real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.contract.processes import marked
from tests.local.shell import Shell
from tests.processes import eventually
from tests.warm import Warm

from trainjob import JobRef, Phase, TrainJobClient, TrainJobFailed, TrainJobResult
from trainjob.errors import Diagnosis
from trainjob.status import observe

TORCH_PYTHON = os.environ.get("TRAINJOB_TORCH_PYTHON", "")
needs_torch = pytest.mark.skipif(
    not TORCH_PYTHON,
    reason="PyTorch (about 5 GB) has a separate environment; TRAINJOB_TORCH_PYTHON names its python",
)


class Jobs:
    """Shortcuts to launch jobs, read their state and wait."""

    def __init__(self, client: TrainJobClient, home: Path) -> None:
        self.client = client
        self.home = home

    def launch(self, script: str = "", key: str = "key", **fields: Any) -> JobRef:
        """Run `script` in a shell on each node, or the command in `fields`."""
        command = {"command": ["sh", "-c", script]} if script else {}
        return self.client.launch({"runtime": "trainjob-step", **command, **fields}, key)

    def run(self, script: str = "", key: str = "key", **fields: Any) -> TrainJobResult:
        return self.client.wait(self.launch(script, key, **fields))

    def fails(self, script: str = "", key: str = "key", **fields: Any) -> Diagnosis:
        with pytest.raises(TrainJobFailed) as caught:
            self.run(script, key, **fields)
        return caught.value.diagnosis

    def lines(self, ref: JobRef | TrainJobResult, rank: str = "") -> list[str]:
        ref = JobRef(ref.namespace, ref.name, ref.uid, ref.attempt)
        return [line.text for line in self.client.logs(ref, ranks=[rank] if rank else ())]

    def phase(self, ref: JobRef) -> Phase:
        return observe(self.client.get(ref)).phase

    def patch(self, ref: JobRef, change: dict[str, Any]) -> None:
        self.client.call(lambda: self.client.backend.patch(ref, change))

    def delete(self, ref: JobRef) -> None:
        self.client.call(lambda: self.client.backend.delete(ref))

    def directory(self, ref: JobRef) -> Path:
        return self.home / "jobs" / ref.namespace / ref.name

    def starts(self, ref: JobRef, ranks: int = 1) -> None:
        """Wait until each of `ranks` ranks has written a line."""
        eventually(lambda: len(self.lines(ref)) >= ranks)

    def supervisors(self, ref: JobRef) -> list[psutil.Process]:
        """The supervisor of a job and its guard, if they are alive."""
        found = {}
        for process in psutil.process_iter():
            try:
                if str(self.directory(ref)) in process.cmdline()[-1:] and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = (process, process.ppid())
            except psutil.Error:
                continue
        return [process for process, parent in sorted(found.values(), key=lambda pair: pair[1] in found)]


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    eventually(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


def send(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to those of the processes that have not ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture
def jobs(home: Path) -> Iterator[Jobs]:
    with TrainJobClient("local") as client:
        jobs = Jobs(client, home)
        yield jobs
        for job in client.list():
            client.cancel(JobRef.of(job))
            assert marked(job["metadata"]["uid"]) == {}


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes an executable shell script, by name and text; returns its folder, to be put first on the PATH."""

    def write(name: str, script: str) -> Path:
        directory = tmp_path / "programs"
        directory.mkdir(exist_ok=True)
        (directory / name).write_text(f"#!/bin/sh\n{script}\n")
        (directory / name).chmod(0o755)
        return directory

    return write


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Runs commands that get no signal and have no terminal."""
    modules = ["cli.run", "cli.look", "cli.pages", "client", "_jobs.launching", "_backends.local.backend"]
    with Warm({"trainjob": "trainjob.cli:main"}, [f"trainjob.{module}" for module in modules]) as running:
        yield running


@pytest.fixture
def trainjob(home: Path, warm: Warm) -> Iterator[Shell]:
    """The command, with the home of this test."""
    shell = Shell(home, warm)
    yield shell
    shell.clean_up()
