"""Every runtime that Trainer ships: the spec of a job for it, and the pods that Trainer creates.

docs/how-to/runtimes.md has the same table (tests/docs/test_runtimes.py); test_runtimes.py runs all jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Object = dict[str, Any]

PROVIDERS = {"python": "Python", "airflow": "Airflow", "kfp": "KFP"}
"""The clients that launch each runtime."""

RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""The field of a pod that has its rank."""

SCRIPT = ["python", "train.py"]

_MOUNT = {"name": "initializer", "mountPath": "/workspace"}
_POD = {
    "volumes": [{"name": "initializer", "emptyDir": {}}],
    "containers": [{"name": "dataset-initializer", "volume_mounts": [_MOUNT]}],
}
_JOB = {"name": "dataset-initializer", "template": {"spec": {"template": {"spec": _POD}}}}
INITIALIZER_VOLUME: Object = {"training_runtime_spec": {"template": {"spec": {"replicated_jobs": [_JOB]}}}}
"""Without it Trainer refuses `initializer.dataset` with torch-distributed-with-cache."""


@dataclass(frozen=True)
class Shipped:
    """One of Trainer's runtimes.

    Attributes:
        runtime: Name of the runtime.
        asked: Fields of the spec besides the runtime.
        pods: Replicated job -> number of pods.
        environment: Variables that Trainer adds to the containers of the training; ``{job}`` is the job's name.
        command: Command of these containers if it differs from the spec's; None for the command of the runtime.
        real: What was tested on the real node, for the documentation.
    """

    runtime: str
    asked: Object
    pods: Mapping[str, int]
    environment: Mapping[str, str] = field(default_factory=dict)
    command: tuple[str, ...] | None = ()
    real: str = ""

    @property
    def trains_in(self) -> str:
        """The replicated job whose container runs the command of the spec."""
        return "launcher" if "launcher" in self.pods else "node"


def _torch(nodes: int, processes: str, *, master: bool = True) -> dict[str, str]:
    address = {"PET_MASTER_ADDR": "{job}-node-0-0.{job}", "PET_MASTER_PORT": "29500"}
    own = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": processes, "PET_NODE_RANK": RANK}
    return {**own, **(address if master else {})}


def _open_mpi(processes: int) -> dict[str, str]:
    return {
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": str(processes),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }


_INITIALIZED = {"dataset-initializer": 1, "model-initializer": 1, "node": 1}
_LLAMA = "tokenizer.path=/workspace/model/original/tokenizer.model"
_QWEN = ("tokenizer.path=/workspace/model/vocab.json", "tokenizer.merges_file=/workspace/model/merges.txt")


def _tune(recipe: str, config: str, *tokenizer: str, meeting: bool = True) -> tuple[str, ...]:
    """The command that Trainer generates from ``tune run``."""
    where = ["--rdzv_endpoint={job}-node-0-0.{job}:29500"] if meeting else []
    paths = ("output_dir=/workspace/output", *tokenizer, "checkpointer.checkpoint_dir=/workspace/model")
    return ("tune", "run", *where, recipe, "--config", config, *paths)


SHIPPED = (
    Shipped(
        "torch-distributed",
        {"num_nodes": 2, "num_proc_per_node": 2, "command": ["torchrun", "train.py"]},
        {"node": 2},
        _torch(2, "2"),
        real="PyTorch 2 on two nodes by `torchrun`, one of which is lost and replaced on the way",
    ),
    Shipped(
        "torch-distributed-with-cache",
        {
            "num_nodes": 2,
            "command": ["torchrun", "train.py"],
            "initializer": {
                "dataset": {
                    "storage_uri": "cache://digits/train",
                    "metadata_loc": "s3://data/metadata.json",
                    "num_data_nodes": 2,
                }
            },
            "runtime_patches": [INITIALIZER_VOLUME],
        },
        {"dataset-initializer": 1, "node": 2},
        _torch(2, "1"),
    ),
    Shipped(
        "jax-distributed",
        {"num_nodes": 2, "command": SCRIPT},
        {"node": 2},
        {
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": RANK,
            "JAX_COORDINATOR_ADDRESS": "{job}-node-0-0.{job}:29500",
        },
        real="the example training with JAX on two nodes",
    ),
    Shipped(
        "xgboost-distributed",
        {"num_nodes": 2, "resources_per_node": {"gpu": 2}, "command": SCRIPT},
        {"node": 2},
        {
            "DMLC_TRACKER_URI": "{job}-node-0-0.{job}",
            "DMLC_TRACKER_PORT": "29500",
            "DMLC_TASK_ID": RANK,
            "DMLC_NUM_WORKER": "4",  # one for each GPU
        },
    ),
    Shipped(
        "deepspeed-distributed",
        {"num_nodes": 3, "resources_per_node": {"gpu": 2}, "command": ["mpirun", *SCRIPT]},
        {"node": 2, "launcher": 1},
        _open_mpi(2),
        real="Debian's Open MPI on two nodes, by a [copy of the runtime with another image](#mpi)",
    ),
    Shipped(
        "mlx-distributed",
        {"num_nodes": 2, "num_proc_per_node": 4, "command": ["mpirun", *SCRIPT]},
        {"node": 1, "launcher": 1},
        _open_mpi(4),
    ),
    Shipped(
        "torchtune-llama3.2-1b",
        {
            "torchtune": {"epochs": 1, "peft_config": {"lora_rank": 8}},
            "initializer": {
                "dataset": "hf://tatsu-lab/alpaca/data",
                "model": {"storage_uri": "hf://meta-llama/Llama-3.2-1B-Instruct", "secret_ref": "hugging-face"},
            },
        },
        _INITIALIZED,
        _torch(1, "auto", master=False),
        _tune("lora_finetune_distributed", "llama3_2/1B_lora", _LLAMA),
    ),
    Shipped("torchtune-llama3.2-3b", {}, _INITIALIZED, _torch(1, "auto"), None),
    Shipped(
        "torchtune-qwen2.5-1.5b",
        {"torchtune": {"batch_size": 8}, "resources_per_node": {"gpu": 1}},
        _INITIALIZED,
        _torch(1, "auto", master=False),
        _tune("full_finetune_single_device", "qwen2_5/1.5B_full_single_device", *_QWEN, meeting=False),
    ),
)

KFP_PARAMETERS = (
    *("runtime", "image", "command", "args", "num_nodes", "num_proc_per_node", "resources_per_node", "env"),
    *("inputs", "outputs"),
)
"""Parameters of the component ``train``; all other fields are passed in ``spec``."""


def for_kfp(fields: Mapping[str, Any]) -> Object:
    """The arguments of the component ``train`` that are equivalent to fields of a spec."""
    own = {name: value for name, value in fields.items() if name in KFP_PARAMETERS}
    others = {name: value for name, value in fields.items() if name not in KFP_PARAMETERS}
    return {**own, **({"spec": others} if others else {})}
