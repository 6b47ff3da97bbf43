"""Trains the TrainJobs of a namespace in a separate process: ``trials.py SERVER CA CERTIFICATE KEY NAMESPACE``

Each job runs, reports three values of its loss, about one every second, and completes. Ends with SIGTERM.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.clients.driver import RUNNING, Connection, complete, in_parallel

STEPS = 3


class Reader(Connection):
    """A connection that also reads."""

    def jobs(self, path: str) -> list[dict[str, Any]]:
        self._http.request("GET", path, headers={"User-Agent": "driver"})
        with self._http.getresponse() as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return list(found.get("items", ()))  # none while the resource is not served yet


def status(job: dict[str, Any], step: int) -> dict[str, Any]:
    values = {each["name"]: each.get("value", "") for each in job["spec"]["trainer"]["env"]}
    x, n = (float(values[f"KUBEFLOW_TRAINER_OPT_{name}"]) for name in ("X", "N"))
    metrics = [{"name": "loss", "value": str(x * x + n + STEPS - step)}, {"name": "trainjob.step", "value": str(step)}]
    reported = {"metrics": metrics, "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    return {**RUNNING, "trainerStatus": reported}


def main(*arguments: str) -> None:
    *address, namespace = arguments
    path = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{namespace}/trainjobs"
    reader, steps, over = Reader(*address), dict[str, int](), set[str]()

    def patch(connection: Connection, job: dict[str, Any]) -> None:
        name, step = job["metadata"]["name"], min(STEPS, steps[job["metadata"]["name"]])
        body = status(job, step)
        if steps[name] > STEPS:
            body |= complete()
        connection.send("PATCH", f"{path}/{name}/status", {"status": body}, "application/merge-patch+json")

    while True:
        began = time.monotonic()
        jobs = [job for job in reader.jobs(path) if job["metadata"]["name"] not in over]
        for job in jobs:
            name = job["metadata"]["name"]
            steps[name] = steps.get(name, 0) + 1
            if steps[name] > STEPS:
                over.add(name)
        in_parallel(patch, jobs, *address)
        time.sleep(max(0.0, 1 - (time.monotonic() - began)))


if __name__ == "__main__":
    main(*sys.argv[1:])
