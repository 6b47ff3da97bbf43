"""The tabs "Training" and "Trainings" in a browser, while tasks run and after they have ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from tests.airflow import templates
from tests.airflow.system.airflow import Airflow
from tests.airflow.versions import since
from tests.processes import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import FrameLocator, Page

pytestmark = since("3.1.1", "tabs with pages of plugins")
DAG = "pages"
SECRET = "hf_PlantedSecretOfThePage1234567890ab"
UNMAPPED = ("finished", "finished_deferred", "failed", "running", "deferred")


@dataclass
class Shown:
    """A run of the DAG; its tasks ``running`` and ``deferred`` end once the flag file exists."""

    airflow: Airflow
    run: str
    flag: Path
    home: Path

    def address(self, task: str, what: str, map_index: int = -1) -> str:
        return f"/trainjob/dags/{DAG}/runs/{quote(self.run, safe='')}/tasks/{task}/{map_index}/{what}"

    def document(self, task: str, map_index: int = -1) -> dict[str, Any]:
        found: dict[str, Any] = (
            self.airflow.http.get(self.address(task, "document", map_index)).raise_for_status().json()
        )
        return found

    def kept(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = self.airflow.xcom(DAG, self.run, task, "trainjob_training")
        return json.loads(found) if isinstance(found, str) else found

    def open(self, page: Page, task: str, map_index: int | None = None) -> FrameLocator:
        """Open the tab of a task as a person does."""
        mapped = "" if map_index is None else f"/mapped/{map_index}"
        page.goto(f"/dags/{DAG}/runs/{quote(self.run, safe='')}/tasks/{task}{mapped}")
        page.get_by_role("link", name="Training", exact=True).click()
        return page.frame_locator("iframe[title=Training]")


@pytest.fixture(scope="module")
def shown(airflow: Airflow, trainings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    workspace = tmp_path_factory.mktemp("pages")
    templates.registry(workspace / "registry.db")
    secret = trainings / "secrets" / "pages"
    secret.mkdir(parents=True)
    (secret / "token").write_text(SECRET)
    flag = workspace / "flag"
    run = airflow.run(DAG, flag=str(flag), workspace=str(workspace))
    for task, state in {"failed": "failed", "finished": "success", "finished_deferred": "success"}.items():
        airflow.until(state, DAG, run, task, seconds=240)
    airflow.until("deferred", DAG, run, "deferred", seconds=240)
    airflow.until("running", DAG, run, "running", seconds=240)
    yield Shown(airflow, run, flag, trainings)
    flag.touch()


def test_running_and_deferred_tasks_are_live(shown: Shown, page: Page) -> None:
    for task in ("running", "deferred"):
        frame = shown.open(page, task)
        frame.get_by_text("Running", exact=True).first.wait_for()
        frame.get_by_text("accuracy").first.wait_for()
        read = lambda task=task: int(shown.document(task)["step"] or 0)  # noqa: E731
        wait_until("a step is reported", read, 60)
        seen = frame.locator("main").inner_text()
        wait_until("the figures change", lambda: frame.locator("main").inner_text() != seen, 30, poll=0.1)  # noqa: B023
        document = shown.document(task)
        assert (document["source"], document["notes"]) == ("live", [])
        assert len(document["history"]["loss"]) > 3


def test_the_pages_of_ended_tasks(shown: Shown, page: Page) -> None:
    for task, text in (
        ("finished", "Complete"),
        ("finished_deferred", "Complete"),
        ("failed", "step 10 has no labels"),
    ):
        frame = shown.open(page, task)
        frame.get_by_text(text).first.wait_for()
        document = shown.document(task)
        assert document["source"] == "kept"
        assert document["history"]["loss"]
    frame = shown.open(page, "mapped", 1)
    frame.get_by_text("Complete").first.wait_for()
    assert shown.document("mapped", 0)["name"] != shown.document("mapped", 1)["name"]


def test_the_page_of_the_run(shown: Shown, page: Page) -> None:
    page.goto(f"/dags/{DAG}/runs/{quote(shown.run, safe='')}")
    page.get_by_role("link", name="Trainings", exact=True).click()
    frame = page.frame_locator("iframe[title=Trainings]")
    for task in UNMAPPED:
        frame.get_by_role("link", name=task, exact=True).first.wait_for()
    frame.get_by_role("link", name="failed", exact=True).first.click()
    frame.get_by_text("step 10 has no labels").first.wait_for()


def test_no_page_and_no_xcom_has_the_secrets(shown: Shown) -> None:
    log = shown.airflow.log(DAG, shown.run, "finished")
    assert "token=" in log
    for task in UNMAPPED:
        for text in (
            shown.airflow.http.get(shown.address(task, "page")).text,
            json.dumps(shown.document(task)),
            json.dumps(shown.kept(task)),
        ):
            assert SECRET not in text
            assert "http" in text


@since("3.3", "writes of a trigger while its job runs")
def test_what_is_stored_outlives_a_triggerer(shown: Shown) -> None:
    def points() -> list[list[float]]:
        found: list[list[float]] = shown.kept("deferred")["history"].get("loss", [])
        return found

    wait_until("the trigger has stored metrics", lambda: len(points()) > 2, 90, poll=0.5)
    first = points()[0]
    shown.airflow.end("triggerer")
    assert shown.document("deferred")["source"] == "live", "the page reads the job itself"
    latest = points()[-1]
    shown.airflow.age("job", "latest_heartbeat", job_type="TriggererJob")
    shown.airflow.parts["triggerer"].start()
    # Not their number, which falls whenever the history is thinned.
    wait_until("the next triggerer has stored metrics", lambda: points()[-1] > latest, 120, poll=0.5)
    assert points()[0] == first


def test_the_end_of_the_run(shown: Shown, page: Page) -> None:
    shown.flag.touch()
    for task in ("running", "deferred", "export"):
        shown.airflow.until("success", DAG, shown.run, task, seconds=240)
    for task in ("running", "deferred"):
        document = shown.document(task)
        assert (document["phase"], document["source"], document["progress"]) == ("Complete", "kept", 100)
        assert document["history"]["loss"][0][2] == 1.0, "the first value is kept"
        assert len(document["history"]["loss"]) > 20
        assert document["attempts"][0]["checkpoints"]
    frame = shown.open(page, "running")
    frame.get_by_text("Complete").first.wait_for()
    registered = wait_until(
        "the registered model is shown", lambda: shown.document("running")["lineage"]["registered"], 30, poll=1
    )
    assert (registered["model"], registered["version"], registered["alias"]) == ("pages", "1", "champion")
