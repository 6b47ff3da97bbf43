"""What the measurements share: their output, and the API server of those about clusters."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import psutil
import yaml
from tests.testcluster.api import client_user, write_kubeconfig
from tests.testcluster.control_plane import Cluster

ROOT = Path(__file__).parents[2]
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["waiter"]}, {"level": "None"}],
}


class Output:
    """Prints each figure as one JSON object in a line, with the load of the machine before it.

    Args:
        bench: Name of the measurement.
    """

    def __init__(self, bench: str) -> None:
        self._bench = bench
        self.emit("machine", f"{os.cpu_count()} cores, Python {platform.python_version()}")

    def emit(self, metric: str, value: float | str, unit: str = "", peer: float | None = None) -> None:
        """Print a figure, and how often that of the peer fits into it."""
        ratio = value / peer if isinstance(value, int | float) and peer else None
        numbers = {"value": _short(value), "unit": unit, "peer": _short(peer), "ratio": _short(ratio)}
        line = {"bench": self._bench, "metric": metric, **numbers, "load": os.getloadavg()[0]}
        print(json.dumps(line), flush=True)

    def spread(self, metric: str, values: Sequence[float], unit: str, peer: Sequence[float] = ()) -> None:
        """Print median and 95th percentile."""
        for name, of in (("median", statistics.median), ("p95", _p95)):
            self.emit(f"{metric}, {name}", of(values), unit, of(peer) if peer else None)


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 95 // 100]


def _short(value: float | str | None) -> float | str | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def environment_of(name: str) -> Path:
    """Python of an environment that `make bench` sets up."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{python} is missing: make .venv-{name}/stamp")
    return python


def timed(run: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return found


def settle(processes: Callable[[], Sequence[psutil.Process]], seconds: float = 60) -> None:
    """Wait until the processes use little CPU time."""
    used, deadline = -1.0, time.monotonic() + seconds
    while (now := cpu(processes())) - used > 0.1 and time.monotonic() < deadline:
        used = now
        time.sleep(1)


def cpu(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds."""
    return float(sum(sum(each.cpu_times()[:2]) for each in processes))


class ApiServer:
    """An API server without controllers that logs the requests of the user ``waiter``.

    Attributes:
        cluster: The running cluster.
        kubeconfig: That of the user.
        waiter: Server, authority, certificate and key of the user.
    """

    def __init__(self, cluster: Cluster, audit_log: Path) -> None:
        self.cluster, self._audit_log = cluster, audit_log
        authority, server = cluster.layout.authority, cluster.layout.server
        pair, admin = authority.issue("waiter", "system:masters"), cluster.layout.client
        self.kubeconfig = write_kubeconfig(
            cluster.directory / "waiter.kubeconfig",
            server,
            authority.certificate.read_bytes(),
            client_user(pair.certificate, pair.key),
        )
        self.waiter = [server, *map(str, (authority.certificate, pair.certificate, pair.key))]
        self._admin = [server, *map(str, (authority.certificate, admin.certificate, admin.key))]

    def drive(self, namespace: str, action: str, number: float, names: Sequence[str] = ()) -> list[str]:
        """Create or end jobs in a separate process (clients/driver.py)."""
        return self._run("driver", *self._admin, namespace, action, str(number), names=names)

    def store(self, namespace: str, state: str, seconds: float, names: Sequence[str]) -> list[str]:
        """Write the status of jobs into etcd (clients/store.py)."""
        return self._run("store", str(self.cluster.layout.ports["etcd"]), namespace, state, str(seconds), names=names)

    def create(self, namespace: str, number: int, kind: str = "create") -> list[str]:
        """Create jobs in a new namespace; return their names."""
        self.cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        return self.drive(namespace, kind, number)

    def end(self, namespace: str, names: Sequence[str], burst: int) -> dict[str, tuple[float, float]]:
        """End jobs: `burst` of them within a second if there are more, else 40 a second. Name -> sent, answered."""
        ending = random.sample(names, min(len(names), burst))
        many = len(names) > burst
        done = self.store(namespace, "complete", 0.95, ending) if many else self.drive(namespace, "finish", 40, ending)
        return {name: (float(at[0]), float(at[-1])) for name, *at in (line.split("\t") for line in done)}

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

    def _run(self, program: str, *arguments: str, names: Sequence[str]) -> list[str]:
        command = [sys.executable, "-m", f"tests.bench.clients.{program}", *arguments]
        done = subprocess.run(command, input="\n".join(names), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout.splitlines()


@contextmanager
def api_server() -> Iterator[ApiServer]:
    """Run it."""
    with tempfile.TemporaryDirectory(prefix="trainjob-bench-") as directory:
        policy, audit_log = Path(directory, "policy.yaml"), Path(directory, "audit.log")
        policy.write_text(yaml.safe_dump(POLICY))
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}")
        with Cluster(kueue=False, controllers=False, api_server_flags=flags) as cluster:
            yield ApiServer(cluster, audit_log)
