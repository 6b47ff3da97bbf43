"""The API server of the measurements about clusters, and the jobs in it."""

from __future__ import annotations

import base64
import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml
from tests.testcluster.api import client_user, write_kubeconfig
from tests.testcluster.control_plane import Cluster

from trainjob._manifest.render import render
from trainjob._spec import TrainJobSpec

POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["waiter"]}, {"level": "None"}],
}
SPEC = TrainJobSpec.parse(
    {
        "runtime": "torch-distributed",
        "image": "registry.example.com/vision/train:2026-11-21",
        "command": ["torchrun", "train.py", "--epochs", "90", "--batch-size", "256"],
        "num_nodes": 4,
        "resources_per_node": {"cpu": 8, "memory": "64Gi", "gpu": 8},
        "env": {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "8"},
        "inputs": {"dataset": "s3://data/imagenet"},
        "outputs": {"model": "s3://models/resnet50/nightly"},
    }
)
ENDS = {"Complete": "AllJobsCompleted", "Failed": "FailedJobs"}


class ApiServer:
    """An API server without controllers that logs the requests of the user ``waiter``.

    Attributes:
        cluster: The running cluster.
        kubeconfig: That of the user.
    """

    def __init__(self, cluster: Cluster, audit_log: Path) -> None:
        self.cluster, self._audit_log = cluster, audit_log
        pair = cluster.layout.authority.issue("waiter", "system:masters")
        self.kubeconfig = write_kubeconfig(
            cluster.directory / "waiter.kubeconfig",
            cluster.layout.server,
            cluster.layout.authority.certificate.read_bytes(),
            client_user(pair.certificate, pair.key),
        )

    def create(self, namespace: str, number: int, manifest: Callable[[str], dict[str, Any]] | None = None) -> list[Any]:
        """Create TrainJobs, or what `manifest` makes of a name, in a new namespace."""
        api = self.cluster.api
        api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        made = manifest or (lambda name: render(SPEC, f"vision/nightly/{name}", 1, namespace))
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda index: api.create(made(f"train-{index:05}")), range(number)))

    def store(
        self, namespace: str, names: Sequence[str], state: str, *, rate: float = float("inf"), at_once: int = 1
    ) -> dict[str, float]:
        """Write the status of TrainJobs into etcd, as a second API server of the same cluster would.

        A PATCH costs an API server 5 ms of CPU, so a single one on two cores cannot end 1,000 jobs within a second.

        Args:
            namespace: Their namespace.
            names: Their names.
            state: ``Running``, ``Complete`` or ``Failed``.
            rate: How many a second.
            at_once: How many in one transaction; etcd allows 128.

        Returns:
            Name -> Unix time of the commit.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.cluster.layout.ports["etcd"])
        began, committed = time.monotonic(), dict[str, float]()
        for first in range(0, len(names), at_once):
            some = names[first : first + at_once]
            keys = [_base64(f"/registry/trainer.kubeflow.org/trainjobs/{namespace}/{name}".encode()) for name in some]
            writes = []
            for found in _transaction(connection, [{"requestRange": {"key": key}} for key in keys])["responses"]:
                (stored,) = found["response_range"]["kvs"]
                changed = {**json.loads(base64.b64decode(stored["value"])), "status": status(state)}
                writes.append({"requestPut": {"key": stored["key"], "value": _base64(json.dumps(changed).encode())}})
            time.sleep(max(0.0, began + first / rate - time.monotonic()))
            _transaction(connection, writes)
            committed |= dict.fromkeys(some, time.time())
        return committed

    def requests(self, since: float, until: float, agent: str = "", verb: str = "") -> int:
        """Requests of the user that the API server received between two Unix times."""
        found = set()
        for line in self._audit_log.read_text().rpartition("\n")[0].splitlines():
            event = json.loads(line)
            its = event.get("userAgent", "").startswith(agent) and event["verb"].startswith(verb)
            if its and since <= datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp() <= until:
                found.add(event["auditID"])
        return len(found)

    def connections(self, processes: Sequence[psutil.Process]) -> int:
        """Open connections of the processes to the API server."""
        found = [each for process in processes for each in process.net_connections("tcp")]
        port = self.cluster.layout.ports["api"]
        return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port for each in found)


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Run it."""
    with tempfile.TemporaryDirectory(prefix="trainjob-bench-") as directory:
        policy, audit_log = Path(directory, "policy.yaml"), Path(directory, "audit.log")
        policy.write_text(yaml.safe_dump(POLICY))
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}")
        with Cluster(kueue=False, controllers=False, api_server_flags=flags) as cluster:
            yield ApiServer(cluster, audit_log)


def status(state: str) -> dict[str, Any]:
    """The status that Trainer writes."""
    counts = {"ready": 0, "succeeded": 0, "failed": 0, "active": 0, "suspended": 0}
    if state == "Running":
        return {"jobsStatus": [{"name": "node", **counts, "ready": 1, "active": 1}]}
    ended = {"type": state, "status": "True", "reason": ENDS[state], "message": f"jobset {state.lower()}"}
    return {"jobsStatus": [{"name": "node", **counts}], "conditions": [{**ended, "lastTransitionTime": now()}]}


def now() -> str:
    """The time as Kubernetes writes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _transaction(connection: http.client.HTTPConnection, success: list[dict[str, Any]]) -> dict[str, Any]:
    connection.request("POST", "/v3/kv/txn", json.dumps({"success": success}))
    answer = connection.getresponse()
    if answer.status != 200:
        raise SystemExit(f"etcd: {answer.status} {answer.read()!r}")
    found: dict[str, Any] = json.load(answer)
    return found


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()
