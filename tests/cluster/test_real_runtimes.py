"""Runtimes that Trainer ships, and Open MPI, with real processes in real pods that train together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cluster import failing as make
from tests.cluster.backends import backend_of
from tests.cluster.pods import pods_of
from tests.cluster.runtimes import SHIPPED
from tests.processes import wait_until
from tests.testcluster import images, step_image as steps
from tests.testcluster.access import Access
from tests.testcluster.control_plane import Cluster

from trainjob import JobRef, TrainJobClient, TrainJobResult
from trainjob._support.log_lines import LogLine

pytestmark = pytest.mark.timeout(900)

EXAMPLES = Path(__file__).parents[2] / "dags_examples" / "cluster"
MPI_RUNTIME = EXAMPLES / "mpi" / "mpi-distributed.yaml"
Object = dict[str, Any]

# Each process prints its pod. After the job's end only the launcher's pod exists.
SUM = """
import json
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.Get_rank() + 1)
print(f"rank {world.Get_rank()} of {world.Get_size()} on {MPI.Get_processor_name()}: {total}", flush=True)
report = {"trainjob": 1, "metrics": [{"name": "sum", "value": str(total)}]}
open("/dev/termination-log", "w").write(json.dumps(report))
"""

# Ends when two nodes train together again after the loss of one.
ELASTIC = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
while True:
    losses = torch.tensor([int(os.environ["TORCHELASTIC_RESTART_COUNT"])])
    dist.all_reduce(losses, op=dist.ReduceOp.MAX)
    print(f"rank {rank} of {world}, {losses.item()} lost", flush=True)
    if losses.item() > 0 and world == 2:
        break
    time.sleep(0.5)
from trainjob import progress
progress.report(metrics={"world": world, "lost": losses.item()})
"""


def rank_of() -> dict[str, str]:
    import os

    return {name: os.environ[name] for name in ("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX")}


@dataclass
class Ended:
    """A job of the real node, with its result and log lines once it has ended."""

    ref: JobRef
    result: TrainJobResult | None = None
    lines: list[LogLine] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(map(str, self.lines))


@pytest.fixture(scope="module")
def namespace(real_node: Access) -> Iterator[str]:
    with real_node.namespace("real", real=True) as name:
        yield name


@pytest.fixture(scope="module")
def client(real_node: Access, namespace: str) -> Iterator[TrainJobClient]:
    with TrainJobClient(backend_of(real_node.kubeconfig_for(namespace=namespace)), namespace) as opened:
        yield opened


@pytest.fixture(scope="module")
def jobs(client: TrainJobClient, own_cluster: Cluster, step_image: str) -> dict[str, Ended]:
    """Launch all jobs in parallel: most of their time is waiting."""
    own_cluster.add_runtime(steps.runtime(MPI_RUNTIME, images.MPI))
    script, data = f"{steps.EXAMPLES}/training/digits_jax.py", f"{steps.EXAMPLES}/data"
    asked: dict[str, Object] = {
        "function": {"runtime": "jax-distributed", "image": step_image, "num_nodes": 2, "func": rank_of},
        "jax": {
            "runtime": "jax-distributed",
            "image": step_image,
            "num_nodes": 2,
            "command": ["python", script, f"--dataset={data}", "--output=/tmp/model", "--epochs=2"],
        },
        "mpi": {"runtime": "mpi-distributed", "num_nodes": 2, "command": ["mpirun", "python", "-c", SUM]},
    }
    if site := images.torch_packages():
        asked["torch"] = elastic(site)
    return {name: Ended(client.launch(fields, name)) for name, fields in asked.items()}


def elastic(site: str) -> Object:
    """The example with PyTorch mounted and a script of this test."""
    example: Object = yaml.safe_load((EXAMPLES / "torch-elastic.yaml").read_text())
    torchrun, *options = example["command"]
    *meeting, script = example["args"]
    assert (torchrun, script) == ("torchrun", "train.py")
    return {
        **example,
        "image": steps.IMAGE,
        "num_proc_per_node": 1,
        "command": ["python", "-m", "torch.distributed.run", *options],
        "args": [*meeting, "--no-python", "python", "-c", ELASTIC],
        "env": {**example["env"], "PYTHONPATH": "/opt/torch", "OMP_NUM_THREADS": "1"},
        **make.mounted({"name": "torch", "hostPath": {"path": site}}, "/opt/torch", readOnly=True),
    }


def end(client: TrainJobClient, job: Ended) -> str:
    """Wait for a job and return its log."""
    job.result = client.wait(job.ref, on_log=job.lines.append)
    return job.text


def test_a_function_returns_the_value_of_rank_0(client: TrainJobClient, jobs: dict[str, Ended]) -> None:
    end(client, jobs["function"])
    assert jobs["function"].result
    assert jobs["function"].result.returned == {"JAX_PROCESS_ID": "0", "JOB_COMPLETION_INDEX": "0"}


def test_elastic_torch_training_survives_the_loss_and_return_of_a_node(
    client: TrainJobClient, own_cluster: Cluster, jobs: dict[str, Ended]
) -> None:
    if "torch" not in jobs:
        pytest.skip("TRAINJOB_TORCH_PYTHON does not name the Python 3.11 of an environment with PyTorch")
    job, api = jobs["torch"], own_cluster.api

    def logged(text: str) -> Callable[[], bool]:
        return lambda: any(text in line.text for line in client.logs(job.ref))

    wait_until("both nodes train", logged("of 2, 0 lost"), 300, poll=1)
    (lost,) = pods_of(own_cluster, job.ref, 1)
    with no_more_pods(own_cluster, job.ref.namespace):  # no replacement before the other rank trains alone
        api.delete("v1", "Pod", job.ref.namespace, lost["metadata"]["name"], grace=0)
        wait_until("one node trains alone", logged("rank 0 of 1,"), 300, poll=1)
    end(client, job)
    assert job.result
    assert job.result.metrics["world"] == 2
    assert float(job.result.metrics["lost"]) > 0
    (replaced,) = pods_of(own_cluster, job.ref, 1)
    assert replaced["metadata"]["uid"] != lost["metadata"]["uid"]


@contextmanager
def no_more_pods(cluster: Cluster, namespace: str) -> Iterator[None]:
    """No pod can be created in a namespace; existing pods stay."""
    with make.applied(make.quota("no-more", pods="0"))(cluster, namespace):

        def counted() -> bool:
            found = cluster.api.get("v1", "ResourceQuota", namespace, "no-more") or {}
            return "used" in found.get("status", {})

        wait_until("the quota is in force", counted)
        yield
    cluster.api.delete("v1", "ResourceQuota", namespace, "no-more")


def test_jax_on_two_nodes(client: TrainJobClient, jobs: dict[str, Ended]) -> None:
    lines = end(client, jobs["jax"])
    assert "[node-1] rank 1 of 2 starts" in lines
    assert "[node-0] epoch 2/2" in lines
    assert jobs["jax"].result
    assert float(jobs["jax"].result.metrics["accuracy"]) > 0.5


def test_mpirun_reaches_the_other_pod_by_ssh(client: TrainJobClient, jobs: dict[str, Ended]) -> None:
    lines = end(client, jobs["mpi"])
    name = jobs["mpi"].ref.name
    hosts = dict(re.findall(r"\[launcher-0\] rank (\d) of 2 on (\S+): 3", lines))
    assert {host.partition(".")[0] for host in hosts.values()} == {f"{name}-launcher-0-0", f"{name}-node-0-0"}, lines
    assert jobs["mpi"].result
    assert jobs["mpi"].result.metrics == {"sum": 3}


def test_the_documented_runtimes_are_those_tested(jobs: dict[str, Ended]) -> None:
    documented = {case.runtime for case in SHIPPED if case.real}
    assert documented == {"torch-distributed", "jax-distributed", "deepspeed-distributed"}
    assert jobs.keys() >= {"jax", "mpi"}
