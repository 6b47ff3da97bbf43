"""A training whose ranks wait for each other in each step, and of which one rank does something that hangs or is slow.

Its collectives stand in for PyTorch's, which needs seconds to start: a `Hub` of the test completes a collective when
all ranks have called the same one. Like NCCL, they wait forever for a rank that is gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

COLLECTIVES = """
import socket, time

def connect(path):
    global hub
    hub = socket.socket(socket.AF_UNIX)
    hub.connect(path)

def all_reduce():
    hub.sendall(b"a")
    _complete()

def barrier():
    hub.sendall(b"b")
    _complete()

def _complete():
    if not hub.recv(1):
        time.sleep(1000)
"""
FAULTS = ("stop", "loop", "lock", "read", "collective", "end", "network")


class Hub(threading.Thread):
    """Completes the collectives of one job.

    Args:
        path: Where it listens.
        world: Number of ranks.
        drop: Number of the collective from which on no rank gets an answer, as without network; None: all are answered.
    """

    def __init__(self, path: Path, world: int, drop: int | None) -> None:
        super().__init__(daemon=True)
        self._world = world
        self._drop = drop
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(world)

    def run(self) -> None:
        ranks = [self._listener.accept()[0] for _ in range(self._world)]
        number = 0
        while True:
            calls = Counter(rank.recv(1) for rank in ranks)  # waits for every rank
            if b"" in calls:  # a rank has ended
                time.sleep(1000)
            if len(calls) == 1 and (self._drop is None or number < self._drop):
                for rank in ranks:
                    rank.sendall(b".")
            number += 1


def prepare(folder: Path, world: int, drop: int | None) -> None:
    """Write the collectives, and start the hub of a job."""
    module = folder / "standin" / "torch" / "distributed"
    module.mkdir(parents=True)
    (module / "distributed_c10d.py").write_text(COLLECTIVES)
    Hub(folder / "hub", world, drop).start()


def load(fault: str) -> None:
    """The data loader of the rank that hangs."""
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "loop":
        while True:
            time.sleep(0.002)
    elif fault == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif fault == "read":
        os.read(os.pipe()[0], 1)
    elif fault == "end":
        sys.exit(0)


def main(folder: Path) -> None:
    """Train as ``plan.json`` says, which `tests.local.test_hangs` writes."""
    from trainjob import progress

    plan = json.loads((folder / "plan.json").read_text())
    sys.path.insert(0, str(folder / "standin" / "torch" / "distributed"))
    import distributed_c10d  # type: ignore[import-not-found]  # written by `prepare`

    rank = int(os.environ["JOB_COMPLETION_INDEX"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(plan["world"])}
    distributed_c10d.connect(str(folder / "hub"))
    if plan["early"]:
        progress.watch()
    time.sleep(plan["first"])
    for step in range(plan["steps"]):
        hangs = rank == plan["culprit"] and step == plan["at"]
        if step == plan["at"]:
            (folder / f"at-{rank}").touch()
        if hangs:
            load(plan["fault"])
        if rank in plan["paused"] and step in plan["pauses"]:
            time.sleep(plan["pause"])
        time.sleep(0.01 * (plan["slower"] if rank == plan["culprit"] else 1))
        if hangs and plan["fault"] == "collective":
            distributed_c10d.barrier()
        else:
            distributed_c10d.all_reduce()
        if plan["counts"] == "calls":
            progress.step()
        elif plan["counts"] == "numbers" or rank:
            progress.step(step)
        if rank == 0 and plan["counts"] == "report":
            progress.report(step=step, total_steps=plan["steps"], metrics={"loss": 1 / (step + 1)})
        if plan["chatty"] == rank:
            print(f"step {step}: " + "x" * 80)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
