"""The local backend for its users: failures, results, limits of this machine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import JobRef, LogLine, Observation, Phase, TrainJobClient, TrainJobFailed, WaitOptions
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.ranks import MARKER, _kill_by_psutil
from trainjob._backends.local.store import JobFiles, _tombstone
from trainjob.errors import NotFound, Rejected, RuntimeNotFound, RunTimeout
from trainjob.status import observe
from trainjob.verdicts import Category, RetryVerdict

# ---------------------------------------------------------------- ends of jobs
# A shell sees $$$$ in scripts as $$: Kubernetes treats $$ as an escaped dollar sign.


def test_rank_1_of_2_exits_with_3(jobs: Jobs) -> None:
    found = jobs.fails(
        'echo "rank $JOB_COMPLETION_INDEX"; if [ $JOB_COMPLETION_INDEX = 0 ]; then sleep 60; fi; '
        'for i in $(seq 30); do echo "line $i"; done; echo "ValueError: no" >&2; exit 3',
        num_nodes=2,
    )
    assert (found.rank, found.exit_code, found.category) == ("node-1", 3, Category.USER_CODE)
    assert found.log[-1] == "ValueError: no"
    text = found.text()
    assert "node-1 exited with code 3" in text
    assert "  | ValueError: no" in text
    assert "line 5\n" not in text


def test_a_rank_is_killed(jobs: Jobs) -> None:
    found = jobs.fails("if [ $JOB_COMPLETION_INDEX = 1 ]; then kill -9 $$$$; fi; sleep 60", num_nodes=3)
    assert (found.rank, found.exit_code, found.retry) == ("node-1", 137, RetryVerdict.INFRASTRUCTURE)
    assert "signal 9 (SIGKILL)" in found.summary


def test_command_not_found(jobs: Jobs) -> None:
    found = jobs.fails(command=["no-such-program"], num_nodes=2)
    assert found.category is Category.CONFIGURATION
    assert found.summary == 'node-0 could not be started: exec: "no-such-program": executable file not found in $PATH'


def test_command_not_executable(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("no program")
    assert "permission denied" in jobs.fails(command=[str(tmp_path / "script")]).summary


def test_working_directory_is_gone(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ref = jobs.launch("true", suspend=True)
    (tmp_path / "here").rmdir()
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"spec": {"suspend": False}}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainJobFailed, match=r"working directory .* does not exist"):
        jobs.client.wait(ref)


def test_deadline(jobs: Jobs) -> None:
    began = time.monotonic()
    found = jobs.fails("echo begun; sleep 60", active_deadline_seconds=3, num_nodes=2)
    assert found.category is Category.DEADLINE
    assert found.log == ("begun",)
    assert 3 <= time.monotonic() - began < 3 + 30


@pytest.mark.full
def test_deadline_does_not_count_while_suspended(jobs: Jobs) -> None:
    ref = jobs.launch("sleep 0.2", active_deadline_seconds=4, suspend=True)
    time.sleep(4.2)
    jobs.client.call(lambda: jobs.client.backend.patch(ref, {"spec": {"suspend": False}}))
    jobs.client.wait(ref)


@pytest.mark.full
def test_a_rank_that_ignores_sigterm(jobs: Jobs) -> None:
    ref = jobs.launch("trap '' TERM; echo deaf; while :; do sleep 0.1; done", num_nodes=2)
    jobs.starts(ref, 2)
    began = time.monotonic()
    assert jobs.client.cancel(ref)
    assert 4 < time.monotonic() - began < 4 + 30
    assert marked(ref.uid) == {}


@pytest.mark.parametrize("patch", [{"spec": {"suspend": True}}, None], ids=["suspend", "delete"])
def test_a_job_counts_as_stopped_when_its_last_process_has_ended(jobs: Jobs, patch: dict[str, Any] | None) -> None:
    ref = jobs.launch("trap 'sleep 1; exit 0' TERM; echo on; while :; do sleep 0.1; done")
    jobs.starts(ref)

    async def stop() -> None:
        backend = LocalBackend()
        await (backend.delete(ref) if patch is None else backend.patch(ref, patch))
        assert not await backend.stopped(ref), "it handles SIGTERM for a second"
        with anyio.fail_after(20):
            while not await backend.stopped(ref):
                await anyio.sleep(0.01)
        assert marked(ref.uid) == {}

    anyio.run(stop)


def test_a_deletion_during_a_creation_reserves_the_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tombstone is written between the check and the rename."""
    directory = home / "jobs" / "default" / "train-1"
    tombstone = _tombstone(directory)
    rename = os.rename

    def late(old: Path, new: Path) -> None:
        rename(old, new)
        tombstone.parent.mkdir(parents=True, exist_ok=True)
        tombstone.touch()

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(FileExistsError):
        JobFiles.create(directory, {"metadata": {}}, {})
    assert not directory.exists()


def test_ranks_have_time_to_handle_sigterm(jobs: Jobs, tmp_path: Path) -> None:
    ref = jobs.launch(f"trap 'sleep 0.5; echo saved > {tmp_path}/checkpoint; exit 0' TERM; echo on; sleep 60 & wait")
    jobs.starts(ref)
    assert jobs.client.cancel(ref)
    assert (tmp_path / "checkpoint").read_text() == "saved\n"


DAEMON = "setsid sh -c 'trap \"\" TERM HUP; echo $$$$ > {0}/daemon; while :; do sleep 0.1; done' >/dev/null 2>&1 &"


@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$$$", "sleep 60"])
def test_no_process_of_a_job_survives_its_end(jobs: Jobs, tmp_path: Path, end: str) -> None:
    ref = jobs.launch(f"{DAEMON.format(tmp_path)} while ! [ -s {tmp_path}/daemon ]; do sleep 0.02; done; {end}")
    eventually(lambda: (tmp_path / "daemon").exists() and (tmp_path / "daemon").read_text())
    daemon = int((tmp_path / "daemon").read_text())
    if end == "sleep 60":
        assert daemon in marked(ref.uid)
        assert jobs.client.cancel(ref)
    else:
        eventually(lambda: observe(jobs.client.get(ref)).phase.terminal)
    assert marked(ref.uid) == {}


def test_leftover_processes_are_found_without_proc(jobs: Jobs, tmp_path: Path) -> None:
    ref = jobs.launch(f"{DAEMON.format(tmp_path)} echo on; sleep 60")
    jobs.starts(ref)
    assert _kill_by_psutil(ref.uid)
    assert os.environ.get(MARKER) is None
    eventually(lambda: marked(ref.uid) == {})


def test_a_rank_that_launches_a_job_does_not_own_it(jobs: Jobs, tmp_path: Path) -> None:
    """As on a cluster: the end of one job does not end another, and no rank outlives its supervisor."""
    program = (
        "from trainjob import TrainJobClient\n"
        "with TrainJobClient('local') as client:\n"
        "    client.launch({'runtime': 'trainjob-step', 'command': ['sleep', '60']}, 'inner')\n"
    )
    jobs.run(command=[sys.executable, "-c", program])
    (inner,) = [job for job in jobs.client.list() if job["metadata"]["annotations"]["trainjob.dev/key"] == "inner"]
    assert not observe(inner).phase.terminal
    eventually(lambda: len(marked(inner["metadata"]["uid"])) == 1)


# ---------------------------------------------------------------- suspend, resume, delete


def test_suspend_and_resume(jobs: Jobs, tmp_path: Path) -> None:
    script = f"echo begun; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; echo over"
    ref = jobs.launch(script, num_nodes=2)
    jobs.starts(ref, 2)
    assert jobs.client.cancel(ref, "suspend")
    assert marked(ref.uid) == {}
    assert observe(jobs.client.get(ref)).phase is Phase.SUSPENDED
    assert jobs.launch(script, num_nodes=2) == ref
    (tmp_path / "go").touch()
    result = jobs.client.wait(ref)
    assert result.uid == ref.uid
    assert jobs.lines(ref, "node-1") == ["begun", "begun", "over"]


def test_waiting_for_a_job_that_is_deleted(jobs: Jobs) -> None:
    ref = jobs.launch("sleep 60")
    timer = threading.Timer(0.3, lambda: jobs.client.start(lambda: jobs.client.backend.delete(ref)).result(10))
    timer.start()
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    timer.join()
    found = caught.value.diagnosis
    assert found.category is Category.DELETED
    assert found.job == f"default/{ref.name}"
    assert marked(ref.uid) == {}
    assert jobs.launch("true").attempt == 2


# ---------------------------------------------------------------- reports of scripts


def test_progress_metrics_and_outputs_while_it_runs(jobs: Jobs, tmp_path: Path) -> None:
    program = f"""
import pathlib, time
from trainjob import progress
progress.report(progress=40, metrics={{"loss": 0.5}}, remaining_seconds=9)
while not pathlib.Path({str(tmp_path / "go")!r}).exists():
    time.sleep(0.02)
progress.report(progress=100, metrics={{"loss": 0.25}}, outputs={{"model": "s3://b/m"}})
"""
    ref = jobs.launch(command=[sys.executable, "-c", program], num_nodes=2)
    eventually(lambda: observe(jobs.client.get(ref)).progress == 40)
    observation = observe(jobs.client.get(ref))
    assert (observation.metrics, observation.remaining_seconds) == ({"loss": 0.5}, 9)
    (tmp_path / "go").touch()
    result = jobs.client.wait(ref)
    assert (result.metrics, result.outputs) == ({"loss": 0.25}, {"model": "s3://b/m"})
    assert observe(jobs.client.get(ref)).progress == 100


def test_remaining_time_is_estimated_from_the_steps(jobs: Jobs, tmp_path: Path) -> None:
    program = f"""
import pathlib, time
from trainjob import progress
for step in (0, 1):
    progress.report(step=step, total_steps=4, metrics={{"loss": 1 - step / 4}})
while not pathlib.Path({str(tmp_path / "go")!r}).exists():
    time.sleep(0.02)
"""
    ref = jobs.launch(command=[sys.executable, "-c", program])
    eventually(lambda: observe(jobs.client.get(ref)).progress == 25)
    assert observe(jobs.client.get(ref)).remaining_seconds is not None
    (tmp_path / "go").touch()
    history = jobs.client.wait(ref).history
    assert [(step, value) for step, _, value in history["loss"]] == [(0, 1.0), (1, 0.75)]


def test_a_script_may_write_the_message_itself_and_only_rank_0_counts(jobs: Jobs) -> None:
    message = json.dumps({"trainjob": 1, "outputs": {"model": "file:///m"}, "metrics": [{"name": "a", "value": "1"}]})
    script = f"[ $JOB_COMPLETION_INDEX = 1 ] && exit; echo '{message}' > $TRAINJOB_TERMINATION_LOG"
    result = jobs.run(script, num_nodes=2)
    assert (result.metrics, result.outputs) == ({"a": 1.0}, {"model": "file:///m"})


@pytest.mark.parametrize("message", ["no JSON", '{"trainjob": 1, "outputs": ', '{"other": 1}', "x" * 9000, r"\377"])
def test_an_invalid_termination_message_is_ignored(jobs: Jobs, message: str) -> None:
    result = jobs.run(f"printf '{message}' > $TRAINJOB_TERMINATION_LOG")
    assert (result.metrics, result.outputs) == ({}, {})


# ---------------------------------------------------------------- environment, secrets, limits


def test_variables_of_the_spec_reach_the_ranks(jobs: Jobs, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "secrets" / "hf").mkdir(parents=True)
    (home / "secrets" / "hf" / "token").write_text("s3cret\n")
    (home / "configmaps" / "conf").mkdir(parents=True)
    (home / "configmaps" / "conf" / "mode").write_text("fast")
    monkeypatch.setenv("AIRFLOW_CTX_DAG_ID", "not for ranks")
    monkeypatch.setenv("FROM_OUTSIDE", "here")
    env = {
        "TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}},
        "MODE": {"configMapKeyRef": {"name": "conf", "key": "mode"}},
        "ABSENT": {"secretKeyRef": {"name": "hf", "key": "nosuch", "optional": True}},
        "POD": {"fieldRef": {"fieldPath": "metadata.name"}},
        "MEMORY": {"resourceFieldRef": {"resource": "limits.memory"}},
        "BOTH": "$(MODE)-$$(MODE)-$(NOSUCH)",
    }
    ref = jobs.launch(
        'echo "$TOKEN|$MODE|${ABSENT-unset}|$POD|$MEMORY|$BOTH|${AIRFLOW_CTX_DAG_ID-unset}|$FROM_OUTSIDE|"$0$1',
        env=env,
        args=["$(TRAINJOB_INPUT_DATA)", "$(MODE)"],
        inputs={"data": "s3://b/d"},
        resources_per_node={"memory": "1Gi"},
    )
    jobs.client.wait(ref)
    expected = f"s3cret|fast|unset|{ref.name}-node-0-0|1Gi|fast-$(MODE)-$(NOSUCH)|unset|here|s3://b/dfast"
    assert jobs.lines(ref) == [expected]
    assert "s3cret" not in (jobs.directory(ref) / "object.json").read_text()
    assert "s3cret" not in (jobs.directory(ref) / "status.json").read_text()


def test_a_missing_secret_is_reported(jobs: Jobs, home: Path) -> None:
    found = jobs.fails("true", env={"TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}}})
    assert found.category is Category.CONFIGURATION
    assert f"write the value to the file {home}/secrets/hf/token" in found.summary


def test_a_binary_secret_is_reported(jobs: Jobs, home: Path) -> None:
    (home / "secrets" / "hf").mkdir(parents=True)
    (home / "secrets" / "hf" / "token").write_bytes(b"\xff\xfe")
    found = jobs.fails("true", env={"TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}}})
    assert "is not UTF-8" in found.summary


def test_an_unsupported_value_source_is_reported(jobs: Jobs) -> None:
    manifest = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "spec": {
            "runtimeRef": {"name": "trainjob-step"},
            "trainer": {"command": ["true"], "env": [{"name": "A", "valueFrom": {"fileKeyRef": {"path": "x"}}}]},
        },
    }
    ref = jobs.client.launch(manifest, "manifest")
    with pytest.raises(TrainJobFailed, match="fileKeyRef is not supported on this machine"):
        jobs.client.wait(ref)


def test_an_unknown_runtime_is_refused(jobs: Jobs) -> None:
    with pytest.raises(RuntimeNotFound, match=r"'torch' does not exist on this machine; .*torch-distributed"):
        jobs.launch("true", runtime="torch")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give command or func"),
        ({"args": ["x"]}, "args need a command"),
        ({"command": ["x"], "initializer": {"dataset": "hf://a/b"}}, "must have dataset-initializer job"),
        ({"command": ["x"], "initializer": {"model": "hf://a/b"}}, "must have model-initializer job"),
    ],
)
def test_unsupported_specs_are_refused(jobs: Jobs, fields: dict[str, object], message: str) -> None:
    with pytest.raises(Rejected, match=message):
        jobs.launch(**fields)  # type: ignore[arg-type]
    assert jobs.client.list() == []


def test_missing_gpus_are_reported(
    jobs: Jobs, program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{program('nvidia-smi', 'echo 0; echo 1')}:{os.environ['PATH']}")
    with pytest.raises(
        Rejected, match=r"cannot be scheduled on this machine: .* 3 node\(s\) x 1 nvidia.com/gpu, .* machine has 2"
    ):
        jobs.launch("true", num_nodes=3, resources_per_node={"gpu": 1})


NVIDIA_SMI = """
# The output of driver 550 on a machine with four GPUs for: nvidia-smi --query-gpu=index --format=csv,noheader
[ "$*" = "--query-gpu=index --format=csv,noheader" ] || exit 2
printf '0\\n1\\n2\\n3\\n'
"""


@pytest.fixture
def four_gpus(program: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{program('nvidia-smi', NVIDIA_SMI)}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("visible", "each", "expected"),
    [(None, 2, ["0,1", "2,3"]), (None, 1, ["0", "1", "2"]), ("3,1", 1, ["3", "1"]), (None, 0, ["unset"])],
)
@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_distributed_to_the_ranks(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, visible: str | None, each: int, expected: list[str]
) -> None:
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    resources = {"gpu": each} if each else None
    result = jobs.run("echo ${CUDA_VISIBLE_DEVICES-unset}", num_nodes=len(expected), resources_per_node=resources)
    assert [jobs.lines(result, f"node-{i}")[0] for i in range(len(expected))] == expected


# ---------------------------------------------------------------- the synchronous client


def test_the_client_reports_changes_and_log_lines(jobs: Jobs, tmp_path: Path) -> None:
    phases: list[Phase] = []
    lines: list[LogLine] = []

    def changed(observation: Observation, notice: str) -> None:
        phases.append(observation.phase)
        if observation.phase is Phase.RUNNING:
            (tmp_path / "go").touch()

    ref = jobs.launch(f"echo one; while ! [ -e {tmp_path}/go ]; do sleep 0.05; done; echo two")
    jobs.client.wait(ref, on_change=changed, on_log=lines.append)
    assert phases[-2:] == [Phase.RUNNING, Phase.COMPLETE]
    assert [line.text for line in lines] == ["one", "two"]
    assert [line.text for line in jobs.client.logs(ref, tail=1)] == ["two"]


def test_the_client_finds_existing_jobs(jobs: Jobs) -> None:
    ref = jobs.launch("sleep 60", labels={"team": "x"})
    with TrainJobClient("local") as another:
        assert another.find(ref.name) == ref
        assert another.get(JobRef(ref.namespace, ref.name, "another")) is None
        assert [job["metadata"]["uid"] for job in another.list({"team": "x"})] == [ref.uid]
        assert another.list({"team": "y"}) == []
        with pytest.raises(NotFound, match="no TrainJob default/nosuch"):
            another.find("nosuch")


def test_the_client_works_inside_a_running_loop(jobs: Jobs) -> None:
    async def cell() -> None:
        jobs.run("true")

    asyncio.run(cell())


def test_a_signal_handler_can_delete_the_job_that_is_waited_for(jobs: Jobs) -> None:
    ref = jobs.launch("sleep 60")
    done = []

    def handler(*_: object) -> None:
        done.append(jobs.client.start(lambda: jobs.client.backend.delete(ref)))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(TrainJobFailed) as caught:
            jobs.client.wait(ref)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value.diagnosis.category is Category.DELETED
    done[0].result(10)


def test_a_closed_client_can_be_used_again(jobs: Jobs) -> None:
    jobs.run("true")
    jobs.client.close()
    jobs.client.close()
    jobs.run("true")


def test_start_timeout_counts_from_the_resume(jobs: Jobs) -> None:
    ref = jobs.launch("sleep 60")
    jobs.client.start(lambda: jobs.client.backend.patch(ref, {"spec": {"suspend": True}})).result(10)
    eventually(lambda: jobs.client.call(lambda: jobs.client.backend.stopped(ref)))
    jobs.client.start(lambda: jobs.client.backend.patch(ref, {"spec": {"suspend": False}})).result(10)
    # The timeout counts from the resume, not from the creation of the job.
    phases: list[Phase] = []
    with pytest.raises(RunTimeout):
        jobs.client.wait(
            ref,
            WaitOptions(start_timeout=timedelta(seconds=5), run_timeout=timedelta(seconds=3)),
            on_change=lambda observation, _: phases.append(observation.phase),
        )
    assert phases[-1] is Phase.RUNNING
