"""The environment that each runtime gives to its ranks, in real processes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.local.conftest import TORCH_PYTHON, Jobs, needs_torch

from trainjob import TrainJobClient, TrainJobResult
from trainjob._backends.local.backend import LocalBackend
from trainjob.errors import Category, Rejected, RetryVerdict

FULL = pytest.mark.full
PREFIXES = ("PET_", "JAX_", "DMLC_", "OMPI_")
needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun (Debian: openmpi-bin)")


def environment(jobs: Jobs, result: TrainJobResult, rank: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in jobs.lines(result, rank) if "=" in line)


TORCH = "PET_NNODES=3 PET_NPROC_PER_NODE=2 PET_NODE_RANK={rank} PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT={port}"
JAX = "JAX_NUM_PROCESSES=2 JAX_PROCESS_ID={rank} JAX_COORDINATOR_ADDRESS=127.0.0.1:{port}"
XGBOOST = "DMLC_TRACKER_URI=127.0.0.1 DMLC_TRACKER_PORT={port} DMLC_TASK_ID={rank} DMLC_NUM_WORKER=4"


@pytest.mark.parametrize(
    ("runtime", "nodes", "processes", "expected"),
    [
        ("torch-distributed", 3, 2, TORCH),
        ("jax-distributed", 2, None, JAX),
        ("xgboost-distributed", 2, 2, XGBOOST),
        ("trainjob-step", 2, None, ""),
    ],
)
def test_the_environment_of_each_rank(
    jobs: Jobs, runtime: str, nodes: int, processes: int | None, expected: str
) -> None:
    result = jobs.run("env", runtime=runtime, num_nodes=nodes, num_proc_per_node=processes)
    ranks = [environment(jobs, result, f"node-{rank}") for rank in range(nodes)]
    ports = [
        value.rpartition(":")[2]
        for name, value in ranks[0].items()
        if name.startswith(PREFIXES) and name.endswith(("_PORT", "_ADDRESS"))
    ]
    assert [port for port in ports if not 1024 <= int(port) < 65536] == []
    for rank, found in enumerate(ranks):
        of_runtime = {f"{name}={value}" for name, value in found.items() if name.startswith(PREFIXES)}
        assert of_runtime == set(expected.format(rank=rank, port="".join(ports)).split())
        assert found["JOB_COMPLETION_INDEX"] == str(rank)


def test_concurrent_jobs_have_different_ports(jobs: Jobs) -> None:
    refs = [jobs.launch("env; sleep 0.5", str(i), runtime="torch-distributed") for i in range(4)]
    results = [jobs.client.wait(ref) for ref in refs]
    assert len({environment(jobs, result, "node-0")["PET_MASTER_PORT"] for result in results}) == 4


def test_variables_of_a_runtime_override_inherited_ones(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_NODE_RANK", "7")
    result = jobs.run("env", runtime="torch-distributed")
    assert environment(jobs, result, "node-0")["PET_NODE_RANK"] == "0"


def test_environments_by_runtime(home: Path, tmp_path: Path) -> None:
    """A runtime's virtual environment is first on the PATH, as the programs of its image on a cluster."""
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").write_text("#!/bin/sh\necho from the environment\n")
    (tmp_path / "venv" / "bin" / "python").chmod(0o755)
    with TrainJobClient(LocalBackend(environments={"jax-distributed": tmp_path / "venv"})) as client:
        jobs = Jobs(client, home)
        ours = jobs.run(key="jax", command=["python"], runtime="jax-distributed")
        assert jobs.lines(ours) == ["from the environment"]
        theirs = jobs.run(key="torch", command=["python", "-c", "import sys; print(sys.prefix)"])
        assert jobs.lines(theirs) == [sys.prefix]


def train(text: str, times: int) -> None:
    """Runs on `every node`: "$5.00" \\ $(HOME)."""
    import os

    print(os.environ["JOB_COMPLETION_INDEX"], text * times)


def test_a_function_on_every_node(jobs: Jobs) -> None:
    text = "$(HOME) $$ `echo no` \"'\\ é"
    result = jobs.run(runtime="jax-distributed", func=train, func_args={"text": text, "times": 2}, num_nodes=2)
    assert jobs.lines(result, "node-1") == [f"1 {text * 2}"]


def test_a_function_without_its_launcher_fails_as_a_command_does(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # without torchrun
    given: list[dict[str, Any]] = [{"command": ["torchrun"]}, {"func": train, "func_args": {"text": "", "times": 1}}]
    for i, fields in enumerate(given):
        diagnosis = jobs.fails(key=str(i), runtime="torch-distributed", **fields)
        assert 'exec: "torchrun": executable file not found in $PATH' in diagnosis.summary
        assert (diagnosis.category, diagnosis.retry) == (Category.CONFIGURATION, RetryVerdict.CONFIGURATION)


def give() -> dict[str, str]:
    import os

    names = "RANK", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize(
    ("runtime", "fields", "rank"),
    [
        ("trainjob-step", {}, "JOB_COMPLETION_INDEX"),
        ("jax-distributed", {"num_nodes": 2}, "JAX_PROCESS_ID"),
        pytest.param("torch-distributed", {"num_nodes": 2, "num_proc_per_node": 2}, "RANK", marks=[FULL, needs_torch]),
        pytest.param("deepspeed-distributed", {"num_nodes": 2}, "OMPI_COMM_WORLD_RANK", marks=[FULL, needs_mpirun]),
    ],
)
def test_the_value_that_rank_0_returns(home: Path, runtime: str, fields: dict[str, Any], rank: str) -> None:
    environments = {"torch-distributed": Path(TORCH_PYTHON).parents[1]} if runtime == "torch-distributed" else {}
    with TrainJobClient(LocalBackend(environments=environments)) as client:
        result = Jobs(client, home).run(runtime=runtime, func=give, **fields)
    assert result.returned[rank] == "0"
    assert result.as_dict()["returned"] == result.returned


# ---------------------------------------------------------------- MPI


@pytest.mark.parametrize("runtime", ["deepspeed-distributed", "mlx-distributed"])
def test_mpi_without_mpirun(jobs: Jobs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, runtime: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        Rejected, match=r"needs mpirun, which is not installed here \(Debian: apt install openmpi-bin\)"
    ):
        jobs.launch(runtime=runtime, command=["mpirun", "true"])


@pytest.mark.full
@needs_mpirun
def test_mpi(jobs: Jobs) -> None:
    script = 'echo "$OMPI_COMM_WORLD_RANK of $OMPI_COMM_WORLD_SIZE"'
    command = ["mpirun", "sh", "-c", script]
    result = jobs.run(runtime="deepspeed-distributed", num_nodes=2, num_proc_per_node=2, command=command)
    assert sorted(jobs.lines(result, "launcher-0")) == [f"{rank} of 4" for rank in range(4)]


def mpi_train() -> None:
    import os
    import sys
    import time

    print("rank", os.environ["OMPI_COMM_WORLD_RANK"], flush=True)
    time.sleep(0.5)  # Open MPI 4.1 ends at once, and can lose the last output of a failing process
    sys.exit(int(os.environ["OMPI_COMM_WORLD_RANK"]) * 3)


@pytest.mark.full
@needs_mpirun
def test_a_function_with_mpi_fails_by_its_launcher(jobs: Jobs) -> None:
    found = jobs.fails(runtime="deepspeed-distributed", func=mpi_train, num_nodes=2)
    assert (found.rank, found.exit_code) == ("launcher-0", 3)
    assert any("rank 1" in line for line in found.log)


@pytest.mark.full
@needs_mpirun
def test_nothing_of_an_mpi_job_is_left(jobs: Jobs) -> None:
    fields: dict[str, Any] = {
        "runtime": "mlx-distributed",
        "command": ["mpirun", "sh", "-c", "trap '' TERM; echo on; sleep 60"],
    }
    ref = jobs.launch(num_nodes=2, **fields)
    jobs.starts(ref, 2)
    assert jobs.client.cancel(ref)  # the fixture fails if a process is left
