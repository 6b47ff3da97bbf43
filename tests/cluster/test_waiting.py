"""Waiting for many jobs in one process on a real API server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.testcluster.access import Access, trainjob
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

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
def test_many_jobs_in_one_process(cluster: Access, namespace: str) -> None:
    """A job that completes, one that fails, one that ended before, one created without trainjob, and a missing one."""
    settings = {"TRAINJOB_BACKEND": "kubernetes", "TRAINJOB_NAMESPACE": namespace}
    environment = {**os.environ, **settings, "KUBECONFIG": str(cluster.kubeconfig)}

    def launched(env: list[dict[str, str]]) -> str:
        words = [word for each in env for word in ("--env", f"{each['name']}={each['value']}")]
        spec = ["--runtime", "torch-distributed", "--num-nodes", "2", *words, "--", "train"]
        command = [TRAINJOB, "run", "--detach", *spec]
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    early, good, bad = map(launched, (simulate(run="1ms"), simulate(run="3s"), simulate(run="100ms", exit_code=3)))
    by_hand = {"numNodes": 2, "env": simulate(run="3s")}
    cluster.api.create(trainjob("by-hand", namespace, trainer=by_hand))
    names = [f"{namespace}/{early}", f"{namespace}/{good}", bad, "by-hand", "nosuch"]
    began = time.time()
    done = subprocess.run(
        [TRAINJOB, "wait", *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    seen = {name: float(at) for name, at in (line.split("\t") for line in done.stdout.splitlines())}
    assert seen.keys() == {*names[:4]}
    assert began < min(seen.values()) < max(seen.values()) < time.time()
    assert f"there is no TrainJob {namespace}/nosuch" in done.stderr
    assert f"TrainJob {namespace}/{bad} is Failed" in done.stderr
    assert done.returncode == 1


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
