"""Workers that are killed, and workers that are terminated."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.airflow.conftest import ENVIRONMENT, jobs
from tests.airflow.forks import WORKER as EXECUTION, airflow_forks
from tests.airflow.tasks import WORKER, phases
from tests.forks import Forked, Warm
from tests.processes import wait_until

from trainjob import Phase

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


pytestmark = pytest.mark.usefixtures("no_job_is_left")


@pytest.fixture
def flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs run until this file exists."""
    path = tmp_path / "flag"
    monkeypatch.setenv("FLAG", str(path))
    return path


@pytest.fixture
def dags(airflow_home: Path) -> Path:
    (airflow_home / "dags" / "killed.py").write_text(DAGS)
    return airflow_home / "dags"


@pytest.fixture(scope="module")
def forks(airflow_home: Path) -> Iterator[Warm]:
    with airflow_forks(ENVIRONMENT, EXECUTION) as forks:
        yield forks


Start = Callable[..., Forked]


@pytest.fixture
def start(forks: Warm, dags: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts a process that runs a DAG, and returns once its TrainJob runs."""
    begun: list[Forked] = []

    def start(name: str, dag_id: str, *, until: bytes = b"[node-0] up", **environment: str) -> Forked:
        command = [sys.executable, "-c", textwrap.dedent(WORKER), str(dags), dag_id]
        process = Forked(forks, name, command, tmp_path, {**os.environ, **environment})
        begun.append(process)
        process.start()
        wait_until(
            f"the log of {dag_id} contains {until!r}", lambda: until in process.log.read_bytes(), 150, among=[process]
        )
        return process

    yield start
    for process in begun:
        process.kill()


def terminate(process: Forked) -> None:
    """Send SIGTERM to the process alone, not to its children, as at the end of a pod."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)


def last_line(process: Forked) -> str:
    return process.log.read_text().splitlines()[-1]


@pytest.mark.usefixtures("flag")
def test_a_terminated_worker_leaves_the_job_running(start: Start, home: Path) -> None:
    """The end of a worker's pod also sends SIGTERM: it does not mean that the job should end."""
    process = start("worker", "killed_cancel")
    terminate(process)
    process.exit_status()
    assert "the worker is terminating; TrainJob default/train-" in process.log.read_text()
    assert [*phases().values()] == [Phase.RUNNING]


@pytest.mark.usefixtures("flag")
@pytest.mark.parametrize(("action", "left"), [("cancel", 0), ("keep", 1)])
def test_a_person_marks_a_task_as_failed(start: Start, home: Path, action: str, left: int) -> None:
    """First Airflow's database has the new state; then the supervisor notices it and sends the same signal."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import update

    process = start("worker", f"killed_{action}")
    with create_session() as session:
        session.execute(update(TaskInstance).where(TaskInstance.dag_id == f"killed_{action}").values(state="failed"))
    terminate(process)
    wait_until("its job has ended", lambda: len(jobs(home)) == left, 30, poll=0.1)
    process.exit_status()
    log = process.log.read_text()
    assert "the task was killed" in log
    assert ("goodput " in log) is (action == "cancel"), "a later wait measures a job that keeps running"
    assert len(jobs(home)) == left


def test_a_result_that_did_not_arrive_is_delivered_again(start: Start, dags: Path, home: Path, flag: Path) -> None:
    """The worker dies after `execute`, before Airflow has recorded its success; nothing is trained twice."""
    flag.touch()
    (dags / "late.py").write_text(LATE)
    assert start("first", "killed_late", until=b"", DIE="1").exit_status() == -signal.SIGKILL
    (name,) = jobs(home)
    second = start("second", "killed_late", until=b"")
    assert second.exit_status() == 0
    assert last_line(second) == "success"
    assert jobs(home) == [name], "one TrainJob only"
    third = start("third", "killed_late", until=b"")
    assert third.exit_status() == 0
    assert last_line(third) == "success"
    assert len(jobs(home)) == 2, "a run of the same task after its success trains again"
