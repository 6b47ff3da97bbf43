"""GPUs of this machine: each job has its own, and the next ones wait in the order of their launches."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.contract.processes import marked
from tests.local.conftest import Jobs, kill
from tests.processes import eventually

from trainjob import JobRef, Phase, WaitOptions
from trainjob._backends.local import gpus
from trainjob.errors import LaunchError, QueueTimeout
from trainjob.status import Observation, observe

# What driver 550 prints on a machine with two GPUs, for the queries that the backend makes.
NVIDIA_SMI = """
case "$*" in
  "--query-gpu=index,uuid --format=csv,noheader") printf '0, GPU-a\\n1, GPU-b\\n';;
  "--query-compute-apps=gpu_uuid,pid,process_name --format=csv,noheader") cat {others};;
  *) exit 2;;
esac
"""
ONE, TWO = {"gpu": 1}, {"gpu": 2}


@pytest.fixture
def others(program: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs; the file lists processes that use them."""
    (others := tmp_path / "others").touch()
    monkeypatch.setenv("PATH", f"{program('nvidia-smi', NVIDIA_SMI.format(others=others))}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return others


class Gated:
    """Jobs that print their GPUs, and run until they are released."""

    def __init__(self, jobs: Jobs, directory: Path) -> None:
        self.jobs, self.directory = jobs, directory

    def launch(self, key: str, resources: dict[str, int], **fields: Any) -> JobRef:
        script = f"echo $CUDA_VISIBLE_DEVICES; until [ -e {self.directory}/{key} ]; do sleep 0.05; done"
        return self.jobs.launch(script, key, resources_per_node=resources, **fields)

    def release(self, key: str) -> None:
        (self.directory / key).touch()

    def gpus(self, ref: JobRef) -> list[str]:
        """Of each rank that has started."""
        return self.jobs.lines(ref)

    def state(self, ref: JobRef) -> Observation:
        return observe(self.jobs.client.get(ref))

    def queued(self, ref: JobRef) -> Observation:
        eventually(lambda: self.state(ref).phase is Phase.QUEUED)
        return self.state(ref)


@pytest.fixture
def gated(jobs: Jobs, tmp_path: Path) -> Gated:
    return Gated(jobs, tmp_path)


@pytest.mark.usefixtures("others")
def test_each_job_has_gpus_of_its_own_and_the_next_one_waits(gated: Gated) -> None:
    first, second = gated.launch("a", ONE), gated.launch("b", ONE)
    third = gated.launch("c", ONE)
    state = gated.queued(third)
    expected = f"GPU 0 is used by TrainJob {first.namespace}/{first.name}; GPU 1 is used by TrainJob default/"
    assert state.message.startswith(f"waiting for 1 of the 2 GPUs of this machine, position 1; {expected}")
    assert (state.reason, state.admitted) == ("WaitingInQueue", None)
    eventually(lambda: [gated.gpus(each) for each in (first, second)] == [["0"], ["1"]])
    gated.release("b")
    eventually(lambda: gated.gpus(third) == ["1"])
    assert (admitted := gated.state(third).admitted) is not None
    assert state.waiting_since is not None
    assert admitted > state.waiting_since


@pytest.mark.usefixtures("others")
def test_the_first_launched_job_is_the_first_to_start(gated: Gated) -> None:
    """Also if a later one would fit at once: a job that needs many GPUs would never start otherwise."""
    refs = {key: gated.launch(key, each) for key, each in (("a", ONE), ("b", TWO), ("c", ONE))}
    gated.queued(refs["b"])
    eventually(lambda: "position 2" in gated.queued(refs["c"]).message)
    gated.release("a")
    eventually(lambda: gated.gpus(refs["b"]) == ["0,1"])
    assert gated.gpus(refs["c"]) == []
    gated.release("b")
    eventually(lambda: gated.gpus(refs["c"]) == ["0"])


@pytest.mark.usefixtures("others")
def test_the_queue_timeout_counts_for_gpus(gated: Gated) -> None:
    gated.launch("a", TWO)
    options = WaitOptions(queue_timeout=timedelta(seconds=0.5))
    with pytest.raises(QueueTimeout, match="waiting for 1 of the 2 GPUs of this machine, position 1"):
        gated.jobs.client.wait(gated.launch("b", ONE), options=options)


def test_gpus_of_other_processes_are_not_free(gated: Gated, others: Path) -> None:
    others.write_text("GPU-a, 4711, /usr/bin/python3\nGPU-b, 12, nvidia-cuda-mps-server\n")
    first = gated.launch("a", ONE)
    eventually(lambda: gated.gpus(first) == ["1"])
    second = gated.launch("b", ONE)
    assert "GPU 0 is used by process 4711 (python3)" in gated.queued(second).message
    others.write_text("")
    eventually(lambda: gated.gpus(second) == ["0"])


def test_jobs_share_gpus_if_a_person_says_so(gated: Gated, others: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others.write_text("GPU-a, 4711, python3\n")
    monkeypatch.setenv("TRAINJOB_LOCAL_GPUS", "3")
    refs = [gated.launch(key, ONE) for key in "abc"]
    eventually(lambda: sorted(gpu for ref in refs for gpu in gated.gpus(ref)) == ["0", "0", "1"])
    with pytest.raises(LaunchError, match=r"requests 1 node\(s\) x 3"):
        gated.launch("d", {"gpu": 3})


@pytest.mark.parametrize("killed", ["rank", "supervisor", "guard", "both"])
@pytest.mark.usefixtures("others")
def test_a_kill_gives_a_gpu_to_nobody_and_to_no_two(gated: Gated, killed: str) -> None:
    first = gated.launch("a", TWO)
    gated.jobs.starts(first)
    second = gated.launch("b", ONE)
    gated.queued(second)
    guard, supervisor = sorted(gated.jobs.supervisors(first), key=lambda each: -each.pid)
    if killed == "rank":
        os.kill(next(iter(marked(first.uid))), 9)
    for each in {"supervisor": [supervisor], "guard": [guard], "both": [guard, supervisor]}.get(killed, []):
        kill(each)
    if killed == "guard":
        gated.release("a")
    eventually(lambda: gated.gpus(second) == ["0"])
    assert marked(first.uid) == {}
    assert gated.state(first).phase is (Phase.COMPLETE if killed == "guard" else Phase.FAILED)


@pytest.mark.usefixtures("others")
def test_a_suspended_job_leaves_its_gpus_and_waits_again(gated: Gated) -> None:
    first = gated.launch("a", TWO)
    gated.jobs.starts(first)
    second = gated.launch("b", TWO)
    gated.queued(second)
    assert gated.jobs.client.cancel(first, "suspend")
    eventually(lambda: gated.gpus(second) == ["0,1"])
    assert gated.launch("a", TWO) == first
    assert "position 1" in gated.queued(first).message
    gated.release("b")
    eventually(lambda: gated.gpus(first) == ["0,1", "0,1"])


@pytest.mark.parametrize("action", ["cancel", "suspend"])
@pytest.mark.usefixtures("others")
def test_a_job_in_the_queue_can_be_stopped(gated: Gated, action: Any) -> None:
    gated.launch("a", TWO)
    second, third = gated.launch("b", ONE), gated.launch("c", ONE)
    gated.queued(third)
    assert gated.jobs.client.cancel(second, action)
    assert gated.state(second).phase is (Phase.CANCELLED if action == "cancel" else Phase.SUSPENDED)
    eventually(lambda: "position 1;" in gated.state(third).message)
    gated.release("a")
    eventually(lambda: gated.gpus(third) == ["0"])
    assert gated.gpus(second) == []


def job(gpus_of_a_node: int, nodes: int = 1, runtime: str = "torch-distributed") -> dict[str, Any]:
    trainer = {"numNodes": nodes, "resourcesPerNode": {"limits": {gpus.RESOURCE: gpus_of_a_node}}}
    return {"spec": {"runtimeRef": {"name": runtime}, "trainer": trainer}}


@pytest.mark.parametrize(
    ("trainjob", "free", "placed"),
    [
        (job(2, nodes=2), {"0": 1, "1": 1, "2": 1, "3": 1}, [["0", "1"], ["2", "3"]]),
        (job(1), {"0": 0, "1": -1, "2": 1}, [["2"]]),
        (job(2), {"0": 2, "1": 0}, None),  # different ones within a node
        (job(2, nodes=2), {"0": 1, "1": 2, "2": 1}, [["1", "0"], ["1", "2"]]),
        (job(1, nodes=2), {"0": 2}, [["0"], ["0"]]),
        (job(1, nodes=2, runtime="deepspeed-distributed"), {"0": 1, "1": 1}, [["0", "1"]]),  # mpirun's are all
        (job(3), {"0": 1, "1": 1}, None),
    ],
)
def test_gpus_are_placed(trainjob: dict[str, Any], free: dict[str, int], placed: list[list[str]] | None) -> None:
    assert gpus.place(trainjob, free) == placed


@pytest.mark.parametrize(
    ("visible", "count", "expected"),
    [
        (None, None, {"0": 1, "1": 1}),
        ("1", None, {"1": 1}),
        ("GPU-b, 0", None, {"1": 1, "0": 1}),
        ("", None, {}),
        (None, "1", {"0": 1}),
        (None, "5", {"0": 3, "1": 2}),
        ("1", "2", {"1": 2}),
        (None, "0", {}),
    ],
)
@pytest.mark.usefixtures("others")
def test_the_gpus_that_jobs_share(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: str | None, expected: dict[str, int]
) -> None:
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("TRAINJOB_LOCAL_GPUS", count)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert list(gpus.present().items()) == list(expected.items())
