"""Waiting for many jobs in one process on a real API server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.testcluster.control_plane import Cluster

TRAINJOB = str(Path(sys.executable).parent / "trainjob")
ROOT = Path(__file__).parents[2]
METRICS = {
    "end to waiter, median",
    "end to waiter, p95",
    "requests while nothing happens",
    "connections",
    "memory, RSS",
}


@pytest.mark.timeout(400)
def test_the_benchmark_of_waiting_runs(own_cluster: Cluster) -> None:
    """Run the benchmark briefly and check its output; its figures are valid only on an idle machine."""
    command = [sys.executable, "-m", "tests.bench.waiting", "--jobs", "50", "--quiet-seconds", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line.keys() == {"bench", "metric", "value", "unit", "peer", "ratio", "load"} for line in lines)
    figures = {line["metric"]: line for line in lines}
    assert figures.keys() >= {f"50 jobs: {metric}" for metric in METRICS}
    assert figures["requests of one launch"]["value"] == 3
    # That of the watch; on a busy machine also the idle one of a request that took part of its time.
    assert figures["50 jobs: connections"]["value"] in (1, 2)
