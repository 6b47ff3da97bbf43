"""Writes recorded.json: the Kubeflow SDK's request for each call of docs/how-to/kubeflow-sdk.md.

``python -m tests.conformance.record PYTHON``, with the Python of the SDK's environment (``make record-sdk``). The SDK
sends requests to a real API server with Trainer and all runtimes, through a proxy that records the TrainJobs and makes
every creation a dry run.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.conformance.page import RECORDED, sdk_calls
from tests.conformance.runtimes import install
from tests.recordings import by_line
from tests.testcluster.api import Api, ApiError
from tests.testcluster.control_plane import Cluster

ROOT = Path(__file__).parents[2]


@contextmanager
def proxy(api: Api) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run a proxy of `api`; yield its URL, and number of a call -> TrainJob."""
    requests: dict[str, Any] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._forward("GET", None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests[self.path.split("/")[1]] = body
            self._forward("POST", body)

        def _forward(self, method: str, body: object) -> None:
            path = "/" + self.path.split("/", 2)[2]
            try:
                answer = api.request(method, path, body, params={"dryRun": "All"} if body else None)
                status, content = 200, json.dumps(answer).encode()
            except ApiError as error:
                error_status = {"kind": "Status", "code": error.status, "reason": error.reason, "message": str(error)}
                status, content = error.status, json.dumps(error_status).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as in the base class
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _publish(api: Api, version: str) -> None:
    """Publish Trainer's version, as its installation does: every SDK client reads it and warns if it is missing."""
    api.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kubeflow-system"}})
    metadata = {"name": "kubeflow-trainer-public", "namespace": "kubeflow-system"}
    data = {"kubeflow_trainer_version": version}
    api.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def main() -> None:
    python = sys.argv[1]
    with Cluster(kueue=False, simulated_nodes=0) as cluster, cluster.namespace("sdk") as namespace:
        install(cluster, namespace)
        _publish(cluster.api, cluster.versions()["trainer"])
        with proxy(cluster.api) as (url, requests):
            command = [python, "-m", "tests.conformance.calls", url, namespace]
            results = json.loads(subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout)
        trainer = cluster.versions()["trainer"]
    sdk = subprocess.run(
        [python, "-c", "import importlib.metadata; print(importlib.metadata.version('kubeflow'))"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    calls = {}
    for number, call in enumerate(sdk_calls()):
        request = requests.get(str(number))
        if request and "Name(" not in call:
            del request["metadata"]["name"]  # made up by the SDK
        refused = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME", results["refused"].get(str(number), ""))
        calls[call] = {"request": request, "refused": refused}
    content = {"kubeflow": sdk, "trainer": trainer, "arguments": results["arguments"], "calls": calls}
    RECORDED.write_text(by_line(content))
    print(f"{len(calls)} calls of kubeflow {sdk} in {RECORDED.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
