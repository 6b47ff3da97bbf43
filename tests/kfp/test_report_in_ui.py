"""The report of a step in the user interface of KFP, which shows it in a sandboxed frame (HTMLViewer.tsx, KFP 2.17)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from tests import debian
from tests.page import documents

from trainjob._pages.page import page_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# As the tab "Visualization" of an artifact in KFP 2.17 does it: the content in `srcdoc`, no origin, no size limit.
FRAME = """<!doctype html><iframe src="about:blank" sandbox="allow-scripts"
style="border: 1px solid; min-height: 600px; width: 1100px"></iframe>
<script>document.querySelector("iframe").srcdoc = {page}</script>"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = debian.program("chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as browser:
        yield browser


@pytest.mark.parametrize("name", ["complete", "hostile"])
def test_the_report_works_in_the_sandbox(browser: Browser, name: str) -> None:
    document = getattr(documents, name)()
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url) if request.url.startswith("http") else None)
    body = FRAME.replace("{page}", json.dumps(page_html(document)).replace("</", "<\\/"))
    page.route("http://kfp.test/", lambda route: route.fulfill(content_type="text/html", body=body))
    page.goto("http://kfp.test/")
    frame = page.frame_locator("iframe")
    frame.get_by_role("heading", name="Curves").wait_for()
    frame.get_by_role("heading", name="Curves").scroll_into_view_if_needed()
    frame.locator("canvas").first.wait_for()
    frame.get_by_role("navigation").get_by_role("button", name="Ranks").click()
    frame.get_by_role("heading", name="Ranks").wait_for()
    page.wait_for_timeout(500)
    assert frame.get_by_role("heading", name="Curves").count() == 1, "the frame still shows the report"
    assert errors == []
    assert requests == ["http://kfp.test/"]
    page.close()
