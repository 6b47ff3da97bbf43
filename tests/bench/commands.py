"""Measures what a person or a training waits for: commands, imports, DAG files, pages, diagnoses, reports of progress.

``python -m tests.bench.commands [--runs N] [--no-peer]``

Each figure of a program is the median over fresh processes. A DAG file with one operator is parsed by Airflow's DagBag,
after ``import airflow.sdk``, which every DAG file needs; its peers are the operators of Airflow's Kubernetes provider
in a separate environment (``make .venv-bench/stamp``).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from tests.bench.figures import Output, environment_of
from tests.objects import ended, event, pod, trainjob
from tests.page import documents

from trainjob import TrainJobClient
from trainjob._backends.kubernetes.pods import MAX_TAILS
from trainjob._backends.local.backend import LocalBackend
from trainjob._diagnosis import READ_LINES, diagnosis_of
from trainjob._diagnosis.evidence import Evidence
from trainjob._pages.documents.jobs import workflow_document
from trainjob._pages.page import page_html
from trainjob.registry import connect
from trainjob.status import Observation, Phase

PROGRAM = str(Path(sys.executable).parent / "trainjob")
PARSE = """
import sys, time
import airflow.sdk
from airflow.dag_processing.dagbag import DagBag
began = time.process_time()
bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
print(time.process_time() - began)
"""
REPORTS = """
import sys, time
from trainjob import progress
began = time.process_time()
for number in range(1, 2001):
    progress.report(step=number, metrics={"loss": 1 / number})
print((time.process_time() - began) / 2000)
"""
DAGS = {
    "TrainJobOperator": ("trainjob_airflow.operators.trainjob", "runtime='torch-distributed', command=['true']"),
    "KubernetesJobOperator": ("airflow.providers.cncf.kubernetes.operators.job", "image='a'"),
    "KubernetesPodOperator": ("airflow.providers.cncf.kubernetes.operators.pod", "image='a'"),
}
LINE = "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.88.0.7]:4711"


def commands(output: Output, home: Path, runs: int, jobs: int) -> None:
    """Commands on the local backend and on a registry in SQLite."""
    environment = {**os.environ, "TRAINJOB_BACKEND": "local", "TRAINJOB_HOME": str(home)}
    registry = f"mlflow+sqlite:///{home}/registry.db"
    connect(registry).register("digits", f"file://{home}/model", export_id="e", digest=f"sha256:{'a' * 64}")
    with TrainJobClient(LocalBackend(home)) as client:
        for number in range(jobs):
            client.wait(client.launch({"runtime": "trainjob-step", "command": ["true"]}, f"job-{number}"))
    for name, command in {
        "from trainjob import TrainJobClient": [sys.executable, "-c", "from trainjob import TrainJobClient"],
        "python -c pass": [sys.executable, "-c", "pass"],
        "trainjob run -- true": [PROGRAM, "run", "--runtime", "trainjob-step", "--", "true"],
        f"trainjob list of {jobs} jobs": [PROGRAM, "list"],
        "trainjob registry show on SQLite": [PROGRAM, "registry", "show", "digits", "1", "--registry", registry],
    }.items():
        before, seconds = os.times(), []
        for _ in range(runs):
            began = time.perf_counter()
            _run(command, environment)
            seconds.append(time.perf_counter() - began)
        used = os.times().children_user + os.times().children_system - before.children_user - before.children_system
        output.emit(f"{name}: time", median(seconds), "s")
        output.emit(f"{name}: CPU", used / runs, "s")


def dag_files(output: Output, folder: Path, runs: int, peer: str) -> None:
    environment = {**os.environ, "AIRFLOW_HOME": str(folder), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    found = {}
    for name, (module, arguments) in DAGS.items():
        file = folder / f"{name}.py"
        file.write_text(
            f"from airflow.sdk import DAG\nfrom {module} import {name}\n"
            f"with DAG('{name}'):\n    {name}(task_id='train', {arguments})\n"
        )
        if python := sys.executable if name == "TrainJobOperator" else peer:
            program = [python, "-c", PARSE, str(file)]
            found[name] = median([float(_run(program, environment).splitlines()[-1]) for _ in range(runs)])
    ours = found.pop("TrainJobOperator")
    output.emit("a DAG file with one operator: CPU", ours, "s")
    for name, its in found.items():
        output.emit(f"a DAG file with one operator: CPU, beside {name}", ours, "s", its)


def diagnosis(output: Output, number: int = 1000, events: int = 5000) -> None:
    """A job of crashed pods, with as many logs, lines and Events as are read at most."""
    pods = [pod(rank, ended(1)) for rank in range(number)]
    names = [each["metadata"]["name"] for each in pods]
    logs = {name: [LINE] * READ_LINES for name in names[:MAX_TAILS]}
    about = [event("FailedMount", "no such volume", about=names[i % number]) for i in range(events)]
    evidence = Evidence(trainjob(), pods, logs, about)
    what = f"{number} pods, {len(logs)} logs of {READ_LINES} lines, {events} events"
    seconds = _used(lambda: diagnosis_of(evidence, Observation(Phase.FAILED)))
    output.emit(f"diagnosis of {what}: CPU", seconds, "s")


def in_process(output: Output, home: Path) -> None:
    """A page, and the CPU time of a report with a watchdog and a termination message as in a container."""
    trainings = [documents.running() for _ in range(60)]
    seconds = _used(lambda: page_html(workflow_document("retrain", trainings)))
    output.emit("page of a workflow of 60 jobs, from their documents: CPU", seconds, "s")
    settings = {"TRAINJOB_STALL_TIMEOUT": "900", "TRAINJOB_TERMINATION_LOG": str(home / "termination-log")}
    report = float(_run([sys.executable, "-c", REPORTS], {**os.environ, **settings}))
    output.emit("progress.report: CPU of a call", 1e6 * report, "us")


def _used(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _run(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="processes of each figure (%(default)s)")
    parser.add_argument("--jobs", type=int, default=500, help="jobs that are listed (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="skip Airflow's Kubernetes provider")
    arguments = parser.parse_args()
    output = Output("commands")
    diagnosis(output)
    with tempfile.TemporaryDirectory(prefix="trainjob-bench-") as folder:
        in_process(output, Path(folder))
        commands(output, Path(folder), arguments.runs, arguments.jobs)
        dag_files(output, Path(folder), arguments.runs, "" if arguments.no_peer else environment_of("bench"))


if __name__ == "__main__":
    main()
