"""The examples of dags_examples/airflow, paused until a test unpauses them."""

from __future__ import annotations

import os
import runpy
from datetime import timedelta
from pathlib import Path

from airflow import __version__
from airflow.sdk.definitions._internal.contextmanager import DagContext
from packaging.version import Version

os.environ.setdefault("DIGITS_BY_DAY", (Path(os.environ["TRAINJOB_HOME"]) / "digits-by-day").as_uri())

for file in (Path(__file__).resolve().parents[4] / "dags_examples" / "airflow").glob("*.py"):
    if file.stem != "train_until_good" or Version(__version__) >= Version("3.4"):
        runpy.run_path(str(file))
for dag, _ in DagContext.autoregistered_dags:
    dag.is_paused_upon_creation = True
    for task in dag.tasks:
        if not task.is_mapped:
            # On a busy machine Airflow's API may be too slow for a starting worker: the task fails before it begins.
            task.retries, task.retry_delay = max(2, task.retries or 0), timedelta(seconds=5)
