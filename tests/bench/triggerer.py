"""Measures the cost of 1,000 deferred jobs for a triggerer, and its latency, compared with KubernetesJobOperator.

``python -m tests.bench.triggerer [--jobs N] [--quiet-seconds S] [--no-peer]``

A real ``airflow triggerer`` on PostgreSQL: with this provider and TrainJobs, of which some complete one after the other
and the others fail within a second; with triggers that only wait, which is Airflow's own part; then with Jobs in a
separate environment (``make .venv-bench/stamp``). The jobs are on the API server of a test cluster without controllers.
clients/deferred.py writes rows of deferred tasks with Airflow's models, one after the other as tasks do; both triggers
have the default arguments of their operators.

Latency runs from the commit of a TrainJob's end, or from the answer to the PATCH that ends a Job, to the timestamp of
the line "Trigger fired event", which Airflow writes to the task's log after a trigger has yielded its event. Requests
are counted in the API server's audit log; memory, CPU time and connections are the kernel's figures of all processes of
the triggerer; the warnings are Airflow's, about a loop blocked for 0.2 s.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from tests.airflow.system.airflow import Airflow
from tests.bench.figures import ROOT, Output, cpu, environment_of, settle
from tests.bench.server import ApiServer, api_server, now
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.processes import Component, wait_until

from trainjob._backends.credentials import Credentials
from trainjob._jobs.steps import StepPolicy
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
        end: Ends the jobs; returns name -> Unix time.
        jobs: Name of a job -> arguments of its trigger.
    """

    run: str
    python: str
    classpath: str
    end: Callable[[], dict[str, float]]
    jobs: dict[str, dict[str, Any]]


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


def measure(
    server: ApiServer, airflow: Airflow, it: Deferred, quiet: float
) -> tuple[list[float], dict[tuple[str, str], float]]:
    """Latencies in ms; name and unit of each other figure -> its value."""
    number = len(it.jobs)
    command = [it.python, "-m", "airflow", "triggerer", "--skip-serve-logs"]
    component = Component(f"{it.run}-triggerer", command, airflow.directory, airflow.environment)

    def all_wait() -> bool:
        # Airflow writes the first line of a log, and a trigger that has read its job the second.
        return sum(path.read_bytes().count(b"\n") > 1 for path in logs(airflow, it.run)) == number

    component.start()
    try:
        wait_until("the triggerer has a runner", lambda: len(processes(component)) > 1, 300, among=[component])
        settle(lambda: processes(component))
        idle, began = memory(component), time.time()
        defer(server, airflow, it)
        wait_until("all wait", all_wait, 600, among=[component], poll=2)
        waiting = time.time()
        settle(lambda: processes(component))
        quiet_from, used = time.time(), cpu(processes(component))
        time.sleep(quiet)
        used, seconds = cpu(processes(component)) - used, time.time() - quiet_from
        connections, above = server.connections(processes(component)), memory(component) - idle
        before = component.log.read_text(errors="replace")
        ended = it.end()
        wait_until("all have fired", lambda: len(fired(airflow, it.run, component)) == number, 600, poll=3)
    finally:
        component.kill()
    log = component.log.read_text(errors="replace")
    blocked = [float(found) for found in BLOCKED.findall(before)]
    blocked_at_end = [float(found) for found in BLOCKED.findall(log[len(before) :])]
    names = list(it.jobs)
    return [(at - ended[names[index]]) * 1000 for index, at in fired(airflow, it.run, component).items()], {
        ("from the first row to the last running trigger", "s"): waiting - began,
        ("API requests until all wait", ""): server.requests(began, quiet_from),
        ("API requests while nothing happens", "1/s"): server.requests(quiet_from, quiet_from + seconds) / seconds,
        ("connections to the API server", ""): connections,
        ("CPU of the triggerer while nothing happens, of one core", "%"): 100 * used / seconds,
        ("memory above the idle triggerer, RSS", "MB"): above,
        ("warnings of a blocked loop until all wait", ""): len(blocked),
        ("longest time for which it was blocked until all wait", "s"): max(blocked, default=0.0),
        ("warnings of a blocked loop from the first end on", ""): len(blocked_at_end),
        ("longest time for which it was blocked from the first end on", "s"): max(blocked_at_end, default=0.0),
    }


def memory(component: Component) -> float:
    found = 0.0
    for process in processes(component):
        with suppress(psutil.NoSuchProcess):
            found += process.memory_info().rss / 1e6
    return found


def trainjobs(server: ApiServer, run: str, number: int, **end: Any) -> Deferred:
    created = server.create(run, number)
    target = Target("kubernetes", None, Credentials(kubeconfig=str(server.kubeconfig))).as_json()
    policy = asdict(StepPolicy(tried=1))
    common = {"trainjob_conn_id": "trainjob_default", "policy": policy, "target": target, "stored": ""}
    found = {job["metadata"]["name"]: job["metadata"]["uid"] for job in created}
    jobs = {name: common | {"key": name, "job": [run, name, uid, 1]} for name, uid in found.items()}
    trigger = "trainjob_airflow.triggers.trainjob.TrainJobTrigger"
    return Deferred(run, sys.executable, trigger, lambda: server.store(run, list(jobs), **end), jobs)


def kubernetes_jobs(server: ApiServer, number: int, python: str) -> Deferred:
    """Jobs as KubernetesJobOperator creates them, which end by what the Job controller writes."""
    common = {
        "job_namespace": "jobs",
        "pod_names": [],
        "pod_namespace": "jobs",
        "base_container_name": "base",
        "kubernetes_conn_id": "kubernetes_default",
    }
    pod = {"restartPolicy": "Never", "containers": [{"name": "base", "image": "train", "command": ["true"]}]}
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": pod}}}
    names = [
        each["metadata"]["name"]
        for each in server.create("jobs", number, lambda name: job | {"metadata": {"name": name, "namespace": "jobs"}})
    ]

    def end() -> dict[str, float]:
        api, began = server.cluster.api, time.monotonic()

        def complete(index: int) -> tuple[str, float]:
            time.sleep(max(0.0, began + index / RATE - time.monotonic()))
            at = {"lastProbeTime": now(), "lastTransitionTime": now(), "reason": "CompletionsReached", "status": "True"}
            conditions = [{"type": kind, **at} for kind in ("SuccessCriteriaMet", "Complete")]
            status = {"startTime": now(), "completionTime": now(), "succeeded": 1, "conditions": conditions}
            path = api.path("batch/v1", "Job", "jobs", names[index]) + "/status"
            api.request("PATCH", path, {"status": status}, content_type="application/merge-patch+json")
            return names[index], time.time()

        with ThreadPoolExecutor(16) as pool:
            return dict(pool.map(complete, range(number)))

    trigger = "airflow.providers.cncf.kubernetes.triggers.job.KubernetesJobTrigger"
    return Deferred("jobs", python, trigger, end, {name: common | {"job_name": name} for name in names})


def bare(run: str, number: int, file: Path, rate: float) -> Deferred:
    """Triggers that only wait: their figures are Airflow's own."""

    def end() -> dict[str, float]:
        began, ended = time.monotonic(), dict[str, float]()
        for index in range(number):
            time.sleep(max(0.0, began + index / rate - time.monotonic()))
            if index % 20 == 19 or rate < number or index == number - 1:
                replacement = file.with_suffix(".new")
                replacement.write_text(str(index + 1))
                replacement.rename(file)
            ended[str(index)] = time.time()
        return ended

    jobs: dict[str, dict[str, Any]] = {str(index): {"path": str(file), "number": index} for index in range(number)}
    return Deferred(run, sys.executable, "tests.bench.clients.bare.BareTrigger", end, jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000, help="number of jobs (%(default)s)")
    parser.add_argument("--quiet-seconds", type=float, default=60, help="time of counting requests (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="skip KubernetesJobOperator")
    arguments = parser.parse_args()
    output, number, quiet = Output("triggerer"), arguments.jobs, arguments.quiet_seconds
    if not PROGRAMS:
        raise SystemExit("PostgreSQL is not installed")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    # Twice as many as are measured: the database may still have the last triggers of the measurement before.
    environment = {"PYTHONPATH": path, "AIRFLOW__TRIGGERER__CAPACITY": str(2 * number)}
    with tempfile.TemporaryDirectory() as temporary, api_server() as server:
        folder = Path(temporary)
        with Database(folder / "airflow", folder / "dags", environment, PostgreSQL()) as airflow:

            def show(
                what: str, it: Deferred, peer: tuple[list[float], dict[tuple[str, str], float]] = ([], {})
            ) -> None:
                latency, figures = measure(server, airflow, it, quiet)
                for (metric, unit), value in figures.items():
                    output.emit(f"{number} {what}: {metric}", value, unit, peer[1].get((metric, unit)))
                output.spread(f"{number} {what}: end to trigger event", latency, "ms", peer[0])

            peer: tuple[list[float], dict[tuple[str, str], float]] = ([], {})
            if not arguments.no_peer:
                peer = measure(server, airflow, kubernetes_jobs(server, number, environment_of("bench")), quiet)
            show("jobs", trainjobs(server, "ours", number, state="Complete", rate=RATE), peer)
            failing = trainjobs(server, "failed", number, state="Failed", rate=number, at_once=20)
            show("jobs that fail within a second", failing)
            show("triggers that only wait", bare("bare", number, folder / "bare", RATE))
            at_once = bare("at-once", number, folder / "at-once", number)
            show("triggers that only wait and end within a second", at_once)


if __name__ == "__main__":
    main()
