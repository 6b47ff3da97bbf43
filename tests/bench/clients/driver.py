"""Creates and ends TrainJobs in a separate process, so that its work does not count for the waiter.

::

    driver.py SERVER CA CERTIFICATE KEY NAMESPACE create N           prints their names
    driver.py SERVER CA CERTIFICATE KEY NAMESPACE finish PER_SECOND  of the names on stdin; prints NAME SENT ANSWERED

A job ends by the condition that Trainer writes at the end. ``create-jobs`` and ``finish-jobs`` do the same with
Kubernetes Jobs.
"""

from __future__ import annotations

import http.client
import json
import queue
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

CONNECTIONS = 16

SPEC = {
    "runtime": "torch-distributed",
    "image": "registry.example.com/vision/train:2026-11-21",
    "command": ["torchrun", "train.py", "--epochs", "90", "--batch-size", "256"],
    "num_nodes": 4,
    "resources_per_node": {"cpu": 8, "memory": "64Gi", "gpu": 8},
    "env": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8"},
    "inputs": {"dataset": "s3://data/imagenet"},
    "outputs": {"model": "s3://models/resnet50/nightly"},
}
RUNNING = {"jobsStatus": [{"name": "node", "ready": 1, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}]}
REASONS = {"Complete": "AllJobsCompleted", "Failed": "FailedJobs"}


def ended(kind: str) -> dict[str, Any]:
    """The status that Trainer writes at the end."""
    condition = {
        "type": kind,
        "status": "True",
        "reason": REASONS[kind],
        "message": f"jobset {kind.lower()}",
        "lastTransitionTime": now(),
    }
    counts = {"ready": 0, "succeeded": 1, "failed": 0, "active": 0, "suspended": 0}
    return {"jobsStatus": [{"name": "node", **counts}], "conditions": [condition]}


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def job(name: str) -> dict[str, Any]:
    """A Job as KubernetesJobOperator creates it."""
    container = {"name": "base", "image": SPEC["image"], "command": SPEC["command"]}
    pod = {"restartPolicy": "Never", "containers": [container]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": {"template": {"spec": pod}}}


def job_complete() -> dict[str, Any]:
    """The status that the Job controller writes at the end."""
    at = {"lastProbeTime": now(), "lastTransitionTime": now(), "reason": "CompletionsReached", "status": "True"}
    conditions = [{"type": kind, **at} for kind in ("SuccessCriteriaMet", "Complete")]
    return {"startTime": now(), "completionTime": now(), "succeeded": 1, "conditions": conditions}


class Connection:
    """One connection to the API server."""

    def __init__(self, server: str, authority: str, certificate: str, key: str) -> None:
        context = ssl.create_default_context(cafile=authority)
        context.load_cert_chain(certificate, key)
        self._http = http.client.HTTPSConnection(urlsplit(server).netloc, context=context)
        self._http.connect()  # so that the first request does not include it

    def send(self, method: str, path: str, body: object, kind: str = "application/json") -> tuple[float, float]:
        """Unix times of the request and of its answer."""
        content = json.dumps(body)
        sent = time.time()
        self._http.request(method, path, content, {"Content-Type": kind, "User-Agent": "driver"})
        with self._http.getresponse() as answer:
            answered = time.time()
            text = answer.read()
            if answer.status >= 300:
                raise SystemExit(f"{method} {path}: {answer.status} {text.decode()}")
        return sent, answered


def in_parallel(work: Callable[[Connection, Any], object], items: Iterable[Any], *address: str) -> None:
    """Do `work` for each of `items`, in their order, on several connections."""
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def worker() -> None:
        connection = Connection(*address)
        while (item := waiting.get()) is not None:
            work(connection, item)

    threads = [threading.Thread(target=worker) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for item in (*items, *[None] * CONNECTIONS):
        waiting.put(item)
    for thread in threads:
        thread.join()


def main(*arguments: str) -> None:
    *address, namespace, action, number = arguments
    action, _, plain = action.partition("-")
    group, resource = ("batch/v1", "jobs") if plain else ("trainer.kubeflow.org/v1alpha1", "trainjobs")
    path = f"/apis/{group}/namespaces/{namespace}/{resource}"
    if action == "create":
        from trainjob._manifest.render import render
        from trainjob._spec import TrainJobSpec

        spec, names = TrainJobSpec.parse(SPEC), [f"train-{i:05}" for i in range(int(number))]
        jobs = [job(name) if plain else render(spec, f"vision/nightly/{name}", 1, namespace) for name in names]
        in_parallel(lambda connection, job: connection.send("POST", path, job), jobs, *address)
        print("\n".join(job["metadata"]["name"] for job in jobs))
        return

    began = time.monotonic() + 1  # the connections are open by then
    times: list[tuple[str, float, float]] = []

    def finish(connection: Connection, job: tuple[int, str]) -> None:
        time.sleep(max(0.0, began + job[0] / float(number) - time.monotonic()))
        status = {"status": job_complete() if plain else ended("Complete")}
        sent = connection.send("PATCH", f"{path}/{job[1]}/status", status, "application/merge-patch+json")
        times.append((job[1], *sent))

    in_parallel(finish, enumerate(sys.stdin.read().split()), *address)
    print("\n".join(f"{name}\t{sent:.6f}\t{answered:.6f}" for name, sent, answered in times))


if __name__ == "__main__":
    main(*sys.argv[1:])
