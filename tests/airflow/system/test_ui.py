"""The provider in Airflow's API, its command line, and a browser."""

from __future__ import annotations

import json
import os
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
from tests.processes import wait_until

from trainjob_airflow.get_provider_info import get_provider_info

if TYPE_CHECKING:
    from playwright.sync_api import Page


DAG = "shown"
URLS = {
    "job_url": "https://dashboard.test/{namespace}/{name}?uid={uid}",
    "logs_url": "https://logs.test/{name}?from={started}",
    "model_url": "https://models.test/{model}/{version}",
}
FIELDS = get_provider_info()["connection-types"][0]["conn-fields"]


@dataclass
class Shown:
    """A run whose trainings wait until the flag file exists."""

    airflow: Airflow
    run: str
    flag: Path

    def path(self, task: str) -> str:
        return f"dags/{DAG}/dagRuns/{self.run}/taskInstances/{task}"

    def page(self, task: str, tab: str) -> str:
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


@pytest.fixture(scope="module")
def shown(airflow: Airflow, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    workspace = tmp_path_factory.mktemp("shown")
    templates.registry(workspace / "registry.db")
    body = {"connection_id": DAG, "conn_type": "trainjob", "extra": json.dumps({"backend": "local", **URLS})}
    airflow.http.post("/api/v2/connections", json=body).raise_for_status()
    flag = workspace / "flag"
    run = airflow.run(DAG, flag=str(flag), workspace=str(workspace))
    airflow.until("deferred", DAG, run, seconds=240)
    airflow.until("running", DAG, run, "adopted", seconds=240)
    yield Shown(airflow, run, flag)
    flag.touch()
    airflow.http.delete(f"/api/v2/connections/{DAG}").raise_for_status()


@pytest.fixture(scope="module")
def finished(shown: Shown) -> Shown:
    shown.flag.touch()
    for task in ("train", "export", "adopted"):
        shown.airflow.until("success", DAG, shown.run, task, seconds=240)
    return shown


def test_links_after_a_new_try_has_adopted_the_job(shown: Shown) -> None:
    address = wait_until("there is a link", lambda: shown.links("adopted").get("TrainJob"), 60)
    shown.airflow.clear(DAG, shown.run, "adopted")
    taken = lambda: "TrainJob is" in shown.airflow.log(DAG, shown.run, "adopted", attempt=2)  # noqa: E731
    wait_until("the second try waits for a job", taken, 240, poll=0.5, ignore=httpx.HTTPError)
    assert shown.links("adopted")["TrainJob"] == address
    assert shown.airflow.task(DAG, shown.run, "adopted")["state"] == "running"


def both_links(shown: Shown, task: str) -> dict[str, str] | None:
    links = shown.links(task)
    return links if len(links) == 2 else None


def test_links_before_the_end(shown: Shown) -> None:
    for task, state in (("train", "deferred"), ("adopted", "running")):
        links = wait_until(f"{task} has its links", partial(both_links, shown, task), 60)
        assert links["TrainJob"] == shown.address(task)
        assert links["TrainJob logs"].startswith(f"https://logs.test/{shown.job(task)['name']}?from=20")
        assert shown.airflow.task(DAG, shown.run, task)["state"] == state


def test_the_connection_form_in_a_browser(airflow: Airflow, page: Page) -> None:
    secret = "apiVersion: v1\nkind: Config\nusers: [{user: {token: typed-token}}]"
    page.goto("/connections")
    page.get_by_role("button", name="Add Connection").click()
    form = page.get_by_role("dialog")
    form.get_by_label("Connection ID").fill("typed")
    form.get_by_role("combobox").first.fill("Kubeflow TrainJob")
    page.get_by_role("option", name="Kubeflow TrainJob").click()
    form.get_by_label("Bearer token").fill("typed-password")
    form.get_by_role("button", name="Extra Fields", exact=True).click()
    for field in FIELDS.values():
        form.get_by_text(field["label"], exact=True).wait_for()
        form.get_by_text(field["description"], exact=True).wait_for()
    form.locator("[name=element_secret_kube_config]").fill(secret)
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="hidden")
    stored = airflow.get("connections/typed")
    extra = {name: value for name, value in json.loads(stored["extra"]).items() if value is not None}
    assert (stored["conn_type"], stored["password"]) == ("trainjob", "***")
    assert extra == {"secret_kube_config": "***"}
    (exported,) = airflow.listed("connections", "get", "typed")
    found = exported["extra_dejson"]
    assert exported["password"] == "typed-password"
    assert (json.loads(found) if isinstance(found, str) else found)["secret_kube_config"] == secret


def test_a_running_task_in_a_browser(shown: Shown, page: Page) -> None:
    wait_until("there is a link", lambda: shown.links("train").get("TrainJob"), 60)
    page.goto(shown.page("train", "details"))
    for name, address in shown.links("train").items():
        link = page.get_by_role("link", name=name, exact=True)
        link.wait_for()
        assert link.get_attribute("href") == address
    assert page.get_by_role("link", name="Model version").count() == 0, "a training has no model version"
    page.goto(shown.page("train", ""))
    page.get_by_text(f"TrainJob shown/{shown.job('train')['name']} (attempt 1)").first.wait_for()
    page.get_by_text("TrainJob is Running").first.wait_for()


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
    page.goto(finished.page("train", ""))
    page.get_by_text("Result: accuracy 0.75").first.wait_for()
    page.goto(finished.page("export", "details"))
    link = page.get_by_role("link", name="Model version", exact=True)
    link.wait_for()
    assert link.get_attribute("href") == "https://models.test/shown/1"


def test_a_finished_run_has_links_fields_xcoms_and_events(finished: Shown) -> None:
    airflow = finished.airflow
    assert finished.links("train")["TrainJob"] == finished.address("train")
    assert finished.links("export")["Model version"] == "https://models.test/shown/1"

    rendered = airflow.get(finished.path("train"))["rendered_fields"]
    assert rendered["env"] == {"FLAG": str(finished.flag)}
    assert rendered["outputs"] == {"model": f"file://{finished.flag.parent}/trained"}
    assert rendered["labels"] == {"team": "vision"}

    result = airflow.xcom(DAG, finished.run)
    assert {name: result[name] for name in ("name", "uid")} == {
        name: finished.job("train")[name] for name in ("name", "uid")
    }
    assert result["metrics"] == {"accuracy": 0.75}

    made = airflow.xcom(DAG, finished.run, "export")["outputs"]
    (event,) = airflow.get("assets/events", source_dag_id=DAG, source_run_id=finished.run)["asset_events"]
    assert event["uri"] == "file:///models/shown"
    extra = event["extra"]
    assert {name: extra[name] for name in ("uri", "digest", "version")} == {
        name: made[name] for name in ("uri", "digest", "version")
    }
    assert extra["version"] == "1"
    assert extra["digest"].startswith("sha256:")
    assert extra["metrics"] == {"accuracy": 0.75}
    assert extra["uid"] == finished.job("export")["uid"]


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
