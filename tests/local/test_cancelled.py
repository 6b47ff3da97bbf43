"""Local jobs that were cancelled, by a person or because nobody waited for them, keep their files until `gc`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs
from tests.processes import eventually
from tests.unit.program import exit_of

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.store import read_json, write_json
from trainjob._jobs.cancellation import cancel_key, give_up, request_cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.unattended import AFTER
from trainjob.errors import Category, Diagnosis, RanksRemain, RetryVerdict
from trainjob.status import CANCELLED, observe

REPORTING = (
    "import time; from trainjob import progress; print('epoch 1'); "
    "progress.report(progress=40, metrics={'loss': 0.5}); time.sleep(60)"
)
SLEEP = "echo on; sleep 60"
DEAF = "trap '' TERM; echo on; while :; do sleep 0.1; done"
TRUE = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")


def training(jobs: Jobs, **fields: Any) -> JobRef:
    """A job that has written a line and reported a metric, and keeps running."""
    ref = jobs.launch(command=[sys.executable, "-c", REPORTING], **fields)
    eventually(lambda: observe(jobs.client.get(ref)).progress == 40)
    return ref


def becomes(jobs: Jobs, ref: JobRef, phase: Phase) -> None:
    """Wait until the job is in a phase."""
    eventually(lambda: jobs.phase(ref) is phase)


def unattended(jobs: Jobs, ref: JobRef) -> None:
    """Let a job count as unattended after a second, which no author may ask for."""
    jobs.patch(ref, {"metadata": {"annotations": {AFTER: "1"}}})


# ---------------------------------------------------------------- what is kept


def by_one_request(jobs: Jobs, ref: JobRef) -> None:
    """As steps of KFP do before they are killed."""
    job = jobs.client.get(ref)
    assert job is not None
    jobs.client.call(lambda: request_cancel(jobs.client.backend, job))
    eventually(lambda: jobs.client.call(lambda: jobs.client.backend.stopped(ref)))


def twice(jobs: Jobs, ref: JobRef) -> None:
    assert [jobs.client.cancel(ref), jobs.client.cancel(ref)] == [True, True]


@pytest.mark.parametrize("cancel", [by_one_request, twice, unattended], ids=lambda way: way.__name__)
def test_a_cancelled_job_keeps_its_logs_and_metrics(jobs: Jobs, cancel: Callable[[Jobs, JobRef], None]) -> None:
    ref = training(jobs, unattended="cancel")
    cancel(jobs, ref)
    becomes(jobs, ref, Phase.CANCELLED)
    why = "because nobody waited for it" if cancel is unattended else "with trainjob"
    message = f"the job was cancelled {why}"
    job = jobs.client.get(ref)
    assert job is not None
    now = observe(job)
    assert (now.message, now.progress, now.metrics) == (message, 40, {"loss": 0.5})
    assert (now.phase.terminal, now.finished is None) == (True, False)
    assert "deletionTimestamp" not in job["metadata"]
    assert jobs.lines(ref)[0] == "epoch 1"
    assert marked(ref.uid) == {}
    report = jobs.client.diagnose(ref.name)
    assert [(rank.rank, bool(rank.exit_code)) for rank in report.ranks] == [("node-0", True)]
    assert (report.diagnosis.category, report.diagnosis.summary) == (Category.DELETED, message)
    with pytest.raises(TrainJobFailed, match=message) as caught:
        jobs.client.wait(ref)
    assert caught.value.diagnosis.category is Category.DELETED
    eventually(lambda: jobs.supervisors(ref) == [])


def test_a_suspended_job_can_be_cancelled(jobs: Jobs) -> None:
    ref = training(jobs)
    assert jobs.client.cancel(ref, "suspend")
    assert jobs.client.cancel(ref)
    assert jobs.phase(ref) is Phase.CANCELLED
    assert jobs.lines(ref)[0] == "epoch 1"


def test_a_cancel_after_the_end_has_no_effect(jobs: Jobs) -> None:
    ref = jobs.launch("echo done")
    jobs.client.wait(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    path = jobs.directory(ref) / "object.json"
    late = read_json(path)
    assert late is not None
    late["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["trainjob.dev/keep"]}
    write_json(path, late)  # the job has ended between the read and the change
    assert jobs.phase(ref) is Phase.COMPLETE
    assert jobs.launch("echo done") == ref, "the result has not been delivered yet"


def test_a_cancelled_job_can_be_deleted(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP)
    jobs.client.cancel(ref)
    jobs.delete(ref)
    assert jobs.client.get(ref) is None
    assert not jobs.directory(ref).exists()
    assert jobs.launch("true").attempt == 2


@pytest.mark.full
def test_a_job_can_be_deleted_during_a_cancel(jobs: Jobs) -> None:
    ref = jobs.launch(DEAF)
    jobs.starts(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    jobs.delete(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    eventually(lambda: jobs.client.get(ref) is None)
    assert not jobs.directory(ref).exists()


# ---------------------------------------------------------------- the next launch


@pytest.mark.parametrize("tried", [None, 1, 7])
@pytest.mark.parametrize("after_failure", ["retry", "verdict", "infrastructure"])
def test_the_next_launch_is_the_next_attempt(jobs: Jobs, after_failure: Any, tried: int | None) -> None:
    ref, other = jobs.launch(SLEEP), jobs.launch(SLEEP, key="another")
    done = jobs.client.cancel_key("key")
    assert (done.jobs, done.ended) == ((ref,), True)
    assert (jobs.phase(ref), jobs.phase(other).terminal) == (Phase.CANCELLED, False)
    done = jobs.client.cancel_key("key")
    assert (done.jobs, done.ended) == ((), True)
    spec = {"runtime": "trainjob-step", "command": ["true"]}
    again = jobs.client.launch(spec, "key", tried=tried, after_failure=after_failure)
    assert (ref.attempt, again.attempt) == (1, 2)


@pytest.mark.full
def test_the_ranks_of_two_attempts_never_run_at_once(jobs: Jobs) -> None:
    ref = jobs.launch(DEAF)
    jobs.starts(ref)
    backend = jobs.client.backend
    jobs.client.call(lambda: cancel_key(backend, "key", namespace="default", timeout_seconds=0))
    assert marked(ref.uid) != {}
    with pytest.raises(RanksRemain, match=f"node-0 of {ref.name}"):
        jobs.client.call(lambda: launch(backend, TRUE, "key", namespace="default", wait_for_ranks=False))
    assert [JobRef.of(job) for job in jobs.client.list()] == [ref]
    assert jobs.launch("true").attempt == 2
    assert marked(ref.uid) == {}


# ---------------------------------------------------------------- jobs that nobody waits for


def test_an_unattended_job_is_suspended_and_the_next_waiter_resumes_it(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP, unattended="suspend")
    unattended(jobs, ref)
    becomes(jobs, ref, Phase.SUSPENDED)
    job = jobs.client.get(ref)
    assert job is not None
    assert job["metadata"]["annotations"][CANCELLED] == "unattended"
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    becomes(jobs, ref, Phase.RUNNING)
    time.sleep(3)  # longer than the job may be unattended
    assert jobs.phase(ref) is Phase.RUNNING
    waiting.cancel()
    becomes(jobs, ref, Phase.SUSPENDED)


def test_a_job_suspended_by_a_person_is_kept(jobs: Jobs) -> None:
    ref = jobs.launch(SLEEP, unattended="suspend")
    jobs.patch(ref, {"spec": {"suspend": True}})
    unattended(jobs, ref)
    becomes(jobs, ref, Phase.SUSPENDED)
    time.sleep(2)  # longer than the job may be unattended
    job = jobs.client.get(ref)
    assert job is not None
    assert CANCELLED not in job["metadata"]["annotations"]


@pytest.mark.anyio
async def test_attending_a_deleted_job_has_no_effect(home: Path) -> None:
    backend = LocalBackend(home)
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"], "unattended": "suspend"})
    ref = await launch(backend, spec, "a", namespace="default")
    with anyio.fail_after(60):
        await wait(backend, ref)
    await backend.delete(ref)
    backend.attend(ref)
    backend.leave(ref, ended=True)
    await backend.aclose()


# ---------------------------------------------------------------- the command line


def test_the_command_line_shows_a_cancelled_job(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    ref = training(jobs)
    expected = f"cancelled {ref}; its logs and metrics are kept: trainjob logs {ref.name}\n"
    assert exit_of(capsys, "cancel", ref.name)[:2] == (0, expected)
    assert exit_of(capsys, "cancel", ref.name)[:2] == (0, f"{ref} has already ended: Cancelled\n")
    (listed,) = json.loads(exit_of(capsys, "list", "--phase", "Cancelled", "--json")[1])["jobs"]
    assert (listed["phase"], listed["reason"], listed["metrics"]) == ("Cancelled", "Cancelled", {"loss": 0.5})
    for command, code, text in (
        ("logs", 0, "epoch 1"),
        ("status", 0, "loss 0.5"),
        ("status", 0, f"TrainJob {ref} is Cancelled: the job was cancelled with trainjob"),
        ("wait", 5, "the job was cancelled with trainjob"),
        ("diagnose", 5, "the job was cancelled with trainjob"),
        ("resume", 2, "is Cancelled; launch it again"),
    ):
        found, out, err = exit_of(capsys, command, ref.name)
        assert (found, text in out + err) == (code, True), (command, out, err)


@pytest.mark.parametrize("stop", ["cancel", "suspend", "give up: cancel", "give up: suspend"])
def test_a_stop_keeps_the_job_and_its_log(jobs: Jobs, stop: str) -> None:
    """Only `delete` and `gc` remove it."""
    ref = jobs.launch(SLEEP)
    jobs.starts(ref)
    why = Diagnosis(Category.HANG, RetryVerdict.USER, "no rank made progress")
    action: Any = stop.removeprefix("give up: ")
    if action == stop:
        jobs.client.cancel(ref, action)
    else:
        jobs.client.call(lambda: give_up(jobs.client.backend, ref, why, action))
    becomes(jobs, ref, Phase.CANCELLED if action == "cancel" else Phase.SUSPENDED)
    assert jobs.lines(ref) == ["on"]
    eventually(lambda: not marked(ref.uid))  # giving up does not wait for them


OLD = "2026-01-01T00:00:00Z"


def end_long_ago(jobs: Jobs, ref: JobRef) -> None:
    """Wait for the end of a job, and date it back."""
    eventually(lambda: jobs.phase(ref).terminal)
    eventually(lambda: jobs.supervisors(ref) == [])
    path = jobs.directory(ref) / "status.json"
    status = read_json(path)
    assert status is not None
    for condition in status["status"]["conditions"]:
        condition["lastTransitionTime"] = OLD
    write_json(path, status)


@pytest.fixture
def old(jobs: Jobs) -> dict[str, str]:
    """Jobs that ended long ago, beside one that has just ended and one that runs: reference -> phase."""
    complete, failed, cancelled = (
        jobs.launch("true", "old"),
        jobs.launch("exit 3", "failed"),
        jobs.launch(SLEEP, "gone"),
    )
    jobs.client.cancel(cancelled)
    for ref in (complete, failed, cancelled):
        end_long_ago(jobs, ref)
    jobs.run("true", "fresh")
    jobs.launch(SLEEP, "runs")
    return {str(complete): "Complete", str(failed): "Failed", str(cancelled): "Cancelled"}


@pytest.fixture
def leftovers(home: Path) -> list[Path]:
    """A half removed job, an old draft of a launch, and one of a launch that may still be in progress."""
    folder = home / "jobs" / "default"
    paths = [folder / ".deleted" / ".a.0", folder / ".new-0", folder / ".new-1"]
    for path in paths:
        (path / "logs").mkdir(parents=True)
    for path in paths[:2]:
        os.utime(path, (1, 1))
    return paths


def test_gc_removes_old_jobs(
    jobs: Jobs, old: dict[str, str], leftovers: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    gc = partial(exit_of, capsys, "gc")
    before = {str(JobRef.of(job)) for job in jobs.client.list()}
    shown = gc("--dry-run")[1].splitlines()
    assert all(any(f"would remove {ref}: {phase}, ended " in line for line in shown) for ref, phase in old.items())
    assert len(shown) == len(old) + 2
    assert {str(JobRef.of(job)) for job in jobs.client.list()} == before
    assert gc("-n", "other")[1:] == ("", "no job in namespace other ended more than 7d00h ago\n")

    answer = json.loads(gc("--older-than", "7d", "--json")[1])
    assert answer["dry_run"] is False
    assert {f"default/{job['name']}": job["phase"] for job in answer["removed"]} == old
    assert answer["leftovers"] == [str(path) for path in leftovers[:2]]
    assert [path.exists() for path in leftovers] == [False, False, True]
    assert {str(JobRef.of(job)) for job in jobs.client.list()} == before - old.keys()
    assert not any((jobs.home / "jobs" / ref).exists() for ref in old)
    assert gc()[1:] == ("", "no job in namespace default ended more than 7d00h ago\n")
    assert jobs.launch("true", key="old").attempt == 2, "the name is not reused"


def test_gc_of_a_cluster_removes_nothing_here(
    jobs: Jobs, old: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    code, _, err = exit_of(capsys, "gc", "--backend", "kubernetes")
    assert (code, "no cluster is configured" in err) == (2, True)
    assert all((jobs.home / "jobs" / ref).exists() for ref in old)
