"""The page in use: curves with mouse and keyboard, the log, print."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect
from tests.page import documents, series, studies
from tests.page.charts import drag, shown_at
from tests.page.conftest import LIVE, Show
from tests.processes import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page


def table(page: Page, metric: str) -> list[list[str]]:
    """The values of a chart, the latest first."""
    region = page.get_by_role("group", name=f"Values of {metric}")
    if not region.count():
        page.get_by_role("button", name=f"Table of values: {metric}").click()
    rows: list[list[str]] = region.evaluate(
        "each => [...each.querySelectorAll('tbody tr')].map(row => [...row.children].map(cell => cell.textContent))"
    )
    return rows


def test_attempts_are_joined_and_the_later_wins(show: Show) -> None:
    page = show(documents.failed())
    rows = {row[0]: row[1:] for row in table(page, "loss")}
    assert rows["1,190"][1] == ""
    assert rows["1,190"][0]
    assert rows["1,200"][0] == ""
    assert rows["1,200"][1]
    assert rows["2,490"][1]
    assert len(rows) == 250
    assert {"1,480", "1,490"} < rows.keys()
    page.get_by_role("radio", name="Time").check()
    assert len(table(page, "loss")) == 280, "over time, all values of both attempts are shown"


def test_a_restart_within_an_attempt_goes_back_in_steps(show: Show) -> None:
    points = [[0, 10, 5.0], [10, 20, 4.0], [20, 30, 3.0], [10, 40, 4.5], [20, 50, 3.5], [30, 60, 2.0], [None, 70, 1.0]]
    page = show(documents.training(history={"loss": points}))
    assert table(page, "loss") == [["30", "2"], ["20", "3.5"], ["10", "4.5"], ["0", "5"]]
    page.get_by_role("radio", name="Time").check()
    assert table(page, "loss")[:2] == [["0:01:00", "1"], ["0:00:50", "2"]]
    assert len(table(page, "loss")) == 7


def test_metrics_without_steps_are_drawn_over_time(show: Show) -> None:
    page = show(documents.training(history={"loss": [[None, 10, 5.0], [None, 20, 4.0]], "one": [[None, 15, 1.0]]}))
    page.locator("canvas").nth(1).wait_for()
    assert page.get_by_text("Steps", exact=True).count() == 0
    assert table(page, "loss") == [["0:00:10", "4"], ["0:00:00", "5"]]
    assert page.get_by_role("img", name="Chart of loss").get_attribute("aria-label") == (
        "Chart of loss: last 4, minimum 4, maximum 5, 2 values"
    )


def test_the_cursor_shows_the_values_of_all_lines(show: Show) -> None:
    page = show(documents.running())
    text = shown_at(page, 0.5)
    assert "step 1,59" in text
    assert "this training" in text
    assert "previous run" in text
    value = page.locator(".chart .value").nth(1).inner_text()
    assert value != "0.865967", "the other charts show their values at the same step"
    page.mouse.move(5, 5)
    assert page.locator(".chart .value").nth(1).inner_text() == "0.865967"
    assert page.locator(".tip:visible").count() == 0


def test_all_charts_are_zoomed_and_reset(show: Show) -> None:
    page = show(documents.running())
    reset = page.get_by_role("button", name="Reset zoom")
    assert reset.is_disabled()
    drag(page, 0.25, 0.5)
    begin = shown_at(page, 0.01, 1)
    assert "step 8" in begin, begin
    page.locator(".u-over").first.dblclick()
    assert reset.is_disabled()
    drag(page, 0.25, 0.5)
    reset.click()
    assert "step 0" in shown_at(page, 0.001, 1) or "step 10\n" in shown_at(page, 0.001, 1)


def test_a_chart_is_used_with_the_keyboard(show: Show) -> None:
    page = show(documents.running() | {"compare": []})
    chart = page.get_by_role("img", name="Chart of loss")
    chart.focus()
    said = page.locator("#announcement")
    for key, expected in (
        ("End", "loss, step 2,390: 0.348486"),
        ("ArrowLeft", "loss, step 2,380:"),
        ("PageDown", "loss, step 2,140:"),
        ("Home", "loss, step 0:"),
        ("ArrowRight", "loss, step 10:"),
    ):
        page.keyboard.press(key)
        expect(said).to_contain_text(expected)
    page.keyboard.press("+")
    assert page.get_by_role("button", name="Reset zoom").is_enabled()
    page.keyboard.press("End")
    expect(said).to_contain_text("2,390")
    page.keyboard.press("0")
    assert page.get_by_role("button", name="Reset zoom").is_disabled()
    page.keyboard.press("Escape")
    assert page.locator(".tip:visible").count() == 0
    assert "2,390" in said.inner_text()


def test_all_controls_are_reached_with_the_tab_key(show: Show) -> None:
    page = show(documents.failed())
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.getAttribute('aria-label') || document.activeElement.textContent || document.activeElement.type"))  # fmt: skip # noqa: E501
    for expected in ("Curves", "checkbox", "Chart of loss", "Enlarge the chart: loss", "Table of values: loss", "Ranks",
                     "Search the log", "Rank", "Log", "2 checkpoints", "radio"):  # fmt: skip
        assert any(expected in str(each) for each in seen), expected


def test_comparisons_are_hidden(show: Show) -> None:
    page = show(documents.complete())
    table(page, "loss")
    heads = page.get_by_role("group", name="Values of loss").locator("thead th")
    assert heads.count() == 4
    page.get_by_label("Comparison").uncheck()
    assert heads.all_inner_texts() == ["step", "this training"]
    page.locator(".legend").get_by_role("button", name="champion").click()
    assert heads.all_inner_texts() == ["step", "this training", "champion"]
    assert page.get_by_label("Comparison").is_checked()


def test_a_log_scale_leaves_out_what_it_cannot_show(show: Show) -> None:
    points = [[0, 1, 0.0], [1, 2, -1.0], [2, 3, 100.0], [3, 4, 0.001]]
    page = show(documents.training(history={"loss": points, "negative": [[0, 1, -1.0], [1, 2, -2.0]]}))
    page.get_by_label("Log scale").check()
    assert [row[0] for row in table(page, "loss")] == ["3", "2"]
    assert [row[0] for row in table(page, "negative")] == ["1", "0"], "without positive values, the scale stays linear"


def test_many_metrics_are_filtered_and_drawn_when_in_view(show: Show) -> None:
    history = {f"layer{index}/norm": series.curve(20, seed=index + 1) for index in range(50)}
    page = show(documents.training(history=history))
    page.locator("canvas").first.wait_for()
    assert 3 <= page.locator("canvas").count() < 30
    page.get_by_role("searchbox", name="Filter metrics").fill("layer49")
    page.locator(".chart:visible canvas").wait_for()
    assert page.locator(".chart:visible").count() == 1
    page.get_by_role("searchbox", name="Filter metrics").fill("nothing")
    assert page.get_by_text("No metric has this name.").is_visible()


def test_a_chart_is_enlarged(show: Show) -> None:
    page = show(documents.running())
    page.get_by_role("button", name="Enlarge the chart: loss").click()
    canvas = page.locator(".chart.large canvas")
    wait_until("the chart is wide", lambda: canvas.evaluate("each => each.clientWidth") > 1000, 120)


def test_the_log_is_searched_and_filtered(show: Show) -> None:
    page = show(documents.running())
    rows = page.locator(".log .row")
    assert rows.count() == 200
    page.get_by_role("searchbox", name="Search the log").fill("STEP 1990")
    assert rows.count() == 1
    assert page.locator("mark").inner_text() == "step 1990"
    assert page.get_by_text("1 line of 200 with this text").is_visible()
    page.get_by_role("searchbox", name="Search the log").fill("")
    page.get_by_role("combobox", name="Rank").select_option("node-1")
    assert rows.count() == 100
    assert set(page.locator(".log .rank").all_inner_texts()) == {"node-1 "}


def test_the_log_stays_at_its_end_until_a_person_scrolls(show: Show) -> None:
    page = show(documents.running(), LIVE | {"seconds": 60})
    box = page.locator(".log")
    at_end = "each => each.scrollHeight - each.scrollTop - each.clientHeight < 24"
    assert box.evaluate(at_end)
    box.evaluate("each => { each.scrollTop = 0; }")
    expect(page.get_by_label("Follow")).not_to_be_checked()
    page.get_by_label("Follow").check()
    assert box.evaluate(at_end)


def test_print_draws_all_charts(show: Show) -> None:
    history = {f"layer{index}/norm": series.curve(20, seed=index + 1) for index in range(50)}
    page = show(documents.failed() | {"history": history})
    page.locator("canvas").first.wait_for()
    assert page.locator("canvas").count() < 30
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("canvas").count() == 55
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.evaluate("document.documentElement.classList.contains('print')")


@pytest.mark.parametrize("make", [documents.failed, studies.study_ended, documents.evaluated])
def test_print_is_light_and_has_no_controls(show: Show, make: Callable[[], series.Document]) -> None:
    page = show(make(), color_scheme="dark")
    assert page.pdf().startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".controls:visible, nav:visible, .chips:visible, .small:visible").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_colors_follow_the_preference(show: Show) -> None:
    page = show(documents.running(), color_scheme="light")
    page.locator("canvas").first.wait_for()
    dark = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(dark)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(dark) != before
    assert page.locator("canvas").count() == 4


def test_reduced_motion_stops_animations(show: Show) -> None:
    page = show(documents.running(), {"document": "document.json", "seconds": 60}, reduced_motion="reduce")
    assert page.locator(".pulse").evaluate("each => getComputedStyle(each).animationName") == "none"


def test_trials_are_visited_with_the_keyboard(show: Show) -> None:
    page = show(studies.study_ended())
    said = page.locator("#announcement")
    page.get_by_role("img", name="Optimization history").focus()
    page.keyboard.press("Home")
    expect(said).to_contain_text("trial 0, complete, loss 0.459449, lr=0.048614, batch_size=16, optimizer=adam")
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("trial 1, complete")
    assert page.locator(".hot .ring").count() == 3, "the trial is shown in all charts"
    page.get_by_role("img", name="Parallel coordinates").focus()
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("trial 28, complete")
    page.keyboard.press("ArrowRight")
    expect(said).to_contain_text("trial 65")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.trial") == "65"
    assert page.locator(".tip:visible").count() == 0


def test_the_pointer_shows_a_trial_and_a_click_its_row(show: Show) -> None:
    page = show(studies.study_ended())
    page.get_by_role("button", name="failed 4").click()
    best = page.get_by_role("img", name="Optimization history").locator(".marks > *").nth(28)
    best.hover()
    tip = page.locator(".tip:visible").inner_text()
    assert "trial 28" in tip
    assert "optimizer" in tip
    best.click()
    assert page.evaluate("document.activeElement.dataset.trial") == "28"
    assert page.locator("#trials tbody tr").count() == 100


def test_trials_are_sorted(show: Show) -> None:
    page = show(studies.study_ended())
    names = page.locator("#trials tbody th a")
    assert names.all_inner_texts()[:3] == ["trial 28", "trial 65", "trial 5"]
    page.get_by_role("button", name="trial", exact=True).click()
    assert names.all_inner_texts()[:3] == ["trial 0", "trial 1", "trial 2"]
    page.get_by_role("button", name="trial", exact=True).click()
    assert names.first.inner_text() == "trial 99"
    page.get_by_role("button", name="momentum").click()
    momentum = page.locator("#trials tbody tr").first.locator("td").nth(7).inner_text()
    assert momentum.startswith("0.80")
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("momentum")


def test_a_log_scale_of_a_study(show: Show) -> None:
    page = show(studies.study_hostile())
    assert page.get_by_label("Log scale").is_checked(), "the values span more than three decades"
    page.get_by_label("Log scale").uncheck()
    assert page.locator(".marks > *").count() == len(series.HOSTILE)
