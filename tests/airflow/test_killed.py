"""A worker that dies, and one that is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.airflow.conftest import jobs

from trainjob import TrainJobClient

DAGS = '''
from airflow.sdk import DAG
from trainjob_airflow.operators.trainjob import TrainJobOperator

CODE = """
import os, time
print("up", flush=True)
while not os.path.exists(os.environ["FLAG"]):
    time.sleep(0.1)
"""

for action in ("cancel", "keep"):
    with DAG("killed_" + action) as dag:
        TrainJobOperator(
            task_id="train",
            runtime="trainjob-step",
            command=["python", "-c", CODE],
            on_kill_action=action,
        )
    globals()[dag.dag_id] = dag
'''

# What ``airflow dags test`` does, for one run id: the second worker finds the first one's task instance.
WORKER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from airflow.dag_processing.dagbag import DagBag
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import update

folder, dag_id = sys.argv[1:]
when = datetime(2026, 1, 2, tzinfo=UTC)
dag = DagBag(Path(folder)).dags[dag_id]
with create_session() as session:  # as the scheduler does with the tasks of a worker that is gone
    session.execute(update(TaskInstance).where(TaskInstance.dag_id == dag_id).values(state=None))
print(dag.test(logical_date=when, run_after=when).state.value)
"""


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The jobs go on until it is there."""
    path = tmp_path / "flag"
    monkeypatch.setenv("FLAG", str(path))
    return path


@pytest.fixture
def dags(airflow_home: Path) -> Path:
    (airflow_home / "dags" / "killed.py").write_text(DAGS)
    return airflow_home / "dags"


def worker(dags: Path, dag_id: str, log: Path) -> subprocess.Popen[bytes]:
    """A process that runs the DAG; returns once its TrainJob runs."""
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(dags), dag_id]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    patience = time.monotonic() + 60
    while b"[node-0] up" not in log.read_bytes():
        assert time.monotonic() < patience, log.read_text()
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    return process


def test_a_second_worker_goes_on_with_the_job_of_the_first(dags: Path, home: Path, tmp_path: Path, flag: Path) -> None:
    first = worker(dags, "killed_cancel", tmp_path / "first.log")
    first.send_signal(signal.SIGKILL)
    first.wait()
    (name,) = jobs(home)
    second = worker(dags, "killed_cancel", tmp_path / "second.log")
    flag.touch()
    assert second.wait(60) == 0
    assert (tmp_path / "second.log").read_text().splitlines()[-1] == "success"
    assert jobs(home) == [name], "one TrainJob only"
    stored = json.loads((home / "jobs" / "default" / name / "object.json").read_text())
    assert stored["metadata"]["annotations"]["trainjob.dev/delivered"] == "true"


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize(("action", "left"), [("cancel", 0), ("keep", 1)])
def test_a_worker_that_is_told_to_end(dags: Path, home: Path, tmp_path: Path, action: str, left: int) -> None:
    """SIGTERM is what a kill by a person comes to, and the end of a worker's pod as well."""
    log = tmp_path / "worker.log"
    process = worker(dags, f"killed_{action}", log)
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.wait(30)
    took = time.monotonic() - began
    assert "the task was killed while it waited for TrainJob default/train-" in log.read_text()
    assert len(jobs(home)) == left
    assert took < 10
    with TrainJobClient("local") as client:
        for name in jobs(home):
            client.cancel(client.find(name))
