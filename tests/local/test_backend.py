"""The local backend for its users: failures, results, limits of this machine.

`tests.contract` has what it has in common with a cluster.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs
from tests.processes import eventually

from trainjob import TrainJobFailed
from trainjob._backends.local.backend import LocalBackend
from trainjob._backends.local.store import JobFiles, _tombstone
from trainjob.errors import Category, LaunchError
from trainjob.status import QUEUE_LABEL, observe

# ---------------------------------------------------------------- ends of jobs
# A shell sees $$$$ in scripts as $$: Kubernetes treats $$ as an escaped dollar sign.


SECRET = {"TOKEN": {"secretKeyRef": {"name": "hf", "key": "token"}}}
FILE = {"fileKeyRef": {"path": "x", "key": "k", "volumeName": "v"}}
UNSUPPORTED = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "spec": {
        "runtimeRef": {"name": "trainjob-step"},
        "trainer": {"command": ["true"], "env": [{"name": "A", "valueFrom": FILE}]},
    },
}


@pytest.mark.parametrize(
    ("spec", "summary"),
    [
        (
            {"command": ["no-such-program"], "num_nodes": 2},
            r'^node-0 could not be started: exec: "no-such-program": executable file not found in \$PATH$',
        ),
        ({"command": [__file__]}, "permission denied"),
        ({"command": ["true"], "env": SECRET}, "write the value to the file {home}/secrets/hf/token"),
        ({"command": ["true"], "env": {"TOKEN": {"secretKeyRef": {"name": "binary", "key": "x"}}}}, "is not UTF-8"),
        (UNSUPPORTED, "fileKeyRef is not supported on this machine"),
    ],
    ids=["no program", "not executable", "no secret", "binary secret", "source of a value"],
)
def test_a_rank_that_cannot_start_is_reported(jobs: Jobs, home: Path, spec: dict[str, Any], summary: str) -> None:
    (home / "secrets" / "binary").mkdir(parents=True)
    (home / "secrets" / "binary" / "x").write_bytes(b"\xff\xfe")
    ref = jobs.client.launch(spec if spec is UNSUPPORTED else {"runtime": "trainjob-step", **spec}, "key")
    with pytest.raises(TrainJobFailed) as caught:
        jobs.client.wait(ref)
    assert caught.value.diagnosis.category is Category.CONFIGURATION
    assert re.search(summary.format(home=home), caught.value.diagnosis.summary)


def test_working_directory_is_gone(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    ref = jobs.launch("true", suspend=True)
    (tmp_path / "here").rmdir()
    jobs.patch(ref, {"spec": {"suspend": False}})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TrainJobFailed, match=r"working directory .* does not exist"):
        jobs.client.wait(ref)


def test_deadline(jobs: Jobs) -> None:
    found = jobs.fails("echo begun; sleep 60", active_deadline_seconds=3, num_nodes=2)
    assert (found.category, found.log) == (Category.DEADLINE, ("begun",))


@pytest.mark.full
def test_a_job_in_a_queue_starts_also_if_it_was_created_suspended(jobs: Jobs) -> None:
    """Manifests for Kueue often have `suspend`; here nothing but the queue's label would ever start it."""
    labels = {QUEUE_LABEL: "training"}
    assert jobs.lines(jobs.run("echo trained", suspend=True, labels=labels)) == ["trained"]
    manifest = {**UNSUPPORTED, "metadata": {"labels": labels}}
    manifest["spec"] = {"runtimeRef": {"name": "trainjob-step"}, "suspend": True, "trainer": {"command": ["true"]}}
    assert jobs.client.wait(jobs.client.launch(manifest, "manifest"))


def test_deadline_does_not_count_while_suspended(jobs: Jobs) -> None:
    ref = jobs.launch("sleep 0.2", active_deadline_seconds=4, suspend=True)
    time.sleep(4.2)
    jobs.patch(ref, {"spec": {"suspend": False}})
    jobs.client.wait(ref)


@pytest.mark.full
def test_ranks_have_seconds_to_handle_sigterm_and_are_killed_then(jobs: Jobs, tmp_path: Path) -> None:
    saves = f"trap 'sleep 4; echo saved > {tmp_path}/checkpoint; exit 0' TERM; echo on; sleep 60 & wait"
    ignores = "trap '' TERM; echo on; while :; do sleep 0.1; done"
    ref = jobs.launch(f"if [ $JOB_COMPLETION_INDEX = 0 ]; then {saves}; else {ignores}; fi", num_nodes=2)
    jobs.starts(ref, 2)
    assert jobs.client.cancel(ref)
    assert (tmp_path / "checkpoint").read_text() == "saved\n"
    assert marked(ref.uid) == {}


@pytest.mark.parametrize("patch", [{"spec": {"suspend": True}}, None], ids=["suspend", "delete"])
def test_a_job_counts_as_stopped_when_its_last_process_has_ended(jobs: Jobs, patch: dict[str, Any] | None) -> None:
    ref = jobs.launch("trap 'sleep 1; exit 0' TERM; echo on; while :; do sleep 0.1; done")
    jobs.starts(ref)

    async def stop() -> None:
        backend = LocalBackend()
        await (backend.delete(ref) if patch is None else backend.patch(ref, patch))
        assert not await backend.stopped(ref), "it handles SIGTERM for a second"
        with anyio.fail_after(60):
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


DAEMON = "setsid sh -c 'trap \"\" TERM HUP; echo $$$$ > {0}/daemon; while :; do sleep 0.1; done' >/dev/null 2>&1 &"
# As a process that exits: it has no environment. And no signal to the group of the rank reaches it.
WITHOUT_ENVIRONMENT = (
    f"env -i {sys.executable} -c 'import os, time; os.setpgid(0, 0);"
    ' open("{0}/daemon", "w").write(str(os.getpid())); time.sleep(60)\' >/dev/null 2>&1 &'
)


@pytest.mark.parametrize("daemon", [DAEMON, WITHOUT_ENVIRONMENT], ids=["session", "no environment"])
@pytest.mark.parametrize("end", ["exit 0", "exit 3", "kill -9 $$$$", "sleep 60"])
def test_no_process_of_a_job_survives_its_end(jobs: Jobs, tmp_path: Path, end: str, daemon: str) -> None:
    ref = jobs.launch(f"{daemon.format(tmp_path)} while ! [ -s {tmp_path}/daemon ]; do sleep 0.02; done; {end}")
    eventually(lambda: (tmp_path / "daemon").exists() and (tmp_path / "daemon").read_text())
    process = psutil.Process(int((tmp_path / "daemon").read_text()))
    if end == "sleep 60":
        assert jobs.client.cancel(ref)
    else:
        eventually(lambda: jobs.phase(ref).terminal)
    assert marked(ref.uid) == {}
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_rank_that_launches_a_job_does_not_own_it(jobs: Jobs) -> None:
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


# ---------------------------------------------------------------- reports of scripts


VALID = {"trainjob": 1, "outputs": {"model": "file:///m"}, "metrics": [{"name": "a", "value": "1"}]}


@pytest.mark.parametrize(
    "message", [json.dumps(VALID), "no JSON", '{"trainjob": 1, "outputs": ', '{"other": 1}', "x" * 9000, r"\377"]
)
def test_a_script_may_write_the_message_itself_and_only_rank_0_counts(jobs: Jobs, message: str) -> None:
    """An invalid one is ignored."""
    script = f"[ $JOB_COMPLETION_INDEX = 1 ] && exit; printf '{message}' > $TRAINJOB_TERMINATION_LOG"
    result = jobs.run(script, num_nodes=2)
    expected = ({"a": 1.0}, {"model": "file:///m"}) if message == json.dumps(VALID) else ({}, {})
    assert (result.metrics, result.outputs) == expected


# ---------------------------------------------------------------- environment, secrets, limits


def test_variables_of_the_spec_reach_the_ranks(jobs: Jobs, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in {"secrets/hf/token": "s3cret\n", "configmaps/conf/mode": "fast"}.items():
        (home / path).parent.mkdir(parents=True)
        (home / path).write_text(text)
    monkeypatch.setenv("AIRFLOW_CTX_DAG_ID", "not for ranks")
    monkeypatch.setenv("FROM_OUTSIDE", "here")
    env = SECRET | {
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


NVIDIA_SMI = """
# The output of driver 550 on a machine with four GPUs for: nvidia-smi --query-gpu=index,uuid --format=csv,noheader
[ "$*" = "--query-gpu=index,uuid --format=csv,noheader" ] || exit 2
printf '0, GPU-a\\n1, GPU-b\\n2, GPU-c\\n3, GPU-d\\n'
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give command or func"),
        ({"args": ["x"]}, "args need a command"),
        ({"command": ["x"], "initializer": {"dataset": "hf://a/b"}}, "must have dataset-initializer job"),
        ({"command": ["x"], "initializer": {"model": "hf://a/b"}}, "must have model-initializer job"),
        ({"command": ["x"], "runtime": "torch"}, "'torch' does not exist on this machine; .*torch-distributed"),
        ({"command": ["x"], "num_nodes": 3, "resources_per_node": {"gpu": 2}}, "machine has 4"),
        ({"command": ["x"], "checkpoints": "pvc://claim/path"}, "^.*checkpoints are in a Persist.*use file:///path"),
        (
            {"command": ["x"], "inputs": {"data": "pvc://claim/path"}},
            "its locations are in a Persist.*use file:///path",
        ),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_what_this_machine_cannot_run_is_refused(jobs: Jobs, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        jobs.launch(**fields)
    assert jobs.client.list() == []


# ---------------------------------------------------------------- the synchronous client


def test_a_closed_client_can_be_used_again_also_inside_a_running_loop(jobs: Jobs) -> None:
    jobs.run("true")
    jobs.client.close()
    jobs.client.close()

    async def cell() -> None:
        jobs.run("true")

    asyncio.run(cell())
