"""A training whose ranks wait for each other in each step, and of which one rank does something that hangs or is slow.

Its collectives stand in for PyTorch's, which needs seconds to start: a `Hub` of the test completes a collective when
all ranks have called the same one. Like NCCL, they wait forever for a rank that is gone.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

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
RING = """
import os, socket, time
from pathlib import Path

def connect(path):
    global world, following, previous
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = socket.create_server(("", 29500))
    addresses = Path(path).parent / "addresses"
    addresses.mkdir(exist_ok=True)
    own = socket.gethostbyname(socket.gethostname())
    os.symlink(own, addresses / str(rank))
    while not os.path.islink(addresses / str((rank + 1) % world)):
        time.sleep(0.05)
    following = socket.create_connection((os.readlink(addresses / str((rank + 1) % world)), 29500))
    following.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    previous = server.accept()[0]

def all_reduce():
    _exchange(b"a")

def barrier():
    _exchange(b"b")

def _exchange(own):
    passed = own
    for _ in range(world - 1):
        try:
            following.sendall(passed)
            passed = previous.recv(1)
        except OSError:
            passed = b""
        if passed != own:
            time.sleep(1000)
"""
"""Collectives of pods, without a `Hub`: each rank sends to the next one, by TCP.

They find each other by files: DNS may take longer than a training may start.
"""

FAULTS = ("stop", "loop", "lock", "read", "collective", "end", "network")
"""Without ``disk``, for which `tests.cluster.test_hangs` slows down a disk."""


SLOW_RANK = """
import os, time
from trainjob import progress
slow = os.environ["JOB_COMPLETION_INDEX"] == "1"
end = time.monotonic() + 10
while time.monotonic() < end:
    time.sleep(0.08 if slow else 0.01)
    progress.step()
"""
"""A script of two ranks, of which rank 1 takes eight times as long for a step; for a timeout of 1.5 s."""


def planned(chance: random.Random, **plan: Any) -> dict[str, Any]:
    """What a job does, for its ``plan.json``: drawn, except for the values in `plan`."""
    world = chance.randint(2, 4)
    return {
        "world": world,
        "culprit": chance.randrange(world),
        "at": chance.randint(2, 60),  # the limit is longer before the second step
        "steps": 10_000,
        "early": chance.random() < 0.5,
        "first": 0,
        "paused": [],
        "slower": 1,
        "pauses": [],
        "pause": 0,
        "counts": chance.choice(["calls", "numbers", "report"]),
        "chatty": chance.choice([None, *range(world)]),
        "outside": False,
        **plan,
    }


def healthy(chance: random.Random, timeout: float) -> dict[str, Any]:
    """The plan of a job that pauses, but not for `timeout` seconds, or before its first step for twice that time.

    Either all ranks pause, up to twice, or rank 0 once: after two pauses it would be a straggler, if each lies on the
    border of two windows between readings.
    """
    steps = chance.randint(50, 120)
    alone = chance.random() < 0.5
    plan = planned(
        chance,
        fault="",
        culprit=-1,
        steps=steps,
        first=chance.choice([0, 1.2 * timeout]),
        pauses=chance.sample(range(1, steps), chance.randint(0, 1 if alone else 2)),
        pause=chance.uniform(0.2, 0.5) * timeout,
    )
    return {**plan, "paused": [0] if alone else [*range(plan["world"])]}


def result_of(right: int, noticed: list[float], timeout: float) -> tuple[str, int]:
    """What a campaign found: culprits that were right, and seconds until hangs were noticed; how many in time."""
    seconds, in_time = sorted(noticed), sum(each <= 2 * timeout for each in noticed)
    times = f"median {seconds[len(seconds) // 2]:.1f} s, longest {seconds[-1]:.1f} s"
    return f"{right} of {len(seconds)} culprits; {in_time} noticed within {2 * timeout:g} s, {times}", in_time


def slow(chance: random.Random, seconds: float) -> dict[str, Any]:
    """The plan of a job of at least so many seconds, in which one rank, or none, works longer than the others."""
    slower = chance.choice([1.0, chance.uniform(3, 8), chance.uniform(3, 8)])
    return planned(chance, fault="", slower=slower, at=0, chatty=None, steps=int(seconds / (0.01 * slower)))


def expected(plan: dict[str, Any]) -> str:
    """The rank that must be named; empty if none may be: nothing distinguishes one rank from the others."""
    undecided = plan["fault"] == "network" or (plan["fault"] == "collective" and plan["world"] == 2)
    return "" if undecided else f"node-{plan['culprit']}"


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
            if b"" in calls:  # a rank has ended, and the others wait for it
                time.sleep(1000)
                continue
            if len(calls) == 1 and (self._drop is None or number < self._drop):
                try:
                    for rank in ranks:
                        rank.sendall(b".")
                except OSError:  # a rank has ended since its call
                    time.sleep(1000)
            number += 1


def prepare(folder: Path, plan: dict[str, Any], collectives: str = COLLECTIVES) -> None:
    """Write the plan and the collectives of a job."""
    module = folder / "standin" / "torch" / "distributed"
    module.mkdir(parents=True)
    (module / "distributed_c10d.py").write_text(collectives)
    (folder / "plan.json").write_text(json.dumps(plan))


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


class Disk:
    """Reads from a file without the page cache."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(mmap.PAGESIZE))
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._page = mmap.mmap(-1, mmap.PAGESIZE)  # a direct read needs aligned memory

    def read(self) -> None:
        """Read a page."""
        os.preadv(self._file, [self._page], 0)


def main(folder: Path) -> None:
    """Train as ``plan.json`` says, which `prepare` writes."""
    from trainjob import progress

    plan = json.loads((folder / "plan.json").read_text())
    outside = plan["outside"]  # the test causes the fault, from outside of the process
    sys.path.insert(0, str(folder / "standin" / "torch" / "distributed"))
    import distributed_c10d  # type: ignore[import-not-found]  # written by `prepare`

    rank = int(os.environ["JOB_COMPLETION_INDEX"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(plan["world"])}
    distributed_c10d.connect(str(folder / "hub"))
    if plan["early"]:
        progress.watch()
    time.sleep(plan["first"])
    sample = Disk(folder / f"data-{rank}") if plan["fault"] == "disk" else None
    for step in range(plan["steps"]):
        hangs = rank == plan["culprit"] and step == plan["at"] and not outside
        if step == plan["at"]:
            (folder / f"at-{rank}").touch()
        if hangs:
            load(plan["fault"])
        if sample is not None:
            sample.read()
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
