"""The environment that each of Trainer's runtimes gives its ranks, on one machine.

The names are those of the ClusterTrainingRuntimes that Trainer 2.3 ships (``manifests/base/runtimes``) and of those in
``trainjob/install``. The variables are those of Trainer's plugins (``pkg/runtime/framework/plugins``), with a loopback
address instead of the headless service.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainjob._backends.local import permissions

FRAMEWORKS = {
    "trainjob-step": "plain",
    "torch-distributed": "torch",
    "torch-resilient": "torch",
    "jax-distributed": "jax",
    "jax-resilient": "jax",
    "xgboost-distributed": "xgboost",
    "deepspeed-distributed": "mpi",
    "mlx-distributed": "mpi",
}

MODULES = {
    **dict.fromkeys(("torch-distributed", "torch-resilient"), ("torch",)),
    **dict.fromkeys(("jax-distributed", "jax-resilient"), ("jax",)),
    "xgboost-distributed": ("xgboost",),
    "deepspeed-distributed": ("deepspeed", "torch"),
    "mlx-distributed": ("mlx",),
}
"""Runtime -> Python modules of its image that a training uses."""


def framework_of(trainjob: Mapping[str, Any]) -> str:
    """Framework of the runtime of a job; KeyError if this machine has no such runtime."""
    return FRAMEWORKS[trainjob["spec"]["runtimeRef"]["name"]]


def num_nodes(trainjob: Mapping[str, Any]) -> int:
    """Number of nodes; the default of the shipped runtimes is 1."""
    return int((trainjob["spec"].get("trainer") or {}).get("numNodes") or 1)


def replicated_jobs(trainjob: Mapping[str, Any]) -> dict[str, int]:
    """Replicated job -> number of its processes. With MPI, mpirun starts the processes of the nodes."""
    return {"launcher": 1} if framework_of(trainjob) == "mpi" else {"node": num_nodes(trainjob)}


def environment(trainjob: Mapping[str, Any], rank: int, port: int, directory: Path) -> dict[str, str]:
    """The variables that the plugin of the runtime injects into the container of `rank`."""
    nodes = num_nodes(trainjob)
    processes = (trainjob["spec"].get("trainer") or {}).get("numProcPerNode") or 1
    injected = {
        "torch": {
            "PET_NNODES": str(nodes),
            "PET_NPROC_PER_NODE": str(processes),
            "PET_NODE_RANK": str(rank),
            "PET_MASTER_ADDR": "127.0.0.1",
            "PET_MASTER_PORT": str(port),
        },
        "jax": {
            "JAX_NUM_PROCESSES": str(nodes),
            "JAX_PROCESS_ID": str(rank),
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        },
        "xgboost": {
            "DMLC_TRACKER_URI": "127.0.0.1",
            "DMLC_TRACKER_PORT": str(port),
            "DMLC_TASK_ID": str(rank),
            "DMLC_NUM_WORKER": str(nodes * processes),
        },
        "mpi": {
            "OMPI_MCA_orte_default_hostfile": str(directory / "hostfile"),
            "OMPI_MCA_orte_set_default_slots": str(processes),
            # mpirun refuses both by default; in a container it runs as the user of the image, on a separate node.
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
    }
    return {"JOB_COMPLETION_INDEX": str(rank), **injected.get(framework_of(trainjob), {})}


def write_hostfile(trainjob: Mapping[str, Any], directory: Path) -> None:
    """Write the list of hosts for mpirun: all slots are on this machine."""
    processes = (trainjob["spec"].get("trainer") or {}).get("numProcPerNode") or 1
    with open(directory / "hostfile", "w", opener=permissions.opener) as file:
        file.write(f"localhost slots={num_nodes(trainjob) * processes}\n")


_VOLUME_PATCHES = {"trainjob.dev/checkpoints": "checkpoints are", "trainjob.dev/claims": "its locations are"}
"""Manager of the patch that mounts PersistentVolumeClaims -> their use."""


def refusal(trainjob: Mapping[str, Any], path: str) -> str:
    """Why this machine cannot run `trainjob`, as a message for its author; empty if it can.

    Args:
        trainjob: The object.
        path: The PATH that its ranks will have.
    """
    spec = trainjob["spec"]
    trainer = spec.get("trainer") or {}
    runtime = spec["runtimeRef"]["name"]
    if not (trainer.get("command") or trainer.get("args")):
        return f"runtime {runtime} has no image on this machine, and so no entry point: give command or func"
    if not trainer.get("command"):
        return f"args need a command: runtime {runtime} has no entry point on this machine"
    for name in spec.get("initializer") or {}:
        return (
            f"runtime {runtime} must have {name}-initializer job when trainJob is configured with input "
            f"{name}Config: initialize it in a separate step before this job"
        )
    for patch in spec.get("runtimePatches") or []:
        if named := _VOLUME_PATCHES.get(patch["manager"]):
            return f"{named} in a PersistentVolumeClaim (pvc://), which this machine does not have: use file:///path"
    if framework_of(trainjob) == "mpi" and shutil.which("mpirun", path=path) is None:
        return f"runtime {runtime} needs mpirun, which is not installed here (Debian: apt install openmpi-bin)"
    return ""
