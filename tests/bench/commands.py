"""Measures what a person or a training waits for: commands, imports, DAG files, reports of progress.

``python -m tests.bench.commands [--runs N] [--no-peer]``

Each figure is the median over fresh processes. A DAG file with one operator is parsed by Airflow's DagBag, after
``import airflow.sdk``, which every DAG file needs; its peers are the operators of Airflow's Kubernetes provider in a
separate environment (``make .venv-bench/stamp``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.bench.figures import Output, environment_of, timed

from trainjob import TrainJobClient
from trainjob._backends.local.backend import LocalBackend
from trainjob.registry import connect

PROGRAM = str(Path(sys.executable).parent / "trainjob")
PARSE = """
import json, sys, time
import airflow.sdk
from airflow.dag_processing.dagbag import DagBag
began = time.process_time()
bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
print(json.dumps(time.process_time() - began))
"""
REPORTS = """
import json, sys, time
from trainjob import progress
def seconds(call, times):
    began = time.process_time()
    for number in range(1, times):
        call(number)
    return (time.process_time() - began) / times
print(json.dumps({
    "step": seconds(progress.step, 200_000),
    "report": seconds(lambda number: progress.report(step=number, metrics={"loss": 1 / number}), 2_000),
}))
"""
DAGS = {
    "TrainJobOperator": ("trainjob_airflow.operators.trainjob", "runtime='torch-distributed', command=['true']"),
    "KubernetesJobOperator": ("airflow.providers.cncf.kubernetes.operators.job", "image='a'"),
    "KubernetesPodOperator": ("airflow.providers.cncf.kubernetes.operators.pod", "image='a'"),
}


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
        before = os.times()
        seconds = timed(lambda command=command: _run(command, environment), runs)  # type: ignore[misc]  # bound now
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
            found[name] = median([float(json.loads(_run(program, environment).splitlines()[-1])) for _ in range(runs)])
    ours = found.pop("TrainJobOperator")
    output.emit("a DAG file with one operator: CPU", ours, "s")
    for name, its in found.items():
        output.emit(f"a DAG file with one operator: CPU, beside {name}", ours, "s", its)


def reports(output: Output, home: Path) -> None:
    """The CPU time of a call, with a watchdog and a termination message as in a container."""
    settings = {"TRAINJOB_STALL_TIMEOUT": "900", "TRAINJOB_TERMINATION_LOG": str(home / "termination-log")}
    found = json.loads(_run([sys.executable, "-c", REPORTS], {**os.environ, **settings}))
    for name, seconds in found.items():
        output.emit(f"progress.{name}: CPU of a call", 1e6 * seconds, "us")


def _run(command: list[str], environment: dict[str, str]) -> str:
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help="processes of each figure (%(default)s)")
    parser.add_argument("--jobs", type=int, default=500, help="jobs that are listed (%(default)s)")
    parser.add_argument("--no-peer", action="store_true", help="skip Airflow's Kubernetes provider")
    arguments = parser.parse_args()
    output = Output("commands")
    peer = "" if arguments.no_peer else str(environment_of("bench"))
    with tempfile.TemporaryDirectory(prefix="trainjob-bench-") as folder:
        commands(output, Path(folder), arguments.runs, arguments.jobs)
        reports(output, Path(folder))
        dag_files(output, Path(folder), arguments.runs, peer)


if __name__ == "__main__":
    main()
