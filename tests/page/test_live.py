"""A page that follows a training."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from playwright.sync_api import expect
from tests.page import documents, series, studies
from tests.page.charts import drag, shown_at
from tests.page.conftest import LIVE, Server, Show
from tests.processes import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

LATER = series.iso(series.TAKEN + timedelta(seconds=30))


def requests(page: Page, server: Server) -> int:
    """Number of requests in 1.2 seconds."""
    before = len(server.ranks)
    page.wait_for_timeout(1200)
    return len(server.ranks) - before


def pass_seconds(page: Page, count: int) -> None:
    """Let the page's clock run; a request needs real time."""
    for _ in range(count):
        page.clock.run_for(1000)
        page.wait_for_timeout(40)


def test_a_page_follows_the_training_until_its_end(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE)
    assert page.get_by_text("Live,").is_visible()
    before = page.locator(".chart .value").first.inner_text()
    points = series.curve(260, every=27)
    server.document = documents.running() | {"taken": LATER, "progress": 55, "history": series.metrics(points)}
    page.get_by_text("55 %").wait_for()
    assert page.locator(".chart .value").first.inner_text() != before
    assert page.get_by_text("02:00:30 UTC").first.is_visible()
    server.document = documents.complete() | {"source": "live"}
    page.get_by_text("Complete since").wait_for()
    expect(page.locator("#announcement")).to_have_text("Phase: Complete")
    assert page.title() == "team-a/digits-ab12cd: Complete"
    assert page.get_by_text("Final, as of").is_visible()
    assert requests(page, server) == 0


def test_a_change_keeps_what_a_person_does(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE)
    drag(page, 0.25, 0.5)
    zoomed = shown_at(page, 0.01, 1)
    search = page.get_by_role("searchbox", name="Search the log")
    search.fill("step 199")
    page.get_by_role("button", name="Table of values: loss").click()
    page.locator("#timeline summary").click()
    search.focus()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('#spec td bdi'))")
    selected = page.evaluate("getSelection().toString()")
    page.evaluate("scrollTo(0, 700)")
    top = page.evaluate("scrollY")
    document = documents.running()
    document["history"] = series.metrics(series.curve(250, every=27))
    document["logs"] = [
        *document["logs"][20:], *({"rank": "node-0", "time": LATER, "text": f"step 199{n} again"} for n in range(5))
    ]  # fmt: skip
    server.document = document | {"progress": 43, "taken": LATER}
    page.get_by_text("43 %").wait_for(state="attached")
    assert page.evaluate("scrollY") == top
    assert page.evaluate("getSelection().toString()") == selected
    assert search.evaluate("each => each === document.activeElement")
    assert search.input_value() == "step 199"
    assert page.locator(".log .row").count() == 6
    assert page.locator("#timeline details").get_attribute("open") is not None
    assert page.get_by_role("group", name="Values of loss").locator("tbody tr").first.inner_text().startswith("3,190")
    assert page.get_by_role("button", name="Reset zoom").is_enabled()
    assert shown_at(page, 0.01, 1) == zoomed


def test_a_selected_rank_is_requested(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE)
    lines = [{"rank": "node-1", "time": series.ago(9000 - n), "text": f"earlier {n}"} for n in range(300)]
    server.document = documents.running() | {"logs": lines + documents.running()["logs"]}
    page.get_by_role("combobox", name="Rank").select_option("node-1")
    wait_until("the page asks for the rank", lambda: server.ranks[-1:] == ["node-1"], 120)
    page.get_by_text("The last 400 lines").wait_for()


def test_lines_are_added_to_the_log(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE)
    page.locator(".log").evaluate("each => { each.scrollTop = 40; }")
    first = page.locator(".log .row").nth(5)
    first.evaluate("each => { each.dataset.mine = 'yes'; }")
    logs = [*series.log(200)[40:], {"rank": "node-0", "time": LATER, "text": "a new line"}]
    server.document = documents.running() | {"logs": logs}
    page.get_by_text("a new line").wait_for(state="attached")
    assert page.locator(".log .row").count() == 201, "lines that the server has dropped stay"
    assert page.locator(".log .row[data-mine]").count() == 1
    assert page.locator(".log").evaluate("each => each.scrollTop") == 40


def test_a_page_reports_that_it_is_not_updated(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE | {"seconds": 2}, clock=True)
    page.get_by_text("Live,").wait_for()
    server.status = 503
    pass_seconds(page, 14)
    page.get_by_text("Not updated since").wait_for()
    failures = len(server.ranks)
    assert 2 <= failures <= 5, "requests become less frequent after errors"
    server.status = 200
    server.document = documents.running() | {"progress": 77, "taken": LATER}
    pass_seconds(page, 31)
    page.get_by_text("77 %").wait_for()
    page.get_by_text("Live,").wait_for()


def test_another_kind_of_answer_is_an_error(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE, clock=True)
    server.document = {"version": 1, "kind": "login"}
    pass_seconds(page, 14)
    page.get_by_text("Not updated since").wait_for()
    assert page.get_by_text("42 %").is_visible()


def test_a_finished_training_is_not_requested(show: Show, server: Server) -> None:
    page = show(documents.failed(), LIVE)
    assert requests(page, server) == 0
    page.get_by_role("combobox", name="Rank").select_option("node-1")
    wait_until("the page asks for the rank", lambda: server.ranks == ["node-1"], 120)


def test_a_new_attempt_is_followed(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE)
    server.document = documents.failed() | {"phase": "Running", "finished": None, "diagnosis": None}
    page.get_by_text("attempt 2 · ").first.wait_for()
    assert page.locator(".legend .line").count() == 2
    assert page.locator("canvas").count() == 5


def test_a_list_is_followed_and_keeps_its_filter(show: Show, server: Server) -> None:
    page = show(documents.listed(), LIVE)
    page.get_by_role("button", name="Queued 1").click()
    page.get_by_role("button", name="Queued 1").focus()
    jobs = documents.listed()["jobs"]
    server.document = documents.listed() | {"jobs": [*jobs, documents.job(20, "Queued")]}
    page.get_by_role("button", name="Queued 2").wait_for()
    assert page.locator("#jobs tbody tr").count() == 2
    assert "Queued" in page.evaluate("document.activeElement.textContent")


def test_a_study_is_followed_until_its_end(show: Show, server: Server) -> None:
    page = show(studies.study_running(), LIVE)
    assert page.get_by_text("14 of 50 trials ended").is_visible()
    page.get_by_role("button", name="complete 10").click()
    page.locator("#trials .scroll").evaluate("each => { each.scrollTop = 30; }")
    trials = studies.trials(17)
    server.document = studies.study([*trials, studies.trial(17, "running")]) | {"taken": LATER}
    page.get_by_text("17 of 50 trials ended").wait_for()
    assert page.locator(".marks > *").count() == 18
    assert page.locator("#trials tbody tr").count() == 10, "the filter stays"
    assert page.locator("#trials .scroll").evaluate("each => each.scrollTop") == 30
    server.document = studies.study_ended() | {"taken": LATER}
    page.get_by_text("100 of 100 trials ended").wait_for()
    expect(page.locator("#announcement")).to_have_text("Study: ended, best trial 28")
    assert page.get_by_text("Final, as of").is_visible()
    assert requests(page, server) == 0


def test_an_evaluation_appears_when_it_is_known(show: Show, server: Server) -> None:
    page = show(documents.running(), LIVE)
    assert page.locator("#evaluation").is_hidden()
    server.document = documents.evaluated() | {"phase": "Running", "taken": LATER}
    page.get_by_role("group", name="Verdict").wait_for()
    page.get_by_role("button", name="Table of values: loss").last.click()
    server.document = documents.evaluated() | {"phase": "Running", "progress": 99, "taken": LATER}
    page.get_by_text("99 %").wait_for()
    assert page.get_by_role("group", name="Values of loss").is_visible(), "an open table stays open"
