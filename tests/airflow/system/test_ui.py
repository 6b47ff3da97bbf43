"""The provider in Airflow's API and in a browser: links, lineage, and the tabs "Training" and "Trainings".

tests/airflow/test_plugin.py and test_links.py test what they show.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest
from tests.airflow import templates
from tests.airflow.conftest import ROOT
from tests.airflow.system.airflow import Airflow
from tests.airflow.versions import since
from tests.processes import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import FrameLocator, Page


DAG = "shown"
SECRET = "hf_PlantedSecretOfThePage1234567890ab"
TASKS = ("train", "running", "finished", "failed")
URLS = {
    "job_url": "https://dashboard.test/{namespace}/{name}?uid={uid}",
    "logs_url": "https://logs.test/{name}?from={started}",
    "model_url": "https://models.test/{model}/{version}",
}
tabs = since("3.1.1", "tabs with pages of plugins")


@dataclass
class Shown:
    """A run of the DAG; its tasks ``train`` (deferred), ``running`` and ``adopted`` end once the flag file exists."""

    airflow: Airflow
    run: str
    flag: Path

    def path(self, task: str) -> str:
        return f"dags/{DAG}/dagRuns/{self.run}/taskInstances/{task}"

    def page(self, task: str, tab: str = "") -> str:
        """URL path of a task in the user interface."""
        return f"/dags/{DAG}/runs/{quote(self.run, safe='')}/tasks/{task}/{tab}"

    def links(self, task: str) -> dict[str, str]:
        """Links of a task that have a URL."""
        found = self.airflow.get(f"{self.path(task)}/links")["extra_links"]
        return {name: address for name, address in found.items() if address}

    def job(self, task: str) -> dict[str, Any]:
        """The job of a task, as in Airflow's task state."""
        found = self.airflow.get(f"{self.path(task)}/state-store/trainjob")["value"]
        return dict(found)

    def address(self, task: str) -> str:
        """URL of the task's job in the dashboard."""
        return URLS["job_url"].format(**self.job(task))

    def answer(self, task: str, what: str) -> httpx.Response:
        """The page or the document of a task's tab."""
        path = f"/trainjob/dags/{DAG}/runs/{quote(self.run, safe='')}/tasks/{task}/-1/{what}"
        return self.airflow.http.get(path).raise_for_status()

    def document(self, task: str) -> dict[str, Any]:
        return dict(self.answer(task, "document").json())

    def kept(self, task: str) -> dict[str, Any]:
        found: dict[str, Any] = self.airflow.xcom(DAG, self.run, task, "trainjob_training")
        return json.loads(found) if isinstance(found, str) else found

    def open(self, page: Page, task: str) -> FrameLocator:
        """Open the tab of a task as a person does."""
        page.goto(self.page(task).rstrip("/"))
        page.get_by_role("link", name="Training", exact=True).click()
        return page.frame_locator("iframe[title=Training]")

    def has_links(self, task: str) -> bool:
        """Whether a running task shows both of its links."""
        return len(self.links(task)) == 2

    def step(self, task: str) -> int:
        """The latest step of its training; 0 before the first."""
        return int(self.document(task)["step"] or 0)


def _differs(frame: FrameLocator, seen: str) -> bool:
    return frame.locator("main").inner_text() != seen


@pytest.fixture(scope="module")
def shown(airflow: Airflow, trainings: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    workspace = tmp_path_factory.mktemp("shown")
    templates.registry(workspace / "registry.db")
    secret = trainings / "secrets" / "shown"
    secret.mkdir(parents=True)
    (secret / "token").write_text(SECRET)
    body = {"connection_id": DAG, "conn_type": "trainjob", "extra": json.dumps({"backend": "local", **URLS})}
    airflow.http.post("/api/v2/connections", json=body).raise_for_status()
    flag = workspace / "flag"
    run = airflow.run(DAG, flag=str(flag), workspace=str(workspace))
    states = {"failed": "failed", "finished": "success", "train": "deferred"}
    states |= dict.fromkeys(("running", "adopted"), "running")
    for task, state in states.items():
        airflow.until(state, DAG, run, task, seconds=240)
    yield Shown(airflow, run, flag)
    flag.touch()
    airflow.http.delete(f"/api/v2/connections/{DAG}").raise_for_status()


@pytest.fixture(scope="module")
def finished(shown: Shown) -> Shown:
    shown.flag.touch()
    for task in ("train", "export", "running", "adopted"):
        shown.airflow.until("success", DAG, shown.run, task, seconds=240)
    return shown


def test_links_after_a_new_try_has_adopted_the_job(shown: Shown) -> None:
    address = wait_until("there is a link", lambda: shown.links("adopted").get("TrainJob"), 60)
    shown.airflow.clear(DAG, shown.run, "adopted")
    taken = lambda: "TrainJob is" in shown.airflow.log(DAG, shown.run, "adopted", attempt=2)  # noqa: E731
    wait_until("the second try waits for a job", taken, 240, poll=0.5, ignore=httpx.HTTPError)
    assert shown.links("adopted")["TrainJob"] == address
    assert shown.airflow.task(DAG, shown.run, "adopted")["state"] == "running"


def test_running_and_deferred_tasks_have_links(shown: Shown, page: Page) -> None:
    for task in ("train", "running"):
        wait_until(f"{task} has its links", partial(shown.has_links, task), 60)
        links = shown.links(task)
        assert links["TrainJob"] == shown.address(task)
        assert links["TrainJob logs"].startswith(f"https://logs.test/{shown.job(task)['name']}?from=20")
    page.goto(shown.page("train", "details"))
    for name, address in shown.links("train").items():
        link = page.get_by_role("link", name=name, exact=True)
        link.wait_for()
        assert link.get_attribute("href") == address
    assert page.get_by_role("link", name="Model version").count() == 0, "a training has no model version"
    page.goto(shown.page("train"))
    page.get_by_text(f"TrainJob shown/{shown.job('train')['name']} (attempt 1)").first.wait_for()
    page.get_by_text("TrainJob is Running").first.wait_for()


@tabs
def test_the_tabs_of_running_and_deferred_tasks_are_live(shown: Shown, page: Page) -> None:
    for task in ("running", "train"):
        frame = shown.open(page, task)
        frame.get_by_text("Running", exact=True).first.wait_for()
        frame.get_by_text("accuracy").first.wait_for()
        wait_until("a step is reported", partial(shown.step, task), 60)
        seen = frame.locator("main").inner_text()
        wait_until("the figures change", partial(_differs, frame, seen), 30, poll=0.1)
        document = shown.document(task)
        assert (document["source"], document["notes"]) == ("live", [])
        assert len(document["history"]["loss"]) > 3


@tabs
def test_no_page_and_no_xcom_has_the_secrets(shown: Shown) -> None:
    log = shown.airflow.log(DAG, shown.run, "finished")
    assert "token=" in log
    for task in TASKS:
        for text in (
            shown.answer(task, "page").text,
            json.dumps(shown.document(task)),
            json.dumps(shown.kept(task)),
        ):
            assert SECRET not in text
            assert "http" in text


def test_a_failed_task_in_a_browser(airflow: Airflow, page: Page) -> None:
    """With ``TRAINJOB_RECORD`` in the environment, README.md gets the screenshot."""
    run = airflow.run("train_digits")
    airflow.until("failed", "train_digits", run, seconds=240)
    page.set_viewport_size({"width": 1500, "height": 820})
    page.goto(f"/dags/train_digits/runs/{quote(run, safe='')}/tasks/train")
    page.get_by_text("node-1 exited with code 1: ValueError: step 300 has no labels").first.wait_for()
    page.get_by_text("what to do: ").first.wait_for()
    page.get_by_text("airflow/sdk/execution_time").first.wait_for()
    assert page.get_by_text("trainjob_airflow/").count() == 0, "the frames that raise the error explain nothing"
    page.get_by_text("TrainJobFailure: ").first.click()  # hides the frames of the traceback
    page.get_by_text("airflow/sdk/execution_time").first.wait_for(state="hidden")
    page.evaluate("document.querySelectorAll('*').forEach(each => { each.scrollLeft = 0 })")
    if "TRAINJOB_RECORD" in os.environ:
        page.screenshot(path=ROOT / "docs" / "images" / "failed-task.png")


def test_a_finished_run_in_a_browser(finished: Shown, page: Page) -> None:
    page.goto(finished.page("train"))
    page.get_by_text(re.compile(r"Result: .*accuracy 0\.75")).first.wait_for()
    page.goto(finished.page("export", "details"))
    link = page.get_by_role("link", name="Model version", exact=True)
    link.wait_for()
    assert link.get_attribute("href") == "https://models.test/shown/1"
    assert finished.links("train")["TrainJob"] == finished.address("train")
    assert finished.links("export")["Model version"] == "https://models.test/shown/1"


def test_openlineage_gets_inputs_and_outputs(finished: Shown) -> None:
    log = finished.airflow.directory / "lineage.jsonl"

    def event(task: str) -> dict[str, Any] | None:
        events = [json.loads(line) for line in log.read_text().splitlines() if line] if log.exists() else []
        ended = [each for each in events if each["job"]["name"] == f"{DAG}.{task}" and each["eventType"] == "COMPLETE"]
        return ended[-1] if ended else None

    train = wait_until("the training is reported", lambda: event("train"), 60)
    export = wait_until("the export is reported", lambda: event("export"), 60)
    workspace = str(finished.flag.parent)
    data = {kind: [(each["namespace"], each["name"]) for each in train[kind]] for kind in ("inputs", "outputs")}
    assert data == {"inputs": [("s3://bucket", "digits")], "outputs": [("file", f"{workspace}/trained")]}
    assert train["run"]["facets"]["externalQuery"]["externalQueryId"] == finished.job("train")["uid"]
    assert [each["name"] for each in export["inputs"]] == [f"{workspace}/trained"]
    assert [each["name"] for each in export["outputs"]] == [
        finished.airflow.xcom(DAG, finished.run, "export")["outputs"]["uri"].removeprefix("file://")
    ]
