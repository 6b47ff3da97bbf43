"""What pages of all kinds of documents show, in light, dark and on a phone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest
from tests.browser import SCREENSHOTS
from tests.page import documents, series, studies
from tests.page.conftest import Server, Show
from tests.processes import wait_until

from trainjob._pages.page import page_html

if TYPE_CHECKING:
    from playwright.sync_api import Page

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
        wait_until("all charts are drawn", lambda: page.locator("canvas, .plot .none").count() >= charts, 120)
    page.screenshot(path=SCREENSHOTS / f"page-{name}.png")


def violations(page: Page) -> dict[str, list[str]]:
    """What axe finds: rules and elements."""
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return {each["id"]: [node["html"][:200] for node in each["nodes"][:5]] for each in found}


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("name", documents.ALL)
def test_a_page_has_no_errors_and_axe_finds_no_violation(show: Show, name: str, screen: str) -> None:
    page = show(documents.ALL[name](), **SCREENS[screen])
    page.wait_for_timeout(100)
    assert screen == "phone" or violations(page) == {}
    picture(page, f"{name}-{screen}")
    width = SCREENS[screen].get("viewport", {"width": 1280})["width"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").count() == 1


@pytest.mark.parametrize("make", [documents.hostile, documents.hostile_evaluation, studies.study_hostile])
def test_hostile_text_stays_text(show: Show, make: Callable[[], series.Document]) -> None:
    page = show(make())
    assert page.evaluate("window.__pwned") is None
    assert page.locator("#page img, #page script, #page iframe").count() == 0
    schemes = page.evaluate("[...document.querySelectorAll('a')].map(each => each.protocol)")
    assert set(schemes) <= {"http:", "https:"}
    assert page.get_by_text("<script>window.__pwned = 1</script>").count() > 3


def test_hostile_links_are_left_out_and_directions_replaced(show: Show) -> None:
    page = show(documents.hostile())
    links = page.evaluate("[...document.querySelectorAll('a')].map(each => each.getAttribute('href'))")
    assert links == ["https://airflow.example/", "trainings/x?y=1"]
    assert page.locator("h1").inner_text().startswith("\ufffdgnp.exe\ufffd \ufffdisolated/\n<script>")
    for text in ('"><img src=x onerror="window.__pwned = 3">', "__proto__"):
        assert page.get_by_text(text).count() > 3


AIRFLOW = "allow-scripts allow-same-origin allow-forms allow-downloads"


def framed(show: Show, server: Server, sandbox: str) -> Page:
    """A page in a frame, with its external links to this server."""
    page = show(documents.training())
    source = escape(page_html(documents.complete()).replace("https://data.example", server.url))
    server.html = f'<iframe sandbox="{sandbox}" width="900" height="800" srcdoc="{source}"></iframe>'
    page.goto(server.url)
    return page


@pytest.mark.parametrize("sandbox", ["allow-scripts", AIRFLOW])
def test_a_page_works_in_a_sandboxed_frame(show: Show, server: Server, sandbox: str) -> None:
    frame = framed(show, server, sandbox).frame_locator("iframe")
    frame.locator("canvas").first.wait_for()
    frame.get_by_role("button", name="Lineage").click()
    assert frame.locator("h2:focus").inner_text() == "Lineage"
    assert frame.get_by_text("Complete since").is_visible()


def test_an_external_link_opens_outside_of_a_frame_that_may_open_no_window(show: Show, server: Server) -> None:
    page = framed(show, server, AIRFLOW)
    with page.context.expect_page() as opened:
        page.frame_locator("iframe").get_by_role("link", name="augmentations.tar").click()
    assert opened.value.url.startswith(server.url)
    assert opened.value.evaluate("window.opener") is None


# The place is a selector, or the name of a group.
SHOWN: list[tuple[Callable[[], series.Document], str, tuple[str, ...]]] = [
    (documents.failed, "Diagnosis", ("node-1 exited with code 3", "What to do: fix", "user code", "exit code 3")),
    (documents.failed, "Diagnosis", ("ValueError: expected",)),
    (documents.failed, "#timeline", ("attempt 1", "attempt 2")),
    (documents.failed, "#events", ("Back-off restarting failed container node",)),
    (documents.failed, "#missing", ("Events of the pods of attempt 1: forbidden", "logs of node-0: the pod was")),
    (documents.failed, "#spec", ("HF_TOKEN",)),
    (documents.queued, "Blocker", ("8 more needed", "3 workloads before it in the queue", "queue gpu")),
    (documents.queued, "Blocker", ("wait until other jobs of the queue finish",)),
    (documents.queued, "#head", ("Queued for 25m00s",)),
    (documents.running, "#head", ("about 2h36m left (estimate: the training script)",)),
    (documents.running, "#resources", ("80 %",)),
    (documents.complete, "#head", ("Kept, stored",)),
    (documents.complete, "#goodput", ("5m20s is assumed to be training: nothing tells what was done.",)),
    (documents.complete, "#lineage", ("digits 15", "champion", "passed", "tiny-vit", "models:/digits/15", "classes")),
    (documents.complete, "#lineage", ("sha256:3c0ffee1",)),
    (documents.no_metrics, "#page", ("has not reported a metric",)),
    (documents.first_evaluation, "#evaluation", ("No gate has judged this evaluation.",)),
    (documents.first_evaluation, "#evaluation", ("There is no champion to compare with.",)),
    (documents.first_evaluation, "#lineage", ("no gate",)),
    (documents.evaluation_failed, "Verdict", ("Not passed: accuracy of digit=9", "1 of 5 checks failed")),
    (documents.evaluation_failed, "Verdict", ("decided by slices.digit=9.accuracy.max_regression",)),
    (documents.evaluation_failed, "Evaluated objects", ("360", "da7a5e70", "c0ffee12", "digits 14", "8d3f0a1c")),
    (documents.evaluation_failed, "Evaluated objects", ("s3://data/digits-held-out", "beef0014")),
    (documents.evaluation_failed, "#lineage", ("not passed",)),
    (studies.study_ended, "#head", ("100 of 100 trials ended", "56 complete", "40 pruned", "4 failed", "adamw")),
    (studies.study_ended, "#head", ("0.178784 in trial 28",)),
    (studies.study_failed, "Failures", ("No trial has completed.", "5 trials failed: node-0 exited with code 1")),
    (studies.study_failed, "#page", ("5 trials have failed; max_failed_trials is 4",)),
    (studies.study_empty, "#head", ("0 of 50 trials ended",)),
]


def test_the_facts_of_each_state_are_shown(show: Show) -> None:
    for make, rows in itertools.groupby(SHOWN, key=lambda row: row[0]):
        page = show(make())
        for _, place, texts in rows:
            part = page.locator(place) if place[0] == "#" else page.get_by_role("group", name=place)
            shown = part.inner_text()
            assert [text for text in texts if text not in shown] == [], (make, place)


def test_a_failed_training_names_the_root_cause(show: Show) -> None:
    page = show(documents.failed())
    assert page.title() == "team-a/digits-2: Failed"
    culprit = page.locator("#ranks tbody tr", has_text="root cause")
    assert culprit.locator("th").inner_text() == "node-1"
    assert page.locator("#timeline .attempt").count() == 2
    assert page.locator("#missing .note").count() == 2


def test_stragglers_are_warnings_at_the_top(show: Show) -> None:
    page = show(documents.failed())
    warning = page.get_by_text("node-2 on gpu-3 is slower than the other ranks")
    assert warning.is_visible()
    assert warning.bounding_box()["y"] < page.locator("#ranks").bounding_box()["y"]  # type: ignore[index]  # both exist
    assert show({**documents.failed(), "stragglers": []}).get_by_text("slower than the other ranks").count() == 0


def test_a_goodput_is_a_bar_of_its_activities(show: Show) -> None:
    page = show(documents.failed())
    page.get_by_role("button", name="Goodput", exact=True).click()
    section = page.locator("#goodput")
    assert "40.5 % of 1h50m was training that counted" in section.inner_text()
    label = section.get_by_role("img").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Goodput 40.5 %: training 44m30s, 40.5 %; stalled 19m00s, 17.3 %; starting 16m30s, 15.0 %;")
    widths = [each.bounding_box() for each in section.locator(".track .span").all()]
    assert len(widths) == 9
    track = section.locator(".track").bounding_box()
    assert track is not None
    assert sum(box["width"] for box in widths if box) == pytest.approx(track["width"], abs=9)
    rows = [each.inner_text().split("\t") for each in section.locator("tbody tr").all()]
    assert [cell.strip() for cell in rows[0][:4]] == ["training", "44m30s", "40.5 %", "11.87"]
    assert "is assumed to be training" not in section.inner_text(), "42 s are less than a hundredth"


def test_the_timeline_shows_activities_if_they_are_known(show: Show) -> None:
    page = show(documents.failed())
    second = page.locator("#timeline .attempt").nth(1)
    label = second.get_by_role("img").get_attribute("aria-label")
    assert label is not None
    assert label.startswith("Attempt 2: queued 9m00s, starting 5m50s, repeated 5m00s, training 16m50s,")
    assert second.locator(".span.repeated").count() == 1
    assert "stalled 19m00s" in page.locator("#timeline .keys").inner_text()


def without_goodput(document: series.Document, *, older: bool) -> series.Document:
    """A document of unknown goodput, or of an `older` version without that key."""
    known: series.Document = {} if older else {"goodput": None}

    def stripped(part: series.Document) -> series.Document:
        return {name: value for name, value in part.items() if name != "goodput"} | known

    return stripped(document) | {"attempts": [stripped(each) for each in document["attempts"]]}


@pytest.mark.parametrize("older", [False, True])
def test_a_training_of_unknown_goodput_shows_its_phases(show: Show, older: bool) -> None:
    page = show(without_goodput(documents.failed(), older=older))
    assert not page.locator("#goodput").is_visible()
    assert page.locator("#timeline .attempt").count() == 2
    assert page.locator("#timeline .span.running").count() == 2


def test_what_is_said_is_said_once(show: Show) -> None:
    page = show(documents.queued())
    assert page.get_by_text("insufficient unused quota").count() == 1
    assert page.get_by_text("has not reported a metric").is_hidden()
    assert show(documents.running()).get_by_role("progressbar").get_attribute("aria-valuenow") == "42"


def test_metrics_are_shown_beside_those_of_other_trainings(show: Show) -> None:
    page = show(documents.complete())
    metrics = page.locator("#metrics tr", has_text="eval/f1").locator("td").all_inner_texts()
    assert metrics == ["0.941", "0.92", "0.933"]
    assert page.get_by_role("link", name="champion").get_attribute("href", timeout=1000) is not None


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


def test_an_evaluation_shows_its_numbers(show: Show) -> None:
    page = show(documents.evaluation_failed())
    assert page.get_by_role("group", name="Checks of the gate").locator("tbody tr").count() == 5
    row = page.get_by_role("group", name="Evaluated metrics").locator("tbody tr").first
    assert row.locator("td").all_inner_texts() == ["0.953", "0.941", "+0.012", "+0.003 to +0.021"]
    bars = page.get_by_role("img", name="Difference of accuracy, candidate minus champion: all examples +0.012 (+0.003")
    assert bars.locator(".bar").count() == 11, "slices without examples have no bar"
    assert bars.locator(".clear").count() == 4
    page.get_by_role("button", name="Table of values: accuracy").last.click()
    slices = page.get_by_role("group", name="Values of accuracy").last.locator("tbody tr")
    assert slices.count() == 11
    assert slices.nth(1).inner_text().split("\t") == ["digit=9", "36", "0.905", "0.95", "-0.045", "-0.083 to -0.007"]


def test_an_evaluation_shows_its_curves(show: Show) -> None:
    page = show(documents.evaluation_failed())
    matrix = page.get_by_role("group", name="Confusion matrix")
    assert matrix.locator("tbody td").count() == 100
    assert matrix.locator("tbody tr").nth(2).locator("td.diagonal").inner_text() == "36"
    assert page.get_by_role("img", name="ROC curve: area 0.79").count() == 1
    page = show(documents.first_evaluation())
    assert page.get_by_role("group", name="Confusion matrix").locator("tbody td").count() == 3600
    assert page.get_by_role("img", name="accuracy of the candidate: all examples 0.953, digit=9 0.905").count() == 1


def test_a_study_shows_all_trials(show: Show) -> None:
    page = show(studies.study_ended())
    assert page.title() == "Study digits: ended"
    assert page.locator(".marks > *").count() == 100
    assert page.locator(".marks path.state-pruned").count() == 40
    assert page.locator("#importances tbody th").all_inner_texts()[:2] == ["lr", "optimizer"]
    curves = page.get_by_role("img", name="Learning curves")
    assert curves.locator(".lines path.best").count() == 1
    assert curves.locator(".lines > .pruned").count() == 40
    rows = page.locator("#trials tbody tr")
    assert rows.count() == 100
    assert rows.first.locator("a").get_attribute("href") == "trainings/28"
    page.get_by_role("button", name="failed 4").click()
    assert rows.count() == 4
    assert "node-0 exited with code 1" in rows.first.inner_text()
    assert page.get_by_text("4 trials of 100").is_visible()
    assert show(studies.study_empty()).locator("section:visible").count() == 0


def test_a_parameter_that_does_not_apply_is_not_used(show: Show) -> None:
    page = show(studies.study_ended())
    chart = page.get_by_role("img", name="Parallel coordinates of 6 parameters and loss")
    names = chart.locator(".axis .name").evaluate_all("all => all.map(each => each.lastChild.data)")
    assert names == ["lr", "optimizer", "dropout", "batch_size", "nesterov", "momentum", "loss"]
    assert chart.get_by_text("not used").count() == 1
    labels = chart.locator(".axis").first.locator(".halo").all_text_contents()
    assert labels == ["1e-5", "1e-4", "0.001", "0.01", "0.1"]


def test_a_thousand_trials_are_marks_and_the_first_of_them_rows(show: Show) -> None:
    document = studies.study_ended(1000)
    assert len(page_html(document)) < 1_000_000
    page = show(document)
    page.locator(".marks > *").first.wait_for()
    assert page.locator(".marks > *").count() == 1000
    assert page.locator("#trials tbody tr").count() == 100
    assert page.get_by_text("1,000 trials; the first 100 are shown").is_visible()
    page.get_by_role("button", name="Show all 1,000 trials").click()
    assert page.locator("#trials tbody tr").count() == 1000
