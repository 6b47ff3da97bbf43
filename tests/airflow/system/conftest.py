"""One complete Airflow for all tests of this directory but those of test_standalone; its DAGs are in `dags`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography.fernet import Fernet
from tests import debian
from tests.airflow import templates
from tests.airflow.system.airflow import Airflow
from tests.airflow.system.training import Training
from tests.postgresql import PROGRAMS, PostgreSQL

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

DAGS = Path(__file__).parent / "dags"
AT_ONCE = 8  # tasks that start at once: each takes half a second of CPU, and heartbeats need some as well


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if DAGS.parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))
            if item.path.name == "test_standalone.py":
                continue
            item.add_marker(pytest.mark.full)
            if not PROGRAMS:
                item.add_marker(pytest.mark.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)"))


@pytest.fixture(scope="session")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TRAINJOB_HOME of all tasks."""
    return tmp_path_factory.mktemp("trainings")


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory, trainings: Path) -> Iterator[Airflow]:
    directory = tmp_path_factory.mktemp("airflow")
    (directory / "tmp").mkdir()
    lineage = {"type": "file", "log_file_path": str(directory / "lineage.jsonl"), "append": True}
    environment = {
        "TRAINJOB_BACKEND": "local",
        "TRAINJOB_HOME": str(trainings),
        "TRAINJOB_REGISTRY": templates.registry(trainings / "registry.db"),
        "TMPDIR": str(directory / "tmp"),
        "AIRFLOW__CORE__FERNET_KEY": Fernet.generate_key().decode(),
        "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps(lineage),
        "AIRFLOW__OPENLINEAGE__SELECTIVE_ENABLE": "True",  # it costs each task a second
    }
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    with Airflow(directory, DAGS, environment, PostgreSQL()) as airflow:
        yield airflow


@pytest.fixture(scope="module")
def begin(airflow: Airflow, trainings: Path) -> Iterator[Callable[..., list[Training]]]:
    """Starts runs of DAGs at once, since starting is slow, and returns when the job of each run is running."""
    begun: list[Training] = []

    def begin(*dags: str) -> list[Training]:
        made = [Training.of(airflow, dag, trainings) for dag in dags]
        begun.extend(made)
        # The LocalExecutor of Airflow 3.0 creates no worker while it has as many workers, busy or idle, as waiting
        # tasks (`LocalExecutor._check_workers`): start tasks first that do not occupy their worker.
        order = sorted(made, key=lambda it: it.dag.startswith("worker"))
        for some in (order[i : i + AT_ONCE] for i in range(0, len(order), AT_ONCE)):
            for each in some:
                each.begin()
            for each in some:
                each.until_up()
        return made

    yield begin
    for each in begun:
        each.clean()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = debian.program("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as browser:
        yield browser


@pytest.fixture
def page(airflow: Airflow, browser: Browser) -> Iterator[Page]:
    """A browser window."""
    page = browser.new_page(base_url=airflow.url, viewport={"width": 1400, "height": 1000}, locale="en-US")
    page.set_default_timeout(120_000)
    page.goto("/auth/token/login")  # Airflow 3.1 forgets the page that a login interrupts
    yield page
    page.close()
