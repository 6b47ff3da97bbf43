"""Disks that are full, read-only or not there."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.processes import eventually, marked
from tests.local.conftest import Jobs, kill

from trainjob import TrainJobClient
from trainjob.backends.local.backend import LocalBackend
from trainjob.errors import Rejected
from trainjob.status import observe


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    disk = tmp_path / "tiny"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def on_tiny(tiny: Path) -> Iterator[Jobs]:
    with TrainJobClient(LocalBackend(tiny)) as client:
        yield Jobs(client, tiny)


def fill(disk: Path, leave: int = 0) -> Path:
    """Use up the disk but for `leave` bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            file.truncate(max(0, file.tell() - leave))
    return filler


def test_no_room_for_a_job(on_tiny: Jobs, tiny: Path) -> None:
    filler = fill(tiny)
    with pytest.raises(Rejected, match=r"cannot be kept in .*tiny: No space left on device"):
        on_tiny.launch("true")
    filler.unlink()
    assert [path for path in tiny.rglob("*") if path.is_file()] == []
    assert on_tiny.run("true").attempt == 1


def test_the_disk_fills_while_a_job_runs(on_tiny: Jobs, tiny: Path) -> None:
    """Log lines are lost; the training is not, and its end is told once there is room."""
    ref = on_tiny.launch("echo on; sleep 0.5; seq 2000; echo over >&2")
    on_tiny.starts(ref)
    filler = fill(tiny, leave=8192)
    log = on_tiny.directory(ref) / "supervisor.log"
    eventually(lambda: not marked(ref.uid), 30)
    filler.unlink()
    for path in (on_tiny.directory(ref) / "logs").iterdir():
        os.truncate(path, 0)
    eventually(lambda: observe(on_tiny.client.get(ref)).phase.terminal, 10)
    assert on_tiny.client.wait(ref).uid == ref.uid
    assert log.exists()


def test_no_room_for_the_status(on_tiny: Jobs, tiny: Path) -> None:
    go = tiny.parent / "go"
    ref = on_tiny.launch(f"while ! [ -e {go} ]; do sleep 0.05; done")
    filler = fill(tiny)
    go.touch()
    eventually(lambda: not marked(ref.uid))
    assert not observe(on_tiny.client.get(ref)).phase.terminal
    filler.unlink()
    assert on_tiny.client.wait(ref).attempt == 1


def test_a_script_that_fills_the_disk_itself(on_tiny: Jobs, tiny: Path) -> None:
    """Its temporary files go with it, so that its end can be written down; log lines may be lost."""
    found = on_tiny.fails('head -c 2000000 /dev/zero > "$TMPDIR/checkpoint" || exit 7')
    assert found.exit_code == 7
    assert [path.name for path in tiny.rglob("checkpoint")] == []


def test_the_supervisor_is_killed_and_the_disk_is_full(on_tiny: Jobs, tiny: Path) -> None:
    """A client that looks is not held up; the ranks are stopped, and the verdict follows once there is room."""
    ref = on_tiny.launch("echo on; sleep 60")
    on_tiny.starts(ref)
    filler = fill(tiny)
    for process in reversed(on_tiny.supervisors(ref)):
        kill(process)
    began = time.monotonic()
    assert not observe(on_tiny.client.get(ref)).phase.terminal
    assert time.monotonic() - began < 5
    assert marked(ref.uid) == {}
    filler.unlink()
    assert observe(on_tiny.client.get(ref)).reason == "SupervisorLost"


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        TrainJobClient(LocalBackend(tmp_path / "file" / "home")) as client,
        pytest.raises(Rejected, match=r"cannot be kept in .*file/home: Not a directory"),
    ):
        Jobs(client, tmp_path).launch("true")


def test_files_that_are_no_jobs(jobs: Jobs, home: Path) -> None:
    ref = jobs.launch("true")
    jobs.client.wait(ref)
    (home / "jobs" / "default" / "README").write_text("not a job")
    (home / "jobs" / "default" / "empty").mkdir()
    (home / "jobs" / "default" / ".new-draft").mkdir()
    assert [job["metadata"]["uid"] for job in jobs.client.list()] == [ref.uid]
