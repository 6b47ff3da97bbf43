"""Full disks, and homes that cannot be created."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs, kill
from tests.processes import eventually

from trainjob import JobRef, TrainJobClient
from trainjob._backends.local import supervision
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.store import JobFiles
from trainjob.errors import BackendUnavailable, Rejected, TrainJobFailed
from trainjob.status import observe

SLEEP = "echo on; sleep 60"


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte."""
    disk = tmp_path / "tiny"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def on_tiny(tiny: Path) -> Iterator[Jobs]:
    with TrainJobClient(LocalBackend(tiny)) as client:
        yield Jobs(client, tiny)


def fill(disk: Path, leave: int = 0) -> Path:
    """Fill the disk except for `leave` bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            file.truncate(max(0, file.tell() - leave))
    return filler


def test_a_full_disk_refuses_a_launch(on_tiny: Jobs, tiny: Path) -> None:
    filler = fill(tiny)
    with pytest.raises(Rejected, match=r"cannot be stored in .*tiny: No space left on device"):
        on_tiny.launch("true")
    filler.unlink()
    assert [path for path in tiny.rglob("*") if path.is_file()] == []
    assert on_tiny.run("true").attempt == 1


def running_on_a_full_disk(jobs: Jobs, script: str, **fields: Any) -> tuple[JobRef, Path]:
    """A job that runs, and the file that fills the disk."""
    ref = jobs.launch(script, **fields)
    jobs.starts(ref)  # its status has been written: a later write would free space on the full disk
    return ref, fill(jobs.home)


def wait_until_gone(jobs: Jobs, ref: JobRef) -> None:
    """Wait for the end of the ranks, and check that the status could not be written."""
    eventually(lambda: not marked(ref.uid))
    time.sleep(0.5)
    assert not jobs.phase(ref).terminal


def test_the_disk_fills_while_a_job_runs(on_tiny: Jobs, tiny: Path) -> None:
    """Log lines are lost, but not the training; its end is reported when the disk has space."""
    ref = on_tiny.launch("echo on; sleep 0.5; seq 2000; echo over >&2")
    on_tiny.starts(ref)
    filler = fill(tiny, leave=8192)
    eventually(lambda: not marked(ref.uid), 30)
    filler.unlink()
    for path in (on_tiny.directory(ref) / "logs").iterdir():
        os.truncate(path, 0)
    eventually(lambda: on_tiny.phase(ref).terminal, 10)
    assert on_tiny.client.wait(ref).uid == ref.uid
    assert (on_tiny.directory(ref) / "supervisor.log").exists()


def test_the_last_status_is_written_when_the_disk_has_space(on_tiny: Jobs, tiny: Path) -> None:
    go = tiny.parent / "go"
    ref, filler = running_on_a_full_disk(on_tiny, f"echo on; while ! [ -e {go} ]; do sleep 0.05; done")
    go.touch()
    wait_until_gone(on_tiny, ref)
    filler.unlink()
    assert on_tiny.client.wait(ref).attempt == 1


def test_an_exceeded_deadline_stays_the_reason(on_tiny: Jobs) -> None:
    """The ranks of a job that has exceeded its deadline fail as well, before its status can be written."""
    ref, filler = running_on_a_full_disk(on_tiny, SLEEP, active_deadline_seconds=2)
    wait_until_gone(on_tiny, ref)
    filler.unlink()
    eventually(lambda: on_tiny.phase(ref).terminal)
    assert observe(on_tiny.client.get(ref)).reason == "DeadlineExceeded"


def test_a_script_that_fills_the_disk(on_tiny: Jobs, tiny: Path) -> None:
    """Its temporary files are deleted at its end, so that its status can be written; log lines may be lost.

    Reports on the full disk are lost and do not block the script.
    """
    progress = 'printf \'{"trainjob": 1, "progressPercentage": %d}\' 1<>"$TRAINJOB_TERMINATION_LOG"'
    ref = on_tiny.launch(
        f"{progress % 1}; echo on; until [ -e {tiny.parent}/go ]; do sleep 0.05; done;"
        f'head -c 2000000 /dev/zero > "$TMPDIR/checkpoint"; {progress % 2}; sleep 0.5; exit 7'
    )
    on_tiny.starts(ref)
    (tiny.parent / "go").touch()
    with pytest.raises(TrainJobFailed) as caught:
        on_tiny.client.wait(ref)
    assert caught.value.diagnosis.exit_code == 7
    assert [path.name for path in tiny.rglob("checkpoint")] == []


def test_a_cancel_needs_space(on_tiny: Jobs) -> None:
    """The error names the cause, and the cancel works when the disk has space."""
    ref, filler = running_on_a_full_disk(on_tiny, SLEEP)
    with pytest.raises(Rejected, match=r"cannot be changed in .*tiny/.*: No space left on device"):
        on_tiny.client.cancel(ref)
    filler.unlink()
    assert on_tiny.client.cancel(ref)
    assert marked(ref.uid) == {}


def test_the_supervisor_is_killed_and_the_disk_is_full(on_tiny: Jobs) -> None:
    """A client is not blocked, and the ranks are stopped. The status is written at a read when there is space."""
    ref, filler = running_on_a_full_disk(on_tiny, SLEEP)
    for process in reversed(on_tiny.supervisors(ref)):
        kill(process)
    assert not on_tiny.phase(ref).terminal
    assert marked(ref.uid) == {}
    filler.unlink()
    assert observe(on_tiny.client.get(ref)).reason == "SupervisorLost"


def test_a_disk_that_fills_before_the_first_status_ends_the_launch(
    on_tiny: Jobs, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = supervision.start

    def on_full(files: JobFiles) -> None:
        fill(tiny)
        start(files)

    with monkeypatch.context() as full:
        full.setattr(supervision, "start", on_full)
        with pytest.raises(BackendUnavailable, match="its supervisor ended 3 times before the job began"):
            on_tiny.launch("true")
    (tiny / "filler").unlink()
    assert on_tiny.run("true").attempt == 1


def test_files_that_are_no_jobs_are_not_listed(jobs: Jobs, home: Path) -> None:
    ref = jobs.launch("true")
    jobs.client.wait(ref)
    (home / "jobs" / "default" / "README").write_text("not a job")
    (home / "jobs" / "default" / "empty").mkdir()
    (home / "jobs" / "default" / ".new-draft").mkdir()
    assert [job["metadata"]["uid"] for job in jobs.client.list()] == [ref.uid]
