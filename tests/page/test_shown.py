"""What pages of all kinds of documents show, in light, dark and on a phone."""

from __future__ import annotations

from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from tests.page import documents
from tests.page.conftest import SCREENSHOTS, Server, Show
from tests.processes import wait_until

from trainjob.page import page_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SCREENS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "has_touch": True},
}
TALLEST = 8000  # pixels of a screenshot


def picture(page: Page, name: str) -> None:
    """A screenshot of the complete page, with the charts that are drawn when they come into view."""
    size = page.viewport_size
    assert size is not None
    height = page.evaluate("document.documentElement.scrollHeight")
    page.set_viewport_size({"width": size["width"], "height": min(TALLEST, height)})
    charts = page.locator("#curves .chart:not(.trials):visible").count()  # others are SVG, drawn at once
    if charts and height < TALLEST:
        wait_until("all charts are drawn", lambda: page.locator("canvas, .plot .none").count() >= charts, 20)
    page.screenshot(path=SCREENSHOTS / f"page-{name}.png")


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", documents.ALL)
def test_a_page_has_no_errors(show: Show, name: str, screen: str) -> None:
    page = show(documents.ALL[name](), **SCREENS[screen])
    picture(page, f"{name}-{screen}")
    width = SCREENS[screen].get("viewport", {"width": 1280})["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", documents.ALL)
def test_axe_finds_no_violation(show: Show, name: str, scheme: str) -> None:
    page = show(documents.ALL[name](), color_scheme=scheme)
    page.wait_for_timeout(100)
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    assert {each["id"]: [node["html"][:200] for node in each["nodes"][:5]] for each in found} == {}


def test_hostile_text_stays_text(show: Show) -> None:
    page = show(documents.hostile())
    assert page.evaluate("window.__pwned") is None
    assert page.locator("#page img, #page script, #page iframe").count() == 0
    links = page.evaluate("[...document.querySelectorAll('a')].map(each => [each.getAttribute('href'), each.protocol])")
    assert [href for href, _ in links] == ["https://mlflow.example/", "trainings/x?y=1"]
    assert page.locator("h1").inner_text().startswith("\ufffdgnp.exe\ufffd \ufffdisolated/\n<script>")
    for text in ("<script>window.__pwned = 1</script>", '"><img src=x onerror="window.__pwned = 3">', "__proto__"):
        assert page.get_by_text(text).count() > 3


@pytest.mark.parametrize("sandbox", ["allow-scripts", "allow-scripts allow-same-origin allow-forms allow-downloads"])
def test_a_page_works_in_a_sandboxed_frame(show: Show, server: Server, sandbox: str) -> None:
    page = show(documents.training())
    source = escape(page_html(documents.complete()))
    server.html = f'<iframe sandbox="{sandbox}" width="900" height="800" srcdoc="{source}"></iframe>'
    page.goto(server.url)
    frame = page.frame_locator("iframe")
    frame.locator("canvas").first.wait_for()
    frame.get_by_role("button", name="Lineage").click()
    assert frame.locator("h2:focus").inner_text() == "Lineage"
    assert frame.get_by_text("Complete for").is_visible()


def test_a_page_without_javascript_has_the_main_facts(browser: Browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.set_content(page_html(documents.failed()))
        text = page.locator("body").inner_text()
    finally:
        context.close()
    for expected in ("team-a/digits-2", "Failed", "node-1 exited with code 3", "fix the training code", "JavaScript"):
        assert expected in text


def test_a_failed_training_shows_its_diagnosis(show: Show) -> None:
    page = show(documents.failed())
    assert page.title() == "team-a/digits-2: Failed"
    card = page.get_by_role("group", name="Diagnosis")
    text = card.inner_text()
    for expected in (
        "node-1 exited with code 3",
        "What to do: fix",
        "user code",
        "exit code 3",
        "ValueError: expected",
    ):
        assert expected in text
    culprit = page.locator("#ranks tbody tr", has_text="root cause")
    assert culprit.locator("th").inner_text() == "node-1"
    assert page.locator("#timeline .attempt").count() == 2
    assert "attempt 1" in page.locator("#timeline").inner_text()
    assert page.locator("#missing .note").count() == 2
    assert "Back-off restarting failed container node" in page.locator("#events").inner_text()
    assert "HF_TOKEN" in page.locator("#spec").inner_text()


def test_a_queued_training_shows_its_blocker(show: Show) -> None:
    page = show(documents.queued())
    text = page.get_by_role("group", name="Blocker").inner_text()
    for expected in ("8 more needed", "3 workloads before it in the queue", "queue gpu", "ask the owner"):
        assert expected in text
    assert page.get_by_text("insufficient unused quota").count() == 1
    assert page.get_by_text("Queued for 25m00s").is_visible()


def test_a_running_training_shows_progress_and_how_it_was_estimated(show: Show) -> None:
    page = show(documents.running())
    assert page.get_by_text("about 2h36m left (estimate: the training script)").is_visible()
    assert page.get_by_role("progressbar").get_attribute("aria-valuenow") == "42"
    assert "80 %" in page.locator("#resources").inner_text()


def test_a_complete_training_shows_its_lineage(show: Show) -> None:
    page = show(documents.complete())
    text = page.locator("#lineage").inner_text()
    for expected in (
        "digits 15",
        "challenger",
        "passed",
        "tiny-vit",
        "sha256:c0ffee12",
        "models:/digits/15",
        "classes",
    ):
        assert expected in text
    assert page.get_by_text("Kept, stored").is_visible()
    metrics = page.locator("#metrics tr", has_text="eval/f1").locator("td").all_inner_texts()
    assert metrics == ["0.941", "0.92", "0.933"]
    assert page.get_by_role("link", name="champion").get_attribute("href", timeout=1000) is not None


def test_a_training_without_metrics_says_so(show: Show) -> None:
    assert show(documents.no_metrics()).get_by_text("has not reported a metric").is_visible()
    assert show(documents.queued()).get_by_text("has not reported a metric").is_hidden()


def test_many_ranks_are_limited(show: Show) -> None:
    page = show(documents.many_ranks(1000))
    rows = page.locator("#ranks tbody tr")
    assert rows.count() == 100
    assert rows.nth(0).locator("th").inner_text() == "node-41", "the root cause comes first"
    page.get_by_role("button", name="Show all 1,000 ranks").click()
    assert rows.count() == 1000
    assert "2.3\u00d7 the median" in page.locator("#ranks tr", has_text="node-17").first.inner_text()


def test_a_list_is_filtered(show: Show) -> None:
    page = show(documents.listed())
    rows = page.locator("#jobs tbody tr")
    assert rows.count() == 9
    page.get_by_role("button", name="Complete 3").click()
    assert rows.count() == 3
    page.get_by_role("searchbox").fill("0004")
    assert rows.count() == 1
    assert rows.get_by_role("link").first.get_attribute("href") == "trainings/4"
    assert rows.get_by_role("link", name="dag retrain").get_attribute("href") == "workflows/1"
    assert page.get_by_text("1 training of 9").is_visible()
    page.get_by_role("searchbox").fill("no such thing")
    assert page.get_by_text("No training matches.").is_visible()


def test_a_workflow_compares_its_trainings(show: Show) -> None:
    page = show(documents.workflow())
    rows = page.locator("#trainings tbody tr")
    assert rows.count() == 4
    assert "node-1 exited with code 3" in rows.nth(3).inner_text()
    assert rows.nth(1).get_by_role("link").get_attribute("href") == "tasks/1"
    page.get_by_role("button", name="Table of values: loss").click()
    head = page.get_by_role("group", name="Values of loss").locator("thead th").all_inner_texts()
    assert head == ["step", "train[lr=3e-4]", "train[lr=1e-3]", "train[lr=3e-3]", "train[lr=1e-2]"]
    page.locator(".legend").get_by_role("button", name="train[lr=1e-2]").click()
    assert page.get_by_role("group", name="Values of loss").locator("thead th").count() == 4
