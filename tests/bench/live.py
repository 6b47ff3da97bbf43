"""Measures live pages of a job: their requests and the age of their figures, and what histories cost a waiter.

::

    python tests/bench/live.py [--jobs N] [--seconds S] [--baseline CHECKOUT]

Starts the test cluster with an audit log. One job runs on a simulated node, and 20 viewers request its document once
per second, as pages of `trainjob ui` do. N further jobs (1,000) run without controllers, and `trainjob wait NAME...`
waits for them. Each reports loss and accuracy every 5 s: clients/metrics.py writes the reports into etcd, as a second
API server would.

* Requests: those of the viewers in the audit log of the API server, per 2 s.
* Age: a PATCH writes a new value into the status of the viewed job, about once per second. The age of a document is the
  time from the answer to the first PATCH that the document does not have, to the delivery of the document. A page shows
  a document until it has the next one, so the time until each viewer has the value is measured, too.
* Waiter: memory, CPU and requests for S seconds without reports and then with them. With --baseline the same for the
  code of another checkout; `ratio` is ours divided by it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.bench.clients.driver import SPEC
from tests.bench.waiting import CLIENTS, PYTHON_PATH, Waiter
from tests.processes import wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.api import client_user, write_kubeconfig
from tests.testcluster.control_plane import Cluster
from tests.testcluster.nodes import simulate

from trainjob import JobRef, TrainJobSpec
from trainjob._backends.credentials import Credentials
from trainjob._backends.kubernetes.backend import KubernetesBackend
from trainjob._jobs.launching import launch
from trainjob._manifest.render import render
from trainjob._pages.live import LiveReader

VIEWERS = 20
POLL = 1.0  # seconds between two requests of a page
EVERY = 5.0  # seconds between two reports of a job
USERS = ("waiter", "viewer")
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": list(USERS)}, {"level": "None"}],
}
UNMANAGED = "kueue.x-k8s.io/multikueue"
"""`managedBy` of jobs that Trainer's controller leaves alone."""


def emit(metric: str, value: float | str, unit: str = "", peer: float | None = None) -> None:
    ratio = value / peer if isinstance(value, float | int) and peer else None
    figures = {"metric": metric, "value": _short(value), "unit": unit, "peer": _short(peer), "ratio": _short(ratio)}
    print(json.dumps({"bench": "live", **figures}), flush=True)


def _short(value: float | str | None) -> float | str | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


@dataclass
class Cost:
    """The cost of a waiter while nothing is reported, or while all jobs report."""

    rss: float
    pss: float
    cpu: float
    requests: int


@dataclass
class Ages:
    """Of the values that were written into the viewed job.

    Attributes:
        written: Value -> time of the answer to its PATCH.
        served: Age of each document; 0 if it has the latest value.
        shown: Seconds until a viewer has a value.
    """

    written: list[tuple[int, float]] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    shown: list[float] = field(default_factory=list)


class Bench:
    """A cluster with many jobs, and with one that is viewed."""

    def __init__(self, cluster: Cluster, audit_log: Path, number: int, seconds: float) -> None:
        self.cluster = cluster
        self._audit_log = audit_log
        self._seconds = seconds
        self.kubeconfigs = {name: self._user(name) for name in USERS}
        self.namespace = "many"
        for namespace in (self.namespace, "viewed"):
            self.cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
            account = ("v1", "ServiceAccount", namespace, "default")
            wait_until("the service account exists", lambda account=account: cluster.api.get(*account))  # type: ignore[misc]
        self.names = self._create(number)

    def _user(self, name: str) -> Path:
        authority = self.cluster.layout.authority
        pair = authority.issue(name, "system:masters")
        path = self.cluster.directory / f"{name}.kubeconfig"
        user = client_user(pair.certificate, pair.key)
        return write_kubeconfig(path, self.cluster.layout.server, authority.certificate.read_bytes(), user)

    def _create(self, number: int) -> list[str]:
        spec = TrainJobSpec.parse(SPEC)
        jobs: list[dict[str, Any]] = []
        for i in range(number):
            job = render(spec, f"vision/nightly/train-{i:05}", 1, self.namespace)
            jobs.append({**job, "spec": {**job["spec"], "managedBy": UNMANAGED}})
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.cluster.api.create, jobs))
        names = [job["metadata"]["name"] for job in jobs]
        self._client("store.py", "running", "0", names=names)
        return names

    def _client(self, program: str, *arguments: str, names: list[str]) -> str:
        command = [sys.executable, str(CLIENTS / program), str(self.cluster.layout.ports["etcd"]), self.namespace]
        environment = {**os.environ, **PYTHON_PATH}
        given = "\n".join(names)
        done = subprocess.run(
            [*command, *arguments], input=given, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout

    def report(self, seconds: float) -> None:
        """Report metrics of all jobs, for some seconds."""
        number, took = self._client("metrics.py", str(EVERY), str(seconds), names=self.names).split()
        if float(took) > 1.2 * seconds:
            raise SystemExit(f"{number} reports took {took} s in place of {seconds} s: the machine is too busy")

    # ------------------------------------------------------------------ waiter

    @contextmanager
    def waiting(self, source: Path) -> Iterator[Waiter]:
        """`trainjob wait NAME...` of a checkout, for all jobs."""
        environment = {
            "PYTHONPATH": str(source / "components"),
            "KUBECONFIG": str(self.kubeconfigs["waiter"]),
            "TRAINJOB_NAMESPACE": self.namespace,
            "TRAINJOB_BACKEND": "kubernetes",
        }
        ticks = str(self.cluster.directory / "ticks")
        began = time.time()
        waiter = Waiter([sys.executable, str(CLIENTS / "ours.py"), ticks], self.names, environment)
        try:
            wait_until("it watches", lambda: self.requests("waiter", began, time.time(), "watch"), 60, poll=0.5)
            waiter.settle()
            yield waiter
        finally:
            waiter.stop()

    def cost(self, waiter: Waiter, during: Callable[[], object]) -> Cost:
        process = psutil.Process(waiter.process.pid)
        cpu, began = sum(process.cpu_times()[:2]), time.time()
        during()
        ended = time.time()
        used = sum(process.cpu_times()[:2]) - cpu
        memory = process.memory_full_info()
        return Cost(memory.rss / 1e6, memory.pss / 1e6, used, self.requests("waiter", began, ended))

    def costs(self, source: Path) -> tuple[Cost, Cost]:
        """Without reports, then with them."""
        with self.waiting(source) as waiter:
            quiet = self.cost(waiter, lambda: time.sleep(self._seconds))
            return quiet, self.cost(waiter, lambda: self.report(self._seconds))

    def requests(self, user: str, since: float, until: float, verb: str = "") -> int:
        """Requests of a user that the API server received between two Unix times."""
        return len(self.received(user, since, until, verb))

    def received(self, user: str, since: float, until: float, verb: str = "") -> dict[str, str]:
        found = {}
        for line in self._audit_log.read_text().rpartition("\n")[0].splitlines():
            event = json.loads(line)
            at = datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp()
            if event["user"]["username"] == user and event["verb"].startswith(verb) and since <= at <= until:
                found[event["auditID"]] = f"{event['verb']} {event['requestURI'].partition('?')[0]}"
        return found

    # ------------------------------------------------------------------ viewers

    async def view(self) -> None:
        """Let 20 viewers look at one job: requests with and without log lines, then the ages of the figures."""
        backend = KubernetesBackend(Credentials(kubeconfig=str(self.kubeconfigs["viewer"])))
        asked = TrainJobSpec.parse({"runtime": "torch-distributed", "num_nodes": 2, "env": simulate(run="never")})
        ref = await launch(backend, asked, "viewed", namespace="viewed")
        reader = LiveReader(backend)
        while (await reader.document(ref.namespace, ref.name))["phase"] != "Running":
            await asyncio.sleep(0.5)
        for what, tail in (("without log lines", 0), ("with log lines", 200)):
            began = time.time()
            await self._viewers(reader, ref, 10, tail, Ages())
            ended = time.time()
            found = sorted(self.received("viewer", began, ended).values())
            emit(f"requests of {VIEWERS} viewers per 2 s, {what}", 2 * len(found) / (ended - began))
            for each in dict.fromkeys(found):
                print(found.count(each), each, file=sys.stderr)
        ages = Ages()
        reports = asyncio.create_task(asyncio.to_thread(self.report, self._seconds))
        viewers = asyncio.create_task(self._viewers(reader, ref, self._seconds, 200, ages))
        await self._write(ref, viewers, ages)
        await reports
        await backend.aclose()
        emit("values written", len(ages.written))
        for what, values in (("age of a document", ages.served), ("time until a viewer has a value", ages.shown)):
            emit(f"{what}, median", statistics.median(values), "s")
            emit(f"{what}, p95", statistics.quantiles(values, n=20)[-1], "s")
            emit(f"{what}, maximum", max(values), "s")

    async def _viewers(self, reader: LiveReader, ref: JobRef, seconds: float, tail: int, ages: Ages) -> None:
        """Request documents until the time is over."""
        until = time.monotonic() + seconds

        async def viewer(number: int) -> None:
            await asyncio.sleep(POLL * number / VIEWERS)
            known = 0
            while time.monotonic() < until:
                document = await reader.document(ref.namespace, ref.name, tail=tail)
                now, value = time.monotonic(), document["metrics"].get("value", 0)
                missed = [at for each, at in ages.written if each > value]
                ages.served.append(now - missed[0] if missed else 0.0)
                ages.shown += [now - at for each, at in ages.written if known < each <= value]
                known = value
                await asyncio.sleep(POLL)

        async with asyncio.TaskGroup() as tasks:
            for number in range(VIEWERS):
                tasks.create_task(viewer(number))

    async def _write(self, ref: JobRef, viewers: asyncio.Task[None], ages: Ages) -> None:
        api = self.cluster.api
        path = f"{api.path(TRAINER, 'TrainJob', ref.namespace, ref.name)}/status"
        number = 0
        while not viewers.done():
            number += 1
            status = {
                "metrics": [{"name": "value", "value": str(number)}],
                "lastUpdatedTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
            body = {"status": {"trainerStatus": status}}
            await asyncio.to_thread(
                lambda body=body: api.request("PATCH", path, body, content_type="application/merge-patch+json")  # type: ignore[misc]
            )
            ages.written.append((number, time.monotonic()))
            await asyncio.sleep(1.07)  # at all times relative to the requests of the viewers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs that are waited for (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60, help="duration of each measurement (%(default)s)")
    parser.add_argument("--baseline", type=Path, help="checkout of another commit, for the cost of its waiter")
    parser.add_argument("--only", choices=("viewers", "waiter"), help="measure only one of both")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        policy, audit_log = Path(temporary, "policy.yaml"), Path(temporary, "audit.log")
        policy.write_text(yaml.safe_dump(POLICY))
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}")
        emit("load average before", os.getloadavg()[0])
        with Cluster(kueue=False, simulated_nodes=1, api_server_flags=flags) as cluster:
            bench = Bench(cluster, audit_log, arguments.jobs, arguments.seconds)
            if arguments.only != "waiter":
                with bench.waiting(ROOT):
                    asyncio.run(bench.view())
            if arguments.only == "viewers":
                return
            ours = bench.costs(ROOT)
            peers = bench.costs(arguments.baseline.absolute()) if arguments.baseline else (None, None)
        for what, cost, peer in zip(("without reports", "with reports"), ours, peers, strict=True):
            for metric, unit in (("rss", "MB"), ("pss", "MB"), ("cpu", "s"), ("requests", "")):
                value, beside = getattr(cost, metric), getattr(peer, metric, None)
                emit(f"waiter of {arguments.jobs} jobs {what}: {metric}", value, unit, beside)
        emit("load average after", os.getloadavg()[0])


if __name__ == "__main__":
    main()
