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

from trainjob import Phase, TrainJobClient
from trainjob.status import observe

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

LATE = """
import os, signal
from airflow.sdk import DAG
from trainjob_airflow.operators.trainjob import TrainJobOperator

def die(context, result):
    if "DIE" in os.environ:
        os.kill(os.getpid(), signal.SIGKILL)

with DAG("killed_late") as dag:
    TrainJobOperator(task_id="train", runtime="trainjob-step", command=["true"], post_execute=die)
"""

# What ``airflow dags test`` does, for one run id: the second worker finds the first one's task instance.
WORKER = """
import sys
from datetime import UTC, datetime
from pathlib import Path
from airflow.models.taskinstance import TaskInstance
from airflow.utils.session import create_session
from sqlalchemy import update
from tests.airflow.versions import dag_bag

folder, dag_id = sys.argv[1:]
when = datetime(2026, 1, 2, tzinfo=UTC)
dag = dag_bag(Path(folder)).dags[dag_id]
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
    patience = time.monotonic() + 150
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
    assert second.wait(120) == 0
    assert (tmp_path / "second.log").read_text().splitlines()[-1] == "success"
    assert jobs(home) == [name], "one TrainJob only"
    stored = json.loads((home / "jobs" / "default" / name / "object.json").read_text())
    assert stored["metadata"]["annotations"]["trainjob.dev/delivered"] == "true"


@pytest.mark.usefixtures("flag")
def test_a_worker_that_goes_away_leaves_the_job_alone(dags: Path, home: Path, tmp_path: Path) -> None:
    """SIGTERM is what the end of a worker's pod comes to: nobody has said that the job is not wanted any more."""
    log = tmp_path / "worker.log"
    process = worker(dags, "killed_cancel", log)
    os.kill(process.pid, signal.SIGTERM)
    process.wait(120)
    assert "the worker is going away, and TrainJob default/train-" in log.read_text()
    with TrainJobClient("local") as client:
        (name,) = jobs(home)
        assert observe(client.get(client.find(name))).phase is Phase.RUNNING
        client.cancel(client.find(name))


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize(("action", "left"), [("cancel", 0), ("keep", 1)])
def test_a_person_ends_a_task(dags: Path, home: Path, tmp_path: Path, action: str, left: int) -> None:
    """Marked as failed in Airflow's database first; then its supervisor finds out and sends the same signal."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import update

    log = tmp_path / "worker.log"
    process = worker(dags, f"killed_{action}", log)
    with create_session() as session:
        session.execute(update(TaskInstance).where(TaskInstance.dag_id == f"killed_{action}").values(state="failed"))
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    while len(jobs(home)) != left:
        assert time.monotonic() - began < 10, "its job goes on"
        time.sleep(0.1)
    process.wait(60)
    assert "the task was killed" in log.read_text()
    assert len(jobs(home)) == left
    with TrainJobClient("local") as client:
        for name in jobs(home):
            client.cancel(client.find(name))


def test_a_result_that_did_not_arrive_is_delivered_again(dags: Path, home: Path, tmp_path: Path, flag: Path) -> None:
    """The worker dies between the end of `execute` and Airflow's answer to it; nothing is trained twice."""
    flag.touch()
    (dags / "late.py").write_text(LATE)
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(dags), "killed_late"]
    first = subprocess.run(command, env={**os.environ, "DIE": "1"}, capture_output=True, check=False, timeout=100)
    assert first.returncode == -signal.SIGKILL
    (name,) = jobs(home)
    second = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert second.stdout.splitlines()[-1] == "success"
    assert jobs(home) == [name], "one TrainJob only"
    third = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert third.stdout.splitlines()[-1] == "success"
    assert len(jobs(home)) == 2, "asked for again, it trains again"
