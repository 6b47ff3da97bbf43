"""Kills of launchers, supervisors and guards: no process of a job keeps running, and its end is visible to all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs, kill
from tests.processes import eventually

from trainjob import JobRef, Phase, TrainJobFailed
from trainjob._backends.local.store import JobFiles, OtherFormat
from trainjob._jobs.waiting import wait
from trainjob.errors import Category, RetryVerdict
from trainjob.status import observe

SLEEP = "echo on; sleep 60"


def scalars(value: object) -> Iterator[object]:
    """Each number and string of a JSON document. Digits inside a time or a UID are no process id."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from scalars(item)
    else:
        yield value


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
    eventually(lambda: jobs.phase(JobRef.of(job)) is Phase.COMPLETE)


# ---------------------------------------------------------------- the supervisor and its guard

DAEMON = "setsid sh -c 'trap \"\" TERM; echo daemon; sleep 60' & "


@pytest.mark.parametrize(
    ("script", "fields", "lines"),
    [(SLEEP, {"num_nodes": 2}, 2), (DAEMON + SLEEP, {}, 2), (SLEEP, {"suspend": True}, 0)],
    ids=["two ranks", "a daemon of the job", "suspended"],
)
@pytest.mark.parametrize("killed", ["supervisor", "both"])
def test_a_job_whose_supervisor_was_killed_has_failed(
    jobs: Jobs, script: str, fields: dict[str, Any], lines: int, killed: str
) -> None:
    """The guard ends it, before any client reads the job; without a guard the next client does."""
    ref = jobs.launch(script, **fields)
    jobs.starts(ref, lines)
    supervisor, guard = jobs.supervisors(ref)
    if killed == "both":
        kill(guard)
    kill(supervisor)
    if killed == "supervisor":
        eventually(JobFiles(jobs.directory(ref)).finished)
        assert marked(ref.uid) == {}
    with pytest.raises(TrainJobFailed, match="supervisor of this job was killed") as caught:
        jobs.client.wait(ref)
    assert (caught.value.diagnosis.category, caught.value.retry) == (Category.NODE_LOST, RetryVerdict.INFRASTRUCTURE)
    assert marked(ref.uid) == {}
    eventually(lambda: jobs.supervisors(ref) == [])  # the guard writes the status, and then ends
    assert jobs.launch("true").attempt == ref.attempt + 1


def test_the_guard_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    ref = jobs.launch(f"echo on; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done")
    kill(jobs.supervisors(ref)[1])
    (tmp_path / "go").touch()
    jobs.client.wait(ref)


REQUESTS: dict[str, Callable[[Jobs, JobRef], bool]] = {
    "get": lambda jobs, ref: observe(jobs.client.get(ref)).reason == "SupervisorLost",
    "list": lambda jobs, _: [observe(job).reason for job in jobs.client.list()] == ["SupervisorLost"],
    "launch": lambda jobs, _: jobs.launch(SLEEP, num_nodes=2).attempt == 2,
}


@pytest.mark.parametrize("request_of", REQUESTS)
def test_the_next_request_ends_a_job_whose_supervisor_and_guard_were_killed(jobs: Jobs, request_of: str) -> None:
    ref = jobs.launch(SLEEP, num_nodes=2)
    jobs.starts(ref, 2)
    supervisor, guard = jobs.supervisors(ref)
    os.kill(guard.pid, signal.SIGSTOP)
    kill(supervisor)
    kill(guard)
    assert len(marked(ref.uid)) >= 2
    assert REQUESTS[request_of](jobs, ref)
    assert jobs.phase(ref) is Phase.FAILED
    assert marked(ref.uid) == {}


def test_a_waiter_sees_the_loss_of_the_supervisor(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP)
    jobs.starts(ref)
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    supervisor, guard = jobs.supervisors(ref)
    kill(guard)
    kill(supervisor)
    with pytest.raises(TrainJobFailed, match="supervisor of this job was killed"):
        waiting.result(60)


def test_supervisor_and_guard_are_killed_during_a_deletion(jobs: Jobs) -> None:
    ref = jobs.launch("trap '' TERM; echo on; while :; do sleep 0.1; done")
    jobs.starts(ref)
    supervisor, guard = jobs.supervisors(ref)
    jobs.delete(ref)
    kill(guard)
    kill(supervisor)
    assert jobs.client.get(ref) is None
    assert marked(ref.uid) == {}
    assert not jobs.directory(ref).exists()


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
    assert not jobs.phase(ref).terminal, "while the lock is held, no client ends the job"
    os.close(mine)
    assert jobs.phase(ref) is Phase.FAILED
    for path in jobs.directory(ref).glob("*.json"):
        assert {supervisor.pid, str(supervisor.pid)}.isdisjoint(scalars(json.loads(path.read_bytes()))), path.name


# ---------------------------------------------------------------- changes that follow each other


def test_changes_right_after_creation_are_seen(jobs: Jobs) -> None:
    refs = [jobs.launch(SLEEP, key=str(i)) for i in range(5)]
    for ref in refs:
        jobs.delete(ref)
    eventually(lambda: [jobs.client.get(ref) for ref in refs] == [None] * 5)


def test_the_end_of_each_short_job_is_seen(jobs: Jobs) -> None:
    """Their states follow each other within one tick of the kernel's clock; a missed one would never be seen."""
    for number in range(10):
        jobs.run(key=f"k/{number}", command=["true"])


def test_a_suspended_job_that_is_deleted_counts_as_stopped_once_it_is_gone(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP, suspend=True)
    eventually(lambda: jobs.phase(ref) is Phase.SUSPENDED)
    backend = jobs.client.backend
    supervisors = jobs.supervisors(ref)
    for process in supervisors:
        os.kill(process.pid, signal.SIGSTOP)
    try:
        jobs.delete(ref)
        assert not jobs.client.call(lambda: backend.stopped(ref))
    finally:
        for process in supervisors:
            os.kill(process.pid, signal.SIGCONT)
    eventually(lambda: jobs.client.call(lambda: backend.stopped(ref)))
    assert not jobs.directory(ref).exists()


def test_a_job_that_a_newer_trainjob_has_changed_runs_on_and_others_are_listed(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    first = jobs.launch(SLEEP)
    jobs.starts(first)
    path = jobs.directory(first) / "object.json"
    kept = path.read_bytes()
    draft = path.with_name(".newer")
    draft.write_text(json.dumps(json.loads(kept) | {"format": 2}))
    draft.chmod(0o600)
    draft.replace(path)
    eventually(lambda: "newer trainjob" in (jobs.directory(first) / "supervisor.log").read_text(), 30)
    with pytest.raises(OtherFormat, match=r"object\.json was written by a newer trainjob"):
        jobs.client.get(first)
    other = jobs.launch(SLEEP, key="other")
    assert [job["metadata"]["name"] for job in jobs.client.list()] == [other.name]
    assert "left out: " in caplog.text
    assert jobs.client.cancel_key("other").ended
    path.write_bytes(kept)
    assert jobs.phase(first) is Phase.RUNNING, "its supervisor lives"
