"""Measures the page of a training with many metrics: its size, and the time until a browser has drawn the first charts.

::

    python tests/bench/page.py [PEER [METRICS [POINTS]]]

Each figure is the median of 5 visits of a file in Chromium. ``raw`` is the same page with all points, as if histories
were not thinned. PEER is a Python with plotly (``pip install plotly``); its self-contained HTML file draws all points.
``-`` skips it.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import sync_playwright  # noqa: E402 - the path comes first
from tests.page import documents  # noqa: E402

from trainjob._goodput.history import MetricHistory  # noqa: E402
from trainjob._pages.documents import MAX_POINTS  # noqa: E402
from trainjob._pages.page import page_html  # noqa: E402

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RUNS = 5
# The first chart: a mark of the page's script, or the first element with this class that is inserted.
OBSERVE = """
new MutationObserver((_, observer) => {
  if (!document.querySelector(".main-svg .xy")) return;
  performance.mark("trainjob-chart");
  observer.disconnect();
}).observe(document, { subtree: true, childList: true });
"""
DRAWN = "performance.getEntriesByName('trainjob-chart')[0]?.startTime"
PLOTLY = """
import json, sys
import plotly.graph_objects as go, plotly.io as io
history = json.load(open(sys.argv[1]))
parts = [
    io.to_html(
        go.Figure(go.Scatter(x=[p[0] for p in points], y=[p[2] for p in points]), layout={"title": name}),
        include_plotlyjs=not index, full_html=False,
    )
    for index, (name, points) in enumerate(history.items())
]
open(sys.argv[2], "w").write("<!doctype html><meta charset=utf-8><body>" + "".join(parts))
"""


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


def document(series: dict[str, list[list[Any]]]) -> dict[str, Any]:
    return documents.running() | {"history": series, "compare": []}


def visit(browser: Browser, file: Path) -> dict[str, float]:
    """Milliseconds from navigation to the first chart, and to the end of all scripts' work."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.add_init_script(OBSERVE)
    began = time.perf_counter()
    page.goto(file.as_uri())
    while not (drawn := page.evaluate(DRAWN)):
        page.wait_for_timeout(5)
    page.evaluate("new Promise(resolve => requestAnimationFrame(() => setTimeout(resolve)))")
    took = 1000 * (time.perf_counter() - began)
    page.close()
    return {"first_chart_ms": drawn, "idle_ms": took}


def measure(peer: str, metrics: int, points: int) -> None:
    full = history(metrics, points)
    with tempfile.TemporaryDirectory() as directory:
        folder, files, made = Path(directory), dict[str, Path](), dict[str, float]()
        began = time.perf_counter()
        collected = MetricHistory(MAX_POINTS)
        collected.merge(full)
        thin = collected.points()
        made["thinning_ms"] = 1000 * (time.perf_counter() - began)
        began = time.perf_counter()
        html = page_html(document(thin))
        made["rendering_ms"] = 1000 * (time.perf_counter() - began)
        files["trainjob"] = folder / "page.html"
        files["trainjob"].write_text(html)
        files["raw"] = folder / "raw.html"
        files["raw"].write_text(page_html(document(full)))
        if peer != "-":
            (folder / "history.json").write_text(json.dumps(full))
            files["plotly"] = folder / "plotly.html"
            subprocess.run([peer, "-c", PLOTLY, folder / "history.json", files["plotly"]], check=True)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
            for name, file in files.items():
                visits = [visit(browser, file) for _ in range(RUNS)]
                figures = {key: round(statistics.median(each[key] for each in visits)) for key in visits[0]}
                shown = sum(map(len, (thin if name == "trainjob" else full).values()))
                record = {"page": name, "metrics": metrics, "points": shown, "bytes": file.stat().st_size, **figures}
                if name == "trainjob":
                    record |= {key: round(value) for key, value in made.items()}
                print(json.dumps(record), flush=True)
            browser.close()


def main() -> None:
    peer, metrics, points = [*sys.argv[1:], *("-", "50", "10000")[len(sys.argv) - 1 :]]
    measure(peer, int(metrics), int(points))


if __name__ == "__main__":
    main()
