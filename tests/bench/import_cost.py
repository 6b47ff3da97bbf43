"""Measures the import of the Airflow provider in a DAG file: time and memory beyond ``import airflow.sdk``.

::

    python tests/bench/import_cost.py [RUNS [PEER]]

Each figure is the median over fresh interpreters, compared with ``import airflow.sdk``, which every DAG file needs, and
with the cost of KubernetesJobOperator and KubernetesPodOperator in the environment of the Python PEER
(``make .venv-bench/stamp``); ``-`` to skip it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from trainjob_airflow.get_provider_info import get_provider_info

INFO = get_provider_info()
BASE = "import airflow.sdk; from airflow.sdk import BaseHook, BaseOperator, BaseSensorOperator, DAG"


def modules(*kinds: str) -> list[str]:
    return [module for kind in kinds for entry in INFO[kind] for module in entry["python-modules"]]


DECORATORS = [entry["class-name"].rpartition(".")[0] for entry in INFO["task-decorators"]]
CASES = {
    "operators, sensors, decorators, hooks": [*modules("operators", "sensors", "hooks"), *DECORATORS],
    "triggers": modules("triggers"),
    "the core, for a worker": ["trainjob.client"],
}
OTHERS = "airflow.providers.cncf.kubernetes"
PEERS = {
    "operators, sensors, decorators, hooks": {
        "KubernetesJobOperator": [f"{OTHERS}.operators.job"],
        "KubernetesPodOperator": [f"{OTHERS}.operators.pod"],
    },
    "triggers": {"KubernetesJobTrigger": [f"{OTHERS}.triggers.job"]},
}
PEER = Path(__file__).parents[2] / ".venv-bench" / "bin" / "python"
PROGRAM = """
import gc, json, os, time
import psutil
process = psutil.Process()
before, began = process.memory_info().rss, time.perf_counter()
{base}
gc.collect()
middle, half = process.memory_info().rss, time.perf_counter()
{code}
took = time.perf_counter() - half
gc.collect()
print(json.dumps([half - began, middle - before, took, process.memory_info().rss - middle]))
"""


def measure(python: str, imported: list[str], runs: int) -> list[float]:
    """Medians of: seconds and bytes of the base, seconds and bytes on top of it."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
        program = PROGRAM.format(base=BASE, code=f"import {', '.join(imported)}")
        answers = [
            json.loads(
                subprocess.run(
                    [python, "-c", program], env=environment, capture_output=True, text=True, check=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(runs + 1)
        ][1:]  # the first fills the caches and writes airflow.cfg
    return [statistics.median(column) for column in zip(*answers, strict=True)]


def emit(metric: str, value: float | str, unit: str = "", peer: float | None = None) -> None:
    short = round(value, 4) if isinstance(value, float) else value
    ratio = float(f"{value / peer:.3g}") if isinstance(value, float) and peer else None
    line = {"metric": metric, "value": short, "unit": unit, "peer": peer and round(peer, 4), "ratio": ratio}
    print(json.dumps({"bench": "import_cost", **line}), flush=True)


def main(runs: int = 7, peer: str = str(PEER)) -> None:
    if peer != "-" and not Path(peer).exists():
        raise SystemExit(f"{peer} is missing: make .venv-bench/stamp, or - for none")
    emit("load average before", os.getloadavg()[0])
    for name, imported in CASES.items():
        base_seconds, base_bytes, seconds, size = measure(sys.executable, imported, runs)
        emit(f"{name}: time, beside import airflow.sdk", seconds, "s", base_seconds)
        emit(f"{name}: memory, beside import airflow.sdk", size / 1e6, "MB", base_bytes / 1e6)
        for other, its in PEERS.get(name, {}).items() if peer != "-" else ():
            _, _, its_seconds, its_size = measure(peer, its, runs)
            emit(f"{name}: time, beside {other}", seconds, "s", its_seconds)
            emit(f"{name}: memory, beside {other}", size / 1e6, "MB", its_size / 1e6)


if __name__ == "__main__":
    main(*(int(each) if each.isdigit() else each for each in sys.argv[1:]))  # type: ignore[arg-type]
