"""A training whose ranks write parts of one checkpoint, for `tests.local.test_training_scripts`. Needs PyTorch.

Each step adds 1 to a sharded tensor. ``FAIL_AT`` is a step in whose checkpoint rank 1 ends after it wrote a file.
"""

# mypy: ignore-errors
# (PyTorch has a separate environment)

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainjob import checkpoints

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
state = {"weights": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])}
found = [checkpoints.latest()]
dist.broadcast_object_list(found)
done = 0
if found[0]:
    done, directory = found[0]
    dcp.load(state, checkpoint_id=directory)
for step in range(done + 1, 6):
    state["weights"] = state["weights"] + 1

    def write(directory: Path, step: int = step) -> None:
        if os.environ.get("FAIL_AT") == str(step) and rank == 1:
            (directory / "__1_0.distcp").write_text("half of a file")
            os._exit(7)
        dcp.save(state, checkpoint_id=directory)

    checkpoints.save(step, write, rank=rank)
total = state["weights"].full_tensor().sum().item()
sys.stdout.write(f"rank {rank} resumed after step {done} and ends with {total:.0f}\n")
sys.stdout.flush()
dist.barrier()
os._exit(0)  # see the end of digits_torch.py
