"""Kills of launchers, supervisors and guards: no process of a job keeps running, and its end is visible to all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs, kill
from tests.processes import eventually

from trainjob import JobRef, Phase, TrainJobFailed
from trainjob._backends.local.store import JobFiles
from trainjob.status import observe
from trainjob.verdicts import Category, RetryVerdict

SLEEP = "echo on; sleep 60"


def scalars(value: object) -> Iterator[object]:
    """Each number and string of a JSON document. Digits inside a time or a UID are no process id."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from scalars(item)
    else:
        yield value


def lost(jobs: Jobs, ref: JobRef) -> None:
    """Check that the job failed with its supervisor and can be retried."""
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert caught.value.diagnosis.category is Category.NODE_LOST
    assert caught.value.retry is RetryVerdict.INFRASTRUCTURE
    assert "supervisor of this job was killed" in str(caught.value)
    assert marked(ref.uid) == {}
    eventually(lambda: jobs.supervisors(ref) == [])  # the guard writes the status, and then ends
    assert jobs.launch("true", key="key").attempt == ref.attempt + 1


# ---------------------------------------------------------------- the launcher

DIES = {
    "before anything is written": "store.write_json = die",
    "with half a job written": "store.JobFiles.create = half",
    "before the job has its name": "store.os.rename = die",
    "right after the job has its name": "supervision.start = die",
    "while its supervisor starts": "supervision.subprocess.run = started",
    "right after its supervisor has started": "supervision.start = after(supervision.start)",
}


@pytest.mark.parametrize("moment", DIES)
def test_the_launcher_is_killed(jobs: Jobs, tmp_path: Path, moment: str) -> None:
    program = f"""
import os, subprocess
from trainjob import TrainJobClient
from trainjob._backends.local import store, supervision

def die(*_, **__):
    os.kill(os.getpid(), 9)

def half(directory, *_):
    draft = directory.with_name(".new-half")
    draft.mkdir(parents=True)
    (draft / "object.json").write_text('{{"metadata": ')
    die()

def started(command, check, **options):
    subprocess.Popen(command, **options)
    die()

def after(function):
    def call(*arguments):
        function(*arguments)
        die()
    return call

{DIES[moment]}
with TrainJobClient("local") as client:
    client.launch({{"runtime": "trainjob-step", "command": ["sh", "-c", {f"echo run >> {tmp_path}/runs"!r}]}}, "key")
"""
    launcher = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    result = jobs.run(f"echo run >> {tmp_path}/runs")
    assert result.attempt == 1
    assert len(jobs.client.list()) == 1
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_job_survives_its_launcher(jobs: Jobs, tmp_path: Path) -> None:
    """A hang-up of the terminal and signals to the launcher's process group do not reach the job."""
    program = f"""
import os, signal, time
from trainjob import TrainJobClient
with TrainJobClient("local") as client:
    script = "sleep 0.5; echo over > {tmp_path}/over"
    client.launch({{"runtime": "trainjob-step", "command": ["sh", "-c", script]}}, "key")
    os.killpg(0, signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False, start_new_session=True)
    eventually((tmp_path / "over").exists)
    (job,) = jobs.client.list()
    eventually(lambda: observe(jobs.client.get(JobRef.of(job))).phase is Phase.COMPLETE)


# ---------------------------------------------------------------- the supervisor and its guard


def test_the_supervisor_is_killed(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP, num_nodes=2)
    jobs.starts(ref, 2)
    supervisor, _ = jobs.supervisors(ref)
    kill(supervisor)
    files = JobFiles(jobs.directory(ref))
    eventually(files.finished)  # by the guard: no client has read the job
    assert marked(ref.uid) == {}
    lost(jobs, ref)


def test_the_supervisor_is_killed_while_a_daemon_of_the_job_runs(jobs: Jobs, tmp_path: Path) -> None:
    ref = jobs.launch(f"setsid sh -c 'trap \"\" TERM; echo > {tmp_path}/daemon; sleep 60' & {SLEEP}")
    eventually((tmp_path / "daemon").exists)
    assert len(marked(ref.uid)) > 1
    kill(jobs.supervisors(ref)[0])
    lost(jobs, ref)


def test_the_guard_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    ref = jobs.launch(f"echo on; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done")
    kill(jobs.supervisors(ref)[1])
    (tmp_path / "go").touch()
    jobs.client.wait(ref)


@pytest.mark.parametrize("operation", ["get", "find", "watch", "launch"])
def test_the_next_request_ends_a_job_whose_supervisor_and_guard_were_killed(jobs: Jobs, operation: str) -> None:
    ref = jobs.launch(SLEEP, num_nodes=2)
    jobs.starts(ref, 2)
    supervisor, guard = jobs.supervisors(ref)
    os.kill(guard.pid, signal.SIGSTOP)
    kill(supervisor)
    kill(guard)
    assert len(marked(ref.uid)) >= 2
    if operation == "get":
        assert observe(jobs.client.get(ref)).reason == "SupervisorLost"
    elif operation == "find":
        assert [observe(job).reason for job in jobs.client.list()] == ["SupervisorLost"]
    elif operation == "launch":
        assert jobs.launch(SLEEP, num_nodes=2).attempt == 2
    observed = observe(jobs.client.get(ref)) if operation != "watch" else None
    assert observed is None or observed.phase is Phase.FAILED
    with pytest.raises(TrainJobFailed, match="supervisor of this job was killed"):
        jobs.client.wait(ref)
    assert marked(ref.uid) == {}


def test_a_waiter_sees_the_loss_of_the_supervisor(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP)
    jobs.starts(ref)
    waiting = jobs.client.start(lambda: _phases(jobs, ref))
    supervisor, guard = jobs.supervisors(ref)
    kill(guard)
    kill(supervisor)
    assert waiting.result(10)[-1] is Phase.FAILED


async def _phases(jobs: Jobs, ref: JobRef) -> list[Phase]:
    phases = []
    async for snapshot in jobs.client.backend.watch(ref):
        phases.append(observe(snapshot.trainjob).phase)
        if phases[-1].terminal:
            break
    return phases


def test_supervisor_and_guard_are_killed_during_a_deletion(jobs: Jobs) -> None:
    ref = jobs.launch("trap '' TERM; echo on; while :; do sleep 0.1; done")
    jobs.starts(ref)
    supervisor, guard = jobs.supervisors(ref)
    jobs.client.call(lambda: jobs.client.backend.delete(ref))
    kill(guard)
    kill(supervisor)
    assert jobs.client.get(ref) is None
    assert marked(ref.uid) == {}
    assert not jobs.directory(ref).exists()


def test_supervisor_and_guard_of_a_suspended_job_are_killed(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP, suspend=True)
    for process in reversed(jobs.supervisors(ref)):
        kill(process)
    lost(jobs, ref)


def test_a_supervisor_killed_before_its_first_status_is_replaced(jobs: Jobs) -> None:
    """No status was written, so the next launch starts a new supervisor."""
    ref = jobs.launch("echo begun")
    jobs.client.wait(ref)
    eventually(lambda: jobs.supervisors(ref) == [])  # otherwise they would treat the missing status as a failure
    (jobs.directory(ref) / "status.json").unlink()
    assert jobs.launch("echo begun") == ref
    jobs.client.wait(ref)
    assert jobs.lines(ref) == ["begun", "begun"]


def test_a_supervisor_is_identified_by_a_lock_and_not_by_a_process_id(jobs: Jobs) -> None:
    """A process id can have been reused. The kernel releases a lock when its holder ends."""
    ref = jobs.launch(SLEEP)
    jobs.starts(ref)
    files = JobFiles(jobs.directory(ref))
    assert files.supervise() is None
    supervisor, guard = jobs.supervisors(ref)
    kill(guard)
    kill(supervisor)
    mine = files.supervise()
    assert mine is not None
    assert not observe(jobs.client.get(ref)).phase.terminal, "while the lock is held, no client ends the job"
    os.close(mine)
    assert observe(jobs.client.get(ref)).phase is Phase.FAILED
    for path in jobs.directory(ref).glob("*.json"):
        assert {supervisor.pid, str(supervisor.pid)}.isdisjoint(scalars(json.loads(path.read_bytes()))), path.name


def test_a_second_supervisor_does_nothing(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP)
    jobs.starts(ref)
    before = {process.pid for process in jobs.supervisors(ref)}
    for _ in range(3):
        command = [sys.executable, "-m", "trainjob._backends.local.supervisor", str(jobs.directory(ref))]
        assert subprocess.run(command, check=False).returncode == 0
    eventually(lambda: {process.pid for process in jobs.supervisors(ref)} == before)
    assert jobs.lines(ref) == ["on"]


def test_no_supervisor_outlives_its_job(jobs: Jobs) -> None:
    ref = jobs.launch("true")
    jobs.client.wait(ref)
    eventually(lambda: jobs.supervisors(ref) == [])


def test_signals_to_the_ranks_from_outside_end_the_job(jobs: Jobs) -> None:
    ref = jobs.launch("echo on; exec sleep 60", num_nodes=2)
    jobs.starts(ref, 2)
    os.kill(min(marked(ref.uid)), signal.SIGTERM)
    with pytest.raises(TrainJobFailed, match=r"SIGTERM"):
        jobs.client.wait(ref)


@pytest.mark.parametrize("burst", [1, 5])
def test_changes_right_after_creation_are_seen(jobs: Jobs, burst: int) -> None:
    refs = [jobs.launch(SLEEP, key=str(i)) for i in range(burst)]
    for ref in refs:
        jobs.client.call(lambda ref=ref: jobs.client.backend.delete(ref))  # type: ignore[misc]
    for ref in refs:
        eventually(lambda ref=ref: jobs.client.get(ref) is None)  # type: ignore[misc]


def test_the_end_of_short_jobs_is_seen_soon(jobs: Jobs) -> None:
    """The states of very short jobs follow each other within one tick of the kernel's clock."""

    def waited(ref: JobRef) -> float:
        began = time.monotonic()
        jobs.client.wait(ref)
        return time.monotonic() - began

    assert max(waited(jobs.launch(key=f"k/{i}", command=["true"])) for i in range(10)) < 2, (
        "a missed state change would never be seen"
    )


def test_a_suspended_job_that_is_deleted_counts_as_stopped_once_it_is_gone(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP, suspend=True)
    eventually(lambda: observe(jobs.client.get(ref)).phase is Phase.SUSPENDED)
    backend = jobs.client.backend
    supervisors = jobs.supervisors(ref)
    for process in supervisors:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        jobs.client.call(lambda: backend.delete(ref))
        assert not jobs.client.call(lambda: backend.stopped(ref))
    finally:
        for process in supervisors:
            os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: jobs.client.call(lambda: backend.stopped(ref)))
    assert not jobs.directory(ref).exists()
