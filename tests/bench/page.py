"""Measures the page of a training with many metrics: its size, and the time until a browser has drawn the first chart.

``python -m tests.bench.page [METRICS [POINTS]]``

Each figure is the median of 5 visits of a file in Chromium. ``raw`` is the same page with all points, as if histories
were not thinned. The page of a workflow of 60 jobs is only made.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from playwright.sync_api import sync_playwright
from tests.bench.figures import Output, timed
from tests.page import documents

from trainjob._goodput.history import MetricHistory
from trainjob._pages.documents import MAX_POINTS
from trainjob._pages.documents.jobs import workflow_document
from trainjob._pages.page import page_html

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUNS = 5
DRAWN = "performance.getEntriesByName('trainjob-chart')[0]?.startTime"


def history(metrics: int, points: int) -> dict[str, list[list[Any]]]:
    """A random walk of each metric, with all digits of its values."""
    chance, found = random.Random(1), dict[str, list[list[Any]]]()
    for metric in range(metrics):
        value, series = 1.0, []
        for step in range(points):
            value += chance.gauss(0, 0.01)
            series.append([step * 10, 1_790_000_000 + step * 2.0, value])
        found[f"layer{metric}/gradient_norm"] = series
    return found


def visit(browser: Browser, file: Path) -> tuple[float, float]:
    """Milliseconds from navigation to the first chart, and to the end of all scripts' work."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    began = time.perf_counter()
    page.goto(file.as_uri())
    while not (drawn := page.evaluate(DRAWN)):
        page.wait_for_timeout(5)
    page.evaluate("new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)))")
    took = 1000 * (time.perf_counter() - began)
    page.close()
    return float(drawn), took


def measure(output: Output, metrics: int, points: int) -> None:
    full = history(metrics, points)
    began = time.process_time()
    collected = MetricHistory(MAX_POINTS)
    collected.merge(full)
    thin = collected.points()
    output.emit("thinning: CPU", 1000 * (time.process_time() - began), "ms")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for name, series in (("page", thin), ("raw", full)):
            what = f"{name}, {metrics} metrics, {sum(map(len, series.values()))} points"
            file = Path(folder, f"{name}.html")
            file.write_text(page_html(documents.running() | {"history": series, "compare": []}))
            output.emit(f"{what}: size", file.stat().st_size / 1e6, "MB")
            drawn, idle = zip(*(visit(browser, file) for _ in range(RUNS)), strict=True)
            output.emit(f"{what}: first chart", statistics.median(drawn), "ms")
            output.emit(f"{what}: end of all scripts' work", statistics.median(idle), "ms")
        browser.close()


def workflow(output: Output) -> None:
    trainings = [documents.running() for _ in range(60)]
    seconds = timed(lambda: page_html(workflow_document("retrain", trainings)), RUNS)
    output.emit("page of a workflow of 60 jobs, from their documents", statistics.median(seconds), "s")


if __name__ == "__main__":
    _output = Output("page")
    workflow(_output)
    measure(_output, *map(int, [*sys.argv[1:], "50", "10000"][:2]))
