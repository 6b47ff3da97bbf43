"""Measures the cost of 1,000 deferred jobs for a triggerer, and its latency, compared with KubernetesJobOperator.

``python -m tests.bench.triggerer [--jobs N] [--quiet-seconds S] [--no-peer]``

A real ``airflow triggerer`` on PostgreSQL: with this provider and TrainJobs, of which some complete one after the other
and the others fail within a second; then with Jobs in a separate environment (``make .venv-bench/stamp``), on the same
API server of the test cluster. That runs without controllers: the driver, a separate process, writes the status that
Trainer and the Job controller would write. clients/deferred.py writes rows of deferred tasks with Airflow's models, one
after the other as tasks do; both triggers have the default arguments of their operators.

Latency runs from the answer to the PATCH that ends a job to the timestamp of the line "Trigger fired event", which
Airflow writes to the task's log after a trigger has yielded its event. Requests are counted in the API server's audit
log; memory, CPU time and connections are the kernel's figures of all processes of the triggerer; the warnings are
Airflow's, about a loop blocked for 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from tests.airflow.system.airflow import Airflow
from tests.bench.figures import ROOT, ApiServer, Output, api_server, cpu, environment_of, settle
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import Component, wait_until
from tests.testcluster.access import TRAINER

from trainjob._backends.credentials import Credentials
from trainjob_airflow.hooks.trainjob import Target

RATE = 40.0  # tasks that defer per second; a higher rate blocks the loop of any triggerer, with any trigger
BLOCKED = re.compile(r"async thread was blocked for ([\d.]+) seconds")
FIRED = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z).*Trigger fired event.*/(\d+)/\d+ \(ID \d+\)")


class Database(Airflow):
    """Airflow's database, without its other components."""

    def _start(self) -> None:
        assert self.database is not None
        self._running.enter_context(self.database)
        self._prepare()


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


@dataclass
class Figures:
    """The figures of one triggerer. Latencies in ms, memory in MB."""

    latency: list[float] = field(default_factory=list)
    numbers: dict[tuple[str, str], float] = field(default_factory=dict)


def processes(component: Component) -> list[psutil.Process]:
    process = psutil.Process(component.pid)
    return [process, *process.children(recursive=True)]


def fired(airflow: Airflow, run: str, component: Component) -> dict[int, float]:
    """Map index of a task -> Unix time at which its trigger fired."""
    found = {}
    # A late event is not in the task's log, but in that of the triggerer.
    for path in [*logs(airflow, run), component.log]:
        for at, index in FIRED.findall(path.read_text(errors="replace")):
            found[int(index)] = datetime.fromisoformat(at).timestamp()
    return found


def logs(airflow: Airflow, run: str) -> list[Path]:
    return list((airflow.directory / "logs" / f"dag_id={run}").rglob("*.trigger.*"))


def defer(server: ApiServer, airflow: Airflow, it: Deferred) -> None:
    command = [sys.executable, "-m", "tests.bench.clients.deferred"]
    arguments = [it.run, str(server.kubeconfig), it.classpath, str(RATE)]
    rows = "\n".join(map(json.dumps, it.jobs.values()))
    environment = {**os.environ, **airflow.environment}
    subprocess.run([*command, *arguments], input=rows, env=environment, cwd=ROOT, text=True, check=True)


def measure(server: ApiServer, airflow: Airflow, it: Deferred, quiet: float) -> Figures:
    figures, number = Figures(), len(it.jobs)
    command = [it.python, "-m", "airflow", "triggerer", "--skip-serve-logs"]
    component = Component(f"{it.run}-triggerer", command, airflow.directory, airflow.environment)
    component.start()
    try:
        wait_until("the triggerer has a runner", lambda: len(processes(component)) > 1, 300, among=[component])
        settle(lambda: processes(component))
        idle, began = memory(component), time.time()
        defer(server, airflow, it)
        # Airflow writes the first line of a log, and a trigger that has read its job the second.
        wait_until(
            "all wait",
            lambda: sum(path.read_bytes().count(b"\n") > 1 for path in logs(airflow, it.run)) == number,
            600,
            among=[component],
            poll=2,
        )
        figures.numbers["from the first row to the last running trigger", "s"] = time.time() - began
        settle(lambda: processes(component))
        quiet_from, used = time.time(), cpu(processes(component))
        time.sleep(quiet)
        used, seconds = cpu(processes(component)) - used, time.time() - quiet_from
        requests = server.requests(quiet_from, quiet_from + seconds)
        figures.numbers |= {
            ("API requests until all wait", ""): server.requests(began, quiet_from),
            ("API requests while nothing happens", "1/s"): requests / seconds,
            ("connections to the API server", ""): server.connections(processes(component)),
            ("CPU of the triggerer while nothing happens, of one core", "%"): 100 * used / seconds,
            ("memory above the idle triggerer, RSS", "MB"): memory(component) - idle,
        }
        ends = (
            server.store(it.run, "failed", 0.95, list(it.jobs))
            if it.finish == "failed"
            else (server.drive(it.run, it.finish, RATE, list(it.jobs)))
        )
        wait_until("all have fired", lambda: len(fired(airflow, it.run, component)) == number, 600, poll=3)
        blocked = [float(found) for found in BLOCKED.findall(component.log.read_text(errors="replace"))]
        figures.numbers["warnings of a blocked loop", ""] = len(blocked)
        figures.numbers["longest time for which it was blocked", "s"] = max(blocked, default=0.0)
        seen = fired(airflow, it.run, component)
    finally:
        component.kill()
    names = list(it.jobs)
    answered = {name: float(at[-1]) for name, *at in (line.split("\t") for line in ends)}
    figures.latency = [(at - answered[names[index]]) * 1000 for index, at in seen.items()]
    return figures


def memory(component: Component) -> float:
    found = 0.0
    for process in processes(component):
        with suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss / 1e6
    return found


def trainjobs(server: ApiServer, run: str, number: int, finish: str) -> Deferred:
    names = server.create(run, number)
    uids = {
        job["metadata"]["name"]: job["metadata"]["uid"] for job in server.cluster.api.find(TRAINER, "TrainJob", run)
    }
    target = Target("kubernetes", None, Credentials(kubeconfig=str(server.kubeconfig))).as_json()
    common = {"trainjob_conn_id": "trainjob_default", "namespace": run, "attempt": 1, "tried": 1, "target": target}
    jobs = {name: common | {"key": name, "name": name, "uid": uids[name]} for name in names}
    return Deferred(run, sys.executable, "trainjob_airflow.triggers.trainjob.TrainJobTrigger", finish, jobs)


def kubernetes_jobs(server: ApiServer, number: int, python: Path) -> Deferred:
    common = {
        "job_namespace": "jobs",
        "pod_names": [],
        "pod_namespace": "jobs",
        "base_container_name": "base",
        "kubernetes_conn_id": "kubernetes_default",
    }
    jobs = {name: common | {"job_name": name} for name in server.create("jobs", number, "create-jobs")}
    trigger = "airflow.providers.cncf.kubernetes.triggers.job.KubernetesJobTrigger"
    return Deferred("jobs", str(python), trigger, "finish-jobs", jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs (%(default)s)")
    parser.add_argument("--quiet-seconds", type=float, default=60, help="time of counting requests (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="skip KubernetesJobOperator")
    arguments = parser.parse_args()
    output, number, quiet = Output("triggerer"), arguments.jobs, arguments.quiet_seconds
    if not PROGRAMS:
        raise SystemExit("PostgreSQL is not installed")
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    with tempfile.TemporaryDirectory() as temporary, api_server() as server:
        folder = Path(temporary)
        with Database(folder / "airflow", folder / "dags", environment, PostgreSQL()) as airflow:
            ours = measure(server, airflow, trainjobs(server, "ours", number, "finish"), quiet)
            failed = measure(server, airflow, trainjobs(server, "failed", number, "failed"), 1)
            peer = Figures()
            if not arguments.no_peer:
                peer = measure(server, airflow, kubernetes_jobs(server, number, environment_of("bench")), quiet)
    for (metric, unit), value in ours.numbers.items():
        output.emit(f"{number} jobs: {metric}", value, unit, peer.numbers.get((metric, unit)))
    output.spread(f"{number} jobs: completion to trigger event", ours.latency, "ms", peer.latency)
    output.spread(f"{number} jobs that fail within a second: failure to trigger event", failed.latency, "ms")
    for (metric, unit), value in failed.numbers.items():
        if "blocked" in metric:
            output.emit(f"{number} jobs that fail within a second: {metric}", value, unit)


if __name__ == "__main__":
    main()
