from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
from tests.fakes.mlflow import MemoryMlflow
from tests.fakes.model_registry import FakeRegistry
from tests.postgresql import PROGRAMS, PostgreSQL
from tests.registry import mlflow_server
from tests.warm import PYTHON, Warm

from trainjob.cli import main
from trainjob.registry import Registry, connect

_T = TypeVar("_T")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove credentials of this machine, so that no registry receives them."""
    for name in ("KUBEFLOW_REGISTRY_TOKEN", "KUBEFLOW_REGISTRY_TOKEN_FILE", "KF_PIPELINES_SA_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("KUBEFLOW_REGISTRY_CA_FILE", raising=False)
    monkeypatch.setattr("trainjob.registry.rest._POD", tmp_path / "pod")


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with FakeRegistry() as fake:
        yield fake


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("registry") / "empty.db"
    connect(f"mlflow+sqlite:///{path}")
    return path


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(empty_database, tmp_path / "registry.db"))


@pytest.fixture(scope="session")
def mlflow_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server on PostgreSQL, as a team runs one; on SQLite if PostgreSQL is not installed."""
    with ExitStack() as database:
        backend = database.enter_context(PostgreSQL()).url if PROGRAMS else ""
        with mlflow_server.running(tmp_path_factory.mktemp("mlflow"), backend) as url:
            yield url


@pytest.fixture
def memory_mlflow(monkeypatch: pytest.MonkeyPatch) -> MemoryMlflow:
    """A server in memory, to which all clients of MLflow connect."""
    server = MemoryMlflow()
    monkeypatch.setattr("trainjob.registry.mlflow.open_client", server.client)
    return server


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """Runs a script in a separate process, as ``python`` does, with MLflow imported already."""
    modules = ["registry.kubeflow", "registry.mlflow", "data.steps"]
    mlflow = ["tracking", "store.tracking.sqlalchemy_store", "store.model_registry.sqlalchemy_store"]
    with Warm({PYTHON: ""}, [f"trainjob.{each}" for each in modules] + [f"mlflow.{each}" for each in mlflow]) as warm:
        yield str(warm.bin / PYTHON)


@pytest.fixture
def registry_uri(request: pytest.FixtureRequest) -> str:
    """URI of a registry of the kind that the parameter names.

    ``mlflow-file`` (SQLite), ``mlflow-server`` (PostgreSQL), ``mlflow-memory`` or ``kubeflow``.
    """
    match request.param:
        case "mlflow-file":
            return f"mlflow+sqlite:///{request.getfixturevalue('database')}"
        case "mlflow-server":
            return f"mlflow+{request.getfixturevalue('mlflow_url')}"
        case "mlflow-memory":
            request.getfixturevalue("memory_mlflow")
            return "mlflow+http://memory"
    if url := os.environ.get("TRAINJOB_TEST_MODEL_REGISTRY"):  # of a real server, see tests.registry.recorder
        return f"kubeflow+{url}"
    return f"kubeflow+{request.getfixturevalue('fake').url}"


@pytest.fixture
def registry(registry_uri: str) -> Registry:
    """The registry that the parameter names."""
    return connect(registry_uri)


@pytest.fixture
def file_registry(database: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """MLflow on SQLite, as TRAINJOB_REGISTRY names it."""
    monkeypatch.setenv("TRAINJOB_REGISTRY", f"mlflow+sqlite:///{database}")
    return connect()


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a test once on a registry of each kind; its URI is the fixture `registry_uri`."""
    return pytest.mark.parametrize("registry_uri", kinds, indirect=True)


def at_once(*actions: Callable[[], _T]) -> list[_T]:
    """Return the results of these actions, started at the same instant, each in a separate thread."""
    start = threading.Barrier(len(actions))

    def run(action: Callable[[], _T]) -> _T:
        start.wait(60)
        return action()

    with ThreadPoolExecutor(len(actions)) as threads:
        return list(threads.map(run, actions, timeout=120))


@pytest.fixture
def trainjob(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line with these words; return its exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main([*words])
        out, err = capsys.readouterr()
        return int(str(left.value.code)), out, err

    return run
