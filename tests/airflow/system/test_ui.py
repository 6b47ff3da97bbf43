"""The provider in Airflow's API, its command line, and a browser."""

from __future__ import annotations

import json
import os
import shutil
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

from trainjob import __version__
from trainjob_airflow.get_provider_info import get_provider_info

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENSHOTS = ROOT / ".test-output" / "screenshots"
DAG = "shown"
URLS = {
    "job_url": "https://dashboard.test/{namespace}/{name}?uid={uid}",
    "logs_url": "https://logs.test/{name}?from={started}",
    "model_url": "https://models.test/{model}/{version}",
}
FIELDS = get_provider_info()["connection-types"][0]["conn-fields"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
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


def picture(page: Page, name: str) -> None:
    page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


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


def test_airflow_knows_the_provider(airflow: Airflow) -> None:
    found = airflow.get("providers", limit=100)["providers"]
    (ours,) = [each for each in found if each["package_name"] == "trainjob"]
    assert ours["version"] == __version__
    assert ours["description"] == get_provider_info()["description"].rstrip(".")
    listed = {command: airflow.listed("providers", command) for command in ("hooks", "triggers", "links")}
    (hook,) = [each for each in listed["hooks"] if each["connection_type"] == "trainjob"]
    assert (hook["class"], hook["hook_name"]) == ("trainjob_airflow.hooks.trainjob.TrainJobHook", "Kubeflow TrainJob")
    triggers = {each["class"] for each in listed["triggers"] if each["package_name"] == "trainjob"}
    assert triggers == {
        f"trainjob_airflow.triggers.{name}" for name in ("assets", "pause", "state", "trainjob", "tuning")
    }
    classes = {each["extra_link_class_name"] for each in listed["links"]}
    assert set(get_provider_info()["extra-links"]) <= classes


def test_the_ui_gets_the_form(airflow: Airflow) -> None:
    found = airflow.http.get("/ui/connections/hook_meta").raise_for_status().json()
    (ours,) = [each for each in found if each["connection_type"] == "trainjob"]
    standard = {name: each for name, each in ours["standard_fields"].items() if each}
    assert {name for name, each in standard.items() if each["hidden"]} == {"port", "login", "url_schema"}
    assert (standard["host"]["title"], standard["password"]["title"]) == ("API server", "Bearer token")
    labels = {name: each["schema"]["title"] for name, each in ours["extra_fields"].items()}
    assert labels == {name: each["label"] for name, each in FIELDS.items()}
    assert all(each["description"] for each in ours["extra_fields"].values()), "each field has a description"


def has_links(shown: Shown, task: str) -> bool:
    return len(shown.links(task)) == 2


def test_links_before_the_end(shown: Shown) -> None:
    for task in ("train", "adopted"):
        wait_until(f"{task} has its links", partial(has_links, shown, task), 60)
        assert shown.links(task)["TrainJob"] == shown.address(task)
        assert shown.links(task)["TrainJob logs"].startswith(f"https://logs.test/{shown.job(task)['name']}?from=20")
    assert {shown.airflow.task(DAG, shown.run, task)["state"] for task in ("train", "adopted")} == {
        "deferred",
        "running",
    }


def test_links_after_a_new_try_has_adopted_the_job(shown: Shown) -> None:
    address = wait_until("there is a link", lambda: shown.links("adopted").get("TrainJob"), 60)
    shown.airflow.clear(DAG, shown.run, "adopted")
    taken = lambda: "TrainJob is" in shown.airflow.log(DAG, shown.run, "adopted", attempt=2)  # noqa: E731
    wait_until("the second try waits for a job", taken, 240, poll=0.5, ignore=httpx.HTTPError)
    assert shown.links("adopted")["TrainJob"] == address
    assert shown.airflow.task(DAG, shown.run, "adopted")["state"] == "running"


def test_the_connection_form_in_a_browser(airflow: Airflow, page: Page) -> None:
    typed = {
        "namespace": "research",
        "kube_config_path": "/etc/trainjob/kubeconfig",
        "secret_kube_config": "apiVersion: v1\nkind: Config\nusers: [{user: {token: typed-token}}]",
        "cluster_context": "gpus",
        "ca_file": "/etc/trainjob/ca.crt",
        **URLS,
    }
    page.goto("/connections")
    page.get_by_role("button", name="Add Connection").click()
    form = page.get_by_role("dialog")
    form.get_by_label("Connection ID").fill("typed")
    kind = form.get_by_role("combobox").first
    kind.fill("Kubeflow TrainJob")
    page.get_by_role("option", name="Kubeflow TrainJob").click()
    form.get_by_label("API server").fill("https://cluster.example:6443")
    form.get_by_label("Bearer token").fill("typed-password")
    picture(page, "connection-standard-fields")
    form.get_by_role("button", name="Extra Fields", exact=True).click()
    for field in FIELDS.values():
        form.get_by_text(field["label"], exact=True).wait_for()
        form.get_by_text(field["description"], exact=True).wait_for()
    for name, value in typed.items():
        form.locator(f"[name=element_{name}]").fill(value)
    form.get_by_label("Backend", exact=True).fill("Kubernetes")
    page.get_by_role("option", name="Kubernetes", exact=True).wait_for()
    form.get_by_label("Backend", exact=True).press("Enter")
    page.set_viewport_size({"width": 1400, "height": 2200})
    picture(page, "connection-extra-fields")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="hidden")
    picture(page, "connections")

    stored = airflow.get("connections/typed")
    assert (stored["conn_type"], stored["host"]) == ("trainjob", "https://cluster.example:6443")
    extra = {name: value for name, value in json.loads(stored["extra"]).items() if value is not None}
    assert extra == {**typed, "backend": "kubernetes", "secret_kube_config": "***"}
    assert stored["password"] == "***"
    (exported,) = airflow.listed("connections", "get", "typed")
    assert exported["password"] == "typed-password"
    assert (
        json.loads(
            exported["extra_dejson"]
            if isinstance(exported["extra_dejson"], str)
            else json.dumps(exported["extra_dejson"])
        )["secret_kube_config"]
        == typed["secret_kube_config"]
    )


def test_a_task_in_a_browser(shown: Shown, page: Page) -> None:
    """While its job runs."""
    wait_until("there is a link", lambda: shown.links("train").get("TrainJob"), 60)
    page.goto(shown.page("train", "details"))
    for name, address in shown.links("train").items():
        link = page.get_by_role("link", name=name, exact=True)
        link.wait_for()
        assert link.get_attribute("href") == address
    assert page.get_by_role("link", name="Model version").count() == 0, "a training has no model version"
    picture(page, "task-links")
    page.goto(shown.page("train", "rendered_templates"))
    page.get_by_text(str(shown.flag)).first.wait_for()
    picture(page, "task-rendered-templates")


def test_the_identity_of_a_job_in_a_browser(shown: Shown, page: Page) -> None:
    """The page that the link to the job opens without ``job_url``, while the job runs."""
    wait_until("there is a link", lambda: shown.links("train").get("TrainJob"), 60)
    page.goto(shown.page("train", "xcom"))
    page.get_by_text("trainjob", exact=True).first.wait_for()
    page.get_by_text(shown.job("train")["name"]).first.wait_for()
    picture(page, "task-xcoms")


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
    picture(page, "task-failed")
    if "TRAINJOB_RECORD" in os.environ:
        page.screenshot(path=ROOT / "docs" / "images" / "failed-task.png")


def test_the_log_of_a_task_in_a_browser(shown: Shown, page: Page) -> None:
    """While its job runs: launch and phases are folded, the lines of the ranks are not."""
    page.goto(shown.page("train", ""))
    page.get_by_text(f"TrainJob shown/{shown.job('train')['name']} (attempt 1)").first.wait_for()
    page.get_by_text("TrainJob is Running").first.wait_for()
    page.wait_for_timeout(1000)
    picture(page, "task-log-running")


def test_the_log_of_a_finished_task_in_a_browser(finished: Shown, page: Page) -> None:
    page.goto(finished.page("train", ""))
    page.get_by_text("Result: accuracy 0.75").first.wait_for()
    page.wait_for_timeout(1000)
    picture(page, "task-log-finished")


def test_a_finished_export_in_a_browser(finished: Shown, page: Page) -> None:
    page.goto(finished.page("export", "details"))
    link = page.get_by_role("link", name="Model version", exact=True)
    link.wait_for()
    assert link.get_attribute("href") == "https://models.test/shown/1"
    picture(page, "export-links")


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
