"""A cancelled local job keeps its files until `gc` or `delete` removes them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs, kill
from tests.processes import eventually
from tests.unit.program import exit_of

from trainjob import JobRef, Phase, TrainJobFailed, TrainJobSpec
from trainjob._backends.local.store import read_json, write_json
from trainjob._jobs.cancellation import cancel_key, request_cancel
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob._manifest.unattended import AFTER
from trainjob.errors import RanksRemain
from trainjob.status import observe
from trainjob.verdicts import Category

REPORTING = (
    "import time; from trainjob import progress; print('epoch 1'); "
    "progress.report(progress=40, metrics={'loss': 0.5}); time.sleep(60)"
)


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")


def training(jobs: Jobs, **fields: Any) -> JobRef:
    """A job that has written a line and reported a metric, and keeps running."""
    ref = jobs.launch(command=[sys.executable, "-c", REPORTING], **fields)
    eventually(lambda: observe(jobs.client.get(ref)).progress == 40)
    return ref


def is_kept(jobs: Jobs, ref: JobRef, message: str = "the job was cancelled with trainjob") -> None:
    """Check that the job has ended as cancelled, that no process runs, and that its files exist."""
    job = jobs.client.get(ref)
    assert job is not None
    now = observe(job)
    assert (now.phase, now.message, now.progress, now.metrics) == (Phase.CANCELLED, message, 40, {"loss": 0.5})
    assert now.phase.terminal
    assert now.finished is not None
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


def test_a_cancelled_job_keeps_its_logs_and_metrics(jobs: Jobs) -> None:
    ref = training(jobs)
    assert jobs.client.cancel(ref)
    is_kept(jobs, ref)
    assert jobs.client.cancel(ref), "a second cancel succeeds"
    is_kept(jobs, ref)


def test_a_job_is_cancelled_by_one_request(jobs: Jobs) -> None:
    """KFP's steps do this before they are killed."""
    ref = training(jobs)
    job = jobs.client.get(ref)
    assert job is not None
    jobs.client.call(lambda: request_cancel(jobs.client.backend, job))
    eventually(lambda: jobs.client.call(lambda: jobs.client.backend.stopped(ref)))
    is_kept(jobs, ref)


def test_an_unattended_job_is_cancelled(jobs: Jobs) -> None:
    ref = training(jobs, unattended="cancel")
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"metadata": {"annotations": {AFTER: "1"}}}))
    eventually(lambda: observe(jobs.client.get(ref)).phase is Phase.CANCELLED)
    is_kept(jobs, ref, "the job was cancelled because nobody waited for it")


@pytest.mark.parametrize("both", [False, True])
def test_the_supervisor_is_killed_during_a_cancel(jobs: Jobs, tmp_path: Path, both: bool) -> None:
    script = REPORTING.replace("import time;", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);")
    ref = jobs.launch(command=[sys.executable, "-c", script])
    eventually(lambda: observe(jobs.client.get(ref)).progress == 40)
    supervisor, guard = jobs.supervisors(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    if both:
        kill(guard)
    kill(supervisor)
    eventually(lambda: observe(jobs.client.get(ref)).phase is Phase.CANCELLED)
    assert marked(ref.uid) == {}
    assert jobs.lines(ref) == ["epoch 1"]


def test_a_suspended_job_can_be_cancelled(jobs: Jobs) -> None:
    ref = training(jobs)
    assert jobs.client.cancel(ref, "suspend")
    assert jobs.client.cancel(ref)
    assert observe(jobs.client.get(ref)).phase is Phase.CANCELLED
    assert jobs.lines(ref)[0] == "epoch 1"


@pytest.mark.parametrize("tried", [None, 1, 7])
@pytest.mark.parametrize("after_failure", ["retry", "verdict", "infrastructure"])
def test_the_next_launch_is_the_next_attempt(jobs: Jobs, after_failure: Any, tried: int | None) -> None:
    ref = jobs.launch("echo on; sleep 60")
    assert jobs.client.cancel(ref)
    spec = {"runtime": "trainjob-step", "command": ["true"]}
    again = jobs.client.launch(spec, "key", tried=tried, after_failure=after_failure)
    assert (ref.attempt, again.attempt) == (1, 2)


def test_the_name_of_a_deleted_job_is_not_used_again(jobs: Jobs) -> None:
    for attempt in (1, 2, 3):
        ref = jobs.launch("true")
        assert ref.attempt == attempt
        jobs.client.wait(ref)
        jobs.client.call(lambda ref=ref: jobs.client.backend.delete(ref))  # type: ignore[misc]
        eventually(lambda ref=ref: jobs.client.get(ref) is None)  # type: ignore[misc]


def test_a_cancel_of_a_key_ends_its_job(jobs: Jobs) -> None:
    ref, other = training(jobs), jobs.launch("echo on; sleep 60", key="another")
    done = jobs.client.cancel_key("key")
    assert (done.jobs, done.ended) == ((ref,), True)
    assert observe(jobs.client.get(ref)).phase is Phase.CANCELLED
    assert not observe(jobs.client.get(other)).phase.terminal
    again = jobs.client.cancel_key("key")
    assert (again.jobs, again.ended) == ((), True)


@pytest.mark.parametrize("action", ["cancel", "suspend"])
def test_a_launch_on_its_way_obeys_a_cancel_of_its_key(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, action: Any
) -> None:
    """The cancel finds no job: the launch has looked, and has not created one yet."""
    backend = jobs.client.backend
    create = backend.create

    async def cancelled_before(trainjob: Any, *, dry_run: bool = False) -> Any:
        monkeypatch.setattr(backend, "create", create)
        assert (await cancel_key(backend, "key", namespace="default", action=action)).jobs == ()
        return await create(trainjob, dry_run=dry_run)

    monkeypatch.setattr(backend, "create", cancelled_before)
    with pytest.raises(TrainJobFailed, match="its key was cancelled while it was launched"):
        jobs.launch("echo on; sleep 60")
    (left,) = jobs.client.list()
    ref = JobRef.of(left)
    eventually(lambda: observe(jobs.client.get(ref)).phase is Phase.SUSPENDED)
    again = jobs.launch("echo on; sleep 60")
    assert again == ref, "a launch that begins afterwards is not concerned, and resumes the job"
    jobs.starts(again)


def test_a_waiter_resumes_a_job_that_the_kill_of_an_earlier_try_suspended(jobs: Jobs) -> None:
    spec = {"runtime": "trainjob-step", "command": ["sh", "-c", "echo on; sleep 60"]}
    ref = jobs.client.launch(spec, "key", tried=1)
    job = jobs.client.get(ref)
    assert job is not None
    assert jobs.client.launch(spec, "key", tried=2) == ref
    jobs.client.call(lambda: request_cancel(jobs.client.backend, job, "suspend", "try:1"))
    eventually(lambda: observe(jobs.client.get(ref)).phase is Phase.SUSPENDED)
    waiting = jobs.client.start(lambda: wait(jobs.client.backend, ref))
    eventually(lambda: observe(jobs.client.get(ref)).phase is Phase.RUNNING)
    waiting.cancel()


def test_many_launchers_at_once_start_one_job(jobs: Jobs) -> None:
    async def launch_all() -> list[JobRef]:
        spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["sh", "-c", "echo on; sleep 60"]})
        backend = jobs.client.backend
        return await asyncio.gather(*(launch(backend, spec, "key", namespace="default") for _ in range(6)))

    refs = jobs.client.call(launch_all)
    assert len(set(refs)) == 1
    assert [JobRef.of(job) for job in jobs.client.list()] == refs[:1]


@pytest.mark.full
def test_a_launch_during_a_cancel_is_the_next_attempt(jobs: Jobs, tmp_path: Path) -> None:
    ref = jobs.launch(f"trap 'until [ -e {tmp_path}/go ]; do sleep 0.05; done; exit' TERM; echo on; sleep 60 & wait")
    jobs.starts(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    assert marked(ref.uid) != {}
    assert jobs.launch("true").attempt == 2
    assert marked(ref.uid) == {}, "the ranks of two attempts never run at once"
    (tmp_path / "go").touch()


@pytest.mark.full
def test_a_launch_that_does_not_wait_for_ranks_names_them(jobs: Jobs) -> None:
    ref = jobs.launch("trap '' TERM; echo on; sleep 60 & wait; sleep 60")
    jobs.starts(ref)
    jobs.client.call(lambda: cancel_key(jobs.client.backend, "key", namespace="default", timeout_seconds=0))
    spec = TrainJobSpec.parse({"runtime": "trainjob-step", "command": ["true"]})
    with pytest.raises(RanksRemain, match=f"node-0 of {ref.name}"):
        jobs.client.call(lambda: launch(jobs.client.backend, spec, "key", namespace="default", wait_for_ranks=False))
    assert [JobRef.of(job) for job in jobs.client.list()] == [ref]


def test_a_cancel_after_the_end_has_no_effect(jobs: Jobs) -> None:
    ref = jobs.launch("echo done")
    jobs.client.wait(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    path = jobs.directory(ref) / "object.json"
    late = read_json(path)
    assert late is not None
    late["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["trainjob.dev/keep"]}
    write_json(path, late)  # the job has ended between the read and the change
    assert observe(jobs.client.get(ref)).phase is Phase.COMPLETE
    assert jobs.launch("echo done") == ref, "the result has not been delivered yet"


def test_a_cancelled_job_can_be_deleted(jobs: Jobs) -> None:
    ref = training(jobs)
    jobs.client.cancel(ref)
    jobs.client.call(lambda: jobs.client.backend.delete(ref))
    assert jobs.client.get(ref) is None
    assert not jobs.directory(ref).exists()
    assert jobs.launch("true").attempt == 2


@pytest.mark.full
def test_a_job_can_be_deleted_during_a_cancel(jobs: Jobs) -> None:
    ref = jobs.launch("trap '' TERM; echo on; while :; do sleep 0.1; done")
    jobs.starts(ref)
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    jobs.client.call(lambda: jobs.client.backend.delete(ref))
    jobs.client.call(lambda: jobs.client.backend.cancel(ref))
    eventually(lambda: jobs.client.get(ref) is None)
    assert not jobs.directory(ref).exists()


# ---------------------------------------------------------------- the command line


def test_the_command_line_prints_how_to_read_the_logs(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    ref = training(jobs)
    expected = f"cancelled {ref}; its logs and metrics are kept: trainjob logs {ref.name}\n"
    assert exit_of(capsys, "cancel", ref.name)[:2] == (0, expected)
    assert exit_of(capsys, "cancel", ref.name)[:2] == (0, f"{ref} has already ended: Cancelled\n")
    assert "epoch 1" in exit_of(capsys, "logs", ref.name)[1]
    (listed,) = json.loads(exit_of(capsys, "list", "--phase", "Cancelled", "--json")[1])["jobs"]
    assert (listed["phase"], listed["reason"], listed["metrics"]) == ("Cancelled", "Cancelled", {"loss": 0.5})
    code, out, _ = exit_of(capsys, "status", ref.name)
    assert code == 0
    assert "loss 0.5" in out
    assert f"TrainJob {ref} is Cancelled: the job was cancelled with trainjob" in out
    code, _, err = exit_of(capsys, "wait", ref.name)
    assert code == 5
    assert "the job was cancelled with trainjob" in err
    assert exit_of(capsys, "diagnose", ref.name)[0] == 5
    code, _, err = exit_of(capsys, "resume", ref.name)
    assert (code, "is Cancelled; launch it again" in err) == (2, True)


def ended_ago(jobs: Jobs, ref: JobRef, time: str) -> None:
    eventually(lambda: jobs.supervisors(ref) == [])
    path = jobs.directory(ref) / "status.json"
    status = read_json(path)
    assert status is not None
    for condition in status["status"]["conditions"]:
        condition["lastTransitionTime"] = time
    write_json(path, status)


def test_gc_removes_old_jobs(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    old, failed, fresh, running = (
        jobs.launch(script, key) for key, script in enumerate_keys("true", "exit 3", "true", "echo on; sleep 60")
    )
    cancelled = training(jobs, key="cancelled")
    jobs.client.cancel(cancelled)
    for ref in (old, failed, fresh):
        eventually(lambda ref=ref: observe(jobs.client.get(ref)).phase.terminal)  # type: ignore[misc]
    for ref in (old, failed, cancelled):
        ended_ago(jobs, ref, "2026-01-01T00:00:00Z")
    phases = {old: "Complete", failed: "Failed", cancelled: "Cancelled"}

    draft, grave = jobs.home / "jobs" / "default" / ".new-0", jobs.home / "jobs" / "default" / ".deleted" / ".a.0"
    for path in (draft, grave, draft.with_name(".new-1")):
        (path / "logs").mkdir(parents=True)
        if path.name != ".new-1":  # the draft of a launch that may still be in progress
            os.utime(path, (1, 1))

    code, out, _ = exit_of(capsys, "gc", "--dry-run")
    assert code == 0
    for ref, phase in phases.items():
        assert f"would remove {ref}: {phase}, ended " in out
    assert len(out.splitlines()) == 3 + 2
    assert all(jobs.directory(ref).exists() for ref in phases)
    assert draft.exists()

    assert exit_of(capsys, "gc", "-n", "other")[1:] == ("", "no job in namespace other ended more than 7d00h ago\n")
    answer = json.loads(exit_of(capsys, "gc", "--older-than", "7d", "--json")[1])
    assert answer["dry_run"] is False
    assert {job["name"]: job["phase"] for job in answer["removed"]} == {
        ref.name: phase for ref, phase in phases.items()
    }
    assert not any(jobs.directory(ref).exists() for ref in phases)
    assert answer["leftovers"] == [str(path) for path in (grave, draft)]
    assert [draft.exists(), grave.exists(), draft.with_name(".new-1").exists()] == [False, False, True]
    assert {job["metadata"]["name"] for job in jobs.client.list()} == {fresh.name, running.name}
    assert observe(jobs.client.get(running)).phase is not Phase.DELETED
    assert exit_of(capsys, "gc")[1:] == ("", "no job in namespace default ended more than 7d00h ago\n")
    assert jobs.launch("true", key="0").attempt == 2, "the name is not reused"


def enumerate_keys(*scripts: str) -> list[tuple[str, str]]:
    return [(str(number), script) for number, script in enumerate(scripts)]


def test_gc_of_a_cluster_removes_nothing_here(
    jobs: Jobs, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = jobs.launch("true", "old")
    ended_ago(jobs, old, "2026-01-01T00:00:00Z")
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    code, _, err = exit_of(capsys, "gc", "--backend", "kubernetes")
    assert (code, "no cluster is configured" in err) == (2, True)
    assert jobs.directory(old).exists()
