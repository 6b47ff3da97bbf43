"""Measures the cost of 1,000 deferred jobs for a triggerer, and its latency, compared with KubernetesJobOperator.

::

    python tests/bench/triggerer.py [--jobs N] [--quiet-seconds S] [--idle-seconds S] [--peer PYTHON | --no-peer]

A real ``airflow triggerer`` on PostgreSQL: first with this provider and TrainJobs, then with Jobs in a separate
environment (``make .venv-bench/stamp``), on the same API server of the test cluster. That runs without controllers: the
driver, a separate process, writes the status that Trainer and the Job controller would write. clients/deferred.py
writes rows of deferred tasks with Airflow's models, one after the other as tasks do; both triggers have the default
arguments of their operators.

Latency runs from the answer to the PATCH that sets ``Complete`` to the timestamp of the line "Trigger fired event",
which Airflow writes to the task's log after a trigger has yielded its event. The time from before the PATCH was sent is
also reported. Requests are counted in the API server's audit log; memory, CPU time and connections are the kernel's
figures of all processes of the triggerer; the warnings are Airflow's, about a loop blocked for 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.airflow.system.airflow import Airflow
from tests.bench.waiting import PYTHON_PATH, STEADY, Bench, wait_for_idle_machine
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import Component, wait_until
from tests.testcluster.access import TRAINER
from tests.testcluster.control_plane import Cluster

from trainjob._backends.credentials import Credentials
from trainjob_airflow.hooks.trainjob import Target

RATE = 40.0  # tasks that defer per second; a higher rate blocks the loop of any triggerer, with any trigger
PEER = ROOT / ".venv-bench" / "bin" / "python"
ROWS = Path(__file__).parent / "clients" / "deferred.py"
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": ["waiter"]}, {"level": "None"}],
}
BLOCKED = re.compile(r"async thread was blocked for ([\d.]+) seconds")
FIRED = "Trigger fired event"
NAME = re.compile(r"/(\d+)/\d+ \(ID \d+\)")
TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z")


def emit(metric: str, value: float | str, unit: str = "", peer: float | str | None = None) -> None:
    both = isinstance(value, float | int) and isinstance(peer, float | int) and peer
    figures = {
        "metric": metric,
        "value": _short(value),
        "unit": unit,
        "peer": _short(peer),
        "ratio": _short(value / peer) if both else None,  # type: ignore[operator]
    }
    print(json.dumps({"bench": "triggerer", **figures}), flush=True)


def _short(value: float | str | None) -> float | str | None:
    return float(f"{value:.4g}") if isinstance(value, float) else value


class Database(Airflow):
    """Airflow's database, without its other components."""

    def _start(self) -> None:
        assert self.database is not None
        self._running.enter_context(self.database)
        self._prepare()


@dataclass
class Figures:
    """The figures of one triggerer. Latencies in ms, memory in MB."""

    after_answer: list[float] = field(default_factory=list)
    after_sending: list[float] = field(default_factory=list)
    seconds_to_wait: float = 0.0
    first_requests: int = 0
    requests_per_second: float = 0.0
    cpu: float = 0.0
    connections: int = 0
    above_idle: float = 0.0
    blocked: list[float] = field(default_factory=list)


@dataclass
class Deferred:
    """The deferred tasks of a triggerer.

    Attributes:
        run: Id of the DAG and its run; also the namespace of the jobs.
        python: Python of the triggerer's environment.
        classpath: Class path of the triggers.
        finish: Command of the driver that ends the jobs.
        jobs: Name of a job -> arguments of its trigger.
    """

    run: str
    python: str
    classpath: str
    finish: str
    jobs: dict[str, dict[str, Any]]


class Triggerer:
    """An ``airflow triggerer`` with all its processes."""

    def __init__(self, airflow: Airflow, python: str, name: str) -> None:
        command = [python, "-m", "airflow", "triggerer", "--skip-serve-logs"]
        self.component = Component(name, command, airflow.directory, airflow.environment)
        self.component.start()
        among = [self.component]
        wait_until("the triggerer has a runner", lambda: len(self.processes()) > 1, 300, among=among, poll=0.5)
        self.settle()

    def processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.component.pid)
        return [process, *process.children(recursive=True)]

    def rss(self) -> float:
        return sum(each.memory_info().rss for each in self.processes()) / 1e6

    def cpu(self) -> float:
        return sum(sum(each.cpu_times()[:2]) for each in self.processes())

    def connections(self, port: int) -> int:
        found = [each for process in self.processes() for each in process.net_connections("tcp")]
        return sum(each.status == psutil.CONN_ESTABLISHED and each.raddr.port == port for each in found)

    def settle(self, seconds: float = 60) -> None:
        """Wait until the triggerer only polls its database, at most `seconds`."""
        deadline = time.monotonic() + seconds
        idle_seconds = 0
        while idle_seconds < 3 and time.monotonic() < deadline:
            before = self.cpu()
            time.sleep(1)
            idle_seconds = idle_seconds + 1 if self.cpu() - before < 0.3 else 0

    def blocked(self) -> list[float]:
        """Seconds for which its event loop was blocked, from Airflow's warnings."""
        return [float(found) for found in BLOCKED.findall(self.component.log.read_text(errors="replace"))]


class Measure:
    """Measures one triggerer after the other."""

    def __init__(self, bench: Bench, cluster: Cluster, airflow: Airflow, audit_log: Path, quiet: float) -> None:
        self._bench = bench
        self._cluster = cluster
        self._airflow = airflow
        self._audit_log = audit_log
        self._quiet = quiet

    def requests(self, since: float, until: float) -> int:
        """Requests of triggerers that the API server received between two Unix times."""
        found = set()
        for line in self._audit_log.read_text().rpartition("\n")[0].splitlines():
            event = json.loads(line)
            if since <= datetime.fromisoformat(event["requestReceivedTimestamp"]).timestamp() <= until:
                found.add(event["auditID"])
        return len(found)

    def defer(self, it: Deferred) -> None:
        environment = {**os.environ, **PYTHON_PATH, **self._airflow.environment}
        command = [sys.executable, str(ROWS), it.run, str(self._bench.kubeconfig), it.classpath, str(RATE)]
        rows = "\n".join(map(json.dumps, it.jobs.values()))
        subprocess.run(command, input=rows, env=environment, stdout=subprocess.DEVNULL, text=True, check=True)

    def fired(self, run: str, triggerer: Triggerer) -> dict[int, float]:
        """Map index of a task -> Unix time at which its trigger fired."""
        times = {}
        # A late event is not in the task's log, but in that of the triggerer.
        for path in [*self._logs(run), triggerer.component.log]:
            for line in path.read_text(errors="replace").splitlines():
                if FIRED in line and (time_of := TIME.search(line)) and (name := NAME.search(line)):
                    times[int(name[1])] = datetime.fromisoformat(time_of[0]).timestamp()
        return times

    def waiting(self, run: str) -> int:
        """Number of triggers that have read their job: they write the second line of a log, Airflow the first."""
        return sum(path.read_bytes().count(b"\n") > 1 for path in self._logs(run))

    def _logs(self, run: str) -> list[Path]:
        return list((self._airflow.directory / "logs" / f"dag_id={run}").rglob("*.trigger.*"))

    def run(self, it: Deferred) -> Figures:
        figures = Figures()
        number = len(it.jobs)
        triggerer = Triggerer(self._airflow, it.python, f"{it.run}-triggerer")
        among = [triggerer.component]
        try:
            idle = triggerer.rss()
            began = time.time()
            self.defer(it)
            wait_until("all wait", lambda: self.waiting(it.run) == number, 600, among=among, poll=2)
            figures.seconds_to_wait = time.time() - began
            triggerer.settle()
            wait_for_idle_machine(self._bench.idle_seconds)
            quiet_from, cpu = time.time(), triggerer.cpu()
            time.sleep(self._quiet)
            quiet_until = time.time()
            figures.cpu = 100 * (triggerer.cpu() - cpu) / (quiet_until - quiet_from)
            figures.connections = triggerer.connections(self._cluster.layout.ports["api"])
            figures.above_idle = triggerer.rss() - idle
            finished = self._bench.drive(it.run, it.finish, STEADY, list(it.jobs))
            wait_until("all have fired", lambda: len(self.fired(it.run, triggerer)) == number, 600, among=among, poll=3)
            figures.blocked = triggerer.blocked()
        finally:
            triggerer.component.kill()
        names = list(it.jobs)
        seen = {names[index]: at for index, at in self.fired(it.run, triggerer).items()}
        for name, sent, answered in (line.split("\t") for line in finished):
            figures.after_sending.append((seen[name] - float(sent)) * 1000)
            figures.after_answer.append((seen[name] - float(answered)) * 1000)
        figures.first_requests = self.requests(began, quiet_from)
        figures.requests_per_second = self.requests(quiet_from, quiet_until) / (quiet_until - quiet_from)
        return figures

    def ours(self, number: int) -> Figures:
        names = self._bench.create("ours", number)
        found = self._cluster.api.find(TRAINER, "TrainJob", "ours")
        uids = {each["metadata"]["name"]: each["metadata"]["uid"] for each in found}
        target = Target("kubernetes", None, Credentials(kubeconfig=str(self._bench.kubeconfig))).as_json()
        common = {"trainjob_conn_id": "trainjob_default", "namespace": "ours", "attempt": 1, "target": target}
        jobs = {name: common | {"name": name, "uid": uids[name]} for name in names}
        trigger = "trainjob_airflow.triggers.trainjob.TrainJobTrigger"
        return self.run(Deferred("ours", sys.executable, trigger, "finish", jobs))

    def peer(self, number: int, python: Path) -> Figures:
        self._cluster.api.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "jobs"}})
        names = self._bench.drive("jobs", "create-jobs", number)
        common = {
            "job_namespace": "jobs",
            "pod_names": [],
            "pod_namespace": "jobs",
            "base_container_name": "base",
            "kubernetes_conn_id": "kubernetes_default",
        }
        jobs = {name: common | {"job_name": name} for name in names}
        trigger = "airflow.providers.cncf.kubernetes.triggers.job.KubernetesJobTrigger"
        return self.run(Deferred("jobs", str(python), trigger, "finish-jobs", jobs))


def report(number: int, ours: Figures, peer: Figures | None) -> None:
    def each(metric: str, of: str, unit: str) -> None:
        emit(metric, getattr(ours, of), unit, getattr(peer, of) if peer else None)

    def p95(values: list[float]) -> float:
        return statistics.quantiles(values, n=20)[-1]

    emit("deferred jobs", number, "", number if peer else None)
    each("from the first row to the last running trigger", "seconds_to_wait", "s")
    each("API requests until all wait", "first_requests", "")
    each("API requests while nothing happens", "requests_per_second", "1/s")
    each("connections to the API server", "connections", "")
    each("CPU of the triggerer while nothing happens, of one core", "cpu", "%")
    each("memory above the idle triggerer, RSS", "above_idle", "MB")
    emit("warnings of a blocked loop", len(ours.blocked), "", len(peer.blocked) if peer else None)
    if ours.blocked or (peer and peer.blocked):
        longest = max(peer.blocked, default=0.0) if peer else None
        emit("longest time for which it was blocked", max(ours.blocked, default=0.0), "s", longest)
    for what, of in (("completion", "after_answer"), ("sending of the completion", "after_sending")):
        for metric, take in (("median", statistics.median), ("p95", p95)):
            beside = take(getattr(peer, of)) if peer else None
            emit(f"{what} to trigger event, {metric}", take(getattr(ours, of)), "ms", beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs (%(default)s)")
    parser.add_argument(
        "--quiet-seconds", type=float, default=60, help="seconds for which requests are counted (%(default)s)"
    )
    parser.add_argument("--idle-seconds", type=float, default=0, help="maximum wait for an idle machine")
    parser.add_argument(
        "--peer", type=Path, default=PEER, help="Python of an environment with Airflow's Kubernetes provider"
    )
    parser.add_argument("--no-peer", action="store_true", help="skip the peer")
    arguments = parser.parse_args()
    if not PROGRAMS:
        emit("not measured", "PostgreSQL is not installed")
        return
    if not arguments.no_peer and not arguments.peer.exists():
        raise SystemExit(f"{arguments.peer} is missing: make .venv-bench/stamp, or --no-peer")
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        policy, audit_log = directory / "policy.yaml", directory / "audit.log"
        policy.write_text(yaml.safe_dump(POLICY))
        flags = (f"--audit-policy-file={policy}", f"--audit-log-path={audit_log}")
        environment = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
        emit("load average before", os.getloadavg()[0])
        cluster = Cluster(kueue=False, controllers=False, api_server_flags=flags)
        with cluster, Database(directory / "airflow", directory / "dags", environment, PostgreSQL()) as airflow:
            bench = Bench(cluster, audit_log, arguments.quiet_seconds, arguments.idle_seconds)
            measure = Measure(bench, cluster, airflow, audit_log, arguments.quiet_seconds)
            ours = measure.ours(arguments.jobs)
            peer = None if arguments.no_peer else measure.peer(arguments.jobs, arguments.peer)
        report(arguments.jobs, ours, peer)
        emit("load average after", os.getloadavg()[0])


if __name__ == "__main__":
    main()
