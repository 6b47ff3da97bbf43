"""Chromium for tests, and where they leave their screenshots."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tests import debian

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SCREENSHOTS = Path(__file__).parents[1] / ".test-output" / "screenshots"


def chromium() -> Iterator[Browser]:
    """For fixtures. Its event loop runs in this thread until their end, so no test of that time may have another."""
    program = debian.program("chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=60_000)  # on a busy machine
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=program) as browser:
        yield browser
