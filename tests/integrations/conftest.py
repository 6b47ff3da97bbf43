"""The five integrations through which each scenario runs, in this process; the jobs are real, on the local backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.airflow.conftest import WARNINGS, Run, airflow_home, airflow_leaves_nothing, run
from tests.integrations.airflow import AirflowTask
from tests.integrations.commands import CommandLine
from tests.integrations.integration import Integration
from tests.integrations.kfp import KfpStep
from tests.integrations.python import PythonClient

from trainjob import JobRef, TrainJobClient

__all__ = ["airflow_home", "airflow_leaves_nothing", "run"]

INTEGRATIONS = ("client", "cli", "worker", "deferred", "kfp")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Airflow, KFP and their dependencies warn about themselves and each other."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in reversed(WARNINGS):
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def local_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Settings of all processes of the test; its jobs are cancelled at its end."""
    monkeypatch.setenv("TRAINJOB_BACKEND", "local")
    yield
    with TrainJobClient() as client:
        for job in client.list():
            client.cancel(JobRef.of(job))


@pytest.fixture(params=INTEGRATIONS)
def integration(
    request: pytest.FixtureRequest, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Integration:
    """Each of the integrations in turn."""
    match request.param:
        case "client":
            return PythonClient()
        case "cli":
            return CommandLine(tmp_path, capfd)
        case "kfp":
            return KfpStep(tmp_path, capfd, monkeypatch)
    dag_run: Run = request.getfixturevalue("run")
    return AirflowTask(dag_run, tmp_path, deferrable=request.param == "deferred")
