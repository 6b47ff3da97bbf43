"""A browser, and a server on 127.0.0.1 of one page and its document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.browser import chromium
from tests.fakes.scripted import Answer, AnsweringServer, Asked, as_json
from tests.serving import serving

from trainjob._pages.page import page_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LIVE = {"document": "document.json", "seconds": 0.2}
WATCH = """
addEventListener("securitypolicyviolation", each => console.error("violation", each.violatedDirective, each.blockedURI))
"""


browser = pytest.fixture(scope="session")(chromium)


class Server(AnsweringServer):
    """Serves ``/``, the page, and ``/document.json``, its document, which a test can change.

    Attributes:
        document: The document.
        html: The page.
        status: HTTP status of the document.
        ranks: The parameter ``rank`` of each request of the document.
    """

    def __init__(self) -> None:
        super().__init__(self._reply)
        self.document: Mapping[str, Any] = {}
        self.html = ""
        self.status = 200
        self.ranks: list[str] = []

    def _reply(self, asked: Asked) -> Answer:
        url = urlsplit(asked.path)
        if url.path == "/document.json":
            self.ranks.append(parse_qs(url.query).get("rank", [""])[0])
            return as_json(self.document, self.status)
        if url.path == "/":
            return Answer(200, self.html.encode(), {"Content-Type": "text/html; charset=utf-8"})
        return Answer(404)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as server:
        yield server


Show = Callable[..., "Page"]


@pytest.fixture
def show(browser: Browser, server: Server) -> Iterator[Show]:
    """Shows a document in a new window. At the end, no window had an error or a request to another server."""
    contexts, problems = [], []

    def shown(
        document: Mapping[str, Any], live: Mapping[str, Any] | None = None, *, clock: bool = False, **options: Any
    ) -> Page:
        context = browser.new_context(
            **{"viewport": {"width": 1280, "height": 900}, "locale": "en-US", "timezone_id": "UTC"} | options
        )
        contexts.append(context)
        context.set_default_timeout(60_000)  # on a busy machine
        page = context.new_page()
        page.add_init_script(WATCH)
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda line: problems.append(line.text) if line.type in ("error", "warning") else None)
        page.on(
            "request",
            lambda asked: (
                problems.append(f"request: {asked.url}")
                if not asked.url.startswith((server.url, "about:", "blob:"))
                else None
            ),
        )
        if clock:
            page.clock.install()
        server.document = document
        server.html = page_html(document, live)
        page.goto(server.url)
        return page

    yield shown
    for context in contexts:
        context.close()
    # Expected: a browser asks for an icon; a test has a server that fails; Airflow's frame has this sandbox.
    expected = ("404 (Not Found)", "503 (Service Unavailable)", "can escape its sandboxing")
    assert [each for each in problems if not any(text in each for text in expected)] == []
