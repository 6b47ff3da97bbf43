"""Measures the time from a rank's crash to a diagnosed failure, on a real node, compared with the Kubeflow SDK's wait.

::

    python tests/bench/first_crash.py [--runs N] [--sdk PYTHON | --no-sdk]

Starts the test cluster with its real node (root) and runs TrainJobs of two nodes on Trainer's runtime
``torch-distributed``. Rank 1 logs the time and exits with 3 at once. Kubernetes restarts it in place; the job fails
when six restarts have failed, too.

* ours: `trainjob.wait` with ``fail_on_first_crash``: from the time that the process logged (its end, without
  the exit of Python), from the container's ``finishedAt`` (whole seconds), and from the moment at which another
  client's watch shows it in the API server, to the raised error;
* the SDK: ``TrainerClient().wait_for_job_status`` on another job that crashes in the same way, in a separate
  environment (``make .venv-sdk/stamp``), to the raised error; then the remaining lines of the log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.testcluster import images
from tests.testcluster.access import Access
from tests.testcluster.api import ApiError
from tests.testcluster.control_plane import Cluster
from tests.testcluster.real_node import why_unsupported

from trainjob import JobRef, TrainJobSpec, WaitOptions
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.cancellation import give_up
from trainjob._jobs.launching import launch
from trainjob._jobs.waiting import wait
from trainjob.errors import RankCrashed

SDK = ROOT / ".venv-sdk" / "bin" / "python"
CLIENT = Path(__file__).parent / "clients" / "sdk.py"
CRASH = """
import os, sys, time
if os.environ["PET_NODE_RANK"] == "1":
    time.sleep(1)
    print("ValueError: the data is wrong", flush=True)
    print(f"{time.time():.3f}", flush=True)
    sys.exit(3)
time.sleep(3600)
"""
SPEC = {
    "runtime": "torch-distributed",
    "num_nodes": 2,
    "image": images.PYTHON,
    "command": ["python3", "-c", CRASH],
}


def emit(metric: str, value: float | str, unit: str = "", peer: float | str | None = None) -> None:
    both = isinstance(value, float | int) and isinstance(peer, float | int) and peer
    ratio = float(f"{value / peer:.3g}") if both else None  # type: ignore[operator]
    figures = {"metric": metric, "value": value, "unit": unit, "peer": peer, "ratio": ratio}
    print(json.dumps({"bench": "first_crash", **figures}), flush=True)


class CrashObserver:
    """Records when the API server first reports a crash of a job, on a separate connection."""

    def __init__(self, cluster: Access, namespace: str, name: str) -> None:
        self.seen = 0.0
        self.finished = 0.0
        self._find_pods: Callable[[], Any] = lambda: cluster.api.find(
            "v1", "Pod", namespace, labels=f"jobset.sigs.k8s.io/jobset-name={name}"
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        deadline = time.monotonic() + 120
        while not self.seen and time.monotonic() < deadline:
            now = time.time()
            for pod in self._find_pods():
                for status in pod["status"].get("containerStatuses") or []:
                    for state in (status.get("state") or {}, status.get("lastState") or {}):
                        ended = state.get("terminated") or {}
                        # The SDK takes minutes to raise its error, so keep the first crash, not the last.
                        if ended.get("exitCode") and not self.seen:
                            self.seen, self.finished = now, datetime.fromisoformat(ended["finishedAt"]).timestamp()
            time.sleep(0.02)

    def done(self) -> None:
        self._thread.join(130)


async def once(cluster: Access, namespace: str, number: int) -> dict[str, float]:
    """Seconds from the crash to the error, by three clocks; the job is stopped."""
    backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
    try:
        ref = await launch(backend, TrainJobSpec.parse(SPEC), f"crash-{number}", namespace=namespace)
        observer = CrashObserver(cluster, namespace, ref.name)
        try:
            await wait(backend, ref, WaitOptions(fail_on_first_crash=True))
        except RankCrashed as error:
            raised, diagnosis = time.time(), error.diagnosis
        else:
            raise SystemExit("the job did not crash")
        await give_up(backend, ref, diagnosis)
        observer.done()
        if (diagnosis.rank, diagnosis.exit_code, len(diagnosis.log)) != ("node-1", 3, 2):
            raise SystemExit(f"another diagnosis than expected: {diagnosis}")
        while not await backend.stopped(ref):
            await asyncio.sleep(0.5)
        return {
            "end of the process to raised error": raised - float(diagnosis.log[-1]),
            "finishedAt of the container to raised error": raised - observer.finished,
            "shown by the API server to raised error": raised - observer.seen,
        }
    finally:
        await backend.aclose()


def created(cluster: Access, namespace: str) -> JobRef:
    """Create a job for the SDK."""

    async def create() -> JobRef:
        backend = KubernetesBackend(Credentials(kubeconfig=str(cluster.kubeconfig)))
        try:
            return await launch(backend, TrainJobSpec.parse(SPEC), "sdk", namespace=namespace)
        finally:
            await backend.aclose()

    return asyncio.run(create())


def remaining_lines(cluster: Access, namespace: str, name: str) -> int:
    """Lines of the failing rank's log that can still be read."""
    lines = 0
    for pod in cluster.api.find("v1", "Pod", namespace, labels=f"jobset.sigs.k8s.io/jobset-name={name}"):
        if pod["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index") == "1":
            for params in ({}, {"previous": "true"}):
                with suppress(ApiError, httpx.HTTPError):
                    lines += len(cluster.pod_log(namespace, pod["metadata"]["name"], **params).splitlines())
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="number of timed crashes (%(default)s)")
    parser.add_argument("--sdk", type=Path, default=SDK, help="Python of an environment with the SDK (%(default)s)")
    parser.add_argument("--no-sdk", action="store_true", help="skip the SDK, which takes more than five minutes")
    arguments = parser.parse_args()
    if why := why_unsupported():
        emit("not measured", f"no real node: {why}")
        return
    if not arguments.no_sdk and not arguments.sdk.exists():
        raise SystemExit(f"{arguments.sdk} is missing: make .venv-sdk/stamp, or --no-sdk")
    emit("load average before", os.getloadavg()[0])
    with Cluster(kueue=False, real_node=True) as cluster, cluster.namespace("real", real=True) as namespace:
        peer: subprocess.Popen[str] | None = None
        if not arguments.no_sdk:
            ref = created(cluster, namespace)
            observer = CrashObserver(cluster, namespace, ref.name)
            command = [arguments.sdk, CLIENT, cluster.kubeconfig, namespace, ref.name]
            peer = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True)
            observer.done()
        found = []
        for number in range(arguments.runs):
            found.append(asyncio.run(once(cluster, namespace, number)))
            for metric, seconds in found[-1].items():
                emit(f"run {number + 1}: {metric}", round(seconds, 2), "s")
        of_sdk: dict[str, float] = {}
        sdk_error, lines = "", 0
        if peer is not None:
            out, _ = peer.communicate(timeout=1500)
            at, _, sdk_error = out.strip().splitlines()[-1].partition("\t")
            # The process logs its time a moment before its container's end, so both are measured from the API's times.
            of_sdk = {
                "finishedAt of the container to raised error": float(at) - observer.finished,
                "shown by the API server to raised error": float(at) - observer.seen,
            }
            lines = remaining_lines(cluster, namespace, ref.name)
        for metric in found[0]:
            values = [each[metric] for each in found]
            beside = of_sdk.get(metric)
            emit(f"{metric}, median", round(statistics.median(values), 2), "s", beside and round(beside, 1))
            emit(f"{metric}, longest of {len(values)}", round(max(values), 2), "s")
        if peer is not None:
            emit("lines of the failing rank's log that the error shows or leaves", 2, "", lines)
            emit("what the error says", "rank, exit code, last lines, advice", "", sdk_error)
        emit("load average after", os.getloadavg()[0])


if __name__ == "__main__":
    main()
