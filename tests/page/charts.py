"""The pointer on the charts of a page."""

from __future__ import annotations

from playwright.sync_api import Page


def drag(page: Page, begin: float, end: float, chart: int = 0) -> None:
    """Select a part of a chart."""
    area = page.locator(".u-over").nth(chart)
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * begin, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * (begin + end) / 2, y)
    page.mouse.move(box["x"] + box["width"] * end, y)
    page.mouse.up()


def shown_at(page: Page, place: float, chart: int = 0) -> str:
    """The text beside the cursor at a place of a chart."""
    area = page.locator(".u-over").nth(chart)
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * place, box["y"] + 30)
    return page.locator(".chart .tip").nth(chart).inner_text()
