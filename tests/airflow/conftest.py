"""A real Airflow for this tier: SQLite, one home per session, DAGs run by ``dag.test()``."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy
import pytest
from tests.airflow import templates
from tests.airflow.versions import store

if TYPE_CHECKING:
    from airflow.sdk import DAG

    from trainjob import Backend, JobRef

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

# Airflow reads its home and settings at its first import, which happens when the modules of this directory are
# collected, before any fixture runs.
HOME = Path(tempfile.mkdtemp(prefix="trainjob-airflow-"))
ENVIRONMENT = {
    "AIRFLOW_HOME": str(HOME),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__DAGS_FOLDER": str(HOME / "dags"),
    "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{HOME}/airflow.db",
    "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(HOME / "logs"),
    "AIRFLOW__API__BASE_URL": "http://airflow.test:8080",
    "AIRFLOW__TRAINJOB__DEPLOYMENT": "",
    "NO_COLOR": "1",
}
os.environ.update(ENVIRONMENT)

# Airflow and its dependencies warn about themselves and each other. Warnings of the project's modules and exceptions
# that nothing catches stay errors. The last matching filter applies.
WARNINGS = (
    "ignore::Warning",
    "error::Warning:trainjob",
    "error::pytest.PytestUnraisableExceptionWarning",
    "error::pytest.PytestUnhandledThreadExceptionWarning",
)


def pytest_unconfigure() -> None:
    shutil.rmtree(HOME, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set the filters for tests of this directory only: hooks of a conftest get all tests of the session."""
    for item in items:
        if HERE in item.path.parents:
            for warning in reversed(WARNINGS):  # the marker that is nearest to the test is applied last
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(scope="session")
def airflow_home() -> Path:
    """AIRFLOW_HOME with a migrated database."""
    (HOME / "dags").mkdir(exist_ok=True)
    from airflow.utils.db import initdb

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initdb()
    return HOME


@pytest.fixture(autouse=True)
def local_backend(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a worker: the local backend and a registry; each test has its own."""
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    monkeypatch.setenv("TRAINJOB_REGISTRY", templates.registry(tmp_path / "registry.db"))


@pytest.fixture(autouse=True)
def airflow_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what tasks of this process set: a SIGTERM handler and AIRFLOW_CTX_* variables."""
    before, environment = signal.getsignal(signal.SIGTERM), dict(os.environ)
    yield
    signal.signal(signal.SIGTERM, before)
    for name in set(os.environ) - set(environment):
        del os.environ[name]


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside a triggerer, connections cannot be looked up."""
    from trainjob_airflow.hooks.trainjob import Target, TrainJobHook

    async def none(self: TrainJobHook) -> Target:
        return Target()

    monkeypatch.setattr(TrainJobHook, "_aresolve", none)


@pytest.fixture
def no_job_is_left(home: Path) -> Iterator[None]:
    """Cancel all jobs at the end."""
    from trainjob import JobRef, TrainJobClient

    yield
    for folder in (home / "jobs").glob("[!.]*"):
        with TrainJobClient("local", folder.name) as client:
            for job in client.list():
                client.cancel(JobRef.of(job))


@dataclass
class Ran:
    """The result of a DAG run."""

    run_id: str
    state: str
    states: dict[str, str]
    xcoms: dict[str, Any]
    errors: dict[str, BaseException]
    log: str = field(repr=False)


Run = Callable[..., Ran]


class Failures:
    """Records the errors of tasks; before Airflow 3.1, callbacks of ``dag.test()`` do not get them."""

    def __init__(self) -> None:
        from airflow.providers.common.compat.sdk import get_listener_manager

        self.errors: dict[str, BaseException] = {}
        self._plugins = get_listener_manager().pm

    def __enter__(self) -> None:
        self._plugins.register(self)

    def __exit__(self, *_: object) -> None:
        self._plugins.unregister(self)

    @pluggy.HookimplMarker("airflow")
    def on_task_instance_failed(self, task_instance: Any, error: BaseException) -> None:
        self.errors[task_instance.task_id] = error


@pytest.fixture
def run(airflow_home: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a DAG by ``dag.test()``: real tasks, a real execution API, triggers in line.

    With ``same_run=True`` all runs of a DAG have one run ID, and so their tasks the same keys.
    """

    def run(dag: DAG, *, same_run: bool = False, **conf: Any) -> Ran:
        from airflow.models.xcom import XComModel
        from airflow.utils.session import create_session
        from sqlalchemy import select

        failures = Failures()
        when: Any = {"logical_date": LONG_AGO, "run_after": LONG_AGO}
        publish(dag)
        capfd.readouterr()
        for name in ("", "airflow.task", "airflow.task.operators", "trainjob_airflow"):
            caplog.set_level(logging.INFO, logger=name)
        with failures:
            dag_run = dag.test(run_conf=conf or None, **(when if same_run else {}))
        log = "".join(capfd.readouterr())
        with create_session() as session:
            rows = session.execute(select(XComModel).where(XComModel.run_id == dag_run.run_id)).scalars()
            xcoms = {
                row.task_id if row.map_index < 0 else f"{row.task_id}[{row.map_index}]": _value(row.value)
                for row in rows
                if row.key == "return_value"
            }
            states = {
                ti.task_id if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]": str(ti.state)
                for ti in dag_run.get_task_instances(session=session)
            }
        return Ran(dag_run.run_id, str(dag_run.state), states, xcoms, failures.errors, log)

    return run


def _value(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def publish(dag: DAG) -> None:
    """Store a DAG without a file as the DAG processor does: ``dag.test()`` reads it back."""
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session

    with create_session() as session:
        session.merge(DagBundleModel(name="testing"))
        session.commit()
        store([dag], session)


def jobs(home: Path, namespace: str = "default") -> list[str]:
    """Names of the TrainJobs of a local backend, without cancelled ones."""
    from trainjob import Phase
    from trainjob._backends.local.store import JobFiles
    from trainjob.status import observe

    held = {path.name: JobFiles(path).read() for path in (home / "jobs" / namespace).glob("[!.]*")}
    return sorted(name for name, job in held.items() if observe(job).phase is not Phase.CANCELLED)


def python(code: str) -> list[str]:
    """Command that runs `code`."""
    return ["python", "-c", code]


async def replaced(backend: Backend, ref: JobRef) -> JobRef:
    """Create another attempt of the key of a job, as a launcher does that has lost sight of it, and delete the job."""
    from trainjob import JobRef
    from trainjob.job import ATTEMPT

    job = await backend.get(ref.namespace, ref.name)
    assert job is not None
    number = ref.attempt + 1
    name = f"{ref.name.rpartition('-')[0]}-{number}"
    own = {"name": name, "namespace": ref.namespace, "labels": {**job["metadata"]["labels"], ATTEMPT: str(number)}}
    metadata = own | {"annotations": dict(job["metadata"]["annotations"])}
    made = await backend.create({name: job[name] for name in ("apiVersion", "kind", "spec")} | {"metadata": metadata})
    await backend.delete(ref)
    return JobRef.of(made)


LONG_AGO = datetime(2026, 1, 2, tzinfo=UTC)
