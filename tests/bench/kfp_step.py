"""Measures the time from the start of a step's container to the creation of its TrainJob, on a real node.

::

    python tests/bench/kfp_step.py [N]

Starts the test cluster with its real node (root), and on it, one after the other, pods that run the compiled ``train``
component in the step image, as a KFP backend does. The kernel's clock gives the start of the container's first process
(to 10 ms), containerd's clock the lines of the step's log. The step logs the job's name after it has created the job
and read it back. The jobs run on simulated nodes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from datetime import datetime
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster.kfp_steps import Execution, Steps, Try, create_account, processes
from tests.processes import wait_until
from tests.testcluster import image_store, step_image as images
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate
from tests.testcluster.real_node import why_unsupported

TOTAL = "container start to TrainJob created"


def emit(metric: str, value: float | str, unit: str = "") -> None:
    figures = {"metric": metric, "value": value, "unit": unit, "peer": None, "ratio": None}
    print(json.dumps({"bench": "kfp_step", **figures}), flush=True)


def once(steps: Steps, jobs: str) -> dict[str, float]:
    """Seconds of each part of one start, and of all parts."""
    env = {each["name"]: each["value"] for each in simulate(run="never")}
    parameters = {"runtime": "trainjob-step", "command": ["train"], "env": env, "namespace": jobs}
    execution = Execution("train", parameters)
    tried = steps.start(execution)
    named = f"TrainJob {jobs}/{execution.job} (attempt 1"
    wait_until("the job exists", lambda: named in steps.log(tried), 60, poll=0.5, ignore=ApiError)
    began = min(started(pid) for pid in processes(tried))
    parts = {
        "until KFP's executor runs": "Looking for component",
        "until it calls the component": "Got executor_input",
        "until the job is created": named,
    }
    ends = [when(steps, tried, text) for text in parts.values()]
    steps.force_delete(tried)
    steps.cluster.api.delete("trainer.kubeflow.org/v1alpha1", "TrainJob", jobs, execution.job)
    return {TOTAL: ends[-1] - began} | dict(
        zip(parts, (end - start for start, end in pairwise([began, *ends])), strict=True)
    )


def started(pid: int) -> float:
    """Start of a process, in seconds since 1970."""
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])  # starttime, proc(5)
    up = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - up + ticks / os.sysconf("SC_CLK_TCK")


def when(steps: Steps, tried: Try, text: str) -> float:
    """Time of the step's first line with `text`."""
    lines = steps.log(tried, timestamps="true").splitlines()
    return datetime.fromisoformat(next(line for line in lines if text in line).partition(" ")[0]).timestamp()


def main(number: int) -> None:
    if why := why_unsupported():
        emit("not measured", f"no real node: {why}")
        return
    emit("load average before", os.getloadavg()[0])
    emit("cores", os.cpu_count() or 0)
    with Cluster(kueue=False, real_node=True) as cluster:
        assert cluster.real_node
        archive = images.build(cluster.directory, image_store.step_layers())
        cluster.real_node.load(archive)
        archive.unlink()
        cluster.add_runtime(images.runtime(images.STEP_RUNTIME, images.IMAGE))
        with cluster.namespace("pipeline", real=True) as namespace, cluster.namespace("jobs") as jobs:
            create_account(cluster, namespace, jobs)
            steps = Steps(cluster, namespace, images.IMAGE)
            found = []
            for _ in range(number + 1):
                found.append(once(steps, jobs))
                time.sleep(3)  # until the last pod is gone
    first, *others = found
    emit(f"{TOTAL}, the first on the node", round(first[TOTAL], 3), "s")
    for metric in first:
        seconds = [each[metric] for each in others]
        emit(f"{metric}, median of {number}", round(statistics.median(seconds), 3), "s")
    emit(f"{TOTAL}, longest of {number}", round(max(each[TOTAL] for each in others), 3), "s")
    emit("load average after", os.getloadavg()[0])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
