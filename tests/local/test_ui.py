"""`trainjob ui` as people use it: real processes, real HTTP, a browser."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.browser import SCREENSHOTS, chromium
from tests.local.conftest import Jobs
from tests.local.shell import TRAINJOB

from trainjob import JobRef

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TRAINING = """
import math, sys, time
from pathlib import Path
from trainjob import progress

for step in range(1, 31):
    progress.report(progress=step, metrics={"loss": 3 / step, "accuracy": 1 - 1 / step, "note": "warm-up"}, step=step)
    print("step", step, flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
progress.report(progress=90, metrics={"loss": 0.0125, "accuracy": 0.98}, step=40)
print("step 40", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.02)
"""


@dataclass
class Ui:
    """A running `trainjob ui`."""

    process: subprocess.Popen[str]
    url: str

    def json(self, path: str = "") -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}{path}document.json", timeout=20) as response:
            found: dict[str, Any] = json.load(response)
        return found

    def end(self, number: signal.Signals = signal.SIGINT) -> tuple[int, str, str]:
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@contextlib.contextmanager
def running(home: Path, *words: str) -> Iterator[Ui]:
    environment = {**os.environ, "TRAINJOB_HOME": str(home)}
    command, pipe = [TRAINJOB, "ui", "--backend", "local", *words], subprocess.PIPE
    process = subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        yield Ui(process, process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate()


def training(jobs: Jobs, tmp_path: Path, key: str, **more: Any) -> JobRef:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = [sys.executable, str(script), str(tmp_path / "go"), str(tmp_path / "end")]
    spec = {"runtime": "jax-distributed", "num_nodes": 2, "command": command}
    return jobs.client.launch(spec, key, **more)


browser = pytest.fixture(scope="module")(chromium)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1300, "height": 900}, locale="en-US")
    page.set_default_timeout(20_000)
    yield page
    page.close()


@pytest.mark.full
def test_the_pages_follow_a_training(jobs: Jobs, tmp_path: Path, page: Page) -> None:
    origin = {"dag_id": "digits", "run_id": "manual", "task_id": "train"}
    jobs.run("exit 0", "airflow/x/digits/manual/-1/load", runtime="trainjob-step")
    ref = training(jobs, tmp_path, "airflow/x/digits/manual/-1/train", origin=origin)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    with running(jobs.home) as ui:
        page.goto(ui.url)
        page.get_by_role("link", name=ref.name).wait_for()
        page.screenshot(path=SCREENSHOTS / "ui-list.png", full_page=True)
        page.get_by_role("link", name="DAG digits, run manual").click()
        page.get_by_role("link", name="train", exact=True).wait_for()
        page.screenshot(path=SCREENSHOTS / "ui-workflow.png", full_page=True)
        page.get_by_role("link", name="train", exact=True).click()
        page.get_by_text("step 30").first.wait_for()
        page.screenshot(path=SCREENSHOTS / "ui-training.png", full_page=True)
        Path(tmp_path, "go").touch()
        page.get_by_text("0.0125").first.wait_for()
        Path(tmp_path, "end").touch()
        page.get_by_text("Complete").first.wait_for()
        page.get_by_text("Final, as of").wait_for()
        page.screenshot(path=SCREENSHOTS / "ui-complete.png", full_page=True)
        page.get_by_role("link", name="All trainings").click()
        page.get_by_role("link", name=ref.name).wait_for()
        assert errors == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_and_frees_the_port(home: Path, number: signal.Signals) -> None:
    with running(home, "-n", "ml", "--json") as ui:
        answer = json.loads(ui.url)
        ui.url = answer["url"]
        assert (answer["namespace"], ui.json()["namespace"]) == ("ml", "ml")
        assert ui.end(number) == (0, "", "")
    port = ui.url.split(":")[2].split("/")[0]
    with running(home, "--port", port) as ui:
        assert f":{port}/" in ui.url
        with running(home, "--port", port) as refused:
            _, err = refused.process.communicate(timeout=60)
        assert refused.process.returncode == 2
        assert f"port {port} on 127.0.0.1 cannot be used" in err
        assert ui.end(number) == (0, "", "jobs of namespace default; Ctrl-C ends the server\n")


def test_an_unusable_cluster_is_reported_at_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("KUBE", "TRAINJOB"))}
    environment |= {"HOME": str(tmp_path), "KUBECONFIG": str(tmp_path / "nosuch")}
    command = [TRAINJOB, "ui", "--no-browser"]
    refused = subprocess.run(command, env=environment, text=True, capture_output=True, check=False, timeout=60)
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
