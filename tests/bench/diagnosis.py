"""Measures the cost of a diagnosis of a job of 1,000 crashed pods, and of reading its ranks for `stall_timeout`.

On the test cluster, with simulated nodes and Kueue. Logs there have one line; `diagnose` is also measured with the
maximum number of logs and lines, and 5,000 Events. ``python tests/bench/diagnosis.py [PODS]``
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import anyio

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.cluster import failing as make
from tests.processes import wait_until
from tests.testcluster.access import Access
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef, Phase, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._backends.kubernetes.client import ApiClient, Request
from trainjob._backends.kubernetes.pods import MAX_TAILS
from trainjob._diagnosis import READ_LINES, diagnosis_of, rank_states
from trainjob._jobs.launching import launch
from trainjob._jobs.stalls import StallWatch
from trainjob.status import Observation
from trainjob.verdicts import Evidence

EVENTS = 5000
CHATTY = 2000  # the most lines of each rank that `trainjob._jobs.stalls` reads
SETTLE = 20  # seconds until the controllers, on the same machine, have processed the ends of 1,000 pods
TIMES = 7
LINE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711"


def emit(metric: str, value: float, unit: str) -> None:
    figures = {"metric": metric, "value": round(value, 4), "unit": unit, "peer": None, "ratio": None}
    print(json.dumps({"bench": "diagnosis", **figures}), flush=True)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count the requests inside the block: purpose -> number."""
    sent: Counter[str] = Counter()
    stream = ApiClient.stream

    def counting(self: ApiClient, request: Request) -> Any:
        resource = request.path.partition("/namespaces/")[2].split("/")[1:]
        kind = "logs" if resource[-1] == "log" else resource[0]
        if len(resource) == 1:
            kind = f"further pages of {kind}" if "continue" in request.params else f"lists of {kind}"
        sent[kind] += 1
        return stream(self, request)

    ApiClient.stream = counting  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        ApiClient.stream = stream  # type: ignore[method-assign]


async def look(cluster: Access, namespace: str, pods: int) -> Evidence:
    """Launch a job, wait until all of its pods have crashed once and then ended, and collect the evidence."""
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    # Pods restart as with Trainer's runtimes, but without a limit: with those the Job fails after the seventh crash.
    runtime = make.stages("node", job={"backoffLimit": 10**6}, pod={"restartPolicy": "OnFailure"})
    settings = simulate(run="20s", exit_code=1, failures=1)
    asked = TrainJobSpec.parse(make.OWN | {"num_nodes": pods, "env": settings})
    with make.own(runtime)(cluster, namespace):
        ref: JobRef = await launch(backend, asked, "many", namespace=namespace)

    def over() -> bool:
        found = cluster.api.find("v1", "Pod", namespace)
        statuses = [status for pod in found for status in pod["status"].get("containerStatuses", [])]
        return sum(bool(each["lastState"]) and "terminated" in each["state"] for each in statuses) >= pods

    await anyio.to_thread.run_sync(lambda: wait_until("all pods crashed, and ended", over, 400, poll=2))
    await anyio.sleep(SETTLE)
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(TIMES):
        with counted() as sent:
            began, busy = time.monotonic(), time.process_time()
            evidence = await backend.evidence(ref)
            took = time.monotonic() - began
            diagnosis_of(evidence, Observation(Phase.FAILED))
            whole, used = time.monotonic() - began, time.process_time() - busy
        await anyio.sleep(1)
        for what, seconds in (("evidence", took), ("evidence and diagnosis", whole), ("CPU time of both", used)):
            taken[what].append(seconds)
    for what, figures in taken.items():
        emit(f"{what}, {pods} pods that crashed: median", median(figures), "s")
        emit(f"{what}, {pods} pods that crashed: longest of {TIMES}", max(figures), "s")
    for kind in sorted(sent):
        emit(f"evidence of {pods} pods: {kind}", sent[kind], "requests")
    await read_for_hangs(backend, ref, pods)
    await backend.aclose()
    return evidence


async def read_for_hangs(backend: KubernetesBackend, ref: JobRef, pods: int) -> None:
    """Read all ranks as often as a job without reports is read in its `stall_timeout`: twice."""
    watch = StallWatch(backend, ref, lambda *_: None)
    with counted() as sent:
        began, busy = time.monotonic(), time.process_time()
        readings = [await watch._read() for _ in range(2)]
        took, used = time.monotonic() - began, time.process_time() - busy
    assert all(reading is not None and len(reading.pods) == pods for reading in readings)
    emit(f"{pods} ranks read twice, as in each stall_timeout: time", took, "s")
    emit(f"{pods} ranks read twice, as in each stall_timeout: CPU time", used, "s")
    for kind in sorted(sent):
        emit(f"{pods} ranks read twice, as in each stall_timeout: {kind}", sent[kind], "requests")


def main(pods: int) -> None:
    logging.basicConfig(level=logging.ERROR)
    emit("load average before", os.getloadavg()[0], "")
    with Cluster() as cluster, cluster.namespace() as namespace:
        evidence = anyio.run(look, cluster, namespace, pods)
    events = [*evidence.events, *[{"reason": "FailedMount", "involvedObject": {"kind": "Pod"}}] * EVENTS][:EVENTS]
    logs = {pod["metadata"]["name"]: [LINE] * READ_LINES for pod in evidence.pods[:MAX_TAILS]}
    full = replace(evidence, events=events, logs=logs)
    began = time.monotonic()
    diagnosis_of(full, Observation(Phase.FAILED))
    what = f"{len(full.pods)} pods, {len(full.logs)} logs of {READ_LINES} lines, {len(events)} events"
    emit(f"diagnose: {what}", time.monotonic() - began, "s")
    began = time.monotonic()
    for rank in range(pods):
        rank_states.states_of(f"node-{rank}", [LINE] * CHATTY)
    emit(f"states of {pods} ranks in logs of {CHATTY} lines", time.monotonic() - began, "s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
