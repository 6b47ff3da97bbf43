"""What importing the Airflow provider adds to a DAG file: time and memory over ``import airflow.sdk``.

::

    python tests/bench/import_cost.py [runs]

Each figure is the median over fresh interpreters. The peer is ``import airflow.sdk`` itself, which every DAG file pays.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile

BASE = "import airflow.sdk; from airflow.sdk import BaseHook, BaseOperator, BaseSensorOperator, DAG"
CASES = {
    "operators": "import trainjob_airflow.operators.trainjob, trainjob_airflow.operators.data",
    "all": (
        "import trainjob_airflow.operators.trainjob, trainjob_airflow.operators.data,"
        " trainjob_airflow.sensors.trainjob, trainjob_airflow.hooks.trainjob"
    ),
    "trigger": "import trainjob_airflow.triggers.trainjob",
    "core": "import trainjob.client",
}
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


def measure(code: str, runs: int) -> list[float]:
    """Medians of: seconds and bytes of the base, seconds and bytes on top of it."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "AIRFLOW_HOME": home, "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
        program = PROGRAM.format(base=BASE, code=code)
        answers = [
            json.loads(
                subprocess.run(
                    [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
                ).stdout.splitlines()[-1]
            )
            for _ in range(runs + 1)
        ][1:]  # the first fills the caches and writes airflow.cfg
    return [statistics.median(column) for column in zip(*answers, strict=True)]


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    for name, code in CASES.items():
        base_seconds, base_bytes, seconds, size = measure(code, runs)
        for metric, value, peer, unit in (
            ("time", seconds, base_seconds, "s"),
            ("memory", size / 1e6, base_bytes / 1e6, "MB"),
        ):
            line = {
                "bench": "import_cost",
                "metric": f"{name}.{metric}",
                "value": round(value, 4),
                "unit": unit,
                "peer": round(peer, 4),
                "ratio": round(value / peer, 4),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
