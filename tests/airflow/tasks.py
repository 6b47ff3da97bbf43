"""Tasks of tests, and what became of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.airflow.conftest import python
from tests.processes import wait_until

from trainjob import JobRef, Phase, TrainJobClient
from trainjob.errors import Category, Diagnosis, RetryVerdict
from trainjob.status import observe
from trainjob_airflow.operators.trainjob import TrainJobOperator

both = pytest.mark.parametrize("deferrable", [False, True], ids=["worker", "deferred"])


REPORT = """
from trainjob.progress import report
report(progress=100, metrics={'loss': 1 / 3, 'bad': 'nan', 'kind': 'x', 'steps': 7, 'stopped': True})
report(outputs={'model': 'file:///m', 'promoted': False, 'shards': 3})
"""


FAIL_ON_RANK_1 = """
import os, sys, time
if os.environ["JAX_PROCESS_ID"] == "1":
    print("about to break", flush=True)
    sys.exit("the data is wrong")
time.sleep(60)
"""


SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def step(task_id: str = "train", code: str = REPORT, **arguments: Any) -> TrainJobOperator:
    return TrainJobOperator(task_id=task_id, **{"runtime": "trainjob-step", "command": python(code), **arguments})


def waits(tmp: Path) -> str:
    """Code of a job that runs until the file exists."""
    return f"import os, time\nprint('up', flush=True)\nwhile not os.path.exists({str(tmp)!r}): time.sleep(0.05)"


def launched(code: str, **fields: Any) -> JobRef:
    with TrainJobClient("local") as client:
        return client.launch({"runtime": "trainjob-step", "command": python(code), **fields}, "launched-elsewhere")


def phases(namespace: str = "default") -> dict[str, Phase]:
    with TrainJobClient("local", namespace) as client:
        return {job["metadata"]["name"]: observe(job).phase for job in client.list()}


@contextmanager
def meanwhile(act: Callable[[TrainJobClient, JobRef], None], seconds: float = 0.5) -> Iterator[None]:
    """Call `act` some seconds after the only job runs."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            wait_until("a job runs", lambda: Phase.RUNNING in phases().values(), 60)
            time.sleep(seconds)  # until it is waited for
            with TrainJobClient("local") as client:
                act(client, JobRef.of(client.list()[0]))
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run)
    thread.start()
    yield
    thread.join()
    assert not failed, failed


CRASHED = Diagnosis(Category.USER_CODE, RetryVerdict.USER, "node-0 exited with code 7", rank="node-0", exit_code=7)


def stored(run_id: str, table: str) -> dict[str, Any]:
    """Rows of a run in a table of Airflow's database: key -> value."""
    from airflow.utils.session import create_session
    from sqlalchemy import text

    with create_session() as session:
        query = f"SELECT t.key, t.value FROM {table} t JOIN dag_run r ON r.id = t.dag_run_id WHERE r.run_id = :run"
        return {key: json.loads(value) for key, value in session.execute(text(query), {"run": run_id})}


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
with create_session() as session:  # as the scheduler does with the tasks of a lost worker
    session.execute(update(TaskInstance).where(TaskInstance.dag_id == dag_id).values(state=None))
print(dag.test(logical_date=when, run_after=when).state.value)
"""
