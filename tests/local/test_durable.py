"""A launch relies only on data that is on the disk: the system calls of the processes of a real launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs at the start of each Python process of the launch: the client, the supervisor, its guard.
TRACER = """
import os, sys

trace = os.open(os.environ["TRACE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
fsync = os.fsync

def traced(file):
    descriptor = file if isinstance(file, int) else file.fileno()
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    fsync(descriptor)
    os.write(trace, f"sync {path}\\n".encode())

def audit(event, arguments):
    if event == "os.rename":
        os.write(trace, f"rename {arguments[0]} {arguments[1]}\\n".encode())
    elif event == "os.mkdir":
        os.write(trace, f"mkdir {arguments[0]}\\n".encode())
    elif event == "subprocess.Popen":
        os.write(trace, f"start {' '.join(map(str, arguments[1]))}\\n".encode())

os.fsync = traced
sys.addaudithook(audit)
"""
PROGRAM = """
from trainjob import TrainJobClient

with TrainJobClient("local") as client:
    ref = client.launch({"runtime": "trainjob-step", "command": ["echo", "the rank"]}, "key")
    client.wait(ref)
    gone = client.launch({"runtime": "trainjob-step", "command": ["sleep", "60"]}, "another")
    client.cancel(gone)
    client.call(lambda: client.backend.delete(gone))
"""


@pytest.fixture
def trace(home: Path, tmp_path: Path) -> list[str]:
    if not Path("/proc/self/fd").exists():
        pytest.skip("the paths of open files are read from /proc")
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "sitecustomize.py").write_text(TRACER)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "python"), "TRACE": str(tmp_path / "trace")}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True, timeout=120)
    return (tmp_path / "trace").read_text().splitlines()


def test_a_launch_relies_only_on_synced_files(trace: list[str], home: Path) -> None:
    """Every file is synced before it is renamed, and every directory before the next process starts."""
    renamed, unsynced = [], set()
    synced: set[str] = set()
    for line in trace:
        what, _, rest = line.partition(" ")
        if not rest.startswith((str(home.parent), sys.executable, "echo the rank")):
            continue
        if what == "sync":
            synced.add(rest)
            unsynced.discard(rest)
        elif what == "mkdir" and not rest.endswith("/tmp"):  # TMPDIR of the ranks, which may be lost
            unsynced.add(str(Path(rest).parent))
        elif what == "rename":
            source, target = rest.split(" ")
            if "/.deleted/" not in target:  # not a removed job
                assert source in synced, f"{target} was not synced before the rename"
                unsynced.add(str(Path(target).parent))
                renamed.append(Path(target).name)
            synced.discard(source)
        elif what == "start":
            left = {path for path in unsynced if "/.new-" not in path}
            assert not left, f"{rest} started before {left} were synced"
            renamed.append("a supervisor" if "supervisor" in rest else "the rank")
    key = next(name for name in renamed if name.startswith("key-"))
    assert renamed[:6] == ["object.json", "start.json", key, "a supervisor", "status.json", "the rank"]
    assert renamed.count("status.json") >= 3
    (tombstone,) = [path for path in (home / "jobs" / "default" / ".deleted").iterdir() if path.name.endswith("-1")]
    assert trace.index(f"sync {tombstone.parent}") < next(
        number
        for number, line in enumerate(trace)
        if line.startswith("rename ") and f"/.deleted/.{tombstone.name}" in line
    ), "the name is reserved before the job is removed"
